"""Measures the cost of traces: the time of a run's step with `metrics.traces`, and without.

Runs a recipe alternately without and with a collector, which decompresses each request and counts its spans in another
process. The median over the steps of a run is the run's step time; each pair gives a ratio. The processor time of the
run is measured, too, because it is less sensitive to a busy machine.
"""

import argparse
import gzip
import http.server
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def collect(port: "multiprocessing.Queue[int]", received: "multiprocessing.sharedctypes.Synchronized[int]") -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = gzip.decompress(self.rfile.read(int(self.headers["content-length"])))
            with received.get_lock():
                received.value += len(body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.put(server.server_port)
    server.serve_forever()


def train(arguments: argparse.Namespace, url: str | None) -> tuple[float, float]:
    """Runs the recipe. Returns the median step time and the processor time, in seconds."""
    with tempfile.TemporaryDirectory(prefix="levade-bench-") as directory:
        changes = [*arguments.set, f"metrics.traces.otlp={url or ''}"]
        sets = [part for change in changes for part in ("--set", change)]
        command = [arguments.levade, "train", arguments.recipe, *sets, "--run", f"{directory}/run"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode != 0:
            sys.exit(f"the run ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
        if "traces" in done.stdout:
            print(f"note  {[line for line in done.stdout.splitlines() if 'traces' in line]}")
        lines = [json.loads(line) for line in Path(directory, "run/metrics.jsonl").read_text().splitlines()]
        steps = [line["timing_s/step"] for line in lines if "timing_s/gen" in line]
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return statistics.median(steps), seconds


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recipe", help="recipe; use --set to make it short")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="recipe keys, as for `levade train`")
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    arguments = p.parse_args()
    ports, received = multiprocessing.Queue(), multiprocessing.Value("q", 0)
    collector = multiprocessing.Process(target=collect, args=(ports, received), daemon=True)
    collector.start()
    url = f"http://127.0.0.1:{ports.get(timeout=60)}/v1/traces"
    ratios, processor = [], []
    for pair in range(arguments.pairs):
        # The first run of a pair changes from pair to pair.
        order = [None, url] if pair % 2 == 0 else [url, None]
        times = {side is not None: train(arguments, side) for side in order}
        ratios.append(times[True][0] / times[False][0])
        processor.append(times[True][1] / times[False][1])
        print(
            f"pair {pair}: step {1000 * times[False][0]:.1f} ms without, {1000 * times[True][0]:.1f} ms with traces"
            f" ({100 * ratios[-1] - 100:+.2f} %); processor time {100 * processor[-1] - 100:+.2f} %"
            f" (load {os.getloadavg()[0]:.1f})",
            flush=True,
        )
    for name, values in (("step time", ratios), ("processor time", processor)):
        median, low, high = statistics.median(values), min(values), max(values)
        print(
            f"{name}: {100 * median - 100:+.2f} % ({100 * low - 100:+.2f} to {100 * high - 100:+.2f}, n = {len(values)})"
        )
    print(f"the collector received {received.value / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
