"""Compares two builds of the binary: both must sample and train the same bits.

Trains toy recipes (bits_recipes.py) with both builds, one recipe for each kind of model caller, from a tiny model that
calls the calculator. Compares:

- the weights of the last checkpoint (policies, adapters, critics);
- every recorded attempt: slot, try, task, status, score, reward, outcome; and for each segment agent, policy, token ids,
  log-probabilities and versions;
- the plan of every step with its advantages and weights;
- evaluations.

Then the second build replays the run of the first build. With `resume-NAME`, the second build resumes runs that were
stopped after three of six steps, or killed, under the first build. They must end like the first build's undisturbed
run. Prints the first difference of each check.

Not compared: names of attempts, which are random, abandoned attempts, which a kill truncates, and the text that
explains why a completion called no tool. With `stale`, timing decides which version samples a token, so each build
replays the other build's run instead. A program's call with `n` above 1 gets two tokens per choice: longer choices are
recorded in the order in which they end, so two runs of one build would differ.

Not checked: samplers and learners other than the embedded engine, speed, and printed output.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bits_recipes import FILES, RECIPES

# Recipes whose runs are stopped and killed, and then resumed.
RESUMED = ["calculator", "forking-program", "two-policies", "ppo", "lora"]
STOPPED_AT = 3
# Crash points of a run. The last one lies in the middle of a step's attempts.
CRASHES = ["after_optim_step:4", "attempt_recorded:18"]


@contextlib.contextmanager
def served(binary: Path, directory: Path, recipe: str) -> Iterator[str]:
    """Serves the model if the recipe calls it. Yields the recipe with the server's port."""
    if "PORT" not in recipe:
        yield recipe
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary, "serve", f"toy={directory / 'model'}", "--port", str(port), "--temperature", "0"]
    with (directory / "serve.log").open("w") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"{binary.name} serve did not start: {(directory / 'serve.log').read_text()}")
        yield recipe.replace("PORT", str(port))
    finally:
        server.kill()
        server.wait()


def prepare(directory: Path, model: Path) -> None:
    """Writes the model and the recipes' programs to a new directory."""
    shutil.copytree(model, directory / "model")
    for name, text in FILES.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


