"""Checks that training `write` and `rewrite` of recipes/spider learns nothing from what `check` writes.

    python3 conformance/spider.py --model FOLDER --path VENV/bin    # langgraph and langchain-openai are in VENV

FOLDER contains a tiny model with random weights and byte tokens, whose queries are all wrong. The agent of the runs
therefore takes a query for right by a hash, so that rewards differ. Each of these runs is made twice, with equal seeds:
once as it is, and once with an agent that calls `check` once more at the end of each attempt and ignores the reply. All
calls of `write` and `rewrite` are therefore the same, and the tokens of `check` are not.

- `frozen`: the recipe, in which another policy plays `check`.
- `shared`: the trained policy also plays `check`, which has `train = false`, as in Agent Lightning's example.
- `control`: the same with `train = true`.

Checks that the weights of both runs are equal bit for bit, except in the control, where they must differ; that the
plan has only tokens of trained agents, and always all tokens of a call; and, for the attempt with most agents, that the
terms of the loss in `inspect --terms` are those of the plan. Also checks that each agent is compared with itself: the
signs of the advantages in the plan follow from the rewards that the record has for its part.

Not checked: how much is learned (bench/log/2026-11-29-spider.md).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from bits import record

ROOT = Path(__file__).resolve().parent.parent
AGENT = """
import importlib.util
import zlib

spec = importlib.util.spec_from_file_location("spider_agent", "agent.py")
spider = importlib.util.module_from_spec(spec)
spec.loader.exec_module(spider)
original, once = spider.execute, spider.run


def execute(state):
    return original(state) | {"right": [zlib.crc32(state["query"].encode()) % 2 == 0]}


def twice(order):
    state = once(order)
    spider.call(spider.connect(order), "check", [("user", "Is SQL a language? " + state["result"])])
    return state


spider.execute = execute
spider.GRAPH = spider.build()
if TWICE:
    spider.run = twice
