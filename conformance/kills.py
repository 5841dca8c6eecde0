"""Kills the store server, runners and the trainer of rollouts at random moments (kill -9), and checks the file that remains.

Starts a `levade store serve` on an SQLite file, several `levade runner`s whose agent is a program of a few
milliseconds, and a trainer: a client of the server that enqueues attempts and counts their results, without a model.
Each kill hits one of them at a random time, and the process starts again at once, the server from its file. After the
last kill, everything must end. Then the script compares the file with the journal of the trainer:

- every rollout that the server acknowledged is in the file, under its key,
- every attempt slot is trained once, on a rollout that succeeded, with the result of this slot,
- no rollout is open, and no later try has started while the lease of an earlier one was valid.

With `--full-disk DIR`, a directory on a small file system, fills the disk under a server instead. The writes that were
acknowledged must be in the file, the error must name the file and the way out, and the server must work again when
there is space.

Not checked: power failures (data that the kernel has accepted survives a killed process), models and gateways.
"""

import argparse
import http.client
import itertools
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUEUE = "run/kills"
LEASE = 2.0
IN_FLIGHT = 12
RECIPE = """
[run]
name = "kills"
[model]
source = "none"
[[tasks]]
kind = "arithmetic"
[agent]
kind = "program"
folder = "."
command = ["sh", "-c", "sleep 0.0$(($$ % 10)); echo \\"$LEVADE_TASK\\""]
[reward]
scorer = { kind = "numeric" }
[[phase]]
kind = "rl"
steps = 1
groups = 1
group_size = 2
learning_rate = 1e-5
"""


