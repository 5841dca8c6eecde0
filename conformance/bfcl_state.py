"""Plays entries of BFCL's multi-turn category with its own APIs as tools and its own state check as the reward.

    uv venv venv && uv pip install --python venv --no-deps bfcl-eval && uv pip install --python venv mpmath
    venv/bin/python conformance/bfcl_state.py --model FOLDER     # FOLDER: random weights, byte tokens

bfcl/api.py makes one toolbox of all APIs, bfcl/user.py a user who writes the message of each turn. Scripted teachers
play each entry of `multi_turn_base` three times in the built-in loop, as demonstrations of three phases:

- `exact` makes the calls of the ground truth.
- `dropped` leaves one of them out.
- `changed` changes an argument of one of them.

The last two make a change after which BFCL's check rejects the final state. Checks:

- The scores equal BFCL's verdicts on the same calls, made by BFCL's own executor without Levade: 1 for every entry of
  `exact`, 0 for every entry of the others.
- The tools made every call, with the result that BFCL's executor returns for it.
- BFCL's complete check, of the states and the results after each turn, agrees with the scores.
- Entries whose ground truth has arguments of other types than the API declares are left out.
- The model, which makes no calls, has a score of 0 on other entries. If the ground truth of an entry changes no state,
  the state cannot decide, and the attempt is unscored.

Not checked: categories in which functions or arguments are missing at first, and long contexts.
"""

import argparse
import ast
import copy
import inspect
import json
import math
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import typing
from collections import Counter
from contextlib import closing
from pathlib import Path

import bfcl_eval
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker, state_checker

from clients import small_model
from environments import Teacher

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "conformance/bfcl"
sys.path.insert(0, str(FILES))

import api  # noqa: E402

CATEGORY = "BFCL_v4_multi_turn_base.json"
KINDS = ("exact", "dropped", "changed")
RECIPE = """
[run]
name = "bfcl"
folder = "run"
checkpoint_every = 0
[model]
source = "model"
context = 32768
[policy.default]
kind = "trained"
{policies}
[[tasks]]
kind = "file"
path = "train.jsonl"
answer = ""
[[tasks]]
kind = "file"
path = "held.jsonl"
answer = ""
held_out = "all"
[agent]
tools = ["bfcl"]
protocol = "hermes"
tool_prompt = "compact"
user = "person"
max_turns = 60
max_tokens = 65536
attempt_seconds = 600

[[tool]]
kind = "python"
name = "bfcl"
file = "api.py"
functions = ["Bfcl"]
python = {python}
workers = 1
worker_calls = 16
seconds = 60

[user.person]
kind = "python"
file = "user.py"
python = {python}
workers = 1

[reward]
scorer = {{ kind = "state", field = "expected" }}

[eval]
tasks = {held}
max_tokens = 64

{phases}
"""
POLICY = """
[policy.{name}]
kind = "external"
url = "http://127.0.0.1:{port}/v1"
model = "{name}"
"""
PHASE = """
[[phase]]
kind = "sft"
demonstrations = {count}
batch = {batch}
learning_rate = 1e-5
source = {{ policy = "{name}", min_score = -1.0, tasks = {count} }}
"""


class Entry:
    """An entry of BFCL with its ground truth, as calls with named arguments."""

    def __init__(self, row: dict, ground_truth: list[list[str]]) -> None:
        self.id, self.config, self.classes = row["id"], row["initial_config"], row["involved_classes"]
        self.messages = ["\n".join(message["content"] for message in turn) for turn in row["question"]]
        self.excluded = row.get("excluded_function", [])
        self.ground_truth = ground_truth
        self.turns = [[named(call) for call in turn] for turn in ground_truth]

    def row(self) -> dict:
        """Returns the row of the task."""
        tools = [name for name, kind in api.METHODS.items() if kind in self.classes and name not in self.excluded]
        return {
            "question": self.id,
            "entry": self.id,
            "initial_config": self.config,
            "involved_classes": self.classes,
            "ground_truth": self.ground_truth,
            "turns": self.messages,
            "expected": {},
            "extra_info": {"tool_selection": tools},
        }

    def play(self, turns: list[list[dict]]) -> tuple[list[str], dict]:
        """Makes calls with BFCL's executor. Returns the results and the APIs."""
        calls = [text(call) for turn in turns for call in turn]
        return api.play(self.id, self.config, self.classes, calls)

    def is_accepted(self, turns: list[list[dict]]) -> bool:
        """Returns whether BFCL's check accepts the final state after these calls."""
        expected = [call for turn in self.ground_truth for call in turn]
        _, found = self.play(turns)
        _, wanted = api.play(self.id, self.config, self.classes, expected)
        return state_checker(found, wanted)["valid"]

    def misfit(self) -> str | None:
        """Returns an argument of the ground truth that is not of the type that the API declares, if there is one. A tool
        call with it is rejected; BFCL's executor checks no types.
        """
        for call in (call for turn in self.turns for call in turn):
            kind = api.CLASSES[api.METHODS[call["name"]]]
            types = typing.get_type_hints(getattr(kind, call["name"]))
            for name, value in call["arguments"].items():
                if types.get(name) in (int, str, bool) and type(value) is not types[name]:
                    return f"{text(call)}, but {name} is declared as {types[name].__name__}"
        return None

    def is_valid(self, turns: list[list[dict]], owner: str) -> bool:
        """Returns the verdict of BFCL's complete check: states and results after each turn."""
        steps = [[[text(call)] for call in turn] for turn in turns]
        row = {"id": self.id, "initial_config": self.config, "involved_classes": self.classes}
        return multi_turn_checker(steps, self.ground_truth, row, "multi_turn_base", owner)["valid"]

    def variants(self, kind: str):
        """Yields changed versions of the calls, from the last call to the first."""
        places = [(turn, at) for turn, calls in enumerate(self.turns) for at in range(len(calls))]
        for turn, at in reversed(places):
            if kind == "dropped":
                changed = copy.deepcopy(self.turns)
                del changed[turn][at]
                yield changed
                continue
            for name, value in self.turns[turn][at]["arguments"].items():
                changed = copy.deepcopy(self.turns)
                changed[turn][at]["arguments"][name] = altered(value)
                yield changed

    def played(self, kind: str) -> list[list[dict]] | None:
        """Returns the calls that the agent `kind` makes; `None` if every change ends in an accepted state."""
        if kind == "exact":
            return self.turns
        return next((turns for turns in self.variants(kind) if not self.is_accepted(turns)), None)


