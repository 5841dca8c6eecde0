"""Trains with `levade runner`s on three hosts: one is cut off and comes back, one is slow, one is killed (kill -9).

    sudo python3 conformance/hosts.py --model FOLDER

The hosts are network namespaces of Linux, each with a link of its own to the namespace of the store and the trainer.
`levade train` runs a toy recipe (bits_recipes.py) with `[runners]`, whose tool takes a random time. When attempts are in
progress on every host:

- the link of `cut` goes down for four lease times and then up again, and meanwhile
- `killed` gets SIGKILL, and is not started again, so that
- `slow` alone remains, whose link carries 256 kbit/s in each direction.

Afterwards, the script checks that every task is accounted for:

- The trainer ended with code 0. Each attempt slot of the run has one finished try; all others are abandoned. Tokens,
  scores, step plans, evaluations and weights equal, to the bit, those of a run with one runner that nothing disturbed.
- In the store, every rollout has ended. No slot was leased while an earlier lease of it was valid, no lease was taken
  away while its runner reported in time, and none was kept for longer than the lease time and five seconds.
- `cut` and `killed` lost leases at their faults, `cut` made attempts again after its link came back, and `slow` made
  attempts, too.

Needs root, iproute2, nsenter and unshare; no packages of Python. Everything runs in namespaces of its own, which end
with the script.

Not checked: lost or reordered packets, because that needs `tc netem`; a kernel without `CONFIG_NET_SCH_NETEM` has only
the rate limit (`tbf`) that is used here. Clocks of different hosts: all namespaces share one.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bits import difference, prepare, record, summary
from bits_recipes import REWARD, TOOLS, recipe
from kills import Process, Server, until_up

ROOT = Path(__file__).resolve().parent.parent
ADDRESS, STORE, GATEWAY = "10.77.0.1", 4747, 8700
KEY = "hosts"
QUEUE = "run/toy"
LEASE = 3
# Time for which the link of the cut host is down.
DOWN = 4 * LEASE
# Maximum time that the store may keep a lease after its end: it searches once a second, and shares two cores here.
LATE = 5
HOSTS = ["cut", "slow", "killed"]
SLOTS = 4
RATE = "256kbit"
# Options of tc for the slow link. The limit holds what waits, in bytes.
SLOW = f"root tbf rate {RATE} burst 4kb limit 256kb"
STEPS, GROUPS, SIZE, EVALUATED = 8, 4, 8, 40
RUNNERS = f"""
[runners]
store = "http://{ADDRESS}:{STORE}"
listen = "{ADDRESS}:{GATEWAY}"
lease_seconds = {LEASE}
wait_seconds = 300
"""


def toy(steps: int) -> str:
    """Returns the recipe. Its tool takes 0.1 to 0.8 s, so that attempts are in progress when a fault hits."""
    reward = REWARD.partition("scorer")[0] + 'scorer = {kind = "numeric"}\n'
    rl = f"steps = {steps}\ngroups = {GROUPS}\ngroup_size = {SIZE}\n"
    text = recipe(f"{TOOLS}tool_delay = 0.8\nmin_tool_delay = 0.1\n", rl, reward=reward)
    return text.replace("[eval]\ntasks = 2\n", f"[eval]\ntasks = {EVALUATED}\n") + RUNNERS


def command(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, timeout=30)


class Host:
    """A network namespace with a link to this one. It ends with its process."""

    def __init__(self, name: str, index: int) -> None:
        self.name, self.link = name, f"host{index}"
        self.holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        self.enter = ["nsenter", "--target", str(self.holder.pid), "--net"]
        own = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + 10
        while os.readlink(f"/proc/{self.holder.pid}/ns/net") == own:
            if time.monotonic() > deadline:
                sys.exit(f"the namespace of {name} was not created within 10 s")
            time.sleep(0.01)
        command("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.holder.pid)
        command("ip", "addr", "add", f"10.77.{index}.1/24", "dev", self.link)
        command("ip", "link", "set", self.link, "up")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "addr", "add", f"10.77.{index}.2/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", f"10.77.{index}.1")

    def run(self, *words: object) -> None:
        command(*self.enter, *words)

    def limit_rate(self) -> None:
        """Limits the rate of the link in both directions."""
        command("tc", "qdisc", "add", "dev", self.link, *SLOW.split())
        self.run("tc", "qdisc", "add", "dev", "eth0", *SLOW.split())

    def set_link(self, state: str) -> None:
        command("ip", "link", "set", self.link, state)

    def close(self) -> None:
        self.holder.kill()
        self.holder.wait()


@contextlib.contextmanager
def store(levade: Path, folder: Path) -> Iterator[Server]:
    """Runs a store server. Yields a client of it."""
    serve = [levade, "store", "serve", "--host", ADDRESS, "--port", STORE, "--api-key", KEY, "--db", "rollouts.db"]
    process = Process("store", serve, folder)
    try:
        until_up(STORE, ADDRESS)
        yield Server(STORE, ADDRESS, KEY)
    finally:
        process.stop()


def runner(levade: Path, folder: Path, name: str, slots: int, enter: list[str]) -> Process:
    """Starts a runner, on the host that `enter` enters."""
    url = f"http://{ADDRESS}:{STORE}"
    return Process(name, [*enter, levade, "runner", "--store", url, "--name", name, "--slots", slots], folder)


def trainer(levade: Path, folder: Path, model: Path, steps: int) -> Process:
    """Starts the training of the recipe in a new directory."""
    directory = folder / "work"
    prepare(directory, model)
    (directory / "recipe.toml").write_text(toy(steps))
    return Process("trainer", ["env", "-C", directory, levade, "train", "recipe.toml"], folder)


def until_ended(process: Process, seconds: float) -> list[str]:
    """Waits until the trainer has ended. Returns what is wrong."""
    try:
        code = process.child.wait(seconds)
    except subprocess.TimeoutExpired:
        return [f"the trainer has not ended within {seconds:.0f} s"]
    text = (process.folder / "trainer.log").read_text()[-2000:]
    return [f"the trainer ended with {code}: {text}"] if code != 0 else []


def undisturbed(levade: Path, folder: Path, model: Path, steps: int) -> dict:
    """Returns the record of a run with one runner that nothing disturbs."""
    folder.mkdir(parents=True)
    with store(levade, folder):
        train = trainer(levade, folder, model, steps)
        alone = runner(levade, folder, "alone", 16, [])
        wrong = until_ended(train, 600)
        for process in (train, alone):
            process.stop()
    if wrong:
        sys.exit(f"the undisturbed run failed: {wrong[0]}")
    return record(folder / "work")


def wait_for(server: Server, train: Process, succeeded: int, leased_by: list[str]) -> None:
    """Waits until so many attempts of training have succeeded, and each of these hosts holds a lease."""
    page = {"limit": None, "offset": 0, "sort_by": None, "order": "asc"}
    deadline = time.monotonic() + 300
    while True:
        found = server.call("rollouts", {"status_in": ["succeeded", "preparing", "running"], "logic": "and"}, page)
        found = [rollout for rollout in found["items"] if rollout["mode"] == "train"]
        ended = sum(rollout["status"] == "succeeded" for rollout in found)
        holders = {rollout["attempt"]["worker_id"] for rollout in found if rollout["status"] != "succeeded"}
        if ended >= succeeded and holders.issuperset(leased_by):
            return
        if train.child.poll() is not None:
            sys.exit(f"the trainer ended before the fault: {(train.folder / 'trainer.log').read_text()[-2000:]}")
        if time.monotonic() > deadline:
            sys.exit(f"waited 300 s for {succeeded} attempts and leases of {leased_by}: {ended}, {holders}")
        time.sleep(0.02)


def disturbed(levade: Path, folder: Path, model: Path, steps: int) -> tuple[list[str], dict[str, float]]:
    """Trains on three hosts with the faults. Returns what is wrong, and the times of the faults."""
    folder.mkdir(parents=True)
    at = {}
    planned = steps * GROUPS * SIZE
    with contextlib.ExitStack() as stack, store(levade, folder) as server:
        hosts = {}
        for index, name in enumerate(HOSTS, 1):
            hosts[name] = Host(name, index)
            stack.callback(hosts[name].close)
        hosts["slow"].limit_rate()
        train = trainer(levade, folder, model, steps)
        runners = {name: runner(levade, folder, name, SLOTS, host.enter) for name, host in hosts.items()}
        wait_for(server, train, planned // 4, HOSTS)
        hosts["cut"].set_link("down")
        at["down"] = time.time()
        wait_for(server, train, planned // 4, ["killed"])
        runners["killed"].child.send_signal(signal.SIGKILL)
        runners["killed"].child.wait()
        at["killed"] = time.time()
        time.sleep(DOWN)
        hosts["cut"].set_link("up")
        at["up"] = time.time()
        wrong = until_ended(train, 600)
        for name in ("cut", "slow"):
            if runners[name].child.poll() is not None:
                wrong.append(f"the runner {name} has ended: {(folder / f'{name}.log').read_text()[-1000:]}")
        for process in (*runners.values(), train):
            process.stop()
    return wrong, at


def check_run(directory: Path) -> list[str]:
    """Checks the tries of each attempt slot. Returns what is wrong."""
    slots: dict[tuple, list[str]] = {}
    with contextlib.closing(sqlite3.connect(f"file:{directory / 'run/run.db'}?mode=ro", uri=True)) as db:
        for *slot, status in db.execute(
            "SELECT purpose, phase, step, grp, sample, status FROM attempts ORDER BY number"
        ):
            slots.setdefault(tuple(slot), []).append(status)
    abandoned = sum(status == "abandoned" for all_tries in slots.values() for status in all_tries)
    finished = {slot: [status for status in all_tries if status != "abandoned"] for slot, all_tries in slots.items()}
    wrong = [f"the tries of {slot} are {slots[slot]}" for slot, found in finished.items() if found != ["completed"]]
    print(f"  {len(slots)} attempt slots, {abandoned} abandoned tries")
    return wrong


def check_store(folder: Path, at: dict[str, float]) -> list[str]:
    """Checks the leases of all rollouts. Returns what is wrong."""
    sql = """SELECT r.input, r.mode, r.status, r.end_time, t.number, t.status, t.worker, t.start_time, t.end_time,
             coalesce(t.heartbeat, t.start_time) FROM rollouts r LEFT JOIN tries t ON t.rollout = r.seq
             WHERE r.queue IN (?, ? || '/evaluation') ORDER BY t.start_time"""
    wrong, slots, hosts, latest = [], {}, {name: [] for name in HOSTS}, 0.0
    with contextlib.closing(sqlite3.connect(folder / "rollouts.db")) as db:
        rows = db.execute(sql, (QUEUE, QUEUE)).fetchall()
    for text, mode, status, ended, number, outcome, host, start, reported, heartbeat in rows:
        name = json.loads(text)["name"]
        if status not in ("succeeded", "failed", "cancelled"):
            wrong.append(f"the rollout of {name} is still {status}")
            continue
        if number is None:
            continue
        if number != 1:
            wrong.append(f"{name} was leased {number} times under one key")
        # A lease ends with its report, or else when the store or the trainer ends the rollout.
        end = reported or ended
        slots.setdefault((mode, json.loads(text)["stream"]), []).append((start, end, name))
        hosts[host].append((start, end, outcome))
        if outcome == "unresponsive":
            latest = max(latest, end - heartbeat - LEASE)
            if end <= heartbeat + LEASE:
                wrong.append(f"{name} was taken from {host} {end - heartbeat:.2f} s after its report")
    if latest > LATE:
        wrong.append(f"a lease was kept {latest:.2f} s longer than its time")
    for tries in slots.values():
        for before, after in itertools.pairwise(tries):
            if after[0] < before[1]:
                wrong.append(f"a slot had two leases at once: {before}, {after}")
    for name, tries in hosts.items():
        made = [(start, end) for start, end, outcome in tries if outcome == "succeeded"]
        mean = sum(end - start for start, end in made) / max(len(made), 1)
        print(f"  {name:<6} {len(tries):4} leases, {len(made):4} succeeded in {mean:.2f} s on average")
        if not made:
            wrong.append(f"{name} made no attempt")
    again = sum(start > at["up"] and outcome == "succeeded" for start, _, outcome in hosts["cut"])
    lost = {
        name: sum(start < at[fault] < end and outcome != "succeeded" for start, end, outcome in hosts[name])
        for name, fault in (("cut", "down"), ("killed", "killed"))
    }
    print(
        f"  lost at the fault: {lost}; {again} made by `cut` after its link was up; longest lease {LEASE + latest:.2f} s"
    )
    wrong += [f"{name} lost no lease" for name, count in lost.items() if not count]
    wrong += [] if again else ["`cut` made no attempt after its link was up"]
    return wrong


def inside(options: argparse.Namespace, root: Path) -> int:
    """Runs everything, in a network namespace of its own. Returns the exit code."""
    os.environ["LEVADE_STORE_KEY"] = KEY
    command("ip", "link", "set", "lo", "up")
    command("ip", "addr", "add", f"{ADDRESS}/32", "dev", "lo")
    want = undisturbed(options.levade, root / "undisturbed", options.model, options.steps)
    print(f"undisturbed: {summary(want)}", flush=True)
    problems = []
    for number in range(options.runs):
        folder = root / f"run{number}"
        start = time.monotonic()
        wrong, at = disturbed(options.levade, folder, options.model, options.steps)
        print(f"run {number}: cut off for {at['up'] - at['down']:.1f} s, {time.monotonic() - start:.0f} s in all")
        wrong += check_run(folder / "work") + check_store(folder, at)
        if not wrong and (found := difference(want, record(folder / "work"))):
            wrong.append(f"differs from the undisturbed run: {found}")
        print(*(f"  FAIL {text}" for text in wrong[:10]), sep="\n", end="" if not wrong else "\n", flush=True)
        problems += wrong
        if not wrong and not options.keep:
            shutil.rmtree(folder)
    print("FAILED" if problems else "passed: equal to the undisturbed run, to the bit")
    return int(bool(problems))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade", help="the binary")
    p.add_argument("--model", type=Path, required=True, help="directory of a tiny model that calls the calculator")
    p.add_argument("--runs", type=int, default=3, help="number of disturbed runs")
    p.add_argument("--steps", type=int, default=STEPS, help="training steps of each run")
    p.add_argument("--keep", type=Path, metavar="FOLDER", help="keep all files in this directory, which must not exist")
    p.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = p.parse_args()
    options.levade, options.model = options.levade.resolve(strict=True), options.model.resolve(strict=True)
    if os.geteuid() != 0:
        sys.exit("network namespaces need root; run the script with sudo")
    for program in ("ip", "tc", "unshare", "nsenter"):
        if not shutil.which(program):
            sys.exit(f"{program} is not installed; install iproute2 and util-linux")
    if not options.inside:
        sys.exit(subprocess.run(["unshare", "--net", sys.executable, *sys.argv, "--inside"]).returncode)
    with tempfile.TemporaryDirectory(prefix="levade-hosts-") as temporary:
        sys.exit(inside(options, options.keep.resolve() if options.keep else Path(temporary)))


if __name__ == "__main__":
    main()
