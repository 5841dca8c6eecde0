"""Checks that training `write` and `rewrite` of recipes/spider learns nothing from what `check` writes.

    python3 conformance/spider.py --path VENV/bin       # needs langgraph and langchain-openai in VENV

First trains the recipe's first phase on a few demonstrations and merges the adapter, so that some queries are right.
Then makes each of these runs twice, with equal seeds: once as it is, and once with an agent that calls `check` once
more at the end of each attempt and ignores the reply. All calls of `write` and `rewrite` are therefore the same, and
the tokens of `check` are not.

- `frozen`: the recipe, in which another policy plays `check`.
- `shared`: the trained policy also plays `check`, which has `train = false`, as in Agent Lightning's example.
- `control`: the same with `train = true`.

Checks for each step that the trained tokens in `inspect --terms` are exactly the tokens that the trained agents
sampled, and that the weights of both runs are equal bit for bit, except in the control, where they must differ. Also
checks that each agent is compared with itself: the advantages in the plan follow from the rewards that the record has
for its part.

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
TWICE = """
import importlib.util

spec = importlib.util.spec_from_file_location("spider_agent", "agent.py")
spider = importlib.util.module_from_spec(spec)
spec.loader.exec_module(spider)
once = spider.run


def twice(order):
    state = once(order)
    spider.call(spider.connect(order), "check", [("user", "Is SQL a language? " + state["result"])])
    return state


spider.run = twice
spider.serve()
"""
SHARED = ['agent.check.policy="sql"', "agent.check.sampling.temperature=1.0"]
RUNS = {"frozen": [], "shared": SHARED, "control": [*SHARED, "agent.check.train=true"]}
# Sizes that take about a minute per run on two cores.
SMALL = ["eval.tasks=0", "run.checkpoint_every=1", "agent.retries=3"]
FIRST = ["phase.0.demonstrations=24", "phase.0.epochs=2"]
THEN = ["run.skip_phases=1", "phase.1.steps=2", "phase.1.groups=3", "phase.1.group_size=4"]
TRAINED = {"frozen": {"write", "rewrite"}, "shared": {"write", "rewrite"}, "control": {"write", "rewrite", "check"}}


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


def check_terms(levade: Levade, directory: Path, found: dict, trained: set[str]) -> tuple[list[str], Counter]:
    """Checks which tokens were trained. Returns what is wrong, and the trained tokens by agent."""
    problems, total = [], Counter()
    # Attempts in plans. A group of equal rewards is left out.
    planned = {path["attempt"] for step in found["steps"].values() for path in step.get("paths", [])}
    for name in sorted(planned):
        attempt = found["attempts"][name]
        got = trained_tokens(levade, directory, name, attempt)
        total += got
        sampled = Counter()
        for segment in attempt["segments"]:
            if segment["kind"] == "sampled" and not segment["filtered"] and segment["temperature"] > 0:
                sampled[segment["agent"]] += len(segment["ids"])
        for agent in sampled.keys() | got.keys():
            want = sampled[agent] if agent in trained else 0
            if got[agent] not in (0, want):
                problems.append(f"{name}: {got[agent]} tokens of {agent} were trained, not {want}")
    if not all(total[agent] for agent in trained):
        problems.append(f"the trained tokens were {dict(total)}, but each of {sorted(trained)} must have some")
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
        (recipe / "twice.py").write_text(TWICE)
        subprocess.run([sys.executable, recipe / "prepare.py"], check=True, stdout=subprocess.DEVNULL)
        # The first phase alone: its checkpoint is the start of every run.
        text = (recipe / "recipe.toml").read_text()
        (recipe / "first.toml").write_text(text[: text.index('[[phase]]\nkind = "rl"')])
        sets = [part for change in [*SMALL, *FIRST] for part in ("--set", change)]
        levade.call(root, "train", recipe / "first.toml", "--run", root / "first", *sets)
        levade.call(root, "merge", root / "first", root / "start")
        for name, changes in RUNS.items():
            if options.only not in name:
                continue
            began, records = time.monotonic(), {}
            for program in ("agent.py", "twice.py"):
                directory = root / f"{name}-{program.removesuffix('.py')}"
                directory.mkdir()
                command = f'agent.command=["python3", "{program}"]'
                levade.train(
                    recipe, directory / "run", *SMALL, *THEN, f'model.source="{root / "start"}"', command, *changes
                )
                found = records[program] = record(directory)
                wrong, total = check_terms(levade, directory, found, TRAINED[name])
                wrong_rewards, turns = check_rewards(found) if name != "control" else ([], 0)
                problems += [f"{name}, {program}: {what}" for what in [*wrong, *wrong_rewards][:5]]
                print(f"{name}, {program}: trained tokens {dict(total)}, {turns} advantages checked", flush=True)
            equal = records["agent.py"]["weights"] == records["twice.py"]["weights"]
            if equal == (name == "control"):
                problems.append(f"{name}: the weights of both runs are {'equal' if equal else 'different'}")
            once, twice = (
                sum(len(attempt["segments"]) for attempt in records[program]["attempts"].values())
                for program in ("agent.py", "twice.py")
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
