"""Trains on AgentScope's own game of Werewolf: nine of its agents over `MsgHub`, in a program behind the gateway.

    uv venv venv && uv pip install --python venv 'agentscope==1.0.21' 'mcp<2' greenlet tqdm
    git clone --depth 1 --branch v1.0.21 https://github.com/agentscope-ai/agentscope /tmp/agentscope
    python3 conformance/agentscope_game.py --checkout /tmp/agentscope --python venv/bin/python --model FOLDER

FOLDER: random weights, byte tokens. The game's own `game.py` runs unchanged; agentscope/play.py gives it the players.
The recipe is trained twice, once for each way to tell the players apart:

- `named`: a player calls as its side and number (`wolf@3`), by the path of its endpoint.
- `matched`: all players call one endpoint, and rules of the recipe match the name in the system prompt. A scripted
  teacher plays three of the players.

First, the model imitates a game that the teacher plays alone, through the gateway, with a tool call for each decision.
Then follow two steps of GRPO, whose groups are a seed and a player. Checks:

- All games end, with a winner or after the game's last round, and none is broken.
- The record has the calls of each of the nine players under its name, as many as the player made. The prompt of each
  recorded call has the player's own system prompt. None counts as a probe, which would not be trained.
- Each step trains tokens of the players whose rewards differ between games, and no log-probability differs (mismatch 0).

Not checked: how much is learned.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bits import record
from clients import small_model
from environments import Teacher

ROOT = Path(__file__).resolve().parent.parent
PLAYERS = range(1, 10)
RECIPE = """
[run]
name = "agentscope"
folder = "run"
checkpoint_every = 1
[model]
source = "model"
context = 32768
[policy.default]
kind = "trained"
[policy.teacher]
kind = "external"
url = "http://127.0.0.1:{port}/v1"
model = "teacher"
[engine]
micro_batch_tokens = 32768

[[tasks]]
kind = "seeds"
train = 100

# The limits of a game.
[agent]
kind = "program"
command = {command}
protocol = "hermes"
tool_prompt = "compact"
max_turns = 600
max_tokens = 60000
attempt_seconds = 900
{agents}
[reward]
scorer = {{ kind = "program", from = "last_line" }}

[eval]
tasks = 0

[[phase]]
kind = "sft"
demonstrations = 1
source = {{ policy = "teacher", min_score = -1.0 }}
batch = 1
epochs = {epochs}
learning_rate = 1e-2

