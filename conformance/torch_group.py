"""Runs groups of `levade_torch` for checks: starts them by torchrun or fork, calls them over HTTP, and ends them by
pid.
"""

import contextlib
import http.client
import json
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from common import ROOT

SOURCE = ROOT / "python" / "levade_torch" / "src"
sys.path.insert(0, str(SOURCE))
# For child processes of this script.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, map(str, [SOURCE, ROOT / "conformance", os.environ.get("PYTHONPATH")]))
)

from levade_torch import blocks, wire  # noqa: E402, F401 found through the path above
from levade_torch.__main__ import main  # noqa: E402

TERM = ("weight", "advantage", "returns", "value", "behaviour", "proximal", "reference", "path_log_ratio", "correction")
START_SECONDS, VERB_SECONDS = 900.0, 600.0


class Refused(Exception):
    """An error response of the group."""

    def __init__(self, status: int, body: dict) -> None:
        super().__init__(f"{status} {body}")
        self.status, self.code, self.message = status, body["error"]["code"], body["error"]["message"]


def _rank(variables: dict[str, str], arguments: list[str], log: str) -> None:
    """Runs a forked rank."""
    os.environ.update(variables)
    with Path(log).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["levade_torch", *arguments]
    main()


class Torchrun:
    """Ranks that torchrun starts and monitors."""

    def __init__(self, processes: int, arguments: list[str], variables: dict[str, str], log: Path) -> None:
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
        with log.open("w") as file:
            command = [*run, "-m", "levade_torch", *arguments]
            self.process = subprocess.Popen(command, env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT)

    def ended(self) -> int | None:
        """Returns the exit code, or None while running."""
        return self.process.poll()

    def wait(self, seconds: float) -> int | None:
        """Waits for the exit code. Returns None if the process is still running."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def pids(self) -> list[int]:
        """Returns the process ids of the ranks, by rank."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"PPid:\t{self.process.pid}\n" in (entry / "status").read_text():
                    parts = (entry / "environ").read_bytes().split(b"\0")
                    rank = [part[5:] for part in parts if part.startswith(b"RANK=")]
                    found |= {int(rank[0]): int(entry.name)} if rank else {}
        return [found[rank] for rank in sorted(found)]

    def terminate(self) -> None:
        """Asks torchrun to end."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills torchrun and its child processes."""
        for pid in [*self.pids(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Forked:
    """Ranks forked from this process, in which everything is imported. A start takes one processor second instead of
    twenty.
    """

    def __init__(self, processes: int, arguments: list[str], variables: dict[str, str], log: Path) -> None:
        # With GPUs, autograd has threads, which do not survive a fork.
        if torch.cuda.is_available():
            raise RuntimeError("ranks are forked on the CPU alone; hide the GPUs with CUDA_VISIBLE_DEVICES=")
        context = multiprocessing.get_context("fork")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        log.write_text("")
        group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.ranks = []
        for rank in range(processes):
            own = variables | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.ranks.append(context.Process(target=_rank, args=(own, arguments, str(log)), daemon=True))
            self.ranks[-1].start()

    def ended(self) -> int | None:
        """Returns the exit code of the first rank that has one."""
        return next((rank.exitcode for rank in self.ranks if rank.exitcode is not None), None)

    def wait(self, seconds: float) -> int | None:
        """Waits for the exit code. Returns None if a rank is still running."""
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        return None if any(rank.is_alive() for rank in self.ranks) else self.ended()

    def pids(self) -> list[int]:
        """Returns process ids, by rank."""
        return [rank.pid for rank in self.ranks]

    def terminate(self) -> None:
        """Asks all ranks to end."""
        for rank in self.ranks:
            rank.terminate()

    def kill(self) -> None:
        """Kills all ranks."""
        for rank in self.ranks:
            rank.kill()


class Group:
    """Local processes that train together, and a client for them."""

    def __init__(self, processes: int, root: Path, launcher=Torchrun, **options) -> None:
        self.root, self.token = Path(root), secrets.token_hex(16)
        self.root.mkdir(parents=True, exist_ok=True)
        self.port_file, self.log = self.root / "port", self.root / "log"
        self.port_file.unlink(missing_ok=True)
        given = []
        for name, value in ({"dtype": "f32", "export_dtype": "f32", "device": "cpu"} | options).items():
            given += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        given += [
            "--run-root",
            str(self.root),
            "--port-file",
            str(self.port_file),
            "--token-env",
            "LEVADE_TEST_TOKEN",
        ]
        self.processes = launcher(processes, given, {"LEVADE_TEST_TOKEN": self.token, "OMP_NUM_THREADS": "1"}, self.log)
        self.description: dict = {}

    def wait(self) -> "Group":
        """Waits until models are loaded."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if (code := self.processes.ended()) is not None:
                raise RuntimeError(f"the group ended with code {code}:\n{self.log.read_text()[-3000:]}")
            with contextlib.suppress(OSError, Refused):
                if self.port_file.exists():
                    self.description = self.get("/v1/describe")
                    return self
            time.sleep(0.2)
        raise TimeoutError(f"the group was not ready after {START_SECONDS} s:\n{self.log.read_text()[-3000:]}")

    def request(self, method: str, path: str, body: bytes = b"", **headers) -> tuple[int, bytes]:
        """Returns status and body of any request."""
        host, port = self.port_file.read_text().split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=VERB_SECONDS)
        try:
            connection.request(method, path, body, {"authorization": f"Bearer {self.token}"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> dict:
        """Returns the JSON of a GET request."""
        status, body = self.request("GET", path)
        if status != 200:
            raise Refused(status, json.loads(body))
        return json.loads(body)

    def call(self, learner: str, verb: str, control: dict, arrays=None, name: str | None = None) -> tuple[dict, dict]:
        """Returns JSON and arrays of a verb's response."""
        headers = {"x-levade-call": name or secrets.token_hex(8), "content-type": "application/x-safetensors"}
        body = wire.pack(control, arrays)
        status, answer = self.request("POST", f"/v1/learners/{learner}/{verb}", body, **headers)
        if status != 200:
            raise Refused(status, json.loads(answer))
        return wire.unpack(answer)

    def stop(self) -> None:
        """Stops the group."""
        if self.processes.ended() is None:
            self.processes.terminate()
        if self.processes.wait(60) is None:
            self.processes.kill()
            self.processes.wait(20)

    def __enter__(self) -> "Group":
        try:
            return self.wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_error) -> None:
        self.stop()


def column(terms: list[dict], name: str) -> np.ndarray:
    """Returns one field of terms, with NaN for absent numbers."""
    fallback = 0.0 if name in ("weight", "advantage", "returns") else None
    values = [term.get(name, fallback) for term in terms]
    return np.array([np.nan if value is None else value for value in values], np.float32)


def term_arrays(terms: list[dict]) -> dict[str, np.ndarray]:
    """Converts terms to the columns of a body."""
    arrays = {name: column(terms, name) for name in TERM}
    arrays["marked"] = np.array([bool(term.get("marked", False)) for term in terms], np.uint8)
    for name in ("age", "version"):
        arrays[name] = np.array([term.get(name, 0) for term in terms], np.int64)
    return arrays


def path_arrays(paths: list[dict]) -> dict[str, np.ndarray]:
    """Creates the body of `train`: sequences with their targets."""
    targets = [target for path in paths for target in path["targets"]]
    return {
        "path_tokens": np.array([token for path in paths for token in path["tokens"]], np.int64),
        "path_len": np.array([len(path["tokens"]) for path in paths], np.int64),
        "path_targets": np.array([len(path["targets"]) for path in paths], np.int64),
        "index": np.array([target["index"] for target in targets], np.int64),
        "temperature": np.array([target["temperature"] for target in targets], np.float32),
    } | term_arrays([target["term"] for target in targets])


def batch_arrays(paths: list[dict]) -> dict[str, np.ndarray]:
    """Creates the body of verbs on a batch. The package merges the sequences."""
    from levade_torch.merge import Paths, merge

    batch = merge(Paths.read(path_arrays(paths)), list(range(len(paths))))
    terms = {name: getattr(batch.terms, name) for name in ("path", *TERM, "age", "version")}
    names = {"target_token": "target_token", "predictor": "predictor", "temperature": "temperature"}
    arrays = {
        wired: getattr(batch, name)
        for name, wired in (names | {"first_term": "first_term", "term_count": "terms"}).items()
    }
    forest = {"tokens": batch.tokens, "position": batch.position, "subtree_end": batch.subtree_end}
    return forest | arrays | terms | {"marked": batch.terms.marked.astype(np.uint8)}


def group_arrays(groups: list[list[dict]]) -> dict[str, np.ndarray]:
    """Creates the body of `plan`."""
    paths = [path for group in groups for path in group]
    return {
        "path_tokens": np.array([token for path in paths for token in path["tokens"]], np.int64),
        "path_len": np.array([len(path["tokens"]) for path in paths], np.int64),
        "group_len": np.array([len(group) for group in groups], np.int64),
    }
