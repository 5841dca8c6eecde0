"""Compares a run's metrics with those on a real MLflow server.

Trains a recipe with a server, kills the run after a step whose metrics the server already has, stops the server while
the run continues, and restarts it. At the end, the server must have every number of `metrics.jsonl` exactly once,
under its name and step (the global step twice if an evaluation follows a step). Runs for a server with a database and
for one with a directory of files.
"""

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Timeout for a server's first response, in seconds.
START = 300


class Server:
    def __init__(self, store: str, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            store,
            "--port",
            str(self.port),
            "--workers",
            "1",
        ]
        self.folder = directory

    def start(self) -> None:
        # Servers reject file stores unless this variable allows them.
        environment = os.environ | {"MLFLOW_ALLOW_FILE_STORE": "true"}
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        end = time.monotonic() + START
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
                return
            except OSError:
                time.sleep(0.2)
        self.stop()
        sys.exit(f"the server did not answer within {START} s:\n{(self.folder / 'server.log').read_text()[-2000:]}")

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def check(kind: str, store: str, directory: Path, arguments: argparse.Namespace) -> None:
    server, run = Server(store, directory), directory / "run"
    changes = [part for change in [*arguments.set, f"metrics.mlflow={server.url}"] for part in ("--set", change)]

    def train(resume: bool, crash_at: str | None = None) -> subprocess.Popen:
        command = [
            arguments.levade,
            "train",
            run if resume else arguments.recipe,
            *(["--resume"] if resume else changes),
        ]
        environment = os.environ | ({"LEVADE_CRASH_AT": crash_at} if crash_at else {})
        with (directory / "run.log").open("a") as log:
            return subprocess.Popen(
                [*command, "--run", run], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    server.start()
    if train(False, "metrics_written:2").wait() != -signal.SIGKILL:
        sys.exit(f"{kind}: the run did not come to its second step; see {directory}/run.log")
    going_on = train(True)
    # The server is down for a while during the run.
    time.sleep(arguments.away_after)
    server.stop()
    time.sleep(arguments.away)
    server.start()
    if going_on.wait() != 0:
        sys.exit(f"{kind}: the run failed; see {directory}/run.log")

    if "did not accept all metrics" in (log := (directory / "run.log").read_text()):
        sys.exit(f"{kind}: the run ended before the server was back; give more steps:\n{log[-500:]}")

    import mlflow

    client = mlflow.MlflowClient(server.url)
    experiments = [experiment for experiment in client.search_experiments() if experiment.name != "Default"]
    runs = client.search_runs([experiment.experiment_id for experiment in experiments])
    if [entry.info.status for entry in runs] != ["FINISHED"]:
        sys.exit(f"{kind}: the server has the runs {[entry.info.status for entry in runs]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if (
                name not in ("phase", "step", "kind", "eval")
                and isinstance(value, (int, float))
                and math.isfinite(value)
            ):
                expected.setdefault(name.replace("@", "_at_"), []).append((int(line["training/global_step"]), value))
    found = {
        name: [(m.step, m.value) for m in client.get_metric_history(runs[0].info.run_id, name)]
        for name in runs[0].data.metrics
    }
    wrong = []
    for name in sorted(expected.keys() | found.keys()):
        # Repeated work has different timings.
        timed = name.startswith(("timing_s/", "perf/", "sampler/"))
        sides = [sorted(side.get(name, [])) for side in (expected, found)]
        if timed:
            sides = [[step for step, _ in side] for side in sides]
        if name == "training/global_step":
            sides = [sorted(set(side)) for side in sides]
        if sides[0] != sides[1]:
            wrong.append(f"{name}: {sides[0]} here, {sides[1]} there")
    server.stop()
    if wrong or not expected:
        sys.exit(f"{kind}: {len(wrong)} of {len(expected)} metrics differ:\n" + "\n".join(wrong[:10]))
    print(f"ok    {kind}: {len(expected)} metrics, {sum(map(len, expected.values()))} numbers", flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recipe", help="recipe of at least three steps; use --set to make it short")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="recipe keys, as for `levade train`")
    p.add_argument("--away-after", type=float, default=3, help="seconds after which the server stops")
    p.add_argument("--away", type=float, default=10, help="seconds for which the server is down")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    arguments = p.parse_args()
    for kind in ("database", "files"):
        with tempfile.TemporaryDirectory(prefix="levade-mlflow-") as directory:
            store = f"sqlite:///{directory}/store.db" if kind == "database" else f"{directory}/store"
            check(kind, store, Path(directory), arguments)


if __name__ == "__main__":
    main()
