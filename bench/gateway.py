"""Measures the cost of the gateway, alone and behind LiteLLM's proxy.

Serves the gateway over a sampler of negligible cost, and requests chat completions of 200-token prompts and 16-token
completions. Alternately, the same load goes through LiteLLM's proxy, whose backend is that server. So LiteLLM's
overhead is measured on top of Levade's. This setup favors LiteLLM in the throughput comparison: only sampling is
omitted from its work.

Each server has one processor and one worker (Levade the first processor, LiteLLM the second together with the load
generator, which needs little of it). In addition to wall-clock times, the script reads each server's processor time
per call, which a busy machine disturbs less.

    cargo build --release -p levade-gateway --example load
    python3 bench/gateway.py --litellm VENV/bin/litellm       # from pip install 'litellm[proxy]'; without it, only Levade
    python3 bench/gateway.py --before OTHER/load --rounds 7   # two builds of the gateway, alternately, and nothing else
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
TICK = os.sysconf("SC_CLK_TCK")
CONFIG = """\
model_list:
  - model_name: tiny
    litellm_params:
      model: openai/tiny
      api_base: http://{address}/v1
      api_key: sk-none
"""
# Disables telemetry, downloaded tables and logs.
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    # Listens only on the loopback, and skips the check of a key.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--load",
        type=Path,
        default=ROOT / "target/release/examples/load",
        help="load example, which serves and sends requests",
    )
    p.add_argument("--litellm", type=Path, help="executable of LiteLLM's proxy")
    p.add_argument("--before", type=Path, help="load example of another build to compare with")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=4, help="duration of each measurement")
    p.add_argument("--connections", type=int, default=32, help="connections of the throughput measurement")
    p.add_argument("--streams", type=int, default=5000, help="number of concurrently open streams")
    p.add_argument("--pace", type=int, default=4000, help="milliseconds per token of these streams")
    return p.parse_args()


class Server:
    """A program on one processor, until `stop`."""

    def __init__(self, cpu: int, command: list, **environment: str):
        pinned = ["taskset", "-c", str(cpu), *map(str, command)]
        self.process = subprocess.Popen(pinned, stdout=subprocess.PIPE, env=os.environ | environment, text=True)

    def seconds(self) -> float:
        """Returns the processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def levade(load: Path, *pace: int) -> tuple[Server, str]:
    server = Server(0, [load, "serve", "127.0.0.1:0", *pace])
    return server, json.loads(server.process.stdout.readline())["address"]


def litellm(program: Path, address: str, directory: str, port: int = 18991) -> tuple[Server, str]:
    config = Path(directory) / "litellm.yaml"
    config.write_text(CONFIG.format(address=address))
    command = [program, "--config", config, "--host", "127.0.0.1", "--port", port, "--num_workers", 1]
    server = Server(1, command, **ENVIRONMENT)
    # Discards the large output.
    subprocess.Popen(["cat"], stdin=server.process.stdout, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 400
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5):
                return server, f"127.0.0.1:{port}"
        except OSError as error:
            if time.monotonic() > deadline or server.process.poll() is not None:
                server.stop()
                raise SystemExit(f"waited for LiteLLM's proxy to answer: {error}") from error
            time.sleep(0.5)


def run_load(load: Path, *command) -> dict:
    done = subprocess.run(
        ["taskset", "-c", "1", load, *map(str, command)], stdout=subprocess.PIPE, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"load {' '.join(map(str, command))} failed with {done.returncode}")
    return json.loads(done.stdout)


def measure_load(load: Path, server: Server, address: str, connections: int, seconds: float, stream: list[str]) -> dict:
    """Returns latency and throughput of `load calls`, and the server's processor time per call."""
    before = server.seconds()
    one = run_load(load, "calls", address, connections, seconds, *stream)
    one["cpu_ms"] = (server.seconds() - before) / (one["calls"] + connections) * 1e3
    return one


