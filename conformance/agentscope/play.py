"""Plays AgentScope's own game of Werewolf as an agent of kind `program`: nine of its `ReActAgent`s over `MsgHub`.

    play.py GAME named|matched      GAME: examples/game/werewolves of AgentScope 1.0.21, whose `game.py` runs unchanged

With `named`, each player calls as its side and number (`wolf@3`, `good@5`), by the path of its endpoint. With
`matched`, all players call the same endpoint, and the recipe tells them apart by their system prompts.

The last line has the reward of each player: 1 if its side won, 1 if it survived, and the fraction of its decisions that
it made itself. The others are made for it, because the game cannot continue without them.
"""

import asyncio
import json
import os
import random
import sys
import warnings
from collections import Counter

warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])

import game  # noqa: E402
import numpy as np  # noqa: E402
from agentscope.agent import ReActAgent  # noqa: E402
from agentscope.formatter import OpenAIMultiAgentFormatter  # noqa: E402
from agentscope.model import OpenAIChatModel  # noqa: E402
from utils import Players  # noqa: E402

IS_NAMED = sys.argv[2] == "named"
SEED = json.loads(os.environ["LEVADE_TASK"])["row"]["seed"]
# The defaults of two games of a seed differ, so that their rewards do.
dice = random.Random(f"{SEED} {os.environ['LEVADE_ATTEMPT']}")
calls, decisions, defaults = Counter(), Counter(), Counter()
# Roles and survivors, as the game keeps them.
TABLE = Players()
game.Players = lambda: TABLE


class Model(OpenAIChatModel):
    """The endpoint of a player, with a count of its calls."""

    def __init__(self, player: str, path: str) -> None:
        url = f"{os.environ['LEVADE_BASE_URL']}{path}/v1"
        key, name = os.environ["LEVADE_API_KEY"], os.environ["LEVADE_MODEL"]
        super().__init__(name, api_key=key, stream=False, client_kwargs={"base_url": url, "timeout": 600})
        self.player = player

    async def __call__(self, *arguments, **named):
        calls[self.player] += 1
        return await super().__call__(*arguments, **named)


class Player(ReActAgent):
    """A player, whose endpoint depends on its role. A player who makes no decision gets a default."""

    def __init__(self, number: int) -> None:
        self.number = number
        name = f"Player{number}"
        super().__init__(
            name=name,
            sys_prompt=f"You play Werewolf. You are {name}.",
            model=None,
            formatter=OpenAIMultiAgentFormatter(),
            max_iters=1,
        )
        self.set_console_output_enabled(False)

    @property
    def agent(self) -> str:
        """The name of the player's agent in the recipe."""
        side = "wolf" if TABLE.name_to_role[self.name] == "werewolf" else "good"
        return f"{side}@{self.number}" if IS_NAMED else self.name.lower()

    async def reply(self, msg=None, structured_model=None):
        # Roles are known by the first call.
        self.model = self.model or Model(self.name, f"/agent/{self.agent}" if IS_NAMED else "")
        said = await super().reply(msg, structured_model)
        if structured_model:
            decisions[self.name] += 1
            if not said.metadata:
                defaults[self.name] += 1
                said.metadata = default(structured_model)
        return said


def default(model) -> dict:
    """Returns a decision for a player who has made none: any name, and no other action."""
    values = {}
    for name, schema in model.model_json_schema()["properties"].items():
        names = [schema["const"]] if "const" in schema else schema.get("enum")
        if names:
            values[name] = dice.choice(names)
        elif schema.get("type") == "boolean":
            values[name] = False
    return model.model_validate(values).model_dump()


def main() -> None:
    np.random.seed(SEED % 2**32)
    players = [Player(number) for number in range(1, 10)]
    asyncio.run(game.werewolves_game(list(players)))
    end = TABLE.check_winning() or ""
    winner = next((side for side in ("werewolves", "villagers") if f"{side} win" in end), None)
    alive = {player.name for player in TABLE.current_alive}
    rewards = []
    for player in players:
        is_wolf = TABLE.name_to_role[player.name] == "werewolf"
        has_won = winner is not None and is_wolf == (winner == "werewolves")
        own = 1 - defaults[player.name] / max(decisions[player.name], 1)
        rewards.append({"value": has_won + (player.name in alive) + own, "agent": player.agent})
    made = {player.agent: calls[player.name] for player in players}
    figures = {"calls": made, "winner": winner, "decisions": decisions.total(), "defaults": defaults.total()}
    print(json.dumps({"rewards": rewards, **figures}), flush=True)


main()
