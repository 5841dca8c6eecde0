"""Compares `levade store serve` with Agent Lightning's own server (`agl store`) under the same load.

The load generator is a compiled program (`crates/store_server/examples/store_load.rs`). Each round starts one server
after the other, and runs three workloads against each: rollouts (enqueue, dequeue, one span, success), single spans of
1 kB, and OTLP batches of 100 spans. Levade stores its data in a file and flushes every write to the disk before it
responds. With `--memory`, it keeps them in memory, as Agent Lightning's server always does. Server and load generator
share the machine, so the script also prints the server's CPU time per operation, which a busy machine disturbs less.

- Closed loop (always): each connection sends its next operation when the previous one has ended.
- Open loop (`--open`): operations arrive at fixed times, at 1, 5 and 20 times the closed-loop rate of Agent Lightning's
  server, or at `--rates`. A latency counts from the time at which the operation was due.
- `--spans N`: the resident memory of Levade after N spans in OTLP batches.

    cargo build --release -p levade && cargo build --release -p levade-store-server --example store_load
    uv venv VENV && uv pip install --python VENV/bin/python agentlightning==0.3.0
    python3 bench/store.py --agl VENV/bin/agl       # without --agl, only Levade
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
    p.add_argument("--open", action="store_true", help="also measure an open loop; needs --agl or --rates")
    p.add_argument("--rates", help="rates of the open loop instead, as rollouts,spans,traces in operations per second")
    p.add_argument("--spans", type=int, default=0, help="also measure the memory of Levade after this many spans")
    p.add_argument("--port", type=int, default=47470)
    return p.parse_args()


def resident(process: subprocess.Popen) -> float:
    """Returns the peak of the resident memory in MiB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def cpu_seconds(process: subprocess.Popen) -> float:
    """Returns the CPU time that a process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(args: argparse.Namespace, port: int, workload: str, seconds: float, rate: float | None = None) -> dict:
    """Runs the load generator and returns its figures."""
    command = [args.load, f"127.0.0.1:{port}", workload, args.connections, seconds, *([rate] if rate else [])]
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def measure(
    command: list[str], args: argparse.Namespace, port: int, rates: dict[str, list[float]], spans: int
) -> dict[str, dict]:
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
            before = cpu_seconds(process)
            of = load(args, port, workload, args.seconds)
            of["server_us"] = (cpu_seconds(process) - before) * 1e6 / max(1, of["operations"])
            figures[workload] = {key: value for key, value in of.items() if value is not None}
        for workload, all_rates in rates.items():
            for rate in all_rates:
                figures[f"{workload} at {rate:.0f}/s"] = load(args, port, workload, args.seconds, rate)
        figures["memory"] = {"MiB": resident(process)}
        if spans:
            stored = 0
            while stored < spans:
                stored += load(args, port, "traces", args.seconds)["operations"]
            figures[f"memory after {spans} spans"] = {"MiB": resident(process)}
        return figures
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    args = arguments()
    rounds: dict[str, list[dict]] = {"agl": [], "levade": []}
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=ROOT / "target") as folder:
            # A port of its own for each server, so that no connection of the last one is in the way.
            port = args.port + 2 * number
            rates: dict[str, list[float]] = {}
            if args.rates:
                rates = {of: [float(rate)] for of, rate in zip(WORKLOADS, args.rates.split(","), strict=True)}
            if args.agl:
                command = [str(args.agl), "store", "--host", "127.0.0.1", "--port", str(port + 1)]
                rounds["agl"].append(measure(command, args, port + 1, {}, 0))
                if args.open and not args.rates:
                    saturated = {of: rounds["agl"][0][of]["per_second"] for of in WORKLOADS}
                    rates = {of: [factor * saturated[of] for factor in (1, 5, 20)] for of in WORKLOADS}
            db = "memory:" if args.memory else f"{folder}/rollouts.db"
            serve = ["store", "serve", "--host", "127.0.0.1", "--port", str(port), "--db", db]
            # In the last round: a large store would slow the others down.
            spans = args.spans if number + 1 == args.rounds else 0
            rounds["levade"].append(measure([str(args.levade), *serve], args, port, rates, spans))
    for name, all_rounds in rounds.items():
        for part in all_rounds[-1] if all_rounds else ():
            of_part = [r[part] for r in all_rounds if part in r]
            of = {
                key: [of[key] for of in of_part] for key, value in of_part[0].items() if isinstance(value, (int, float))
            }
            shown = (f"{k} {statistics.median(v):.4g} ({min(v):.4g}-{max(v):.4g})" for k, v in of.items())
            print(f"{name:7} {part:22} " + ", ".join(shown))
    if args.agl:
        for workload in WORKLOADS:
            for figure, better in (("per_second", "levade"), ("server_us", "agl")):
                of = {name: statistics.median(r[workload][figure] for r in rounds[name]) for name in rounds}
                other = "agl" if better == "levade" else "levade"
                print(f"ratio   {workload:9} {figure:10} {of[better] / of[other]:.1f}")


if __name__ == "__main__":
    main()