def call(binary: Path, directory: Path, *arguments: str, crash_at: str | None = None) -> str:
    """Runs a subcommand in a directory and returns its output. Only a run with `crash_at` may end by a signal."""
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_CRASH_AT")}
    if crash_at:
        environment |= {"DRESSAGE_CRASH_AT": crash_at, "LEVADE_CRASH_AT": crash_at}
    command = [binary, *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=directory, env=environment, timeout=600, **pipes)
    with (directory / "log").open("a") as log:
        log.write(done.stdout + done.stderr)
    if done.returncode != (-signal.SIGKILL if crash_at else 0):
        raise RuntimeError(f"{binary.name} {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def train(binary: Path, directory: Path, model: Path, name: str, *changes: str, crash_at: str | None = None) -> Path:
    """Trains a recipe in a new directory, and returns that directory."""
    prepare(directory, model)
    with served(binary, directory, RECIPES[name]) as text:
        (directory / "recipe.toml").write_text(text)
        if "./school" in text:
            call(binary, directory, "train", "school.toml")
        sets = [part for change in changes for part in ("--set", change)]
        call(binary, directory, "train", "recipe.toml", *sets, crash_at=crash_at)
    return directory


def numbers(kind: str, blob: bytes | None) -> list | None:
    """Returns little-endian numbers of a blob; `kind` as in `struct`, for one item."""
    return None if blob is None else [list(item) for item in struct.iter_unpack(f"<{kind}", blob)]


def without_explanation(result: dict) -> dict:
    """Removes the text that explains why a completion called no tool. Builds may word it differently."""
    (result.get("uncalled") or {}).pop("why", None)
    return result


def record(directory: Path) -> dict:
    """Returns what a run trained and recorded."""
    last = max((directory / "run/checkpoints").glob("step-*"))
    files = [file for file in last.rglob("*.safetensors") if not file.name.startswith("optimi")]
    weights = {str(file.relative_to(last)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    with contextlib.closing(sqlite3.connect(f"file:{directory / 'run/run.db'}?mode=ro", uri=True)) as db:
        db.row_factory = sqlite3.Row
        # Tries that a kill interrupted are repeated, so tries are numbered without the interrupted ones.
        kept = "SELECT * FROM attempts WHERE status NOT IN ('running', 'abandoned') ORDER BY number"
        names, attempts = {}, {}
        for row in db.execute(kept).fetchall():
            slot = "/".join(str(row[key]) for key in ("purpose", "phase", "step", "grp", "sample"))
            name = f"{slot}, try {sum(key.startswith(slot + ',') for key in attempts)}"
            names[row["name"]] = name
            attempts[name] = {key: row[key] for key in ("status", "score", "reward", "sampled_tokens", "tokens")}
            attempts[name] |= {key: json.loads(row[key]) for key in ("task", "outcome", "earned")}
            attempts[name]["segments"] = segments(db, row["id"])
        steps = {f"{row['phase']}/{row['step']}": json.loads(row["plan"]) for row in db.execute("SELECT * FROM steps")}
        for row in db.execute("SELECT * FROM planned_paths ORDER BY phase, step, place"):
            path = {key: row[key] for key in ("policy", "upd", "leaf")} | {"attempt": names.get(row["attempt"])}
            path |= {key: numbers("fI", row[key]) for key in ("advantage", "weight", "returns", "vals")}
            steps[f"{row['phase']}/{row['step']}"].setdefault("paths", []).append(path)
        results = db.execute("SELECT * FROM evals ORDER BY phase, step")
        evals = [[row["phase"], row["step"], without_explanation(json.loads(row["result"]))] for row in results]
    # The order is that in which differences arise, so that the first printed difference is the cause.
    return {"attempts": dict(sorted(attempts.items(), key=by_time)), "steps": steps, "evals": evals, "weights": weights}


def by_time(item: tuple[str, dict]) -> tuple:
    """Returns the sort key of attempts: phase, step, purpose, group, sample."""
    purpose, phase, step, *rest = item[0].split(",")[0].split("/")
    return int(phase), int(step), purpose, *map(int, rest)


def segments(db: sqlite3.Connection, attempt: int) -> list[dict]:
    """Returns the segments of an attempt."""
    query = (
        "SELECT s.*, coalesce(s.tokens, p.tokens) AS ids FROM segments s LEFT JOIN prompts p ON p.id = s.prompt "
        "WHERE attempt = ? ORDER BY s.id"
    )
    keys = ("parent", "after", "kind", "agent", "policy", "turn", "temperature", "filtered")
    blobs = {"ids": "I", "logprobs": "f", "versions": "QI"}
    return [
        {key: row[key] for key in keys} | {key: numbers(kind, row[key]) for key, kind in blobs.items()}
        for row in db.execute(query, (attempt,))
    ]


def difference(before: object, after: object, location: str = "") -> str | None:
    """Returns the first difference between two values, with its location."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if key not in before or key not in after:
                return f"{location}: {key} is only in the run {'before' if key in before else 'after'}"
            if found := difference(before[key], after[key], f"{location} · {key}" if location else key):
                return found
    elif isinstance(before, list) and isinstance(after, list):
        for index, pair in enumerate(zip(before, after, strict=False)):
            if found := difference(*pair, f"{location}[{index}]"):
                return found
        if len(before) != len(after):
            return f"{location}: {len(before)} and {len(after)} items"
    elif repr(before) != repr(after):
        return f"{location}: {before!r:.200} and {after!r:.200}"
    return None


def summary(found: dict) -> str:
    """Returns counts that show what a recipe exercised."""
    attempts = found["attempts"].values()
    calls = sum(attempt["outcome"]["calls"]["ok"] for attempt in attempts)
    tokens = sum(attempt["sampled_tokens"] for attempt in attempts)
    return f"{len(attempts)} attempts, {calls} calls answered, {tokens} tokens, {len(found['steps'])} steps"


def checks(options: argparse.Namespace) -> Iterator[tuple[str, object]]:
    """Yields each check: its name, and a function from a directory to a difference and a summary."""
    before, after, model = options.before, options.after, options.model

    def pair(name: str, directory: Path) -> tuple[str | None, str]:
        runs = [train(binary, directory / key, model, name) for key, binary in (("before", before), ("after", after))]
        found = [record(run) for run in runs]
        note = ""
        if name == "stale":
            try:
                call(before, runs[1], "replay", "run")
            except RuntimeError as error:
                if "unknown key" not in str(error):
                    raise
                note = "; the build before knows not all keys of the other's recipe, and did not replay its run"
        differs = None if name == "stale" else difference(*found)
        if not differs:
            # Exits with a non-zero code unless all checkpoints are reproduced bit for bit.
            call(after, runs[0], "replay", "run")
        return differs, summary(found[0]) + note

    def resumed(name: str, directory: Path) -> tuple[str | None, str]:
        keys = ["phase.0.steps=6", "eval.tasks=0", "run.checkpoint_every=1"]
        undisturbed = train(before, directory / "whole", model, name, *keys)
        stopped = train(before, directory / "stopped", model, name, f"phase.0.steps={STOPPED_AT}", *keys[1:])
        call(after, stopped, "train", "run", "--resume", "--set", keys[0])
        runs = {"stopped": stopped}
        for moment in CRASHES:
            runs[moment] = train(before, directory / moment.replace(":", "-"), model, name, *keys, crash_at=moment)
            call(after, runs[moment], "train", "run", "--resume")
        want = record(undisturbed)
        for moment, run in runs.items():
            if found := difference(want, record(run)):
                return f"{moment}: {found}", ""
        call(after, undisturbed, "replay", "run")
        return None, f"{len(runs)} resumed, 1 replayed"

    for name in RECIPES:
        yield name, lambda directory, name=name: pair(name, directory)
    for name in RESUMED:
        yield f"resume-{name}", lambda directory, name=name: resumed(name, directory)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--before", type=Path, required=True, help="levade binary to compare with")
    p.add_argument("--after", type=Path, required=True, help="levade binary under test")
    p.add_argument("--model", type=Path, required=True, help="directory of a tiny model that calls the calculator")
    p.add_argument("--only", default="", metavar="NAME", help="checks whose names contain this")
    p.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs in this directory, which must not exist")
    options = p.parse_args()
    for key in ("before", "after", "model"):
        setattr(options, key, getattr(options, key).resolve(strict=True))
    chosen = [(name, check) for name, check in checks(options) if options.only in name]
    if not chosen:
        sys.exit(f"no check is called {options.only}: {', '.join(name for name, _ in checks(options))}")
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep.resolve() if options.keep else Path(temporary)
        for name, check in chosen:
            start = time.monotonic()
            (root / name).mkdir(parents=True)
            try:
                found, what = check(root / name)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                found, what = str(error), ""
            failures += found is not None
            line = f"{'FAIL' if found else 'ok  '}  {name}: {found or what}"
            print(f"{line} ({time.monotonic() - start:.1f} s)", flush=True)
            if not options.keep:
                shutil.rmtree(root / name)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
