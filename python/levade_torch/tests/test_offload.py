"""Checks that offloading learners between any two verbs changes no bit, on one and two ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from levade_torch import wire
from levade_torch.host import Host
from levade_torch.offload import OffloadedStorages
from levade_torch.optimizer import local_shard
from ranks import ABSENT, ADAM, CPU, IMITATION, VALUES, VOCABULARY, Rank, make_model, run


def batch(seed: int) -> dict[str, np.ndarray]:
    """Creates four trees of one sequence each, in which all tokens except the first are targets."""
    rows, length = 4, 6
    random = np.random.default_rng(seed)
    position = np.tile(np.arange(length), rows)
    ends = np.repeat(np.arange(1, rows + 1) * length, length)
    targets = np.flatnonzero(position > 0)
    count = len(targets)
    return {
        "tokens": random.integers(0, VOCABULARY, rows * length),
        "position": position,
        "subtree_end": ends,
        "target_token": targets,
        "predictor": targets - 1,
        "temperature": np.ones(count, np.float32),
        "first_term": np.arange(count),
        "terms": np.ones(count, np.int64),
        "path": np.repeat(np.arange(rows), length - 1),
        "weight": np.full(count, 0.1, np.float32),
        "advantage": np.ones(count, np.float32),
        "returns": np.ones(count, np.float32),
        "marked": np.zeros(count, np.uint8),
        "age": np.zeros(count, np.int64),
        "version": np.zeros(count, np.int64),
    } | dict.fromkeys(ABSENT, np.full(count, np.nan, np.float32))


def held(host: Host, names=("policy", "critic", "reference"), state: bool = True) -> int:
    """Returns the bytes that learners hold on their compute device. Counts each storage once."""
    learners = [host.learners[name] for name in names]
    tensors = [t for one in learners for t in one.weights()] if not state else []
    tensors = tensors or [t for one in learners for t in [*one.weights(), *one.state()]]
    return sum({s._cdata: s.nbytes() for s in (local_shard(t).untyped_storage() for t in tensors)}.values())


def work(rank: Rank, disturbed: bool) -> list[bytes]:
    """Returns the responses of verbs. If `disturbed`, the learner is offloaded before each verb."""
    host = rank.host

    def ask(name: str, verb: str, control=None, arrays=None):
        reply, error = rank.worker._perform(name, verb, wire.pack(control or {}, arrays))
        assert error is None, f"{verb}: {error.message}"
        return reply

    replies = []

    def verb(name: str, verb: str, control=None, arrays=None) -> None:
        replies.append(ask(name, verb, control, arrays))
        if disturbed:
            before = held(host)
            first = ask("policy", "offload", {"keeps_weights": len(replies) % 2 == 0})
            ask("policy", "offload", {"keeps_weights": False})
            assert held(host) == 0, "everything has left"
            again = ask("policy", "offload", {"keeps_weights": False})
            if not rank.group.rank:
                assert wire.unpack(first)[0]["bytes"] > 0 == wire.unpack(again)[0]["bytes"]
            if len(replies) % 3 == 0:
                ask("policy", "onload")
                assert held(host) == before, "and has come back"

    loss, values = {"loss": IMITATION}, {"loss": VALUES}
    for step in range(2):
        verb("policy", "logprobs", {}, batch(step))
        verb("reference", "logprobs", {}, batch(step))
        verb("critic", "forward_backward", values, batch(step))
        verb("critic", "optim_step", {"params": ADAM})
        verb("policy", "forward_backward", loss, batch(step))
        # Accumulated gradients are offloaded as well.
        verb("policy", "forward_backward", loss, batch(step + 9))
        verb("policy", "optim_step", {"params": ADAM})
        verb("critic", "values", {}, batch(step))
    if disturbed:
        ask("policy", "onload")
        ask("policy", "offload", {"keeps_weights": True})
        kept = held(host)
        assert kept == held(host, ["policy"], state=False) > 0, "all but the weights that are to be sent"
        ask("policy", "offload", {"keeps_weights": False})
        ask("policy", "offload", {"keeps_weights": True})
        assert held(host) == kept, "which come back for that"
    for name in ("policy", "critic"):
        ask(name, "save", {"folder": str(rank.root / name), "with_optimiser": True})
    ask("policy", "load", {"folder": str(rank.root / "policy"), "with_optimiser": True})
    verb("policy", "logprobs", {}, batch(5))
    return replies


@pytest.mark.parametrize("world", [1, 2])
def test_offloaded_learners_keep_bits(tmp_path, world):
    model = make_model(tmp_path / "model")
    found, roots = [], []
    for disturbed in (False, True):
        directory = tmp_path / f"disturbed-{disturbed}"
        roots.append(directory / "run")
        for name in ("policy", "critic"):
            (roots[-1] / name).mkdir(parents=True)
        replies, *_ = run(world, work, directory, disturbed, model=model, critic=model, reference=model)
        found.append(replies)
    assert found[0] == found[1]
    files = [
        {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        for root in roots
    ]
    assert files[0] == files[1]
    assert Path("policy/optimiser.second.safetensors") in files[0]


def test_shared_storage_moves_once():
    base = torch.arange(12.0)
    view, other = base[3:7], torch.ones(2, 3)
    storages = OffloadedStorages(CPU)
    assert storages.offload([view, base, other, torch.zeros(0)]) == 12 * 4 + 6 * 4
    assert len(storages) == 2 and base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert storages.offload([base, other]) == 0
    assert storages.onload() == 72 and len(storages) == 0
    assert base.tolist() == list(range(12)) and view.tolist() == [3, 4, 5, 6] and other.sum() == 6
    view[0] = 9
    assert base[3] == 9
