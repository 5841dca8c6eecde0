"""Checks pipeline stages of `levade_torch`, except for gradients, which torch_learner.py compares.

Checks, on tiny models, over gloo:

- A checkpoint of two stages loads in one process, and a checkpoint of one process in two stages, with equal bits. There, the
  same update agrees to 1e-5.
- The same update, repeated, gives equal bits.
- A tied embedding stays bit-identical on both ends (log-probabilities match the files that the first stage writes).
- Published directories are complete, and plain transformers loads them.
- A process that joins a push gets the tensors of all stages.
- kill -9 of a later stage ends the group, and the client gets an error.
- An adapter starts with equal bits.
- Groups that cannot be split into stages fail to start, with a reason.

Not checked: CUDA (NCCL), several machines.
"""

import multiprocessing
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import GraniteConfig, GraniteForCausalLM

from common import Report, parser, scratch
from models import FAMILIES, Case, make
from torch_group import Forked, Group, batch_arrays, path_arrays
from torch_killed import Run, crcs_of, ended
from torch_learner import EVEN, GRPO, MODELS, OPTIM, Plain, distance

FAMILIES["granite"] = (GraniteConfig, GraniteForCausalLM, {"embedding_multiplier": 3.0})
GRANITE = Case("granite", "granite", EVEN)
TIED = "qwen2"
SECONDS = 60.0


