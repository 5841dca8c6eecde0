"""Checks groups of `levade_torch` after kills, stops, resumes, replays and invalid requests, against their own
checkpoints.

Checks, on a tiny model and two ranks:

- An update repeated from a checkpoint gives equal bits (checksums of weights and moments), also after kill -9 of a rank during
  `train` and a restart.
- A repeated call is not executed again.
- A killed or stopped rank ends the group within its timeout. The client and the log name the rank.
- Checkpoints load on another number of ranks, where the same update agrees to 1e-5.
- Invalid requests change nothing, and get a reason.

Not checked: several machines, CUDA.
"""

import contextlib
import http.client
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from common import Report, parser, scratch
from models import BASE, make
from torch_group import Forked, Group, Refused, Torchrun, batch_arrays, group_arrays, path_arrays
from torch_learner import GRPO, MODELS, OPTIM, Plain, distance
from trees import f32, paths

DEADLINE = 60


def crcs(manifest: dict) -> dict[str, int]:
    """Returns the checksums of saved files."""
    return {file["name"]: file["crc32c"] for file in manifest["manifest"]["files"]}


class Run:
    """Updates of a policy in a directory, on successive groups."""

    def __init__(self, directory: Path) -> None:
        self.made = make(MODELS["qwen3"], directory)
        self.root = directory / "run"
        self.updates = [self._update(seed) for seed in (20, 40)]

    def _update(self, seed: int) -> list[dict]:
        """Creates enough sequences for a long step, with log-probabilities near those of an untrained model."""
        rng = random.Random(seed)
        found = [path for number in range(6) for path in paths(BASE["vocab_size"], seed + number, longest=60)]
        for target in (target for path in found for target in path["targets"]):
            target["term"] |= {name: f32(-7.0 + rng.gauss(0.0, 0.5)) for name in ("behaviour", "reference")}
        return found

    def group(self, processes: int = 2, launcher=Forked, **options) -> Group:
        """Starts a new group on the same directory."""
        return Group(processes, self.root, launcher, model=self.made, collective_seconds=DEADLINE, **options)

    def cut(self, group: Group, number: int) -> dict:
        """Returns the group's micro-batch plan of an update."""
        batch = self.updates[number]
        arrays = group_arrays([batch[i : i + 6] for i in range(0, len(batch), 6)])
        return group.call("policy", "plan", {"micro_batch_tokens": 60}, arrays)[0]["cut"]

    def train(self, group: Group, number: int, name: str | None = None) -> dict:
        """Runs one update."""
        control = {"loss": GRPO, "params": OPTIM | {"max_grad_norm": 1.0}, "cut": self.cut(group, number)}
        return group.call("policy", "train", control, path_arrays(self.updates[number]), name)[0]

    def save(self, group: Group, name: str) -> dict[str, int]:
        """Saves a checkpoint. Returns checksums."""
        directory = self.root / name
        directory.mkdir(exist_ok=True)
        return crcs(group.call("policy", "save", {"folder": str(directory), "with_optimiser": True})[0])

    def load(self, group: Group, name: str) -> None:
        """Loads a checkpoint."""
        group.call("policy", "load", {"folder": str(self.root / name), "with_optimiser": True})


def first_group(report: Report, run: Run) -> dict[str, int]:
    """Saves a checkpoint after one update and compares the next update. Checks replay, repeated calls and invalid
    requests.
    """
    with run.group() as group:
        cut = run.cut(group, 0)
        report.expect(
            "a repeated plan request returns the same micro-batch plan",
            cut == run.cut(group, 0),
            f"{len(cut['micro_batches'])} micro-batches",
        )
        run.train(group, 0)
        run.save(group, "first")
        answer = run.train(group, 1, "call-1")
        second = run.save(group, "second")
        again = run.train(group, 1, "call-1")
        report.expect(
            "a repeated call gets the response, and does not run again",
            again == answer and run.save(group, "second") == second,
        )
        run.load(group, "first")
        report.expect("loading restores every bit", run.save(group, "loaded") == run.save(group, "first"))
        report.expect("replay gives the same sums", run.train(group, 1) == answer)
        report.expect("replay gives the same bits", run.save(group, "replayed") == second)
        invalid_requests(report, run, group)
        report.expect("invalid requests changed nothing", run.save(group, "after") == second)
        publications(report, run, group)
    return second


