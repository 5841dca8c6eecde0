"""Processes of this host, and programs that are started and ended by their ids."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# In the environment of everything that a check starts: what is left of it is found by this.
MARK = "LEVADE_LAUNCH_CHECK"


@dataclass(frozen=True)
class Process:
    """A process as it was when it was looked at."""

    pid: int
    parent: int
    words: tuple[str, ...]

    @property
    def command(self) -> str:
        return " ".join(self.words)

    def variable(self, name: str) -> str | None:
        """Of its environment, as it was started with."""
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace").split("\0"):
                if entry.startswith(f"{name}="):
                    return entry.partition("=")[2]
        return None

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, how)


def processes() -> Iterator[Process]:
    """All that are alive; zombies and threads of the kernel have no command."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = entry.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                if words:
                    yield Process(int(entry.name), parent, tuple(words))


def below(roots: set[int]) -> list[Process]:
    """Everything that these have started and that still hangs on them, itself not counted."""
    alive, found = list(processes()), []
    while further := [one for one in alive if one.parent in roots and one not in found]:
        found += further
        roots = roots | {one.pid for one in further}
    return found


def left_of(mark: str, folder: Path) -> list[Process]:
    """Processes that a check has started, told by their environment or their command."""
    mine = os.getpid()
    named = (one for one in processes() if one.variable(MARK) == mark or str(folder) in one.command)
    return [one for one in named if one.pid != mine]


def wait(what: str, holds: Callable[[], object], seconds: float) -> float:
    """Waits until something holds; returns for how long."""
    start = time.monotonic()
    while not holds():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)
    return time.monotonic() - start


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Programs:
    """Programs of a set-up, in the foreground, each with a log; they end in reverse order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: list[str], **variables: str) -> subprocess.Popen:
        """Starts one, which may have been there before."""
        # Python compiles what it imports once, not in each of dozens of processes.
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
        """Kill -9."""
        self.running[name].kill()
        self.running.pop(name).wait()

    def stop(self) -> None:
        """Ends all in good order, within 20 seconds each."""
        for program in reversed(self.running.values()):
            program.terminate()
            try:
                program.wait(20)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
        self.running.clear()


def said(*command: str, **variables: str) -> str:
    """What a program prints; it must end well within a minute."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **variables})
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
