"""Prints legal.jsonl: one row for every legal move at every information set of Kuhn poker."""

import json

RULES = (
    "You are {} in Kuhn poker. Each of the two players pays 1 chip and gets one of the cards "
    "J < Q < K. Player1 checks or bets 1 chip. A bet is called or folded. After a check, Player2 "
    "checks or bets. After two checks or a call, the higher card wins the pot."
)


def ask(observed, choices):
    moves = " | ".join(json.dumps(choice) for choice in choices)
    lines = [
        *observed,
        f"Your turn: {' or '.join(choices)}?",
        f'Reply with one JSON object: {{"move": {moves}}}',
    ]
    return {"role": "user", "content": "\n".join(lines)}


def reply(choice):
    return json.dumps({"move": choice})


OPEN, ANSWER = ["check", "bet"], ["fold", "call"]
for card in "JQK":
    own = f"Your card is {card}."
    first = ask([own], OPEN)
    second = ask(["Player1: check.", "Player2: bet."], ANSWER)
    checked = {"role": "assistant", "content": reply("check")}
    decisions = [
        ("Player1", [first], OPEN),
        ("Player1", [first, checked, second], ANSWER),
        ("Player2", [ask([own, "Player1: check."], OPEN)], OPEN),
        ("Player2", [ask([own, "Player1: bet."], ANSWER)], ANSWER),
    ]
    for player, messages, choices in decisions:
        for choice in choices:
            rules = {"role": "system", "content": RULES.format(player)}
            row = {"question": [rules, *messages], "answer": reply(choice)}
            print(json.dumps(row | {"demonstration": [reply(choice)]}))
