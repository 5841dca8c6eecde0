"""Runs two resident programs alternately on one machine, and keeps their times comparable.

Only one of them works at any moment. For each request, the processor time of the whole machine is compared with that
of the program. If other processes used more than a small fraction, the round is dropped and repeated.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# By default, glibc returns large blocks to the kernel, and PyTorch then pays for their pages in every step.
KEEP_BLOCKS = {
    "MALLOC_MMAP_THRESHOLD_": str(16 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
TICK = os.sysconf("SC_CLK_TCK")


def parser(description: str) -> argparse.ArgumentParser:
    """Creates a parser with the options that all comparisons share."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="GGUF file or Hugging Face directory")
    p.add_argument("--python", default=sys.executable, help="Python interpreter with torch and transformers")
    p.add_argument(
        "--levade",
        type=Path,
        default=os.environ.get("LEVADE_BENCH", ROOT / "target/release/examples/bench"),
        help="bench binary (env LEVADE_BENCH)",
    )
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--precision", choices=["f32", "bf16"], default="f32", help="precision of both sides")
    p.add_argument(
        "--isa",
        choices=["amx", "avx512_bf16", "avx512", "avx2", "portable"],
        help="instruction set of Levade; by default the best one",
    )
    p.add_argument(
        "--batch-tokens",
        type=int,
        default=4096,
        help="maximum number of tokens per pass in Levade, unless a script has its own sizes",
    )
    p.add_argument("--rounds", type=int, default=7, help="number of undisturbed rounds for the median")
    p.add_argument(
        "--disturbance",
        type=float,
        default=0.05,
        help="maximum fraction of the processors that other processes may use during a request; above it, the round is dropped",
    )
    return p


def machine_seconds() -> float:
    """Returns the processor time of all work on the machine since boot, including stolen time."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _stat().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICK


def _stat() -> str:
    with open("/proc/stat") as file:
        return file.readline()


@dataclass
class Peer:
    """A resident program that executes requests."""

    name: str
    process: subprocess.Popen
    # The program's response after it loaded the model.
    loaded: dict = field(default_factory=dict)

    @classmethod
    def start(cls, command: list, model: Path, **options) -> "Peer":
        """Starts the program and loads the model."""
        peer = cls("", cls._spawn(command))
        peer.loaded = peer.ask(do="load", model=str(model), **options)
        peer.name = peer.loaded["name"]
        return peer

    @classmethod
    def listen(cls, command: list) -> "Peer":
        """Starts a program that prints its name when it is ready."""
        peer = cls("", cls._spawn(command))
        peer.name = json.loads(peer.process.stdout.readline())["name"]
        return peer

    @staticmethod
    def _spawn(command: list) -> subprocess.Popen:
        if not Path(command[0]).is_file():
            sys.exit(
                f"{command[0]} does not exist. Levade's timing binary is built with\n"
                "  cargo build --release -p levade-engine --example bench"
            )
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | KEEP_BLOCKS,
        )

    def ask(self, **request) -> dict:
        """Sends a request and waits. The response also contains the fraction of the processors that other processes
        used meanwhile.
        """
        before = machine_seconds() - self._own_seconds()
        start = time.perf_counter()
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name or 'a peer'} stopped with code {self.process.wait()}; its last output is above")
        foreign = machine_seconds() - self._own_seconds() - before
        available = (time.perf_counter() - start) * (os.cpu_count() or 1)
        return json.loads(line) | {"foreign": max(foreign, 0.0) / available}

    def _own_seconds(self) -> float:
        with open(f"/proc/{self.process.pid}/stat") as file:
            after_name = file.read().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / TICK

    def peak_memory(self) -> float:
        """Returns the peak resident size so far, in GiB."""
        with open(f"/proc/{self.process.pid}/status") as file:
            line = next(line for line in file if line.startswith("VmHWM"))
        return int(line.split()[1]) / (1 << 20)

    def stop(self) -> None:
        """Stops the program by closing its input."""
        self.process.stdin.close()
        self.process.wait(timeout=60)


def pair(
    arguments: argparse.Namespace, worker: str = "torch_worker.py", model: Path | None = None
) -> tuple[Peer, Peer]:
    """Starts Levade and a peer (by default PyTorch), both with the model loaded. The peer may load it from another
    file.
    """
    theirs = [arguments.python, Path(__file__).with_name(worker)]
    options = {"threads": arguments.threads, "precision": arguments.precision}
    return levade(arguments, arguments.model), Peer.start(theirs, model or arguments.model, **options)


def levade(arguments: argparse.Namespace, model: Path, **options) -> Peer:
    """Starts Levade with a model, with the engine options that all comparisons share and additional ones."""
    common = {name: getattr(arguments, name) for name in ("threads", "precision", "isa", "batch_tokens")}
    return Peer.start([arguments.levade], model, options=common | options)


@dataclass
class Series:
    """The seconds of undisturbed rounds, for both sides."""

    disturbance: float
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    dropped: int = 0

    def add(self, ours: dict, theirs: dict) -> bool:
        """Adds a round if nothing disturbed it."""
        worst = max(ours["foreign"], theirs["foreign"])
        clean = worst <= self.disturbance
        mark = "" if clean else f"   dropped: other processes used {worst:.0%} of the processors"
        print(f"  {ours['seconds']:8.3f} s {theirs['seconds']:8.3f} s{mark}", flush=True)
        if clean:
            self.ours.append(ours["seconds"])
            self.theirs.append(theirs["seconds"])
        else:
            self.dropped += 1
        return clean

    def medians(self) -> tuple[float, float]:
        return statistics.median(self.ours), statistics.median(self.theirs)

    def ratio(self) -> float:
        """Returns the speedup of Levade."""
        ours, theirs = self.medians()
        return theirs / ours

    def spread(self) -> str:
        """Returns the minimum and maximum speedup of single rounds."""
        ratios = sorted(b / a for a, b in zip(self.ours, self.theirs, strict=True))
        return f"{ratios[0]:.2f}–{ratios[-1]:.2f}, n = {len(ratios)}, {self.dropped} rounds dropped"


def take_turns(arguments: argparse.Namespace, one_round) -> Series:
    """Calls `one_round()`, which returns both responses, until enough rounds were undisturbed.

    Gives up after four times as many rounds.
    """
    series, rounds = Series(arguments.disturbance), arguments.rounds
    for _ in range(4 * rounds):
        series.add(*one_round())
        if len(series.ours) == rounds:
            break
    if len(series.ours) < 3:
        sys.exit(f"Only {len(series.ours)} rounds were undisturbed, too few for a median: run this on an idle machine.")
    return series


def machine() -> str:
    """Returns processor, cores, kernel and load, for an entry in `log/`."""
    with open("/proc/cpuinfo") as file:
        lines = dict(tuple(map(str.strip, line.split(":", 1))) for line in file if ":" in line)
    cpu = f"{lines.get('model name')} (family {lines.get('cpu family')}, model {lines.get('model')})"
    return f"{cpu}, {os.cpu_count()} cores, Linux {platform.release()}, load {os.getloadavg()[0]:.2f}"
