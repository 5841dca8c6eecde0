"""A game of TextArena as a game of Levade.

The option `environment` names the game, such as `TicTacToe-v0` or `KuhnPoker-v0`; `players` is the number of seats. An
action is a text, in the format that the game's own instructions demand.

TextArena cannot save a position. The state therefore has the seed and all actions, and another process plays them
again. A process keeps its last environment, so that a match that stays in one process plays every action once.
"""

import contextlib
import json
import random
import sys

import textarena

last = {"state": None, "environment": None}


def open_environment(state):
    """Returns the environment at a position."""
    if last["state"] == state:
        return last["environment"]
    random.seed(state["seed"])
    environment = textarena.make(state["environment"])
    environment.reset(num_players=state["players"], seed=state["seed"] % 2**31)
    for action in state["actions"]:
        environment.get_observation()
        environment.step(action=action)
    return environment


def start(options, seed):
    state = {"environment": options["environment"], "players": options.get("players", 2), "seed": seed, "actions": []}
    names = [f"Player {index}" for index in range(state["players"])]
    seats = [{"index": i, "name": name, "role": name, "side": name, "instructions": ""} for i, name in enumerate(names)]
    return {"seats": seats, **position(open_environment(state), state)}


def apply(state, moves):
    environment = open_environment(state)
    [[_, move]] = moves
    done, _ = environment.step(action=move["move"])
    return position(environment, {**state, "actions": state["actions"] + [move["move"]]}, done)


def position(environment, state, done=False):
    if done:
        rewards, info = environment.close()
        outcomes = []
        for seat in range(state["players"]):
            invalid = float(info[seat].get("invalid_move", False))
            outcomes.append({"seat": seat, "reward": float(rewards[seat]), "parts": [["invalid", invalid]]})
        return {"next": {"over": outcomes}, "state": state}
    seat, observation = environment.get_observation()
    last.update(state=state, environment=environment)
    choice = {"schema": {"type": "string"}}
    ask = {"seat": seat, "kind": "action", "prompt": observation, "choice": choice, "default": {"move": ""}}
    return {"next": {"ask": [ask]}, "state": state}


def main():
    for line in sys.stdin:
        request = json.loads(line)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                if "start" in request:
                    response = start(request["start"]["options"], request["start"]["seed"])
                else:
                    response = apply(request["state"], request["apply"])
        except Exception as error:
            response = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"attempt": request["attempt"], **response}), flush=True)


if __name__ == "__main__":
    main()
