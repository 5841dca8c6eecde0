"""Checks the MongoDB backend on a server: the contracts of both traits, and runs that equal those on SQLite to the bit.

    pip install pymongo
    python3 conformance/mongo.py --url mongodb://127.0.0.1:27017 --levade target/release/levade --model FOLDER

Four parts, which `--only` selects:

- contracts: `cargo test -p levade-store-mongo` with the URL: every test of the contracts of `Store` and `Rollouts`,
  leases of runs, documents of killed calls, chunks, bytes per token. `--cargo` names another command.
- bits: trains a toy recipe (bits_recipes.py) with `run.store` unset and with the URL. Weights, attempts with every token
  and log-probability, step plans and evaluations must be equal.
- kills: trains it again, kills the trainer with SIGKILL at random times, and resumes it, `--kills` times. The run must
  end like the undisturbed one. A second trainer in another directory must be rejected while the first one runs.
- bytes: attempts of 10, 50 and 100 turns of a program, in a file and in the server. Both must have the same tokens, and
  the bytes of the record per token and per turn may not grow with the number of turns.

The databases that it writes start with `levade_conformance`, and are dropped.

Not checked: loss of the server or of its disk, failover, and speed.
"""

import argparse
import hashlib
import json
import os
import random
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import bson
import pymongo

from bits import by_time, call, difference, numbers, prepare, record, summary, train
from bits_recipes import RECIPES, recipe

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "levade_conformance"
RECIPE = "calculator"

# Turns of the attempts whose bytes are measured, and the program that makes them.
TURNS = [10, 50, 100]
# Maximum ratio of the bytes per token, and per turn, of the longest and of the shortest attempts.
MAX_GROWTH = 1.05
TALKER = """
import json, os, urllib.request

BASE, KEY, MODEL = (os.environ[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
HEAD = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
task = json.loads(os.environ["LEVADE_TASK"])
messages = [{"role": "user", "content": task["question"]}]
for turn in range(task["row"]["turns"]):
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 16}).encode()
    request = urllib.request.Request(BASE + "/chat/completions", body, HEAD)
    with urllib.request.urlopen(request, timeout=100) as response:
        reply = json.load(response)["choices"][0]["message"]
    messages += [reply, {"role": "user", "content": f"{turn} + 2"}]
print(turn)
"""
TALK = (
    recipe(
        'kind = "program"\ncommand = ["python3", "talk.py"]\nmax_turns = 100\nmax_tokens = 2000\nattempt_seconds = 300\n',
        f"steps = 1\ngroups = {len(TURNS)}\ngroup_size = 2\n",
        tasks='[[tasks]]\nkind = "file"\npath = "talk.jsonl"\nheld_out = 0\n',
    )
    .replace("tasks = 2", "tasks = 0")
    .replace("600", "16384")
)


def stored_json(document: dict, name: str) -> object:
    """Returns the JSON in a field. Its text has precedence."""
    text = document.get(f"{name}_text")
    return json.loads(text) if text is not None else document.get(name)


