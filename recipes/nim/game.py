"""The rules of nim as a game of Levade: two players take 1 to 3 stones, and whoever takes the last one wins.

Reads requests and writes responses, one line of JSON each (docs/games.md). The state is part of every request, so any
process can answer any request.
"""

import json
import random
import sys


def start(options, seed):
    stones = options.get("stones") or random.Random(seed).randint(5, 12)
    seats = [
        {
            "index": index,
            "name": name,
            "role": name,
            "side": name,
            "instructions": f"You are {name} in nim. Players take 1 to 3 stones in turn. Whoever takes the last stone wins.",
        }
        for index, name in enumerate(["first", "second"])
    ]
    return {"seats": seats, "events": [event(f"There are {stones} stones.")], **position({"stones": stones, "turn": 0})}


def apply(state, moves):
    [[seat, move]] = moves
    stones = state["stones"] - move["move"]
    text = f"{['first', 'second'][seat]} takes {move['move']}; {stones} stones are left."
    return {"events": [event(text)], **position({"stones": stones, "turn": state["turn"] + 1})}


def event(text):
    return {"to": "all", "text": text}


def position(state):
    """Returns the state with the next turn: a request for a move, or the outcome of each seat."""
    player = state["turn"] % 2
    if state["stones"] == 0:
        rewards = [1.0 if seat != player else -1.0 for seat in range(2)]
        outcomes = [{"seat": seat, "reward": reward} for seat, reward in enumerate(rewards)]
        return {"next": {"over": outcomes}, "state": state}
    legal = list(range(1, min(3, state["stones"]) + 1))
    ask = {
        "seat": player,
        "kind": "take",
        "prompt": f"There are {state['stones']} stones. How many do you take?",
        "choice": {"one_of": legal},
        "default": {"move": 1},
    }
    return {"next": {"ask": [ask]}, "state": state}


def main():
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "start" in request:
                response = start(request["start"]["options"], request["start"]["seed"])
            else:
                response = apply(request["state"], request["apply"])
        except Exception as error:
            response = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"attempt": request["attempt"], **response}), flush=True)


if __name__ == "__main__":
    main()
