"""Finds processes of this host, and starts and ends programs by their process ids."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Environment variable of all processes that a check starts, by which remaining processes are found.
MARK = "LEVADE_LAUNCH_CHECK"


@dataclass(frozen=True)
class Process:
    """A snapshot of a process."""

    pid: int
    parent: int
    words: tuple[str, ...]

    @property
    def command(self) -> str:
        return " ".join(self.words)

    def variable(self, name: str) -> str | None:
        """Returns a variable of the environment with which the process was started."""
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace").split("\0"):
                if entry.startswith(f"{name}="):
                    return entry.partition("=")[2]
        return None

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, how)


def processes() -> Iterator[Process]:
    """Returns all running processes. Zombies and kernel threads have no command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = entry.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                if words:
                    yield Process(int(entry.name), parent, tuple(words))


def below(roots: set[int]) -> list[Process]:
    """Returns all descendants of the given processes, without these."""
    alive, found = list(processes()), []
    while further := [one for one in alive if one.parent in roots and one not in found]:
        found += further
        roots = roots | {one.pid for one in further}
    return found


def left_of(mark: str, directory: Path) -> list[Process]:
    """Returns the processes that a check has started, identified by environment or command line."""
    mine = os.getpid()
    named = (one for one in processes() if one.variable(MARK) == mark or str(directory) in one.command)
    return [one for one in named if one.pid != mine]


def wait(what: str, holds: Callable[[], object], seconds: float) -> float:
    """Waits until a condition holds. Returns the waiting time."""
    start = time.monotonic()
    while not holds():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)
    return time.monotonic() - start


def free_port() -> int:
    """Returns a port on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Programs:
    """Foreground programs of a set-up, each with a log. They end in reverse order."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory
        self.running: dict[str, subprocess.Popen] = {}
        directory.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: list[str], **variables: str) -> subprocess.Popen:
        """Starts a program, possibly again."""
        # Lets Python cache bytecode, so that dozens of processes do not compile the same imports.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with (self.folder / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | variables,
                start_new_session=True,
            )
        self.running[name] = started
        return started

    def kill(self, name: str) -> None:
        """Kills a program with kill -9."""
        self.running[name].kill()
        self.running.pop(name).wait()

    def stop(self) -> None:
        """Ends all programs gracefully, with 20 seconds for each."""
        for program in reversed(self.running.values()):
            program.terminate()
            try:
                program.wait(20)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        self.running.clear()


def said(*command: str, **variables: str) -> str:
    """Returns the output of a program, which must succeed within a minute."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **variables})
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
