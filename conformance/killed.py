"""Kill -9: a run that is killed again and again ends with the weights of one that is not.

Trains a recipe twice with the same settings: once in peace, once killed at every named place and at random moments, and resumed
after each. Checks that the final checkpoints are equal byte for byte, that every kill was one, and that the record holds each
attempt once. Tools take a random time before they answer, so that their order differs from run to run.

Not checked here: power failures (what the kernel had accepted survives a killed process).
"""

import argparse
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = [
    "sampling:40", "tool_call:3", "decode_step:25", "attempt_recorded:5", "ledger_written:1", "micro_batch:1", "before_optim_step:1",
    "in_optim_step:1", "after_optim_step:1", "metrics_written:1", "checkpoint_file:2", "weights_saved:1", "companions_saved:1",
    "before_rename:1", "after_rename:1",
]  


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recipe", help="a recipe; give --set so that it ends soon, with checkpoints on the way")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `dressage train`")
    p.add_argument("--folder", type=Path, required=True, help="an empty folder for both runs")
    p.add_argument("--random", type=int, default=5, help="kills at random moments, after those at named places")
    p.add_argument("--seed", type=int, default=0, help="of the random moments")
    p.add_argument("--dressage", type=Path, default=ROOT / "target/release/dressage")
    arguments = p.parse_args()
    changes = [part for change in arguments.set for part in ("--set", change)]

    def train(run: Path, resume: bool, crash_at: str | None = None, kill_after: float | None = None) -> int:
        """Trains until the end, or until it dies; returns the exit status."""
        command = [arguments.dressage, "train", run if resume else arguments.recipe, *(["--resume"] if resume else changes)]
        environment = {k: v for k, v in os.environ.items() if k != "DRESSAGE_CRASH_AT"}
        if crash_at:
            environment["DRESSAGE_CRASH_AT"] = crash_at
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
    calm, killed = arguments.folder / "calm", arguments.folder / "killed"
    start = time.monotonic()
    if train(calm, resume=False) != 0:
        sys.exit(f"the undisturbed run failed; see {calm}.log")
    length = time.monotonic() - start
    print(f"undisturbed: {length:.0f} s")

    rng = random.Random(arguments.seed)
    plan = [(place, None) for place in PLACES]
    plan += [(None, rng.uniform(0.1, 0.5) * length) for _ in range(arguments.random)]
    rng.shuffle(plan)
    status, deaths = None, 0
    for place, seconds in plan:
        status = train(killed, resume=killed.exists(), crash_at=place, kill_after=seconds)
        what = place or f"after {seconds:.1f} s"
        if status == -signal.SIGKILL:
            deaths += 1
            print(f"  killed: {what}", flush=True)
        elif status == 0:
            print(f"  ended before it was killed: {what}", flush=True)
            break
        else:
            sys.exit(f"exit status {status} at {what}; see {killed}.log")
    if status != 0 and train(killed, resume=True) != 0:
        sys.exit(f"the last resumption failed; see {killed}.log")

    failures = []
    ends = [sorted((run / "checkpoints").iterdir())[-1] for run in (calm, killed)]
    if ends[0].name != ends[1].name:
        failures.append(f"the runs end at {ends[0].name} and {ends[1].name}")
    for name in ("model.safetensors", "optimiser.first.safetensors", "optimiser.second.safetensors"):
        same = all((end / name).is_file() for end in ends) and (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()
        print(f"{'ok  ' if same else 'FAIL'}  {name}")
        if not same:
            failures.append(name)
    query = "SELECT purpose, phase, step, grp, sample, score FROM attempts ORDER BY 1, 2, 3, 4, 5"
    records = [sqlite3.connect(run / "run.db").execute(query).fetchall() for run in (calm, killed)]
    same = records[0] == records[1]
    print(f"{'ok  ' if same else 'FAIL'}  attempts and scores: {len(records[0])} and {len(records[1])}")
    if not same:
        failures.append("the records")
    if deaths == 0:
        failures.append("it was never killed")
    if failures:
        sys.exit("different after being killed: " + ", ".join(failures))
    print(f"equal after {deaths} kills")


if __name__ == "__main__":
    main()
