"""`levade store serve` beside Agent Lightning's own server (`agl store`), under the same load.

The load generator is compiled (`crates/store_server/examples/store_load.rs`). Each round starts both servers anew, in turns, and runs three workloads
against each: rollouts (enqueue, dequeue, one span, success), spans of 1 kB one by one, and OTLP batches of 100 spans. Levade keeps its data in a file and
flushes every write to the disk before it answers; with `--memory` it keeps them in memory, as Agent Lightning's server always does. Server and load share
the machine.

    cargo build --release -p levade && cargo build --release -p levade-store-server --example store_load
    uv venv VENV && uv pip install --python VENV/bin/python agentlightning==0.3.0
    python3 bench/store.py --agl VENV/bin/agl       # without it, Levade alone
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKLOADS = ("rollouts", "spans", "traces")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--load", type=Path, default=ROOT / "target/release/examples/store_load")
    p.add_argument("--agl", type=Path, help="the program `agl` of agentlightning 0.3.0")
    p.add_argument("--memory", action="store_true", help="Levade keeps its data in memory, too")
    p.add_argument("--connections", type=int, default=32)
    p.add_argument("--seconds", type=float, default=5, help="duration of a workload")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--port", type=int, default=47470)
    return p.parse_args()


def resident(process: subprocess.Popen) -> float:
    """Returns the peak of the resident memory in MiB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def measure(command: list[str], args: argparse.Namespace, port: int) -> dict[str, dict]:
    """Starts a server, and returns the figures of each workload, the time of the start and the peak of memory."""
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    start = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/agl/health", timeout=1)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() - start > 120:
                    raise SystemExit(f"{command[0]} does not serve") from None
                time.sleep(0.005)
        figures = {"start": {"seconds": time.monotonic() - start}}
        for workload in WORKLOADS:
            load = [str(args.load), f"127.0.0.1:{port}", workload, str(args.connections), str(args.seconds)]
            figures[workload] = json.loads(subprocess.run(load, check=True, capture_output=True, text=True).stdout)
        figures["memory"] = {"MiB": resident(process)}
        return figures
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    args = arguments()
    rounds: dict[str, list[dict]] = {}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
            db = "memory:" if args.memory else f"{folder}/rollouts.db"
            # A port of its own for each server, so that no connection of the last one is in the way.
            port = args.port + 2 * number
            serve = ["store", "serve", "--host", "127.0.0.1", "--port", str(port), "--db", db]
            rounds.setdefault("levade", []).append(measure([str(args.levade), *serve], args, port))
            if args.agl:
                command = [str(args.agl), "store", "--host", "127.0.0.1", "--port", str(port + 1)]
                rounds.setdefault("agl", []).append(measure(command, args, port + 1))
    for name, all_rounds in rounds.items():
        for part in ("start", *WORKLOADS, "memory"):
            of = {key: [r[part][key] for r in all_rounds] for key, value in all_rounds[0][part].items() if key != "workload"}
            shown = (f"{k} {statistics.median(v):.4g} ({min(v):.4g}-{max(v):.4g})" for k, v in of.items())
            print(f"{name:7} {part:9} " + ", ".join(shown))
    if args.agl:
        for workload in WORKLOADS:
            rate = {name: statistics.median(r[workload]["per_second"] for r in rounds[name]) for name in rounds}
            print(f"ratio   {workload:9} {rate['levade'] / rate['agl']:.1f}")


if __name__ == "__main__":
    main()
