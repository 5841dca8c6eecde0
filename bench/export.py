"""Measures `levade export` of many attempts: peak memory, rate, and what an interruption costs.

Copies the directory of a recorded run and multiplies its completed training attempts under new ids and steps, to each
of the sizes. For each target, exports once undisturbed and once killed several times, and compares the bytes. The
copies have ids that do not belong to their slots, which `levade store check` would report; an export does not depend
on it.
"""

import argparse
import filecmp
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    "rows.jsonl": [],
    "tokens.jsonl": ["--tokens"],
    "rows.parquet": ["--tokens"],
    "sft.jsonl": ["--format", "trl-sft"],
    "verl.parquet": ["--format", "verl"],
}


def multiply(file: Path, wanted: int) -> int:
    """Adds copies of the completed training attempts until there are `wanted`. Returns their number of tokens."""
    database = sqlite3.connect(file)
    database.execute("PRAGMA synchronous = OFF")
    database.execute("PRAGMA journal_mode = MEMORY")
    originals = database.execute(
        "SELECT id, grp, sample FROM attempts WHERE purpose = 'train' AND status = 'completed' ORDER BY id"
    ).fetchall()
    if not originals:
        sys.exit(f"{file} has no completed training attempts")

    def names(table: str, skipped: set[str]) -> list[str]:
        columns = [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")]
        return [name for name in columns if name not in skipped]

    kept = names("attempts", {"id", "name", "step", "number"})
    parts = names("segments", {"attempt"})
    step, made = 10_000, len(originals)
    while made < wanted:
        for original, *_ in originals[: wanted - made]:
            cursor = database.execute(
                f"INSERT INTO attempts (name, step, number, {', '.join(kept)})"
                f" SELECT randomblob(16), ? + step, number, {', '.join(kept)} FROM attempts WHERE id = ?",
                (step, original),
            )
            database.execute(
                f"INSERT INTO segments (attempt, {', '.join(parts)}) SELECT ?, {', '.join(parts)} FROM segments"
                " WHERE attempt = ?",
                (cursor.lastrowid, original),
            )
        made = min(wanted, made + len(originals))
        step += 10_000
    database.commit()
    (tokens,) = database.execute(
        "SELECT sum(tokens) FROM attempts WHERE purpose = 'train' AND status = 'completed'"
    ).fetchone()
    database.close()
    return tokens


def export(
    levade: Path, run: Path, out: Path, options: list[str], kill_after: float | None = None
) -> tuple[int, float, int]:
    """Exports, and kills the process after some seconds. Returns exit code, wall seconds and peak memory in bytes."""
    start = time.monotonic()
    process = subprocess.Popen([levade, "export", run, "--out", out, *options], stderr=subprocess.PIPE)
    deadline = start + (3600 if kill_after is None else kill_after)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            process.returncode = code
            if code not in (0, -signal.SIGKILL):
                sys.exit(process.stderr.read().decode())
            return code, time.monotonic() - start, usage.ru_maxrss * 1024
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(0.02)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", type=Path, help="directory of a recorded run with a store in a file")
    p.add_argument("--attempts", type=int, nargs="+", default=[10_000, 100_000])
    p.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    p.add_argument("--kills", type=int, default=3, help="interruptions of each export")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--directory", type=Path, help="where to put copies; the system's by default")
    arguments = p.parse_args()
    failed = False
    for wanted in arguments.attempts:
        with tempfile.TemporaryDirectory(prefix="levade-bench-", dir=arguments.directory) as directory:
            run = Path(directory, arguments.run.name)
            shutil.copytree(arguments.run, run)
            tokens = multiply(run / "run.db", wanted)
            print(f"{wanted} attempts, {tokens} tokens, record of {(run / 'run.db').stat().st_size / 1e6:.0f} MB")
            for name in arguments.targets:
                options = TARGETS[name]
                out = Path(directory, name)
                _, seconds, peak = export(arguments.levade, run, out, options)
                kills, code, peaks = 0, -1, [peak]
                other = Path(directory, f"killed-{name}")
                while code != 0:
                    after = seconds * 0.3 if kills < arguments.kills else None
                    code, _, memory = export(arguments.levade, run, other, options, after)
                    peaks.append(memory)
                    kills += code != 0
                # The peak of a child includes the memory of this process when it started, so that must stay small.
                equal = filecmp.cmp(out, other, shallow=False)
                failed |= not equal
                print(
                    f"  {name}: {wanted / seconds:.0f} attempts/s, {out.stat().st_size / 1e6:.1f} MB, peak"
                    f" {max(peaks) / 2**20:.0f} MiB, {'equal' if equal else 'DIFFERENT'} after {kills} kills",
                    flush=True,
                )
                out.unlink()
                other.unlink()
    sys.exit(failed)


if __name__ == "__main__":
    main()
