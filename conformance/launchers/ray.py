"""Ray: a head and a worker on this host, with one processor each."""

import json
import signal
import time
import urllib.request
from pathlib import Path

from .processes import MARK, Process, Programs, below, free_port, processes, wait


class Ray:
    """A cluster of two raylets. `program` is the `ray` of an environment with ray[default]."""

    needs = ()
    logs = ("ray.log",)

    def __init__(self, directory: Path, mark: str, program: Path) -> None:
        self.folder, self.program = directory / "ray", program
        self.programs = Programs(self.folder)
        # Sockets are created below this directory, and their names are limited to 107 characters.
        self.session = directory / "r"
        self.port, self.dashboard = free_port(), free_port()
        self.variables = {MARK: mark, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

    def start(self) -> None:
        head = ["--head", f"--port={self.port}", f"--dashboard-port={self.dashboard}", f"--temp-dir={self.session}"]
        self._node("head", *head, f"--ray-client-server-port={free_port()}")
        wait("the dashboard", lambda: self._alive() == 1, 300)
        self.worker()

    def worker(self) -> None:
        """Adds a node."""
        self._node("worker", f"--address=127.0.0.1:{self.port}")
        wait("two nodes", lambda: self._alive() == 2, 300)

    def _node(self, name: str, *flags: str) -> None:
        common = [
            "--node-ip-address=127.0.0.1",
            "--num-cpus=1",
            "--object-store-memory=80000000",
            "--disable-usage-stats",
            "--block",
        ]
        self.programs.start(name, [str(self.program), "start", *flags, *common], **self.variables)

    def _alive(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.dashboard}/nodes?view=summary", timeout=10) as answer:
                nodes = json.load(answer)["data"]["summary"]
        except (OSError, KeyError, ValueError):
            return 0
        return sum(node.get("raylet", {}).get("state") == "ALIVE" for node in nodes)

    def options(self) -> list[str]:
        python = self.program.with_name("python")
        return ["--address", f"http://127.0.0.1:{self.dashboard}", "--ray-python", str(python)]

    def _of(self, name: str, text: str) -> list[Process]:
        """Returns the processes of a node whose command line contains a text."""
        return [one for one in below({self.programs.running[name].pid}) if text in one.command]

    def kill_actor(self) -> None:
        """Kills the actor that runs the second machine."""
        for actor in [one for one in processes() if one.command.startswith("ray::Machine")]:
            if any("cluster join" in one.command for one in below({actor.pid})):
                actor.kill()

    def lose_node(self) -> None:
        """Kills the raylet of the second node, and adds another node after some seconds."""
        for raylet in self._of("worker", "raylet/raylet "):
            raylet.kill()
        self.programs.running.pop("worker").wait(60)
        time.sleep(5)
        self.worker()

    def silence(self) -> None:
        """Stops the dashboard, which reports the job's status, for longer than the response timeout."""
        dashboards = self._of("head", "dashboard/dashboard.py")
        for one in dashboards:
            one.kill(signal.SIGSTOP)
        time.sleep(70)
        for one in dashboards:
            one.kill(signal.SIGCONT)

    @property
    def kills(self) -> dict:
        return {"actor": self.kill_actor, "node": self.lose_node, "dashboard": self.silence}

    def stop(self) -> None:
        own = {one.pid for one in below({program.pid for program in self.programs.running.values()})}
        self.programs.stop()
        # Processes notice that their raylet has exited, and then end; some take longer.
        deadline = time.monotonic() + 15
        while (left := [one for one in processes() if one.pid in own]) and time.monotonic() < deadline:
            time.sleep(0.5)
        for one in left:
            one.kill()
