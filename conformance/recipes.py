"""Checks that scripted completions get the full reward in the recipes, with the recipes' own tools and scorers.

Each recipe generates its tasks, and starts supervised training on as many demonstrations as it may try: attempts
replay the scripted completions, tools return results, and the end is scored. Checks that each attempt scores 1.

Not checked: whether a model learns the task. `mcp` needs `mcp-server-time` on the PATH, and `calc-x` a `python3` with
AutoGen; select other recipes, or pass `--path`.
"""

import argparse
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Recipes, and the phases whose scripted completions are tested.
RECIPES = {"retool": [0], "search-r1": [0], "sql": [0, 1], "retail": [0], "mcp": [0], "calc-x": [0]}


def scores(record: Path) -> list[tuple[str, float | None]]:
    """Returns status and score of each recorded demonstration so far."""
    try:
        with closing(sqlite3.connect(f"file:{record}?mode=ro", uri=True)) as file:
            asked = "SELECT status, score FROM attempts WHERE purpose = 'demonstration' AND status <> 'superseded'"
            return file.execute(asked).fetchall()
    except sqlite3.OperationalError:
        return []  # not there yet


def replay_scores(
    arguments: argparse.Namespace, name: str, phase: int, environment: dict, directory: Path
) -> list[float]:
    """Returns the scores of scripted completions in one phase of a recipe."""
    recipe, text = ROOT / "recipes" / name, (ROOT / "recipes" / name / "recipe.toml").read_text(encoding="utf-8")
    fields = [line.split('"')[1] for line in text.splitlines() if line.startswith("source = { field")]
    values = {
        "eval.tasks": 0,
        "phase.0.source.field": f'"{fields[phase]}"',
        "phase.0.source.tasks": arguments.tasks,
        "phase.0.demonstrations": arguments.tasks,
    }
    changes = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    run = directory / f"{name}-{phase}"
    command = [arguments.levade, "train", recipe, "--run", run, *changes]
    began, found = time.monotonic(), []
    with (directory / f"{name}-{phase}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() - began < arguments.seconds:
                found = scores(run / "run.db")
                if len(found) >= arguments.tasks and all(status != "running" for status, _ in found):
                    break
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if len(found) < arguments.tasks:
        print((directory / f"{name}-{phase}.log").read_text()[-2000:], file=sys.stderr)
    return [score or 0.0 for _, score in scores(run / "run.db")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=[], help=f"of {', '.join(RECIPES)}; all where none is given")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=600, help="timeout per recipe phase, in seconds")
    parser.add_argument("--path", action="append", default=[], help="directories that precede those of PATH")
    parser.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.recipes if name not in RECIPES]:
        parser.error(f"there is no recipe {unknown[0]} among {', '.join(RECIPES)}")
    environment = os.environ | {"PATH": ":".join([*arguments.path, os.environ["PATH"]])}
    good = True
    with tempfile.TemporaryDirectory() as directory:
        for name in arguments.recipes or RECIPES:
            recipe = ROOT / "recipes" / name
            subprocess.run([sys.executable, recipe / "prepare.py"], check=True, stdout=subprocess.DEVNULL)
            if name == "search-r1" and not (recipe / "data/index").exists():
                index = [recipe / "data/made-up-passages.jsonl", "--out", recipe / "data/index"]
                subprocess.run([arguments.levade, "search", "index", *index], check=True)
            for phase in RECIPES[name]:
                found = replay_scores(arguments, name, phase, environment, Path(directory))
                right = sum(score >= 1.0 for score in found)
                good &= right == len(found) == arguments.tasks
                print(f"{name}, phase {phase}: {right} of {arguments.tasks} with a score of 1", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
