"""Kills a run in its prompt phase (kill -9), resumes it, and counts what the editor is asked.

Trains a recipe with a prompt phase once undisturbed. Then trains it again and kills it, in turn: when the editor has
received a request, some time after it has answered one, and at random times. The editor runs in this process, so it
survives. Checks:

- A request whose reply is in the record at a kill is never made again, and a reply that was sent `--margin` seconds
  before the kill is in the record. Requests in flight at a kill are made again.
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
class Request:
    """A request to the editor, and the times at which it was received and answered."""

    text: str
    # Number of the process that made it.
    process: int
    received: float
    answered: float = float("inf")


@dataclass
class Journal:
    """All requests of the processes of a run, in the order in which they were received."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: list[Request] = field(default_factory=list)
    # Number of the current process, and whether it runs.
    process: int = 0
    is_alive: bool = False
    # Called after a request of the current process, with the event and the number of such events in the process.
    on_event: object = None

    def receive(self, text: str) -> Request:
        with self.lock:
            request = Request(text, self.process, time.monotonic())
            self.requests.append(request)
            number = sum(other.process == self.process for other in self.requests)
        if self.on_event:
            self.on_event("received", number)
        return request

    def answer(self, request: Request) -> None:
        with self.lock:
            if not self.is_alive or request.process != self.process:
                return  # The process was killed while it waited for the reply.
            request.answered = time.monotonic()
            number = sum(r.process == self.process and r.answered < float("inf") for r in self.requests)
        if self.on_event:
            self.on_event("answered", number)

    def kill(self, process: subprocess.Popen) -> None:
        with self.lock:
            self.is_alive = False
        process.kill()

    def counts(self, process: int | None = None) -> collections.Counter:
        """Counts requests by their text: of one process, or of all."""
        return collections.Counter(r.text for r in self.requests if process in (None, r.process))


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
            request = journal.receive(text)
            time.sleep(delay)
            # The recipe's handler reads the request again.
            self.rfile = _Body(body)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                super().do_POST()
            journal.answer(request)

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
    length, requests = time.monotonic() - start, calm_journal.requests
    first = requests[0].received - start
    print(
        f"undisturbed: {length:.0f} s, {len(requests)} requests to the editor, the first after {first:.0f} s",
        flush=True,
    )

    killed, journal = arguments.folder / "killed", Journal()
    server.journal = journal
    kills = 0
    recorded: collections.Counter = collections.Counter()
    expected = calm_journal.counts()
    while True:
        # Requests are counted from the start of this process. Few may be left, so the kill comes soon.
        kinds = [
            ("received", rng.randint(1, 4)),
            ("answered", rng.randint(1, 4)),
            ("time", rng.uniform(0.1, 0.9) * first),
        ]
        plan = kinds[kills % len(kinds)] if kills < arguments.kills else None
        status = run(arguments, server, killed, plan)
        made = journal.counts(journal.process)
        for text, count in made.items():
            if count > expected[text] - recorded[text]:
                sys.exit(
                    f"process {journal.process} made a request {count} times, although {recorded[text]} of "
                    f"{expected[text]} replies were recorded:\n{text[:500]}"
                )
        if status == 0:
            break
        if status != -signal.SIGKILL:
            sys.exit(f"exit status {status}; see {killed}.log")
        kills += 1
        died, recorded = time.monotonic(), replies(killed)
        sent = collections.Counter(r.text for r in journal.requests if r.answered < died - arguments.margin)
        lost = [text for text, count in sent.items() if recorded[text] < count]
        if lost:
            sys.exit(
                f"a reply that was sent {arguments.margin} s before kill {kills} is not recorded:\n{lost[0][:500]}"
            )
        print(f"  kill {kills} ({plan[0]} {plan[1]:.3g}): {len(journal.requests)} requests so far", flush=True)
    if kills == 0:
        sys.exit("the run was never killed")

    found = journal.counts()
    if set(expected) != set(found):
        sys.exit(f"the killed run asked {len(set(found) - set(expected))} other questions")
    again = sum((found - expected).values())
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
        f"ok    {kills} kills: {sum(expected.values())} requests as in the undisturbed run, {again} made again "
        f"because they were in flight, none after its reply was recorded; {counted} attempts count, {abandoned} in "
        "flight were abandoned; equal prompts and scores"
    )


def replies(at: Path) -> collections.Counter:
    """Counts the recorded replies of the editor, by the text of their requests."""
    if not (at / "run.db").exists():
        return collections.Counter()
    query = "SELECT task FROM attempts WHERE purpose = 'prompt' AND status = 'completed'"
    with contextlib.closing(sqlite3.connect(at / "run.db")) as db:
        tasks = [json.loads(task) for (task,) in db.execute(query)]
    return collections.Counter(task["question"] for task in tasks if (task.get("agent") or "").endswith(".editor"))


def run(arguments: argparse.Namespace, server: Server, at: Path, plan: tuple[str, float] | None) -> int:
    """Starts or resumes a run, and kills it by the plan. Returns the exit status."""
    journal = server.journal
    journal.process += 1
    changes = [*arguments.set, f"policy.editor.url=http://127.0.0.1:{server.server_port}/v1"]
    sets = [part for change in changes for part in ("--set", change)]
    source = [at, "--resume"] if (at / "recipe.toml").exists() else [arguments.recipe, *sets]
    with at.with_suffix(".log").open("a") as log:
        process = subprocess.Popen(
            [arguments.levade, "train", *source, "--run", at], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

        def kill_at(event: str, number: int) -> None:
            if plan == (event, number):
                if event == "answered":
                    # Some replies are recorded before the kill, and some are not.
                    time.sleep(random.Random(len(journal.requests)).uniform(0, 2 * arguments.margin))
                journal.kill(process)

        journal.on_event, journal.is_alive = kill_at, True
        try:
            return process.wait(timeout=plan[1] if plan and plan[0] == "time" else DEADLINE)
        except subprocess.TimeoutExpired:
            journal.kill(process)
            return process.wait(timeout=60)
        finally:
            journal.on_event = None


if __name__ == "__main__":
    main()