class Server:
    """Client of the native routes. Repeats each call until the server responds; every call can be repeated."""

    def __init__(self, port: int, host: str = "127.0.0.1", key: str = "") -> None:
        self.host, self.port, self.key = host, port, key
        self.connection = None

    def once(self, method: str, arguments: list) -> tuple[int, object]:
        try:
            self.connection = self.connection or http.client.HTTPConnection(self.host, self.port, timeout=30)
            headers = {"content-type": "application/json"} | ({"x-api-key": self.key} if self.key else {})
            self.connection.request("POST", f"/v1/rollouts/{method}", json.dumps(arguments), headers)
            response = self.connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError):
            self.connection = None
            raise

    def call(self, method: str, *arguments: object) -> object:
        deadline = time.monotonic() + 60
        while True:
            try:
                status, body = self.once(method, list(arguments))
                if status == 200:
                    return body
                why = f"{status}: {body}"
                if status < 500:
                    sys.exit(f"{method} was rejected: {why}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = str(error)
            if time.monotonic() > deadline:
                sys.exit(f"waited 60 s for the server to {method}: {why}")
            time.sleep(0.02)


def wait(seconds: float) -> dict:
    return {"secs": int(seconds), "nanos": int(seconds % 1 * 1e9)}


def attempt(slot: int, number: int, version: int) -> dict:
    """Returns the input of a rollout, as the trainer of a run with a program writes it."""
    limits = {"max_turns": 1, "max_tokens": 1, "completion_timeout": wait(60), "attempt_timeout": wait(60)}
    endpoint = {"base_url": "http://127.0.0.1:9", "key": "k", "reward_key": None, "model": "m", "agents": ["default"]}
    task = {"id": str(slot), "question": "?", "answer": 0, "source": "kills", "template": None, "kind": None}
    return {
        "resources_id": QUEUE,
        "recipe_version": version,
        "name": f"{slot}-{number}",
        "task": task | {"demonstration": None, "row": {}},
        "messages": [],
        "agent": "default",
        "seed": 0,
        "stream": slot,
        "is_evaluation": False,
        "params": {},
        "limits": limits,
        "endpoint": endpoint,
    }


def train(folder: Path, port: int) -> None:
    """The trainer process: enqueues attempts until the file `stop` exists and all have ended."""
    journal = os.open(folder / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    lines = [line.split() for line in (folder / "journal").read_text().splitlines()]
    trained = {int(line[1]) for line in lines if line[0] == "trained"}
    tries: dict[int, int] = {}
    for line in (line for line in lines if line[0] == "start"):
        tries[int(line[1])] = int(line[2])

    def note(*words: object) -> None:
        # One write, which a killed process has made or not.
        os.write(journal, (" ".join(map(str, words)) + "\n").encode())

    server = Server(port)
    value = {"levade_runner_protocol": 1, "recipe": RECIPE}
    version = server.call("put_resources", QUEUE, value)["version"]
    since = 0
    states = ["queuing", "preparing", "running", "requeuing"]
    page = {"limit": None, "offset": 0, "sort_by": None, "order": "asc"}
    found = server.call("rollouts", {"status_in": states, "logic": "and"}, page)["items"]
    since = max([rollout["changed"] for rollout in found], default=0)
    server.call("cancel", [rollout["rollout_id"] for rollout in found])
    pending: dict[str, int] = {}
    todo = [slot for slot in tries if slot not in trained]

    def start(slot: int) -> None:
        tries[slot] = tries.get(slot, 0) + 1
        if tries[slot] > 100:
            sys.exit(f"slot {slot} has failed 100 times; see the logs of the runners")
        note("start", slot, tries[slot])
        key = f"{QUEUE}/{slot}/{tries[slot]}"
        config = {"unresponsive_seconds": LEASE, "timeout_seconds": None, "max_attempts": 1, "retry_condition": []}
        new = {"id": None, "key": key, "queue": QUEUE, "priority": 0, "mode": "train", "resources_id": QUEUE}
        new |= {"config": config, "input": attempt(slot, tries[slot], version)}
        rollout = server.call("enqueue", [new])[0]
        note("enqueued", key, rollout["rollout_id"])
        pending[rollout["rollout_id"]] = slot

    while True:
        is_stopping = (folder / "stop").exists()
        while len(pending) < IN_FLIGHT and (todo or not is_stopping):
            start(todo.pop() if todo else max(tries, default=-1) + 1)
        if not pending:
            return
        changed, since = server.call("changes", since, 1000, wait(0.5))
        for rollout in changed:
            slot = pending.get(rollout["rollout_id"])
            if slot is None or rollout["status"] not in ("succeeded", "failed", "cancelled"):
                continue
            del pending[rollout["rollout_id"]]
            latest = rollout.get("attempt") or {}
            report = (latest.get("metadata") or {}).get("program") or {}
            if rollout["status"] == "succeeded" and report.get("code") == 0:
                made = json.loads(report["stdout"])["id"]
                note("trained", slot, rollout["rollout_id"], latest["sequence_id"], made)
                trained.add(slot)
            else:
                todo.append(slot)


class Process:
    """A process that is started again after each kill."""

    def __init__(self, name: str, command: list, folder: Path) -> None:
        self.name, self.command, self.folder = name, [str(part) for part in command], folder
        self.kills = 0
        self.child = None
        self.start()

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LEVADE_API")}
        with (self.folder / f"{self.name}.log").open("a") as log:
            self.child = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=self.folder
            )

    def kill(self) -> None:
        # What ends by itself has failed, as nothing but a kill ends it.
        code = self.child.poll()
        if code is not None:
            text = (self.folder / f"{self.name}.log").read_text()[-2000:]
            sys.exit(f"{self.name} has ended with {code}: {text}")
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()
        self.kills += 1
        self.start()

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def until_up(port: int, host: str = "127.0.0.1") -> float:
    """Waits until the server responds, and returns the time in seconds."""
    start = time.monotonic()
    while time.monotonic() < start + 60:
        try:
            Server(port, host).once("statistics", [])
            return time.monotonic() - start
        except (OSError, http.client.HTTPException, ValueError):
            time.sleep(0.01)
    sys.exit("the server does not respond within 60 s")


def check(folder: Path, database: Path) -> list[str]:
    """Compares the file with the journal of the trainer. Returns what is wrong."""
    wrong = []
    db = sqlite3.connect(database)
    known = dict(db.execute("SELECT key, id FROM rollouts"))
    status = dict(db.execute("SELECT id, status FROM rollouts"))
    tries: dict[str, list] = {}
    sql = """SELECT r.id, t.number, t.status, t.start_time, t.end_time, coalesce(t.heartbeat, t.start_time)
             FROM tries t JOIN rollouts r ON r.seq = t.rollout ORDER BY t.rollout, t.number"""
    for rollout, *of in db.execute(sql):
        tries.setdefault(rollout, []).append(of)
    trained: dict[str, list] = {}
    started = set()
    enqueued = 0
    for line in (folder / "journal").read_text().splitlines():
        kind, *words = line.split()
        if kind == "start":
            started.add(words[0])
        elif kind == "enqueued":
            enqueued += 1
            if known.get(words[0]) != words[1]:
                wrong.append(f"the acknowledged rollout {words} is lost: {known.get(words[0])}")
        elif kind == "trained":
            slot, rollout, number, made = words
            trained.setdefault(slot, []).append(rollout)
            ends = {of[0]: of[1] for of in tries.get(rollout, [])}
            if status.get(rollout) != "succeeded" or ends.get(int(number)) != "succeeded" or made != slot:
                wrong.append(f"slot {slot} was trained on {rollout}, {status.get(rollout)}: {ends}, made for {made}")
    wrong += [
        f"slot {slot} was trained {len(trained.get(slot, []))} times"
        for slot in started
        if len(trained.get(slot, [])) != 1
    ]
    wrong += [
        f"the rollout {of} is still {name}"
        for of, name in status.items()
        if name not in ("succeeded", "failed", "cancelled")
    ]
    for rollout, all_tries in tries.items():
        if [of[0] for of in all_tries] != list(range(1, len(all_tries) + 1)):
            wrong.append(f"the tries of {rollout} are {all_tries}")
        if sum(of[1] == "succeeded" for of in all_tries) > 1:
            wrong.append(f"two tries of {rollout} succeeded")
        for before, after in itertools.pairwise(all_tries):
            if before[3] is None and after[2] <= before[4] + LEASE:
                wrong.append(f"two tries of {rollout} had leases at once: {before}, {after}")
    if db.execute("PRAGMA integrity_check").fetchone() != ("ok",):
        wrong.append("the file is damaged")
    print(
        f"  {len(started)} slots, {enqueued} acknowledged rollouts, {len(known)} in the file, "
        f"{sum(map(len, tries.values()))} tries, {len(wrong)} violations"
    )
    return wrong


def kill_all(levade: Path, folder: Path, kills: int, runners: int, seed: int) -> list[str]:
    """Runs one seed. Returns what is wrong."""
    folder.mkdir(parents=True)
    choose = random.Random(seed)
    port = free_port()
    database = folder / "rollouts.db"
    serve = [levade, "store", "serve", "--db", database, "--port", port]
    store = Process("store", serve, folder)
    starts = [until_up(port)]
    trainer = Process("trainer", [sys.executable, __file__, "--trainer", folder, "--port", port], folder)
    url = f"http://127.0.0.1:{port}"
    names = [f"runner{index}" for index in range(runners)]
    others = [Process(name, [levade, "runner", "--store", url, "--name", name, "--slots", 4], folder) for name in names]
    start = time.monotonic()
    for _ in range(kills):
        time.sleep(choose.uniform(0.0, 0.5))
        # The server, the trainer and one of the runners are killed equally often.
        chosen = choose.choice([store, trainer, choose.choice(others)])
        chosen.kill()
        if chosen is store and choose.random() < 0.5:
            # The other half of the kills may hit a server that starts.
            starts.append(until_up(port))
    (folder / "stop").touch()
    try:
        code = trainer.child.wait(120)
        wrong = [] if code == 0 else [f"the trainer has ended with {code}"]
    except subprocess.TimeoutExpired:
        wrong = ["the trainer has not ended within 120 s"]
    # A try whose rollout was cancelled has no timeout, but what a killed trainer sent late is made.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        counts = Server(port).call("statistics")
        if counts["queued_rollouts"] + counts["active_rollouts"] == 0:
            break
        time.sleep(0.2)
    seconds = time.monotonic() - start
    for process in [*others, trainer, store]:
        process.stop()
    by_kind = f"{store.kills} of the store, {trainer.kills} of the trainer, {sum(of.kills for of in others)} of runners"
    print(f"seed {seed}: {kills} kills in {seconds:.0f} s: {by_kind}; the server starts within {max(starts):.2f} s")
    return wrong + check(folder, database)


def fill_disk(levade: Path, disk: Path) -> list[str]:
    """Fills the file system of `disk` while a client enqueues. Returns what is wrong."""
    wrong = []
    database = disk / "rollouts.db"
    port = free_port()
    store = Process("store", [levade, "store", "serve", "--db", database, "--port", port], disk)
    until_up(port)
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    ballast.write_bytes(b"\1" * max(0, free - (8 << 20)))
    server = Server(port)
    acknowledged, error = [], None
    for index in range(100_000):
        new = {"id": f"id{index}", "key": None, "queue": "q", "priority": 0, "input": "x" * 10_000, "mode": None}
        new |= {"resources_id": None, "config": {}}
        status, body = server.once("enqueue", [[new]])
        if status != 200:
            error = (status, body["detail"])
            break
        acknowledged.append(f"id{index}")
    if error is None:
        sys.exit("the disk did not fill")
    print(f"{len(acknowledged)} rollouts were acknowledged; then the server responded {error[0]}: {error[1]}")
    for word in (str(database), "full", "free"):
        if word not in error[1]:
            wrong.append(f"the error does not contain {word!r}")
    found = server.call("statistics")["total_rollouts"]
    if found != len(acknowledged):
        wrong.append(f"the full store has {found} rollouts")
    # Killed while the disk is full, and started again.
    store.kill()
    until_up(port)
    ballast.unlink()
    new["id"] = "after"
    status, body = Server(port).once("enqueue", [[new]])
    if status != 200:
        wrong.append(f"with space again, the server responds {status}: {body}")
    store.stop()
    db = sqlite3.connect(database)
    ids = {of for (of,) in db.execute("SELECT id FROM rollouts")}
    lost = [of for of in acknowledged if of not in ids]
    wrong += [f"{len(lost)} acknowledged rollouts are lost"] if lost else []
    if db.execute("PRAGMA integrity_check").fetchone() != ("ok",):
        wrong.append("the file is damaged")
    print(f"{len(ids)} rollouts are in the file")
    return wrong


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--folder", type=Path, help="directory that does not exist; files of correct seeds stay there")
    p.add_argument("--kills", type=int, default=200, help="number of kills of each seed")
    p.add_argument("--seeds", type=int, default=5, help="number of seeds")
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--runners", type=int, default=3)
    p.add_argument("--full-disk", type=Path, metavar="DIR", help="empty directory on a file system of 16 to 64 MiB")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = p.parse_args()
    if arguments.trainer:
        return train(arguments.trainer, arguments.port)
    levade = arguments.levade.resolve()
    if arguments.full_disk:
        wrong = fill_disk(levade, arguments.full_disk.resolve())
    elif arguments.folder:
        wrong = []
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            folder = arguments.folder.resolve() / str(seed)
            wrong += kill_all(levade, folder, arguments.kills, arguments.runners, seed)
    else:
        p.error("give --folder or --full-disk")
    print(*wrong[:20], sep="\n")
    print("FAILED" if wrong else "passed")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
