"""The desk of a shop: an object of `Desk` has the orders of one conversation, and its methods are the agent's tools."""


class Desk:
    def __init__(self, orders: dict):
        self.orders = orders

    def cancel_order(self, order: int) -> str:
        """Cancels an order.

        Args:
            order: Number of the order.
        """
        self.open_order(order)["status"] = "cancelled"
        return f"Order {order} is cancelled."

    def exchange_item(self, order: int, item: str) -> str:
        """Replaces the item of an order.

        Args:
            order: Number of the order.
            item: The new item.
        """
        self.open_order(order)["item"] = item
        return f"Order {order} is now for a {item}."

    def change_address(self, order: int, city: str) -> str:
        """Changes where an order is sent.

        Args:
            order: Number of the order.
            city: The new city.
        """
        self.open_order(order)["city"] = city
        return f"Order {order} goes to {city}."

    def open_order(self, order):
        found = self.orders.get(str(order))
        if found is None:
            raise ValueError(f"there is no order {order}")
        if found["status"] != "open":
            raise ValueError(f"order {order} is {found['status']}")
        return found

    def final_state(self) -> dict:
        return self.orders