def invalid_requests(report: Report, run: Run, group: Group) -> None:
    """Sends invalid requests, and checks the status and a part of the reason."""
    batch, update = batch_arrays(run.updates[0]), path_arrays(run.updates[0])
    cut = run.cut(group, 0)
    fewer = cut | {"micro_batches": cut["micro_batches"][1:]}
    control = {"loss": GRPO, "params": OPTIM}
    beyond = batch | {"tokens": batch["tokens"] + BASE["vocab_size"]}
    bare = {name: column for name, column in batch.items() if name != "reference"}
    unknown = batch | {"reference": np.full_like(batch["reference"], np.nan)}
    outside = {"folder": "/tmp", "with_optimiser": True}
    cases = [
        (
            "a cut that lacks paths",
            409,
            "is missing from the micro-batch plan",
            "train",
            control | {"cut": fewer},
            update,
        ),
        ("a cut for other ranks", 409, "is for 7 ranks", "train", control | {"cut": cut | {"world_size": 7}}, update),
        ("an id beyond the vocabulary", 400, "vocabulary has", "logprobs", {}, beyond),
        ("a body without a column", 400, "no tensor 'reference'", "logprobs", {}, bare),
        ("a loss that terms do not fit", 400, "lacks a reference", "forward_backward", {"loss": GRPO}, unknown),
        ("a loss that does not exist", 400, "unknown loss", "forward_backward", {"loss": {"policy": "dpo"}}, batch),
        ("values without a value head", 422, "no value head", "values", {}, batch),
        ("a folder outside of the run", 400, "outside the root", "save", outside, None),
        (
            "a folder without weights",
            422,
            "configuration",
            "load",
            {"folder": str(run.root), "with_optimiser": True},
            None,
        ),
        ("numbers that are missing", 400, "learning_rate", "optim_step", {"params": {}}, None),
        ("an unknown verb", 404, "unknown verb", "dream", {}, None),
    ]
    for what, status, reason, verb, asked, arrays in cases:
        try:
            group.call("policy", verb, asked, arrays)
            report.expect(what, False, "was done")
        except Refused as refused:
            report.expect(what, refused.status == status and reason in refused.message, refused.message[:110])
    status, _ = group.request("GET", "/v1/describe", authorization="Bearer wrong")
    report.expect("a wrong token is rejected", status == 401)
    report.expect("health needs no token", group.request("GET", "/health", authorization="")[0] == 200)
    status, _ = group.request("POST", "/v1/learners/policy/logprobs", b"nonsense", **{"x-levade-call": "odd"})
    report.expect("a body that is not a safetensors file is rejected", status == 400)


def publications(report: Report, run: Run, group: Group) -> None:
    """Publishes three versions, of which two stay. transformers loads the last one."""
    found = [group.call("policy", "publish", {"version": version})[0]["weights"] for version in (1, 2, 3)]
    directory = Path(found[-1]["at"]["manifest"]["place"]["local"])
    report.expect("two publications stay on disk", sorted(p.name for p in directory.parent.iterdir()) == ["v2", "v3"])
    saved, published = load_file(run.root / "after" / "model.safetensors"), load_file(directory / "model.safetensors")
    report.check("published weights", distance(published, saved), 0.0)
    report.expect("the published version is described", group.get("/v1/describe")["learners"]["policy"]["version"] == 3)
    Plain(directory, critic=False)


