"""Compares runs that are killed repeatedly (kill -9) with an undisturbed run: both must end with the same weights.

Trains a recipe once undisturbed. Then trains it with kills at every named crash point and at random times, and resumes
after each kill. Checks that all runs end with the same weights, moments and attempts, byte for byte. With `--set
agent.tool_delay=0.2`, tools take a random time, so that the order of events differs between runs.

With `--ahead`, for a recipe with asynchronous attempts (`staleness` above 0), a step takes the attempts that end
first, so runs differ. Then each run is compared with its own ledger: exactly one step takes each task, from recorded
attempts; every step is measured once; and `levade replay` reproduces the weights.

Not checked: power failures (data that the kernel has accepted survives a killed process).
"""

import argparse
import contextlib
import filecmp
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = [
    "sampling:40",
    "tool_call:3",
    "decode_step:25",
    "attempt_recorded:5",
    "ledger_written:1",
    "micro_batch:1",
    "before_optim_step:1",
    "in_optim_step:1",
    "after_optim_step:1",
    "metrics_written:1",
    "checkpoint_file:2",
    "weights_saved:1",
    "companions_saved:1",
    "before_rename:1",
    "after_rename:1",
]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recipe", help="recipe; use --set to make it short, with several checkpoints")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="recipe keys, as for `levade train`")
    p.add_argument("--folder", type=Path, required=True, help="empty directory; correct runs are removed from it")
    p.add_argument(
        "--random",
        type=int,
        default=5,
        help="number of kills at random times, in addition to those at named crash points",
    )
    p.add_argument("--seed", type=int, default=0, help="seed of the random times")
    p.add_argument("--ahead", action="store_true", help="compare each run with its own ledger")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    arguments = p.parse_args()
    changes = [part for change in arguments.set for part in ("--set", change)]

    def train(run: Path, resume: bool, crash_at: str | None = None, kill_after: float | None = None) -> int:
        """Trains until the run ends or is killed. Returns the exit status."""
        command = [
            arguments.levade,
            "train",
            run if resume else arguments.recipe,
            *(["--resume"] if resume else changes),
        ]
        environment = {k: v for k, v in os.environ.items() if k != "LEVADE_CRASH_AT"}
        if crash_at:
            environment["LEVADE_CRASH_AT"] = crash_at
        with (arguments.folder / f"{run.name}.log").open("a") as log:
            process = subprocess.Popen(
                [*command, "--run", run], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
            try:
                return process.wait(timeout=kill_after)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                return process.wait()

    arguments.folder.mkdir(parents=True, exist_ok=True)
    calm = arguments.folder / "calm"
    start = time.monotonic()
    if train(calm, resume=False) != 0:
        sys.exit(f"the undisturbed run failed; see {calm}.log")
    length = time.monotonic() - start
    print(f"undisturbed: {length:.0f} s")

    rng = random.Random(arguments.seed)
    plan = [(crash_point, None) for crash_point in PLACES]
    plan += [(None, rng.uniform(0.1, 0.5) * length) for _ in range(arguments.random)]
    rng.shuffle(plan)
    runs = deaths = 0
    while plan:
        runs += 1
        killed = arguments.folder / f"killed-{runs}"
        survived = 0
        while plan:
            crash_point, seconds = plan[0]
            status = train(killed, resume=killed.exists(), crash_at=crash_point, kill_after=seconds)
            if status == 0:
                break
            what = crash_point or f"after {seconds:.1f} s"
            if status != -signal.SIGKILL:
                sys.exit(f"exit status {status} at {what}; see {killed}.log")
            print(f"  run {runs} killed: {what}", flush=True)
            plan.pop(0)
            survived += 1
        if survived == 0:
            sys.exit(f"a complete run never reached {plan[0][0]}")
        if train(killed, resume=True) != 0:
            sys.exit(f"the last resumption failed; see {killed}.log")
        if arguments.ahead:
            audit(killed, arguments.levade)
        else:
            compare(calm, killed)
        shutil.rmtree(killed)
        deaths += survived
    print(f"all as it should be after {deaths} kills in {runs} runs")


def compare(calm: Path, killed: Path) -> None:
    """Exits with an error if the two runs differ."""
    ends = [sorted((run / "checkpoints").iterdir())[-1] for run in (calm, killed)]
    different = []
    if ends[0].name != ends[1].name:
        different.append(f"the last checkpoint ({ends[0].name} and {ends[1].name})")
    # Moments exist as soon as a gradient was not zero.
    for name in sorted({path.name for end in ends for path in end.glob("*.safetensors")}):
        files = [end / name for end in ends]
        if not all(file.exists() for file in files) or not filecmp.cmp(*files, shallow=False):
            different.append(name)
    # An attempt in flight at a kill is abandoned, and the next try has a higher number. So tries are numbered by
    # failed ones.
    query = (
        "SELECT purpose, phase, step, grp, sample, (SELECT count(*) FROM attempts b WHERE b.status = 'superseded' "
        "AND (b.purpose, b.phase, b.step, b.grp, b.sample) = (a.purpose, a.phase, a.step, a.grp, a.sample) "
        "AND b.number < a.number), status, score FROM attempts a WHERE status NOT IN ('running', 'abandoned') "
        "ORDER BY 1, 2, 3, 4, 5, 6"
    )
    records = [rows(run, query) for run in (calm, killed)]
    if records[0] != records[1]:
        different.append(f"the record ({len(records[0])} and {len(records[1])} attempts)")
    if different:
        sys.exit(f"{killed.name} ends differently: " + ", ".join(different))
    print(f"ok    {killed.name}: weights, both moments and {len(records[0])} attempts are equal", flush=True)


def rows(run: Path, query: str) -> list[tuple]:
    """Queries a run's store."""
    # The last connection to close removes auxiliary database files. Closing here avoids a close during garbage
    # collection.
    with contextlib.closing(sqlite3.connect(run / "run.db")) as db:
        return db.execute(query).fetchall()


def audit(run: Path, levade: Path) -> None:
    """Exits with an error if a run does not agree with its ledger."""
    taken = [
        (phase, position)
        for phase, plan in rows(run, "SELECT phase, plan FROM steps ORDER BY phase, step")
        for position in json.loads(plan).get("places", [])
    ]
    if len(taken) != len(set(taken)):
        sys.exit(f"{run.name}: a task was taken twice")
    for phase in {phase for phase, _ in taken}:
        mine = sorted(position for at, position in taken if at == phase)
        if mine != list(range(len(mine))):
            sys.exit(f"{run.name}: tasks of phase {phase} were left out: {mine}")
    missing = (
        "SELECT p.phase, p.step, hex(p.attempt) FROM planned_paths p LEFT JOIN attempts a ON a.name = p.attempt "
        "WHERE a.id IS NULL OR a.status NOT IN ('completed', 'failed')"
    )
    for phase, step, attempt in rows(run, missing):
        sys.exit(
            f"{run.name}: phase {phase}, step {step} trained on {attempt}, which is not recorded as one that counts"
        )
    ((planned,),) = rows(run, "SELECT count(*) FROM steps")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [(line["phase"], line["step"]) for line in lines if "eval" not in line]
    if steps != sorted(set(steps)) or len(steps) != planned:
        sys.exit(f"{run.name}: {planned} steps were planned, {len(steps)} measured")
    replayed = subprocess.run([levade, "replay", run], capture_output=True, text=True)
    if replayed.returncode != 0:
        sys.exit(f"{run.name} is not done again: {replayed.stdout}{replayed.stderr}")
    print(f"ok    {run.name}: {len(taken)} tasks taken once, {len(steps)} steps done again to the bit", flush=True)


if __name__ == "__main__":
    main()