def named(call: str) -> dict:
    """Parses a call in Python's syntax, and names its positional arguments."""
    tree = ast.parse(call, mode="eval").body
    function = getattr(api.Bfcl, tree.func.id)
    positional = [ast.literal_eval(value) for value in tree.args]
    others = {keyword.arg: ast.literal_eval(keyword.value) for keyword in tree.keywords}
    arguments = inspect.signature(function).bind(None, *positional, **others).arguments
    return {"name": tree.func.id, "arguments": {name: arguments[name] for name in list(arguments)[1:]}}


def text(call: dict) -> str:
    """Returns a call in Python's syntax."""
    return f"{call['name']}({', '.join(f'{name}={value!r}' for name, value in call['arguments'].items())})"


def altered(value):
    """Returns another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + " x"
    if isinstance(value, list):
        return value[:-1] if value else [0]
    if isinstance(value, dict):
        return {key: altered(inner) for key, inner in value.items()}
    raise TypeError(f"an argument is {value!r}, which the script cannot change")


def as_value(result: str):
    """Returns the value that the result of a call stands for. Levade writes it as JSON, and `None` as an empty text;
    BFCL partly writes it as Python does.
    """
    if result == "":
        return None
    if result.startswith("Error"):
        return "Error"
    for read in (json.loads, ast.literal_eval):
        try:
            return read(result)
        except (ValueError, SyntaxError):
            pass
    return result


def is_same(ours: str, theirs: str) -> bool:
    """Returns whether two texts of a result stand for the same value. JSON has no numbers of mpmath: Levade writes their
    `str`, BFCL their `repr`, which has more digits.
    """
    number = re.fullmatch(r"\{'result': mpf\('(.*)'\)\}", theirs)
    if number:
        return math.isclose(float(json.loads(ours)["result"]), float(number[1]), rel_tol=1e-9)
    return as_value(ours) == as_value(theirs)


def entries(count: int) -> list[Entry]:
    """Returns the first entries of the category. Entries that begin with the same message as an earlier one are left
    out, because the scripted agents know an entry by its messages.
    """
    data = Path(bfcl_eval.__file__).parent / "data"
    rows = [json.loads(line) for line in (data / CATEGORY).read_text().splitlines()]
    answers = [json.loads(line) for line in (data / "possible_answer" / CATEGORY).read_text().splitlines()]
    truth = {answer["id"]: answer["ground_truth"] for answer in answers}
    found = {}
    for row in rows:
        entry = Entry(row, truth[row["id"]])
        found.setdefault(entry.messages[0], entry)
    return list(found.values())[:count]


def serve(plans: dict, seen: dict) -> Teacher:
    """Starts the teachers on a free port. `plans` has the calls by teacher and first message; `seen` gets the results
    that the teacher has read.
    """

    def rule(body: dict) -> str | dict:
        roles = [message["role"] for message in body["messages"]]
        first = next(message for message in body["messages"] if message["role"] == "user")["content"]
        last = len(roles) - 1 - roles[::-1].index("user")
        calls = plans[body["model"], first][roles.count("user") - 1]
        made = roles[last:].count("assistant")
        seen[body["model"], first] = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if made >= len(calls):
            return "Done."
        return {"name": calls[made]["name"], "arguments": json.dumps(calls[made]["arguments"])}

    return Teacher(rule)


def train(options: argparse.Namespace, folder: Path, rows: dict[str, list[Entry]], port: int) -> None:
    """Writes the recipe and its tasks, and trains."""
    for name, its in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry.row()) + "\n" for entry in its))
    for name in ("api.py", "user.py"):
        shutil.copy(FILES / name, folder)
    small_model(folder / "model", options.model)
    count = len(rows["train"])
    recipe = RECIPE.format(
        policies="".join(POLICY.format(name=kind, port=port) for kind in KINDS),
        phases="".join(PHASE.format(name=kind, count=count, batch=-(-count // 2)) for kind in KINDS),
        python=json.dumps(sys.executable),
        held=len(rows["held"]),
    )
    (folder / "recipe.toml").write_text(recipe)
    command = [options.levade.resolve(), "train", "recipe.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=options.seconds, check=False)
    if done.returncode != 0:
        sys.exit(f"levade ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


class Report:
    """Prints the lines of a check, and records whether one failed."""

    failed = False

    def expect(self, holds: bool, line: str) -> None:
        self.failed |= not holds
        print(f"{'ok  ' if holds else 'FAIL'} {line}", flush=True)


def attempts_of(db: sqlite3.Connection, where: str) -> list[tuple[str, dict, float | None]]:
    """Returns the entry, the outcome and the score of recorded attempts."""
    rows = db.execute(f"SELECT task, outcome, score FROM attempts WHERE {where}").fetchall()
    return [(json.loads(task)["row"]["entry"], json.loads(outcome), score) for task, outcome, score in rows]


def shown(scores: Counter) -> str:
    return ", ".join(f"{count} {'unscored' if score is None else f'with {score:g}'}" for score, count in scores.items())


def check(report: Report, db: sqlite3.Connection, plans: dict, seen: dict, rows: dict[str, list[Entry]]) -> None:
    """Compares the recorded attempts with BFCL's verdicts."""
    known = {entry.id: entry for its in rows.values() for entry in its}
    for phase, kind in enumerate(KINDS):
        attempts = attempts_of(db, f"purpose = 'demonstration' AND phase = {phase}")
        scores, wrong, different, disagree, calls = Counter(), [], [], 0, 0
        for name, outcome, score in attempts:
            entry = known[name]
            turns = plans[kind, entry.messages[0]]
            theirs = float(entry.is_accepted(turns))
            scores[score] += 1
            pairs = list(zip(seen[kind, entry.messages[0]], entry.play(turns)[0], strict=True))
            calls += len(pairs)
            different += [f"{name}: {mine!r}, by BFCL {their!r}" for mine, their in pairs if not is_same(mine, their)]
            if score != theirs or outcome.get("error"):
                wrong.append(f"{entry.id}: {score}, by BFCL {theirs}; {outcome.get('error')}")
            disagree += entry.is_valid(turns, f"complete_{kind}") != (score == 1)
        want, distinct = float(kind == "exact"), {name for name, *_ in attempts}
        report.expect(len(distinct) == len(attempts) == len(rows["train"]), f"{kind}: {len(attempts)} entries")
        report.expect(not different, f"{kind}: {calls - len(different)} of {calls} results are equal")
        report.expect(not wrong and set(scores) == {want}, f"{kind}: {shown(scores)}, as by BFCL")
        report.expect(disagree == 0, f"{kind}: BFCL's complete check disagrees with {disagree} scores")
        for line in [*wrong[:5], *different[:5]]:
            print(f"       {line}")
    scores, wrong = Counter(), []
    for name, outcome, score in attempts_of(db, "purpose = 'eval'"):
        scores[score] += 1
        if score != (None if known[name].is_accepted([]) else 0.0):
            wrong.append(f"{name}: {score}, {outcome.get('error')}")
    report.expect(not wrong and set(scores) == {0.0, None}, f"without calls: {shown(scores)}; {wrong[:5]}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument(
        "--model", type=Path, required=True, help="directory with a tokenizer of bytes and its configuration"
    )
    p.add_argument("--entries", type=int, default=200, help="maximum number of entries")
    p.add_argument("--seconds", type=float, default=3600, help="timeout of the run, in seconds")
    p.add_argument("--keep", type=Path, help="directory for the run, which is kept; must not exist")
    options = p.parse_args()
    report, plans, seen, rows, silent = Report(), {}, {}, {"train": [], "held": []}, []
    for entry in entries(options.entries):
        if misfit := entry.misfit():
            print(f"     {entry.id} is left out: {misfit}")
            continue
        if entry.is_accepted([]):
            silent.append(entry)
            continue
        played = {kind: entry.played(kind) for kind in KINDS}
        if None in played.values():
            print(f"     {entry.id}: BFCL accepts every change of its calls")
            rows["held"].append(entry)
            continue
        plans |= {(kind, entry.messages[0]): turns for kind, turns in played.items()}
        rows["train"].append(entry)
    rows["held"] += [*silent, *(rows["train"].pop() for _ in range(5))]
    print(f"     {len(rows['train'])} entries; {len(silent)} others change no state", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch) / "bfcl"
        folder.mkdir(parents=True)
        teacher = serve(plans, seen)
        try:
            train(options, folder, rows, teacher.port)
        finally:
            teacher.server.shutdown()
        with closing(sqlite3.connect(f"file:{folder / 'run/run.db'}?mode=ro", uri=True)) as db:
            check(report, db, plans, seen, rows)
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