def spread(values: list[float], digits: int = 2) -> str:
    """Formats median (min–max)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def compare_with_litellm(a: argparse.Namespace, directory: str) -> None:
    """Measures latency at one connection and throughput at many, alternating with LiteLLM if it is available."""
    server, address = levade(a.load)
    sides = {"levade": (server, address)}
    try:
        if a.litellm:
            sides["litellm"] = litellm(a.litellm, address, directory)
        found: dict[tuple, list[dict]] = {}
        alone = []
        for number in range(a.rounds):
            alone.append(run_load(a.load, "sampler", 2000))
            for connections in (1, a.connections):
                for stream in ([], ["stream"]):
                    for name, (program, at) in sides.items():
                        one = measure_load(a.load, program, at, connections, a.seconds, stream)
                        found.setdefault((name, connections, bool(stream)), []).append(one)
            print(f"round {number + 1} of {a.rounds}, load average {os.getloadavg()[0]:.1f}", flush=True)
    finally:
        for program, _ in sides.values():
            program.stop()
    sampler = [one["p50_ms"] for one in alone]
    print(
        f"{alone[0]['prompt_tokens']:.0f} prompt tokens, {alone[0]['reply_tokens']:.1f} completion tokens; n = {a.rounds}"
    )
    print(f"sampler alone: p50 {spread(sampler, 3)} ms")
    for (name, connections, stream), ones in sorted(found.items(), key=lambda item: item[0][1:]):
        kind = "streams" if stream else "whole"
        print(
            f"{name}, {connections} connections, {kind}: {spread([one['calls_a_second'] for one in ones], 0)} calls/s, "
            f"p50 {spread([one['p50_ms'] for one in ones])} ms, p99 {spread([one['p99_ms'] for one in ones])} ms, "
            f"first byte p50 {spread([one['first_p50_ms'] for one in ones])} ms, processor {spread([one['cpu_ms'] for one in ones], 3)} ms a call"
        )
    for stream in (False, True):
        kind = "streams" if stream else "whole"
        direct = found["levade", 1, stream]
        print(
            f"added p50, {kind}: Levade {spread([d['p50_ms'] - s for d, s in zip(direct, sampler, strict=True)])} ms over the sampler"
        )
        if not a.litellm:
            continue
        pairs = list(zip(direct, found["litellm", 1, stream], strict=True))
        print(
            f"added p50, {kind}: LiteLLM {spread([peer['p50_ms'] - own['p50_ms'] for own, peer in pairs])} ms over Levade"
        )
        pairs = list(zip(found["levade", a.connections, stream], found["litellm", a.connections, stream], strict=True))
        clock = spread([own["calls_a_second"] / peer["calls_a_second"] for own, peer in pairs], 1)
        cpu = spread([peer["cpu_ms"] / own["cpu_ms"] for own, peer in pairs], 1)
        print(f"throughput, {kind}: {clock} times LiteLLM's by the clock, {cpu} by processor time")


def compare_builds(a: argparse.Namespace) -> None:
    """Prints the ratio of latency and processor time of the earlier build to this build. Above 1, this build is
    faster.
    """
    sides: dict[str, tuple] = {}
    ratios: dict[tuple, list[float]] = {}
    try:
        for name, load in (("after", a.load), ("before", a.before)):
            sides[name] = (load, *levade(load))
        for number in range(a.rounds):
            for stream in ([], ["stream"]):
                order = ("after", "before") if number % 2 else ("before", "after")
                found = {name: measure_load(*sides[name], a.connections, a.seconds, stream) for name in order}
                for figure in ("p50_ms", "cpu_ms"):
                    ratio = found["before"][figure] / found["after"][figure]
                    ratios.setdefault((figure, "streams" if stream else "whole"), []).append(ratio)
            print(f"round {number + 1} of {a.rounds}, load average {os.getloadavg()[0]:.1f}", flush=True)
    finally:
        for _, server, _ in sides.values():
            server.stop()
    for (figure, kind), values in ratios.items():
        print(f"{figure}, {kind}, {a.connections} connections, before over after: {spread(values, 3)}, n = {a.rounds}")


def main() -> None:
    a = arguments()
    if a.before:
        compare_builds(a)
        return
    if a.litellm:
        asks = [a.litellm.with_name("python"), "-c", "import importlib.metadata as m; print(m.version('litellm'))"]
        print(f"LiteLLM {subprocess.run(asks, capture_output=True, text=True, check=True).stdout.strip()}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        compare_with_litellm(a, directory)
    turns = [run_load(a.load, "turns", 100, 10) for _ in range(a.rounds)]
    last = turns[-1]
    print(
        f"turn 100 ({last['prompt_tokens']} tokens) {spread([t['last_ms'] for t in turns], 3)} ms, turn 2 {spread([t['second_ms'] for t in turns], 3)} ms, "
        f"ratio {spread([t['ratio'] for t in turns])}"
    )
    server, address = levade(a.load, a.pace)
    try:
        print(f"streams: {json.dumps(run_load(a.load, 'streams', address, a.streams, server.process.pid))}")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
