"""The user of an entry of BFCL, who writes the message of each turn."""


class Person:
    def __init__(self, turns: list):
        self.turns = iter(turns)

    def respond(self, _messages):
        return next(self.turns, None)