def ended(report: Report, run: Run, rank: int, how: signal.Signals, launcher=Forked, **options) -> None:
    """Kills or stops a rank during `train`."""
    what = f"{how.name} of rank {rank} in the middle of train ({launcher.__name__.lower()})"
    with run.group(launcher=launcher, **options) as group:
        run.load(group, "first")
        results: list[str] = []

        def train() -> None:
            try:
                results.append(str(run.train(group, 1)))
            except (Refused, OSError, http.client.HTTPException) as error:
                results.append(str(error))

        thread = threading.Thread(target=train)
        thread.start()
        while group.get("/v1/progress")["micro_batches_done"] < 2:
            time.sleep(0.01)
        victim = group.processes.pids()[rank]
        start = time.monotonic()
        os.kill(victim, how)
        if how is signal.SIGSTOP:
            while group.processes.ended() is None and time.monotonic() - start < 4 * DEADLINE:
                time.sleep(0.1)
            # With forked ranks, no other process ends a stopped rank.
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        code = group.processes.wait(4 * DEADLINE)
        seconds = time.monotonic() - start
        thread.join()
        log = group.log.read_text()
        report.expect(f"{what}: the group ends", code not in (0, None), f"code {code} after {seconds:.0f} s")
        if rank:
            report.expect(f"{what}: the log names the rank", f"dead or stopped: rank {rank}" in log)
            report.expect(f"{what}: the client gets the reason", f"rank {rank}" in results[0], results[0][:140])
        else:
            report.expect(
                f"{what}: the client gets the reason", bool(results) and "sums" not in results[0], results[0][:140]
            )


def other_sizes(report: Report, run: Run) -> None:
    """Loads a checkpoint of two processes on one, and a checkpoint of one process on two."""
    with run.group(1) as group:
        run.load(group, "first")
        report.expect("one rank loads what two saved", run.save(group, "alone") == crcs_of(run.root / "first"))
        run.train(group, 1)
        run.save(group, "second of one")
    ours, theirs = (load_file(run.root / name / "model.safetensors") for name in ("second of one", "second"))
    report.check("the same update on one rank: weights", distance(ours, theirs), 1e-5)
    with run.group(2) as group:
        run.load(group, "second of one")
        report.expect("two ranks load what one saved", run.save(group, "back") == crcs_of(run.root / "second of one"))


def crcs_of(directory: Path) -> dict[str, int]:
    """Returns checksums of the files on disk."""
    from levade_torch.files import checksum

    return {path.name: checksum(path)[1] for path in directory.iterdir()}


def refused_starts(report: Report, run: Run) -> None:
    """Starts groups with invalid input, which must fail with a reason."""
    taken = socket.create_server(("127.0.0.1", 0))
    empty = run.root / "empty"
    empty.mkdir(exist_ok=True)
    cases = [
        ("a port in use", {"port": taken.getsockname()[1]}, "cannot listen"),
        ("ranks that do not divide", {"tp": 3}, "do not divide into --tp 3"),
        ("a folder without a model", {"critic": empty}, "no folder with a config.json"),
    ]
    for what, options, reason in cases:
        group = run.group(1, **options)
        code = group.processes.wait(300)
        report.expect(f"{what}: the group does not start", code not in (0, None) and reason in group.log.read_text())
    taken.close()


def main() -> None:
    arguments = parser(__doc__).parse_args()
    report = Report()
    with scratch() as directory:
        run = Run(Path(directory))
        steps = {
            "first": lambda: None,
            "kill 1": lambda: ended(report, run, 1, signal.SIGKILL),
            "kill 1, torchrun": lambda: ended(report, run, 1, signal.SIGKILL, Torchrun),
            "kill 0": lambda: ended(report, run, 0, signal.SIGKILL),
            "stop 1": lambda: ended(report, run, 1, signal.SIGSTOP),
            "sizes": lambda: other_sizes(report, run),
            "starts": lambda: refused_starts(report, run),
        }
        second = first_group(report, run)
        for name, step in steps.items():
            if arguments.only in name:
                step()
        with run.group() as group:
            run.load(group, "first")
            run.train(group, 1)
            report.expect("a new group afterwards gives the same bits", run.save(group, "resumed") == second)
    report.finish()


if __name__ == "__main__":
    main()