[[phase]]
kind = "rl"
steps = 2
groups = 1
group_size = {attempts}
group_by = "agent"
learning_rate = 1e-3
"""
NAMED = """
[agent.wolf]
max_tokens = 16
[agent.good]
max_tokens = 16
"""
MATCHED = """
[agent.player{number}]
match = {{ system = "You are Player{number}[.]" }}
max_tokens = 16
"""
# The teacher plays the last three players.
TAUGHT = 'policy = "teacher"\ntrain = false\n'
MATCHES = [MATCHED.format(number=number) + (TAUGHT if number > 6 else "") for number in PLAYERS]
AGENTS = {"named": NAMED, "matched": "".join(MATCHES)}


DICE = random.Random(1)


def play(body: dict) -> str | dict:
    """Answers for a player who says a word, and decides by one call that suits every question of the game."""
    if not body.get("tools"):
        return "Fine."
    fields = body["tools"][0]["function"]["parameters"]["properties"]
    # A name, if the question is for one of these; other questions ignore it.
    names = next((field["enum"] for field in fields.values() if "enum" in field), ["Player1"])
    name = DICE.choice(names)
    decision = {
        "vote": name,
        "name": name,
        "reach_agreement": True,
        "resurrect": False,
        "poison": False,
        "shoot": False,
    }
    return {"name": "generate_response", "arguments": json.dumps(decision)}


class Report:
    """Prints the lines of a check, and records whether one failed."""

    failed = False

    def expect(self, holds: bool, line: str) -> None:
        self.failed |= not holds
        print(f"{'ok  ' if holds else 'FAIL'} {line}", flush=True)


def prompt_of(segments: list[dict], index: int) -> bytes:
    """Returns the text before a segment, whose tokens are bytes."""
    parts, at = [], segments[index]
    while at["parent"] is not None:
        after, at = at["after"], segments[at["parent"]]
        parts.append(at["ids"] if after is None else at["ids"][:after])
    return bytes(token for ids in reversed(parts) for (token,) in ids if token < 256)


def check_names(report: Report, name: str, attempts: dict[str, dict]) -> None:
    """Compares the recorded calls with those that the players made."""
    wrong, calls, probes, figures = [], 0, 0, Counter()
    for key, attempt in attempts.items():
        program = attempt["outcome"]["evidence"]["program"]
        line = json.loads(program["last_line"])
        found = Counter(call["agent"] for call in program["calls"])
        if found != Counter(line["calls"]) or any(call["fault"] for call in program["calls"]):
            wrong.append(f"{key}: recorded {dict(found)}, made {line['calls']}")
        segments = attempt["segments"]
        prompts = [
            (part["agent"], prompt_of(segments, at)) for at, part in enumerate(segments) if part["kind"] != "given"
        ]
        # Calls of policies that run elsewhere are recorded as messages.
        for call in program.get("external", []):
            if call["shared"] == 0:
                prompts.append((call["agent"], json.dumps(call["messages"]).encode()))
        for agent, prompt in prompts:
            number = agent.removesuffix(".probe").removeprefix("player").rpartition("@")[2]
            if f"You are Player{number}.".encode() not in prompt:
                wrong.append(f"{key}: a call of {agent} has another player's prompt")
        calls += found.total()
        probes += sum(agent.endswith(".probe") for agent, _ in prompts)
        figures[f"won by {line['winner'] or 'nobody'}"] += 1
        figures["decisions"] += line["decisions"]
        figures["defaults"] += line["defaults"]
    note = ", ".join(f"{count} {what}" for what, count in sorted(figures.items()))
    report.expect(probes == 0, f"{name}: {probes} calls count as probes, which are not trained")
    report.expect(not wrong, f"{name}: {calls} calls of {len(attempts)} games under the names of the players; {note}")
    for line in wrong[:5]:
        print(f"       {line}")


def check(report: Report, name: str, folder: Path, attempts_per_step: int) -> None:
    found = record(folder)
    trained = {key: attempt for key, attempt in found["attempts"].items() if key.startswith("train/")}
    broken = [
        attempt["outcome"].get("error") or attempt["outcome"]["finish"]
        for attempt in trained.values()
        if attempt["status"] != "completed"
    ]
    report.expect(
        len(trained) == 2 * attempts_per_step and not broken, f"{name}: {len(trained)} games have ended {broken[:2]}"
    )
    check_names(
        report, name, {key: attempt for key, attempt in found["attempts"].items() if attempt["status"] == "completed"}
    )
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "grpo" and "training/targets" in line] if lines else []
    for line in steps:
        mismatch, targets = line["training/logprob_mismatch"], line["training/targets"]
        players = set()
        for path in found["steps"][f"1/{line['step'] - 1}"].get("paths", []):
            segments, at = found["attempts"][path["attempt"]]["segments"], path["leaf"]
            if any(weight for weight, _ in path["weight"]):
                players.add(segments[at]["agent"])
        report.expect(
            mismatch == 0 and targets > 0, f"{name}, step {line['step']}: {targets:.0f} tokens, mismatch {mismatch:.0f}"
        )
        has_gradient = bool(players) and line["actor/grad_norm"] > 0
        report.expect(has_gradient, f"{name}, step {line['step']}: trained {sorted(players)}")
    report.expect(len(steps) == 2, f"{name}: {len(steps)} steps of GRPO")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument(
        "--model", type=Path, required=True, help="directory with a tokenizer of bytes and its configuration"
    )
    p.add_argument("--checkout", type=Path, required=True, help="AgentScope's repository at v1.0.21")
    p.add_argument("--python", type=Path, required=True, help="interpreter that has the package agentscope")
    p.add_argument("--attempts", type=int, default=3, help="games of a step")
    p.add_argument("--epochs", type=int, default=1, help="epochs on the teacher's game")
    p.add_argument("--seconds", type=float, default=3600, help="timeout of a run, in seconds")
    p.add_argument("--only", default="", help="only the runs whose names contain this")
    p.add_argument("--keep", type=Path, help="directory for the runs, which are kept")
    p.add_argument("--check", action="store_true", help="only check the runs in --keep, and start none")
    options = p.parse_args()
    game = options.checkout.resolve() / "examples/game/werewolves"
    if not (game / "game.py").is_file():
        sys.exit(f"{game / 'game.py'} does not exist; --checkout must be AgentScope's repository at v1.0.21")
    teacher = Teacher(play)
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        for name, agents in AGENTS.items():
            if options.only not in name:
                continue
            folder = (options.keep or Path(scratch)) / name
            if options.check:
                check(report, name, folder, options.attempts)
                continue
            folder.mkdir(parents=True)
            small_model(folder / "model", options.model)
            # The interpreter of a virtual environment must not be resolved.
            command = [str(options.python.absolute()), str(ROOT / "conformance/agentscope/play.py"), str(game), name]
            filled = {"command": json.dumps(command), "agents": agents, "port": teacher.port}
            (folder / "recipe.toml").write_text(
                RECIPE.format(**filled, epochs=options.epochs, attempts=options.attempts)
            )
            train = [options.levade.resolve(), "train", "recipe.toml"]
            done = subprocess.run(
                train, cwd=folder, capture_output=True, text=True, timeout=options.seconds, check=False
            )
            if done.returncode != 0:
                report.expect(
                    False, f"{name}: levade ended with {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
                )
                continue
            check(report, name, folder, options.attempts)
    teacher.server.shutdown()
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