class Staged(Run):
    """Updates of a model with a tied embedding."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.made = make(MODELS[TIED], directory)


def checkpoints(report: Report, run: Run) -> None:
    """Moves checkpoints from two stages to one process, and back."""
    with run.group(2, pp=2) as group:
        told = group.description
        report.expect("two stages are described", (told["pp"], told["world_size"], told["processes"]) == (2, 1, 2))
        parameters = told["parameters"]
        run.train(group, 0)
        run.save(group, "first")
        answer = run.train(group, 1)
        second = run.save(group, "second")
        run.load(group, "first")
        report.expect("loading restores every bit", run.save(group, "loaded") == crcs_of(run.root / "first"))
        report.expect("the same update again: sums", run.train(group, 1) == answer)
        report.expect("the same update again: bits", run.save(group, "again") == second)
        empty_update(report, run, group)
        check_tied_ends(report, run, group)
        check_publication(report, run, group)
        check_push(report, run, group)
    with run.group(1) as group:
        report.expect("parameters are counted once", group.description["parameters"] == parameters, f"{parameters}")
        run.load(group, "first")
        report.expect(
            "one process loads what two stages saved", run.save(group, "alone") == crcs_of(run.root / "first")
        )
        run.train(group, 1)
        run.save(group, "second of one")
    for file in ("model", "optimiser.first", "optimiser.second"):
        ours, theirs = (load_file(run.root / name / f"{file}.safetensors") for name in ("second", "second of one"))
        report.check(f"the same update in one process: {file}", distance(ours, theirs), 1e-5)
    with run.group(2, pp=2) as group:
        run.load(group, "second of one")
        same = run.save(group, "back") == crcs_of(run.root / "second of one")
        report.expect("two stages load what one process saved", same)


def empty_update(report: Report, run: Run, group: Group) -> None:
    """Runs an update without sequences."""
    control = {"loss": GRPO, "params": OPTIM, "cut": {"world_size": 1, "micro_batches": []}}
    answer, _ = group.call("policy", "train", control, path_arrays([]))
    report.expect(
        "an update without sequences", answer["sums"] == [] and answer["step"]["grad_norm"] == 0.0, str(answer)
    )


def adapters(report: Report, run: Run) -> None:
    """Checks that an adapter does not depend on the sharding."""
    found = []
    for stages in (1, 2):
        with run.group(stages, pp=stages, lora_rank=4) as group:
            found.append(run.save(group, f"adapter of {stages}"))
    del found[0]["adapter_config.json"], found[1]["adapter_config.json"]
    report.expect("an adapter has equal initial values in stages", found[0] == found[1], ", ".join(found[0]))


def check_tied_ends(report: Report, run: Run, group: Group) -> None:
    """Compares log-probabilities, which use the last stage's head, with files, which contain the first stage's
    embedding.
    """
    arrays = batch_arrays(run.updates[0])

    def logprobs():
        return group.call("policy", "logprobs", {}, arrays)[1]["logprobs"]

    before = logprobs()
    run.save(group, "ends")
    for seed in range(2):
        run.train(group, seed)
    report.expect("updates move log-probabilities", (logprobs() != before).any())
    run.save(group, "ends")
    updated = logprobs()
    run.load(group, "ends")
    report.expect(
        "tied weights are bit-identical after updates", (logprobs() == updated).all(), f"{len(updated)} targets"
    )


def check_publication(report: Report, run: Run, group: Group) -> None:
    """Loads a published directory with plain transformers."""
    weights = group.call("policy", "publish", {"version": 1})[0]["weights"]
    directory = Path(weights["at"]["manifest"]["place"]["local"])
    run.save(group, "published")
    ours, saved = (load_file(path / "model.safetensors") for path in (directory, run.root / "published"))
    report.check("published weights", distance(ours, saved), 0.0)
    plain = Plain(directory, critic=False).parameters
    report.check("published weights in transformers", distance({n: p.detach() for n, p in plain.items()}, ours), 0.0)


def receive(told: dict, pipe) -> None:
    """Runs a server process, which joins the group of a push and receives all tensors."""
    meeting = told["meeting"]
    wait = timedelta(seconds=SECONDS)
    store = dist.TCPStore(meeting["address"], meeting["port"], 2, False, wait)
    # The prefixes that `torch.distributed` uses for an additional group's part of a store.
    store = dist.PrefixStore("cpu/", dist.PrefixStore("push/", dist.PrefixStore("push", store)))
    group = dist.ProcessGroupGloo(store, 1, 2, wait)
    sums = {}
    for name, dtype, shape in zip(told["names"], told["dtypes"], told["shapes"], strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        group.broadcast([tensor], dist.BroadcastOptions()).wait()
        sums[name] = tensor.numpy().tobytes()
    pipe.send(sums)
    os._exit(0)


def check_push(report: Report, run: Run, group: Group) -> None:
    """Checks that a push sends all tensors as they were published."""
    asked = {
        "group": "push",
        "backend": "gloo",
        "rendezvous": "store",
        "ranks": 2,
        "peer": "127.0.0.1",
        "seconds": SECONDS,
        "version": 1,
    }
    told, _ = group.call("policy", "push_open", asked)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=receive, args=(told, theirs), daemon=True)
    server.start()
    sent, _ = group.call("policy", "push_send", {"group": "push"})
    found = ours.recv() if ours.poll(SECONDS) else {}
    server.join(SECONDS)
    wanted = load_file(run.root / "published" / "model.safetensors")
    report.expect("a push sends the tensors of all stages", found.keys() == wanted.keys(), f"{sent['tensors']} tensors")
    same = all(found.get(name) == tensor.numpy().tobytes() for name, tensor in wanted.items())
    report.expect("a push sends their bits", same, f"{sent['bytes']} bytes")


def refused_starts(report: Report, run: Run) -> None:
    """Starts groups with invalid input, which must fail with a reason."""
    granite = make(GRANITE, run.root)
    cases = [
        ("more stages than layers", 4, {"pp": 4}, "has 3 layers, and a stage needs one"),
        ("ranks that do not divide", 2, {"pp": 2, "tp": 2}, "do not divide into --tp 2 × --cp 1 × --pp 2"),
        ("a model that scales embeddings by itself", 2, {"pp": 2, "model": granite}, "outside of its layers"),
    ]
    for what, processes, options, reason in cases:
        given = {"model": run.made} | options
        group = Group(processes, run.root, Forked, collective_seconds=SECONDS, **given)
        code = group.processes.wait(300)
        group.stop()
        said = reason in group.log.read_text()
        report.expect(f"{what}: the group does not start", code not in (0, None) and said, f"code {code}")


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report()
    with scratch() as directory:
        run = Staged(Path(directory))
        steps = {
            "checkpoints": lambda: checkpoints(report, run),
            "adapters": lambda: adapters(report, run),
            "kill 1": lambda: ended(report, run, 1, signal.SIGKILL, pp=2),
            "starts": lambda: refused_starts(report, run),
        }
        for name, step in steps.items():
            if arguments.only in name:
                step()
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
