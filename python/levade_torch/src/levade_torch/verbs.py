"""The verbs: from a request to a response.

A verb first reads and checks the request, which changes nothing and can fail. It then returns a job, which all ranks
run at once.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import files, wire
from .batch import TreeBatch
from .errors import invalid_request
from .host import Host
from .losses import Loss
from .merge import Paths, read_tokens
from .micro_batches import MicroBatchPlan, plan
from .model import max_context
from .optimizer import OptimizerParams
from .push import BACKENDS, STORE, UNIQUE_ID, PushRequest
from .wire import Arrays, Columns

# The work of a verb. Returns the response body on rank 0, and None on other ranks.
Job = Callable[[], bytes | None]


def number(value: float) -> float | None:
    """Converts a number for JSON: null if it is not finite."""
    return value if math.isfinite(value) else None


def _sums(sums) -> dict:
    return {name: number(value) for name, value in sums.json().items()}


def _field(control: Any, name: str, kind: type) -> Any:
    value = control.get(name) if isinstance(control, dict) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise invalid_request(f"the JSON of the request must have {name!r} of type {kind.__name__}; it has {value!r}")
    return value


def _batch(host: Host, name: str, arrays: Arrays) -> TreeBatch:
    batch = TreeBatch.read(arrays)
    config = host.learners[name].model.config
    batch.check_fits(config.vocab_size, max_context(config))
    return batch


def plan_update(host: Host, name: str, control: Any, arrays: Arrays) -> Job:
    """`plan`: returns the micro-batch plan of an update for the ranks."""
    max_tokens = _field(control, "micro_batch_tokens", int)
    if max_tokens < 1:
        raise invalid_request(f"micro_batch_tokens is {max_tokens}; it must be at least 1")
    columns = Columns(arrays)
    tokens, sizes = read_tokens(columns), columns.integers("group_len")
    if (sizes < 0).any() or sizes.sum() != len(tokens):
        raise invalid_request(f"group_len adds up to {sizes.sum()} paths, but the request has {len(tokens)}")
    ends = np.cumsum(sizes)
    groups = [tokens[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    batch_plan = plan(groups, max_tokens, host.ranks.shape.data)
    return lambda: wire.pack({"cut": batch_plan.json()})


def train(host: Host, name: str, control: Any, arrays: Arrays) -> Job:
    """`train`: runs an update exactly according to its micro-batch plan."""
    learner = host.learners[name]
    loss = Loss.parse(control.get("loss"))
    params, batch_plan = OptimizerParams.parse(control.get("params")), MicroBatchPlan.parse(control.get("cut"))
    learner.check_trains(loss)
    paths = Paths.read(arrays)
    batch_plan.check(len(paths.tokens), host.ranks.shape.data)
    loss.check(paths.terms)
    _check_paths(host, name, paths)

    def job() -> bytes | None:
        sums, step = learner.train(paths, batch_plan, loss, params)
        return wire.pack({"sums": [_sums(s) for s in sums], "step": step}) if sums is not None else None

    return job


def _check_paths(host: Host, name: str, paths: Paths) -> None:
    config = host.learners[name].model.config
    context, vocabulary = max_context(config), config.vocab_size
    for index, tokens in enumerate(paths.tokens):
        if len(tokens) > context:
            raise invalid_request(f"path {index} has {len(tokens)} tokens, but the context has room for {context}")
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise invalid_request(
                f"path {index} has token ids from {tokens.min()} to {tokens.max()}, but the vocabulary has {vocabulary} entries"
            )


def _evaluation(kind: str) -> Callable:
    def verb(host: Host, name: str, _control: Any, arrays: Arrays) -> Job:
        batch = _batch(host, name, arrays)

        def job() -> bytes | None:
            found = host.learners[name].evaluate(batch, kind)
            return wire.pack({}, found) if found is not None else None

        return job

    return verb


def forward_backward(host: Host, name: str, control: Any, arrays: Arrays) -> Job:
    """`forward_backward`: adds the gradient of a batch."""
    learner = host.learners[name]
    loss = Loss.parse(control.get("loss"))
    learner.check_trains(loss)
    batch = _batch(host, name, arrays)
    loss.check(batch.terms)

    def job() -> bytes | None:
        sums = learner.forward_backward(batch, loss)
        return wire.pack({"sums": _sums(sums)}) if sums is not None else None

    return job


def optim_step(host: Host, name: str, control: Any, _arrays: Arrays) -> Job:
    """`optim_step`: takes a step with the accumulated gradients."""
    learner = host.learners[name]
    params = OptimizerParams.parse(control.get("params"))
    learner.check_trains()
    return lambda: wire.pack({"step": learner.step(params)})


def save(host: Host, name: str, control: Any, _arrays: Arrays) -> Job:
    """`save`: writes to a directory under the root of the run."""
    directory = _folder(host, control)
    with_optimizer = _field(control, "with_optimiser", bool)

    def job() -> bytes | None:
        manifest = host.save(name, directory, with_optimizer)
        return wire.pack({"manifest": manifest}) if manifest else None

    return job


def load(host: Host, name: str, control: Any, _arrays: Arrays) -> Job:
    """`load`: reads from a directory under the root of the run. Null restores the state in which the group was
    started.
    """
    if control.get("folder", "") is None:
        directory, with_optimizer = None, False
    else:
        directory, with_optimizer = _folder(host, control), _field(control, "with_optimiser", bool)
    host.check_load(name, directory, with_optimizer)

    def job() -> bytes:
        host.load(name, directory, with_optimizer)
        return wire.pack({})

    return job


def _folder(host: Host, control: Any) -> Path:
    directory = files.resolve_directory(host.options.run_root, _field(control, "folder", str))
    if not directory.is_dir():
        raise invalid_request(f"{directory} is not a folder on the machine of rank {host.ranks.rank}")
    return directory


def publish(host: Host, name: str, control: Any, _arrays: Arrays) -> Job:
    """`publish`: writes weights for samplers."""
    version = _field(control, "version", int)
    if version < 0:
        raise invalid_request(f"version is {version}; it must not be negative")

    def job() -> bytes | None:
        weights = host.publish(name, version)
        return wire.pack({"weights": weights}) if weights else None

    return job


def push_open(host: Host, name: str, control: Any, _arrays: Arrays) -> Job:
    """`push_open`: opens a group that a server joins, and lists the tensors that will follow."""
    seconds = control.get("seconds")
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise invalid_request(f"seconds is {seconds!r}; it must be a number of seconds above 0")
    texts = [_field(control, field, str) for field in ("group", "backend", "rendezvous")]
    wanted = PushRequest(*texts, _field(control, "ranks", int), _field(control, "peer", str), float(seconds))
    if wanted.backend not in BACKENDS or wanted.rendezvous not in (STORE, UNIQUE_ID) or not wanted.name:
        raise invalid_request(
            f"a group needs a name, a backend of {', '.join(BACKENDS)} and a rendezvous of {STORE}, {UNIQUE_ID}; it has "
            f"{wanted.name!r}, {wanted.backend!r} and {wanted.rendezvous!r}"
        )
    if wanted.rendezvous == UNIQUE_ID and wanted.backend != "nccl":
        raise invalid_request(f"{wanted.backend} has no unique ID; use the rendezvous {STORE}")
    if wanted.ranks < 2:
        raise invalid_request(
            f"ranks is {wanted.ranks}; it must be at least 2: the learner and one process of the server"
        )
    host.check_push(name, _field(control, "version", int), wanted)

    def job() -> bytes | None:
        response = host.open_push(name, wanted)
        return wire.pack(response) if response else None

    return job


def push_send(host: Host, _name: str, control: Any, _arrays: Arrays) -> Job:
    """`push_send`: sends all weights to the open group."""
    group = _field(control, "group", str)
    open_name = host.push and host.push.wanted.name
    if open_name != group:
        raise invalid_request(
            f"the group {group!r} is not open (open group: {open_name or 'none'}); call push_open again"
        )

    def job() -> bytes | None:
        sent = host.send_push()
        return wire.pack(sent) if sent else None

    return job


def offload(host: Host, name: str, control: Any, _arrays: Arrays) -> Job:
    """`offload`: moves all learners to host memory, so that other processes can use the devices."""
    keeps_weights = _field(control, "keeps_weights", bool)

    def job() -> bytes | None:
        moved = host.offload(name, keeps_weights)
        return wire.pack(moved) if moved else None

    return job


def onload(host: Host, _name: str, _control: Any, _arrays: Arrays) -> Job:
    """`onload`: moves all learners back to their devices. Verbs that need a device do this on their own."""

    def job() -> bytes | None:
        moved = host.onload()
        return wire.pack(moved) if moved else None

    return job


# Verbs that need no device memory, and verbs that need only the weights of their learner.
ANYWHERE, WEIGHTS_ALONE = ("plan", "offload", "onload"), ("push_open", "push_send")

VERBS: dict[str, Callable[[Host, str, Any, Arrays], Job]] = {
    "plan": plan_update,
    "train": train,
    "logprobs": _evaluation("logprobs"),
    "predictions": _evaluation("predictions"),
    "values": _evaluation("values"),
    "forward_backward": forward_backward,
    "optim_step": optim_step,
    "save": save,
    "load": load,
    "publish": publish,
    "push_open": push_open,
    "push_send": push_send,
    "offload": offload,
    "onload": onload,
}
