"""Kills a run in its prompt phase (kill -9), resumes it, and counts what the editor is asked.

Trains a recipe with a prompt phase once undisturbed. Then trains it again and kills it, in turn: when the editor has
received a request, some time after it has answered one, and at random times. The editor runs in this process, so it
survives. Checks:

- A request whose reply was sent `--margin` seconds before a kill is never made again. Requests in flight at a kill, and
  replies that the killed process had no time to record, are made again once per kill.
- The killed run asks the same questions as the undisturbed one, and ends with the same prompts and scores, byte for
  byte.
- Each attempt slot of the phase has one attempt that counts.

    python3 conformance/prompts.py recipes/apo --folder /tmp/prompts --set model.source=CHECKPOINT \\
        --set 'phase=[{kind="prompt", editor="editor", rounds=2, beam_width=2, branch_factor=2, selection_tasks=4}]' \\
        --set eval.tasks=0

The editor is that of `recipes/apo`, with `--delay` seconds before each reply.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Longest time for one process of a run, in seconds.
DEADLINE = 1800


def load_editor():
    """Returns the module of the recipe's editor."""
    spec = importlib.util.spec_from_file_location("editor", ROOT / "recipes/apo/editor.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Journal:
    """Requests to the editor, by their text, with the time at which each was received and answered."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    received: list[tuple[str, float]] = field(default_factory=list)
    answered: list[tuple[str, float]] = field(default_factory=list)
    # Called with the number of a request when it is received, and when it has been answered.
    on_received: object = None
    on_answered: object = None

    def counts(self) -> collections.Counter:
        return collections.Counter(text for text, _ in self.received)


class Server(ThreadingHTTPServer):
    """The recipe's editor, which records requests in a journal."""

    daemon_threads = True
    journal: Journal


def start_editor(delay: float) -> Server:
    """Starts the editor on a free port. A run cannot change the address of its editor."""
    editor = load_editor()

    class Handler(editor.Handler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            text = json.loads(body)["messages"][-1]["content"]
            journal = self.server.journal
            with journal.lock:
                journal.received.append((text, time.monotonic()))
                number = len(journal.received)
            if journal.on_received:
                journal.on_received(number)
            time.sleep(delay)
            # The recipe's handler reads the request again.
            self.rfile = _Body(body)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                super().do_POST()
            with journal.lock:
                journal.answered.append((text, time.monotonic()))
                number = len(journal.answered)
            if journal.on_answered:
                journal.on_answered(number)

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Body:
    """A request's body that was read already."""

    def __init__(self, body: bytes):
        self.body = body

    def read(self, _length: int) -> bytes:
        return self.body

    def close(self) -> None:
        pass


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recipe", help="recipe with a policy `editor` and one prompt phase")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="recipe keys, as for `levade train`")
    p.add_argument("--folder", type=Path, required=True, help="directory without runs of an earlier check")
    p.add_argument("--kills", type=int, default=9, help="number of kills")
    p.add_argument("--delay", type=float, default=0.5, help="seconds before each reply of the editor")
    p.add_argument("--margin", type=float, default=1.0, help="seconds within which a reply must be in the record")
    p.add_argument("--seed", type=int, default=0, help="seed of the times of kills")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    arguments = p.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(arguments.seed)

    server = start_editor(arguments.delay)
    calm, calm_journal = arguments.folder / "calm", Journal()
    server.journal = calm_journal
    start = time.monotonic()
    if run(arguments, server, calm, None) != 0:
        sys.exit(f"the undisturbed run failed; see {calm}.log")
    length, requests = time.monotonic() - start, len(calm_journal.received)
    first = calm_journal.received[0][1] - start
    print(f"undisturbed: {length:.0f} s, {requests} requests to the editor, the first after {first:.0f} s", flush=True)

    killed, journal = arguments.folder / "killed", Journal()
    server.journal = journal
    kills = 0
    allowed: collections.Counter = collections.Counter()
    while True:
        # Requests are counted from the start of this process. Few may be left, so the kill comes soon.
        kinds = [
            ("received", rng.randint(1, 4)),
            ("answered", rng.randint(1, 4)),
            ("time", rng.uniform(0.1, 0.9) * first),
        ]
        plan = kinds[kills % len(kinds)] if kills < arguments.kills else None
        status = run(arguments, server, killed, plan)
        if status == 0:
            break
        if status != -signal.SIGKILL:
            sys.exit(f"exit status {status}; see {killed}.log")
        kills += 1
        died = time.monotonic()
        answered = dict(journal.answered)
        for text in {text for text, _ in journal.received}:
            # In flight, or answered too late to be recorded for certain.
            if answered.get(text, died) > died - arguments.margin:
                allowed[text] += 1
        print(f"  kill {kills} ({plan[0]} {plan[1]:.3g}): {len(journal.received)} requests so far", flush=True)
    if kills == 0:
        sys.exit("the run was never killed")

    expected, found = calm_journal.counts(), journal.counts()
    if set(expected) != set(found):
        sys.exit(f"the killed run asked {len(set(found) - set(expected))} other questions")
    again = {text: found[text] - count for text, count in expected.items() if found[text] > count}
    for text, count in again.items():
        if count > allowed[text]:
            sys.exit(
                f"a request was made {count} times again, of which {allowed[text]} were in flight at a kill:\n{text[:500]}"
            )
    pools = [sorted((at / "prompts").iterdir()) for at in (calm, killed)]
    if not pools[0] or [path.read_bytes() for path in pools[0]] != [path.read_bytes() for path in pools[1]]:
        sys.exit(f"the prompts differ: {pools}")
    doubles = (
        "SELECT count(*) FROM (SELECT 1 FROM attempts WHERE status IN ('completed', 'failed', 'unscored') "
        "GROUP BY purpose, phase, step, grp, sample HAVING count(*) > 1)"
    )
    query = "SELECT count(*) FROM attempts WHERE status = ?"
    with contextlib.closing(sqlite3.connect(killed / "run.db")) as db:
        ((twice,),) = db.execute(doubles).fetchall()
        ((abandoned,),) = db.execute(query, ("abandoned",)).fetchall()
        ((counted,),) = db.execute(query, ("completed",)).fetchall()
    if twice:
        sys.exit(f"{twice} attempt slots have several attempts that count")
    print(
        f"ok    {kills} kills: {len(found)} different requests, {sum(again.values())} of them made again because they "
        f"were in flight, none after its reply was recorded; {counted} attempts count, {abandoned} in flight were "
        "abandoned; equal prompts and scores"
    )


def run(arguments: argparse.Namespace, server: Server, at: Path, plan: tuple[str, float] | None) -> int:
    """Starts or resumes a run, and kills it by the plan. Returns the exit status."""
    journal = server.journal
    changes = [*arguments.set, f"policy.editor.url=http://127.0.0.1:{server.server_port}/v1"]
    sets = [part for change in changes for part in ("--set", change)]
    source = [at, "--resume"] if (at / "recipe.toml").exists() else [arguments.recipe, *sets]
    with at.with_suffix(".log").open("a") as log:
        process = subprocess.Popen(
            [arguments.levade, "train", *source, "--run", at], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        already = {"received": len(journal.received), "answered": len(journal.answered)}

        def kill_at(event: str, number: int) -> None:
            if plan and plan[0] == event and number - already[event] == plan[1]:
                if event == "answered":
                    # Some replies are recorded before the kill, and some are not.
                    time.sleep(random.Random(number).uniform(0, 2 * arguments.margin))
                process.kill()

        journal.on_received = lambda number: kill_at("received", number)
        journal.on_answered = lambda number: kill_at("answered", number)
        try:
            return process.wait(timeout=plan[1] if plan and plan[0] == "time" else DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(timeout=60)
        finally:
            journal.on_received = journal.on_answered = None


if __name__ == "__main__":
    main()
