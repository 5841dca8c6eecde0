from typing import Annotated


class Ledger:
    """A class that no tool is made of, since another one derives from it."""

    def entries(self) -> list:
        """Lists all entries."""
        return self.log


class Bank(Ledger):
    """An account of one attempt."""

    log = []
    rates = {"high": [5]}

    def __init__(self, owner: str, balance: float = 0.0):
        self.owner, self.balance = owner, balance

    def reset(self, **fields):
        return f"The account of {self.owner} ({', '.join(sorted(fields))})."

    def deposit(self, amount: Annotated[float, "In euros"]) -> dict:
        """Pays in.

        Args:
            amount: How much.
        """
        if amount <= 0:
            raise ValueError(f"{amount} is not positive")
        self.balance += amount
        self.log.append(amount)
        self.rates["high"].append(amount)
        return {"balance": self.balance, "log": self.log, "rates": self.rates["high"]}

    async def later(self):
        """Waits."""
        return "later"

    def pair(self):
        """Returns what verl's tools would take for a reward."""
        return "text", 2.0

    @staticmethod
    def add(a: int, b: int) -> int:
        return a + b

    @classmethod
    def kind(cls):
        """Names the class."""
        return cls.__name__

    def undocumented(self, x):
        return x

    def _hidden(self):
        """Is no tool."""

    @property
    def size(self) -> int:
        """Is no tool."""
        return len(self.log)

    def calc_reward(self):
        return self.balance

    def close(self):
        with open("closed", "a") as closed:
            closed.write(f"close {self.owner}\n")

    def __del__(self):
        with open("closed", "a") as closed:
            closed.write(f"del {self.owner}\n")
