"""Compares short Python programs in the sandbox, each in a new interpreter, with SandboxFusion's own server.

Alternates between `levade sandbox serve` with full protection, SandboxFusion's server with its own local configuration
(without isolation), both over HTTP (`POST /run_code`, language python), and `python3 -c` started by this script
without HTTP, which is a lower bound for every program that starts an interpreter. There are three programs: an empty
one, one with a little work in the standard library, and one that prints 3 MB, which must succeed. For each, measures
the times of sequential calls, and the calls per second of several concurrent ones. Server and script share the
processors, so run it on a quiet machine.

    cargo build --release
    python3 bench/sandbox.py --fusion FOLDER --fusion-python VENV/bin/python

FOLDER is a checkout of github.com/bytedance/SandboxFusion, VENV a virtual environment with its dependencies. Its
server requires Conda and built documentation; the script creates the empty directories `VENV/condabin` and
`FOLDER/docs/build`, which suffice.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODES = {
    "pass": "pass",
    "stdlib": "import json, re, collections\nprint(json.dumps(collections.Counter(re.findall('.', 'abcabc' * 1000))))",
    "3 MB": "print('x' * 3_000_000)",
}


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ask(url: str, code: str) -> dict:
    body = json.dumps({"code": code, "language": "python", "run_timeout": 10}).encode()
    request = urllib.request.Request(f"{url}/run_code", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


class Service:
    """A server that is called over HTTP."""

    def __init__(self, name: str, command: list, url: str, **options) -> None:
        self.name, self.url = name, url
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True, **options)
        for _ in range(1800):
            if self.process.poll() is not None:
                break
            try:
                ask(url, "pass")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        self.log.seek(0)
        sys.exit(f"{name} did not start:\n{self.log.read().decode()[-3000:]}")

    def run(self, code: str) -> bool:
        return ask(self.url, code)["status"] == "Success"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Interpreter:
    """Starts a new interpreter for each call, without isolation."""

    name = "python3 -c"

    def run(self, code: str) -> bool:
        done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True)
        return done.returncode == 0

    def stop(self) -> None:
        pass


def fusion(directory: Path, python: Path) -> Service:
    """Starts SandboxFusion's server. A virtual environment with a directory `condabin` passes for Conda."""
    (directory / "docs/build").mkdir(parents=True, exist_ok=True)
    (python.absolute().parent.parent / "condabin").mkdir(exist_ok=True)
    number = port()
    command = [python.absolute(), "-m", "uvicorn", "sandbox.server.server:app", "--port", str(number)]
    environment = os.environ | {"SANDBOX_CONFIG": "local"}
    return Service("SandboxFusion", command, f"http://127.0.0.1:{number}", cwd=directory, env=environment)


def measure(who, code: str, calls: int, at_once: int) -> dict:
    """Returns sequential times in seconds, concurrent calls per second, and the number of successful calls."""
    times, good = [], 0
    for _ in range(calls):
        started = time.perf_counter()
        good += who.run(code)
        times.append(time.perf_counter() - started)
    started = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        good += sum(pool.map(lambda _: who.run(code), range(calls)))
    rate = calls / (time.perf_counter() - started)
    return {"times": times, "rate": rate, "good": good, "all": 2 * calls}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade", help="levade binary")
    p.add_argument("--fusion", type=Path, help="checkout of SandboxFusion; without it, SandboxFusion is skipped")
    p.add_argument(
        "--fusion-python",
        type=Path,
        default=Path(sys.executable),
        help="Python interpreter with SandboxFusion's dependencies",
    )
    p.add_argument("--calls", type=int, default=20, help="calls per round, first sequentially and then concurrently")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--at-once", type=int, default=4)
    arguments = p.parse_args()
    address = f"127.0.0.1:{port()}"
    command = [arguments.levade, "sandbox", "serve", "--bind", address, "--python", sys.executable]
    everyone = [Service("levade", command, f"http://{address}"), Interpreter()]
    if arguments.fusion:
        everyone.append(fusion(arguments.fusion, arguments.fusion_python))
    try:
        for title, code in CODES.items():
            rounds = {who.name: [] for who in everyone}
            for _ in range(arguments.rounds):
                for who in everyone:
                    calls = max(2, arguments.calls // 5) if who.name == "SandboxFusion" else arguments.calls
                    rounds[who.name].append(measure(who, code, calls, arguments.at_once))
            for name, found in rounds.items():
                times = sorted(t for r in found for t in r["times"])
                rate = statistics.median(r["rate"] for r in found)
                # Compares round by round, since other users of the machine change the load between rounds.
                times_ours = [ours["rate"] / r["rate"] for ours, r in zip(rounds["levade"], found, strict=True)]
                ratio = f"{statistics.median(times_ours):5.2f} x ({min(times_ours):.2f}–{max(times_ours):.2f})"
                good, every = sum(r["good"] for r in found), sum(r["all"] for r in found)
                print(
                    f"{title:<8} {name:<14} p50 {times[len(times) // 2] * 1e3:8.1f} ms   "
                    f"least {times[0] * 1e3:8.1f} ms   {rate:8.1f} calls/s (levade: {ratio})   "
                    f"good {good}/{every}",
                    flush=True,
                )
    finally:
        for who in everyone:
            who.stop()


if __name__ == "__main__":
    main()