spider.serve()
"""
SHARED = ['agent.check.policy="sql"']
PROGRAMS = {"once.py": False, "twice.py": True}
# In the control, the figure of `check` counts, because it would otherwise have no advantage.
CONTROL = [*SHARED, "agent.check.train=true", "reward.scorers.1.weights.check=0.5"]
RUNS = {"frozen": [], "shared": SHARED, "control": CONTROL}
TRAINED = {"frozen": {"write", "rewrite"}, "shared": {"write", "rewrite"}, "control": {"write", "rewrite", "check"}}
SMALL = [
    "eval.tasks=0",
    "run.checkpoint_every=1",
    "run.skip_phases=1",
    "phase.1.steps=2",
    "phase.1.groups=3",
    "phase.1.group_size=6",
    "phase.1.learning_rate=1e-2",
    "model.context=1024",
    "engine.threads=1",
    # For a further call of `check`.
    "agent.max_turns=8",
    "agent.max_tokens=400",
    # So that verdicts differ, and could be trained.
    "agent.check.sampling.temperature=1.0",
]


class Levade:
    """The binary, with the environment of the agent."""

    def __init__(self, binary: Path, path: list[str]) -> None:
        self.binary = binary
        self.environment = os.environ | {"PATH": ":".join([*path, os.environ["PATH"]])}

    def call(self, directory: Path, *arguments: str | Path) -> str:
        """Runs a subcommand in a directory and returns its output."""
        done = subprocess.run(
            [self.binary, *arguments], cwd=directory, env=self.environment, capture_output=True, text=True, timeout=1800
        )
        if done.returncode != 0:
            raise RuntimeError(f"levade {arguments[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout

    def train(self, directory: Path, run: Path, *changes: str) -> None:
        """Trains the recipe in a directory."""
        sets = [part for change in changes for part in ("--set", change)]
        self.call(directory, "train", directory, "--run", run, *sets)


def sequence(segments: list[dict], leaf: int) -> list[tuple[int, int]]:
    """Returns the segments from the root to a leaf, each with its number of tokens on this sequence."""
    found, at, end = [], leaf, None
    while at is not None:
        tokens = len(segments[at]["ids"])
        found.append((at, tokens if end is None else min(end, tokens)))
        at, end = segments[at]["parent"], segments[at]["after"]
    return found[::-1]


def trained_tokens(levade: Levade, directory: Path, name: str, attempt: dict) -> Counter:
    """Returns the number of terms of an attempt by agent. Terms without weight do not count."""
    slot = name.split(",")[0]
    try:
        output = levade.call(directory, "inspect", "run", "--attempt", slot, "--terms", "--json")
    except RuntimeError as error:
        if "trained on no token of" in str(error):
            return Counter()
        raise
    found = Counter()
    for term in map(json.loads, output.splitlines()):
        agents = [
            attempt["segments"][segment]["agent"]
            for segment, tokens in sequence(attempt["segments"], term["leaf"])
            for _ in range(tokens)
        ]
        found[agents[term["index"]]] += term["weight"] != 0.0
    return found


def sampled_tokens(attempt: dict) -> Counter:
    """Returns the number of trainable tokens of an attempt by agent."""
    found = Counter()
    for segment in attempt["segments"]:
        if segment["kind"] == "sampled" and not segment["filtered"] and segment["temperature"] > 0:
            found[segment["agent"]] += len(segment["ids"])
    return found


def planned_tokens(found: dict) -> dict[str, Counter]:
    """Returns the number of tokens with a weight in the plans of a run, by attempt and agent."""
    planned = defaultdict(Counter)
    for step in found["steps"].values():
        for path in step.get("paths", []):
            segments = found["attempts"][path["attempt"]]["segments"]
            # Each call starts a conversation, so a sequence has one sampled segment, its leaf.
            leaf = segments[path["leaf"]]
            planned[path["attempt"]][leaf["agent"]] += len(leaf["ids"]) if any(w for w, _ in path["weight"]) else 0
    return planned


def check_tokens(levade: Levade, directory: Path, found: dict, trained: set[str]) -> tuple[list[str], Counter]:
    """Checks which tokens were trained. Returns what is wrong, and the trained tokens by agent."""
    problems, total, planned = [], Counter(), planned_tokens(found)
    for name, got in planned.items():
        total += got
        sampled = sampled_tokens(found["attempts"][name])
        # Agents without an advantage are not in the plan.
        if any(tokens != sampled[agent] or agent not in trained for agent, tokens in got.items()):
            problems.append(f"{name}: the plan trains {dict(got)} tokens of {dict(sampled)}")
    if set(total) != trained:
        problems.append(f"the plan trains tokens of {sorted(total)}, but must train those of {sorted(trained)}")
    if planned:
        name = max(planned, key=lambda name: len(planned[name]))
        terms = trained_tokens(levade, directory, name, found["attempts"][name])
        if terms != planned[name]:
            problems.append(f"{name}: there are terms of {dict(terms)} tokens, not {dict(planned[name])}")
    return problems, total


def check_rewards(found: dict) -> tuple[list[str], int]:
    """Checks the advantages against the parts of the rewards. Returns what is wrong, and the number of checked turns."""
    problems, turns = [], 0
    groups = defaultdict(list)
    for name, attempt in found["attempts"].items():
        if attempt["status"] == "completed" and name.startswith("train/"):
            phase, step, group = name.split("/")[1:4]
            own = defaultdict(float)
            for part in attempt["earned"]:
                own[part["by"]["agent"]] += part["reward"]
            outcome = attempt["reward"] - sum(own.values())
            groups[phase, step, group].append((name, outcome, own, {s["agent"] for s in attempt["segments"]}))
    expected = {}
    for members in groups.values():
        for agent in ("write", "rewrite"):
            scores = {name: outcome + own[agent] for name, outcome, own, acted in members if agent in acted}
            for name, score in scores.items():
                expected[name, agent] = score - sum(scores.values()) / len(scores)
    for step in found["steps"].values():
        for path in step.get("paths", []):
            segments = found["attempts"][path["attempt"]]["segments"]
            agent = segments[path["leaf"]]["agent"]
            want, got = expected.get((path["attempt"], agent)), path["advantage"][0][0]
            turns += 1
            # The default algorithm divides by the deviation, which keeps the sign.
            if want is None or (abs(want) < 1e-9) != (abs(got) < 1e-6) or want * got < 0:
                problems.append(
                    f"{path['attempt']}: the advantage of {agent} is {got}, but its reward differs by {want}"
                )
    return problems, turns


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="directory of a tiny model with byte tokens")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--path", action="append", default=[], help="directories that precede those of PATH")
    p.add_argument("--only", default="", metavar="NAME", help="runs whose names contain this")
    p.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs in this directory, which must not exist")
    options = p.parse_args()
    levade = Levade(options.levade.resolve(strict=True), [str(Path(path).resolve()) for path in options.path])
    problems = []
    with tempfile.TemporaryDirectory() as temporary:
        root = (options.keep or Path(temporary)).resolve()
        for name in ("sql", "spider"):
            shutil.copytree(ROOT / "recipes" / name, root / name, ignore=shutil.ignore_patterns("data"))
        recipe = root / "spider"
        for program, twice in PROGRAMS.items():
            (recipe / program).write_text(AGENT.replace("TWICE", str(twice)))
        subprocess.run([sys.executable, recipe / "prepare.py"], check=True, stdout=subprocess.DEVNULL)
        model = f'model.source="{options.model.resolve(strict=True)}"'
        for name, changes in RUNS.items():
            if options.only not in name:
                continue
            began, records = time.monotonic(), {}
            for program in PROGRAMS:
                directory = root / f"{name}-{program.removesuffix('.py')}"
                directory.mkdir()
                command = f'agent.command=["python3", "{program}"]'
                levade.train(recipe, directory / "run", *SMALL, model, command, *changes)
                found = records[program] = record(directory)
                wrong, total = check_tokens(levade, directory, found, TRAINED[name])
                wrong_rewards, turns = check_rewards(found) if name != "control" else ([], 0)
                problems += [f"{name}, {program}: {what}" for what in [*wrong, *wrong_rewards][:5]]
                print(f"{name}, {program}: trained tokens {dict(total)}, {turns} advantages checked", flush=True)
            equal = records["once.py"]["weights"] == records["twice.py"]["weights"]
            if equal == (name == "control"):
                problems.append(f"{name}: the weights of both runs are {'equal' if equal else 'different'}")
            once, twice = (
                sum(len(attempt["segments"]) for attempt in records[program]["attempts"].values())
                for program in PROGRAMS
            )
            extra = twice - once
            print(
                f"{name}: weights {'equal' if equal else 'different'}, {extra} more segments in the second run "
                f"({time.monotonic() - began:.0f} s)",
                flush=True,
            )
            if extra <= 0:
                problems.append(f"{name}: the second run has no further calls of check")
    if problems:
        sys.exit("\n".join(problems))
    print("all passed")


if __name__ == "__main__":
    main()
