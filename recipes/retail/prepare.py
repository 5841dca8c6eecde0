"""Makes conversations for the desk, into data/train.jsonl and data/dev.jsonl.

    python3 prepare.py [--train 400] [--dev 100] [--seed 1]

A row has the orders of the shop (`orders`), what the customer says first (`opening`) and the number of the order, the
calls that the customer wants (`expected_actions`), an instruction for a model that plays the customer
(`instruction`), and the completions of an agent that serves the customer (`demonstration`). In half of the rows, the
customer gives the number only when asked.
"""

import argparse
import json
import random
from pathlib import Path

ITEMS = ("lamp", "mug", "pen", "bag", "cap", "clock", "scarf", "vase")
CITIES = ("Ghent", "Lyon", "Porto", "Turin", "Bern", "Oslo", "Riga", "Graz")
# For each tool: its second argument, the instruction, and openings with and without the number of the order.
WISHES = {
    "cancel_order": (
        None,
        "You want to cancel your order.",
        ("Please cancel order {order}.", "I want to cancel order {order}.", "Cancel order {order} for me."),
        ("Please cancel my order.", "I want to cancel an order.", "Can you cancel something for me?"),
    ),
    "exchange_item": (
        ("item", ITEMS),
        "You want a {value} in place of what you ordered.",
        (
            "Please make order {order} a {value}.",
            "I want a {value} for order {order} instead.",
            "Exchange order {order} for a {value}.",
        ),
        ("I want a {value} instead.", "Please exchange my order for a {value}.", "Can I have a {value} instead?"),
    ),
    "change_address": (
        ("city", CITIES),
        "You want your order to be sent to {value}.",
        (
            "Please send order {order} to {value}.",
            "Order {order} should go to {value}.",
            "I moved, send order {order} to {value}.",
        ),
        ("Please send my order to {value}.", "I moved to {value}.", "My order should go to {value}."),
    ),
}


def row(dice: random.Random) -> dict:
    numbers = dice.sample(range(1000, 10000), 3)
    order = numbers[0]
    orders = {
        str(number): {"status": "open", "item": dice.choice(ITEMS), "city": dice.choice(CITIES)}
        for number in sorted(numbers)
    }
    tool, (argument, instruction, told, hidden) = dice.choice(list(WISHES.items()))
    arguments, value = {"order": order}, ""
    if argument:
        name, values = argument
        value = dice.choice([value for value in values if value != orders[str(order)][name]])
        arguments[name] = value
    is_hidden = dice.random() < 0.5
    opening = dice.choice(hidden if is_hidden else told).format(order=order, value=value)
    call = {"content": "", "tool_calls": [{"function": {"name": tool, "arguments": arguments}}]}
    asks = ["Which order is it?"] if is_hidden else []
    return {
        "question": f"{opening} (order {order})",
        "opening": opening,
        "order": order,
        "orders": orders,
        "instruction": f"{instruction.format(value=value)} The number of your order is {order}.",
        "expected_actions": [{"name": tool, "arguments": arguments}],
        "demonstration": [*asks, call, "Done."],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--dev", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    folder = Path(__file__).resolve().parent / "data"
    folder.mkdir(exist_ok=True)
    dice = random.Random(arguments.seed)
    for name, count in (("train", arguments.train), ("dev", arguments.dev)):
        rows = [json.dumps(row(dice)) + "\n" for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