def mongo_record(database: pymongo.database.Database, directory: Path) -> dict:
    """Returns what bits.record returns, from a database."""
    last = max((directory / "run/checkpoints").glob("step-*"))
    files = [file for file in last.rglob("*.safetensors") if not file.name.startswith("optimi")]
    weights = {str(file.relative_to(last)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    names, attempts = {}, {}
    kept = {"status": {"$nin": ["running", "abandoned"]}}
    for row in sorted(database.attempts.find(kept), key=lambda row: row["number"]):
        slot = "/".join(str(row[key]) for key in ("purpose", "phase", "step", "group", "sample"))
        name = f"{slot}, try {sum(key.startswith(slot + ',') for key in attempts)}"
        names[row["_id"]] = name
        attempts[name] = {key: row[key] for key in ("status", "score", "reward", "sampled_tokens", "tokens")}
        attempts[name] |= {key: stored_json(row, key) for key in ("task", "outcome")}
        attempts[name]["earned"] = stored_json(row, "step_rewards")
        attempts[name]["segments"] = segments(database, row)
    steps = {row["_id"]: (stored_json(row, "header"), row["plan"]) for row in database.steps.find()}
    for step, (header, plan) in steps.items():
        found = database.planned_sequences.find({"plan": plan, "_id": {"$regex": f"^{step}/"}}).sort("index", 1)
        for row in found:
            path = {"policy": row["policy"], "upd": row["update"], "leaf": row["leaf"]}
            path["attempt"] = names.get(row["attempt"])
            columns = {"advantage": "advantage", "weight": "weight", "returns": "returns", "vals": "values"}
            path |= {key: numbers("fI", row[column]) for key, column in columns.items()}
            header.setdefault("paths", []).append(path)
    evals = [[row["phase"], row["step"], stored_json(row, "result")] for row in database.evals.find()]
    return {
        "attempts": dict(sorted(attempts.items(), key=by_time)),
        "steps": {step: header for step, (header, _) in steps.items()},
        "evals": sorted(evals, key=lambda item: item[:2]),
        "weights": weights,
    }


def segments(database: pymongo.database.Database, attempt: dict) -> list[dict]:
    """Returns the segments of an attempt, which its last one names."""
    found = {row["digest"]: row for row in database.segments.find({"attempt": attempt["_id"]})}
    chain, digest = [], attempt["last"]
    while digest is not None:
        row = found[digest]
        digest = row.get("previous")
        prompt = database.prompts.find_one({"_id": row["prompt"]}) if "prompt" in row else row
        keys = ("parent", "after", "kind", "agent", "policy", "turn", "temperature")
        values = {key: row.get(key) for key in keys} | {"filtered": int(row.get("filtered", False))}
        ids = numbers("I", prompt.get("tokens", b""))
        chain.append(values | {"ids": ids, "logprobs": numbers("f", row.get("logprobs", b""))})
        chain[-1]["versions"] = numbers("QI", row.get("versions", b""))
    return chain[::-1]


def sqlite_bytes(directory: Path) -> list[tuple[int, int, int]]:
    """Returns turns, tokens and stored bytes of each attempt: of its row, its segments and its prompts, without indexes."""
    rows = []
    with closing(sqlite3.connect(f"file:{directory / 'run/run.db'}?mode=ro", uri=True)) as db:
        db.row_factory = sqlite3.Row
        for attempt in db.execute("SELECT * FROM attempts WHERE status NOT IN ('running', 'abandoned')").fetchall():
            found = db.execute("SELECT * FROM segments WHERE attempt = ?", (attempt["id"],)).fetchall()
            chosen = "SELECT * FROM prompts WHERE id IN (SELECT prompt FROM segments WHERE attempt = ?)"
            found += db.execute(chosen, (attempt["id"],)).fetchall()
            stored = sum(stored_size(value) for row in [attempt, *found] for value in row)
            rows.append((json.loads(attempt["task"])["row"]["turns"], attempt["tokens"], stored))
    return rows


def stored_size(value: object) -> int:
    """Returns the bytes of a value in a row of SQLite, with at most 8 for a number."""
    if value is None:
        return 1
    return 1 + (len(value.encode() if isinstance(value, str) else value) if isinstance(value, str | bytes) else 8)


def mongo_bytes(database: pymongo.database.Database) -> list[tuple[int, int, int]]:
    """Returns the same as `sqlite_bytes`, of documents as BSON."""
    rows = []
    for attempt in database.attempts.find({"status": {"$nin": ["running", "abandoned"]}}):
        found = list(database.segments.find({"attempt": attempt["_id"]}))
        found += database.prompts.find({"_id": {"$in": [row["prompt"] for row in found if "prompt" in row]}})
        found += database.chunks.find({"of": {"$in": [row["_id"] for row in found]}})
        stored = sum(len(bson.encode(document)) for document in [attempt, *found])
        rows.append((stored_json(attempt, "task")["row"]["turns"], attempt["tokens"], stored))
    return rows


class Check:
    """The options of the script, and a client of the server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.levade, self.model, self.kills = options.levade, options.model, options.kills
        self.url, self.cargo = options.url, options.cargo
        self.client = pymongo.MongoClient(options.url, serverSelectionTimeoutMS=10_000)
        head, _, tail = options.url.partition("://")
        address, question, query = tail.partition("?")
        self.store = f"{head}://{address.rstrip('/')}/{PREFIX}{question}{query}"

    @contextmanager
    def run(
        self, root: Path, name: str, text: str = RECIPES[RECIPE]
    ) -> Iterator[tuple[Path, pymongo.database.Database]]:
        """Yields a directory for a run, and the run's database. The run directory has a name of its own."""
        directory = root / name
        prepare(directory, self.model)
        text = text.replace('folder = "run"', f'folder = "run", store = "{self.store}"')
        (directory / "recipe.toml").write_text(text)
        database = self.client[f"{PREFIX}_run"]
        self.client.drop_database(database.name)
        try:
            yield directory, database
        finally:
            self.client.drop_database(database.name)

    def contracts(self, root: Path) -> tuple[str | None, str]:
        """Runs the tests of the crate."""
        environment = {**os.environ, "LEVADE_MONGODB_URL": self.url}
        command = [*shlex.split(self.cargo), "test", "-p", "levade-store-mongo", "--lib", "--", "--nocapture"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
        output = done.stdout + done.stderr
        result = [line for line in output.splitlines() if line.startswith(("test result", "45000 tokens"))]
        failed = sorted({line.split()[1] for line in output.splitlines() if line.endswith("... FAILED")})
        return (None if done.returncode == 0 else f"{failed} {output[-500:]}"), "; ".join(result)

    def bits(self, root: Path) -> tuple[str | None, str]:
        """Compares a run with that on SQLite."""
        want = record(train(self.levade, root / "sqlite", self.model, RECIPE))
        with self.run(root, "mongo") as (directory, database):
            start = time.monotonic()
            call(self.levade, directory, "train", "recipe.toml")
            seconds = time.monotonic() - start
            found = mongo_record(database, directory)
            # Exits with a non-zero code unless all checkpoints are reproduced bit for bit.
            call(self.levade, directory, "replay", "run")
        return difference(want, found), f"{summary(found)}, trained in {seconds:.1f} s"

    def killed(self, root: Path) -> tuple[str | None, str]:
        """Kills and resumes a run, and compares it with the undisturbed one."""
        keys = [part for key in ("run.checkpoint_every=1",) for part in ("--set", key)]
        want = record(train(self.levade, root / "whole", self.model, RECIPE, "run.checkpoint_every=1"))
        with self.run(root, "killed") as (directory, database):
            start = [str(self.levade), "train", "recipe.toml", *keys]
            again = [str(self.levade), "train", "run", "--resume"]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            kills, rejected = 0, False
            while kills < self.kills:
                resumes = (directory / "run/recipe.toml").exists()
                trainer = subprocess.Popen(again if resumes else start, cwd=directory, **pipes)
                try:
                    trainer.wait(timeout=random.uniform(0.3, 3))
                except subprocess.TimeoutExpired:
                    if not rejected and database.run.find_one({"owner": {"$ne": None}}):
                        rejected = self.second_trainer_is_rejected(root)
                    trainer.kill()
                    trainer.communicate()
                    kills += 1
                else:
                    error = trainer.communicate()[1]
                    if trainer.returncode != 0:
                        return f"after {kills} kills: exit code {trainer.returncode}: {error[-500:]}", ""
                    break
            if kills == self.kills:
                call(self.levade, directory, *(again if (directory / "run/recipe.toml").exists() else start)[1:])
            found = mongo_record(database, directory)
            abandoned = database.attempts.count_documents({"status": "abandoned"})
            running = database.attempts.count_documents({"status": "running"})
        what = (
            f"{kills} kills, {abandoned} attempts abandoned, second trainer {'rejected' if rejected else 'not tried'}"
        )
        return difference(want, found) or (f"{running} attempts still run" if running else None), what

    def growth(self, root: Path) -> tuple[str | None, str]:
        """Measures the bytes of attempts by their number of turns, in a file and in the server."""
        prepare(root / "sqlite", self.model)
        (root / "sqlite/recipe.toml").write_text(TALK)
        self.talk(root / "sqlite")
        with self.run(root, "mongo", TALK) as (directory, database):
            self.talk(directory)
            found = {"SQLite": sqlite_bytes(root / "sqlite"), "MongoDB": mongo_bytes(database)}
            want, same = record(root / "sqlite"), mongo_record(database, directory)
        wrong, texts = difference(want, same), []
        for backend, rows in found.items():
            # If each turn stored its history again, the tokens would grow with it, so the bytes per turn count, too.
            per = {}
            for turns in TURNS:
                tokens, stored = (sum(row[key] for row in rows if row[0] == turns) for key in (1, 2))
                count = sum(row[0] == turns for row in rows)
                per[turns] = (stored / max(tokens, 1), stored / max(turns * count, 1))
                texts.append(f"{backend} {turns} turns: {tokens} tokens, {stored} bytes, {per[turns][0]:.2f} per token")
            short, long = per[TURNS[0]], per[TURNS[-1]]
            if not all(short) or any(
                of_long > MAX_GROWTH * of_short for of_short, of_long in zip(short, long, strict=True)
            ):
                wrong = wrong or f"the bytes of {backend} per token and per turn grow: {per}"
        return wrong and f"{wrong}; {'; '.join(texts)}", "; ".join(texts)

    def talk(self, directory: Path) -> None:
        """Trains on attempts of different lengths, with a model whose context holds the longest ones."""
        config = directory / "model/config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 16384}))
        (directory / "talk.py").write_text(TALKER)
        rows = [{"question": f"{turns} + 1", "answer": turns + 1, "turns": turns} for turns in TURNS]
        (directory / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        call(self.levade, directory, "train", "recipe.toml")

    def second_trainer_is_rejected(self, root: Path) -> bool:
        """Returns whether a copy of the run in another directory reports the first trainer."""
        directory = root / "second"
        if not directory.exists():
            prepare(directory, self.model)
        shutil.copytree(root / "killed/run", directory / "run", dirs_exist_ok=True)
        command = [str(self.levade), "train", "run", "--resume"]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600)
        return done.returncode != 0 and "another trainer works on the run" in done.stderr


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", default=os.environ.get("LEVADE_MONGODB_URL"), help="server (env LEVADE_MONGODB_URL)")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade", help="binary under test")
    p.add_argument("--model", type=Path, help="directory of a tiny model that calls the calculator")
    p.add_argument("--cargo", default="cargo", help="command that runs the tests of the crate")
    p.add_argument("--kills", type=int, default=10, help="number of kills")
    p.add_argument("--only", default="", metavar="NAME", help="parts whose names contain this")
    options = p.parse_args()
    if not options.url:
        p.error("set --url or LEVADE_MONGODB_URL to the URL of a server")
    check = Check(options)
    parts = {"contracts": check.contracts, "bits": check.bits, "kills": check.killed, "bytes": check.growth}
    chosen = {name: part for name, part in parts.items() if options.only in name}
    if chosen.keys() - {"contracts"}:
        if not options.model:
            p.error("set --model to the directory of a tiny model")
        check.levade, check.model = options.levade.resolve(strict=True), options.model.resolve(strict=True)
    failures = 0
    for name, part in chosen.items():
        with tempfile.TemporaryDirectory() as root:
            found, what = part(Path(root))
        failures += found is not None
        print(f"{'FAIL' if found else 'ok  '}  {name}: {found or what}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
