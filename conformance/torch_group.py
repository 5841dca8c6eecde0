"""A group of `dressage_torch` for checks: started by torchrun, asked over HTTP, ended by pid."""

import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from common import ROOT

SOURCE = ROOT / "python" / "dressage_torch" / "src"
sys.path.insert(0, str(SOURCE))

from dressage_torch import wire  # noqa: E402 found through the path above

TERM = ("weight", "advantage", "returns", "value", "behaviour", "proximal", "reference", "path_log_ratio", "correction")
START_SECONDS, VERB_SECONDS = 300.0, 300.0


class Refused(Exception):
    """An error that the group answered with."""

    def __init__(self, status: int, body: dict) -> None:
        super().__init__(f"{status} {body}")
        self.status, self.code, self.message = status, body["error"]["code"], body["error"]["message"]


class Group:
    """Processes of one machine that train together, and a client of theirs."""

    def __init__(self, processes: int, root: Path, **options) -> None:
        self.root, self.token = Path(root), secrets.token_hex(16)
        self.root.mkdir(parents=True, exist_ok=True)
        self.port_file, self.log = self.root / "port", self.root / "log"
        self.port_file.unlink(missing_ok=True)
        given = []
        for name, value in ({"dtype": "f32", "export_dtype": "f32", "device": "cpu"} | options).items():
            given += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
        command += ["-m", "dressage_torch", *given, "--run-root", str(self.root), "--port-file", str(self.port_file)]
        path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "DRESSAGE_TEST_TOKEN": self.token, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            command += ["--token-env", "DRESSAGE_TEST_TOKEN"]
            self.process = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=subprocess.STDOUT)
        self.description: dict = {}

    def wait(self) -> "Group":
        """Until models are loaded."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the group ended with code {self.process.returncode}:\n{self.log.read_text()[-3000:]}"
                )
            with contextlib.suppress(OSError, Refused):
                if self.port_file.exists():
                    self.description = self.get("/v1/describe")
                    return self
            time.sleep(0.2)
        raise TimeoutError(f"the group was not ready after {START_SECONDS} s:\n{self.log.read_text()[-3000:]}")

    def request(self, method: str, path: str, body: bytes = b"", **headers) -> tuple[int, bytes]:
        """Status and body of any request."""
        host, port = self.port_file.read_text().split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=VERB_SECONDS)
        try:
            connection.request(method, path, body, {"authorization": f"Bearer {self.token}"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> dict:
        """JSON."""
        status, body = self.request("GET", path)
        if status != 200:
            raise Refused(status, json.loads(body))
        return json.loads(body)

    def call(self, learner: str, verb: str, control: dict, arrays=None, name: str | None = None) -> tuple[dict, dict]:
        """JSON and arrays of a verb's answer."""
        headers = {"x-dressage-call": name or secrets.token_hex(8), "content-type": "application/x-safetensors"}
        body = wire.pack(control, arrays)
        status, answer = self.request("POST", f"/v1/learners/{learner}/{verb}", body, **headers)
        if status != 200:
            raise Refused(status, json.loads(answer))
        return wire.unpack(answer)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, by rank."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"PPid:\t{self.process.pid}\n" in (entry / "status").read_text():
                    environment = dict(
                        v.split(b"=", 1) for v in (entry / "environ").read_bytes().split(b"\0") if b"=" in v
                    )
                    if b"RANK" in environment:
                        found[int(environment[b"RANK"])] = int(entry.name)
        return [found[rank] for rank in sorted(found)]

    def stop(self) -> int:
        """Ends the group; returns the exit code of torchrun."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                for pid in self.ranks():
                    os.kill(pid, signal.SIGKILL)
                self.process.kill()
        return self.process.wait()

    def __enter__(self) -> "Group":
        try:
            return self.wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_error) -> None:
        self.stop()


def column(terms: list[dict], name: str) -> np.ndarray:
    """One field of terms; NaN where it is absent."""
    fallback = 0.0 if name in ("weight", "advantage", "returns") else None
    values = [term.get(name, fallback) for term in terms]
    return np.array([np.nan if value is None else value for value in values], np.float32)


def term_arrays(terms: list[dict]) -> dict[str, np.ndarray]:
    """Terms as the columns of a body."""
    arrays = {name: column(terms, name) for name in TERM}
    arrays["marked"] = np.array([bool(term.get("marked", False)) for term in terms], np.uint8)
    for name in ("age", "version"):
        arrays[name] = np.array([term.get(name, 0) for term in terms], np.int64)
    return arrays


def path_arrays(paths: list[dict]) -> dict[str, np.ndarray]:
    """The body of `train`: paths with their targets."""
    targets = [target for path in paths for target in path["targets"]]
    return {
        "path_tokens": np.array([token for path in paths for token in path["tokens"]], np.int64),
        "path_len": np.array([len(path["tokens"]) for path in paths], np.int64),
        "path_targets": np.array([len(path["targets"]) for path in paths], np.int64),
        "index": np.array([target["index"] for target in targets], np.int64),
        "temperature": np.array([target["temperature"] for target in targets], np.float32),
    } | term_arrays([target["term"] for target in targets])


def batch_arrays(paths: list[dict]) -> dict[str, np.ndarray]:
    """The body of verbs on a batch: the paths, merged by the package."""
    from dressage_torch.merge import Paths, merge

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
    """The body of `plan`."""
    paths = [path for group in groups for path in group]
    return {
        "path_tokens": np.array([token for path in paths for token in path["tokens"]], np.int64),
        "path_len": np.array([len(path["tokens"]) for path in paths], np.int64),
        "group_len": np.array([len(group) for group in groups], np.int64),
    }
