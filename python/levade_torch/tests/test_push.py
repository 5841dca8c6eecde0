"""Checks that weights reach a server process complete and in order, and that a failed server fails only its push."""

import multiprocessing
import os
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from levade_torch.errors import VerbError
from levade_torch.push import STORE, Push, PushRequest, Sender
from levade_torch.unique_id import UNIQUE_ID_BYTES, Noting

SECONDS = 60.0
CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    # A view with non-standard strides, and an empty tensor.
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "empty": torch.zeros(0, 5),
    "c": torch.tensor([1.0, 1.0 / 3.0, -2.5e8]),
}


def push(seconds: float, dtype=torch.float32, got: list | None = None) -> Push:
    """Opens a group of two processes for the tensors of the tests."""
    wanted = PushRequest("g", "gloo", STORE, 2, "127.0.0.1", seconds)

    def entry(name, tensor):
        def get():
            if got is not None:
                got.append(name)
            return tensor

        return name, tuple(tensor.shape), dtype, get

    return Push(wanted, [entry(*item) for item in TENSORS.items()], Sender(wanted, CPU))


@dataclass
class Server:
    """A process that joins as servers do, with torch's own function for additional groups.

    It receives a given number of tensors, and then exits or stalls.
    """

    takes: int | None = None
    hangs: bool = False

    def __call__(self, pipe) -> None:
        pipe.send("here")
        message, seconds = pipe.recv(), timedelta(seconds=SECONDS)
        meeting = message["meeting"]
        store = dist.TCPStore(meeting["address"], meeting["port"], 2, False, seconds)
        store = dist.PrefixStore("g", store)
        group, _ = _new_process_group_helper(
            2, 1, [], "gloo", store, group_name="g", timeout=seconds, backend_options=None
        )
        _world.pg_group_ranks[group] = {0: 0, 1: 1}
        listed = zip(message["names"], message["dtypes"], message["shapes"], strict=True)
        found = {}
        for name, dtype, shape in list(listed)[: self.takes]:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            if tensor.numel():
                dist.broadcast(tensor, src=0, group=group)
            found[name] = (tensor.view(torch.uint8).numpy().tobytes(), dtype)
        pipe.send(found)
        if self.hangs:
            time.sleep(600)
        os._exit(0)


class ServerProcess:
    """Starts a server process. It is spawned, since a fork with threads of earlier groups could crash anywhere."""

    def __init__(self, server: Server) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=server, args=(theirs,), daemon=True)
        self.process.start()
        assert self.pipe.poll(10 * SECONDS), "no process within its time"
        assert self.pipe.recv() == "here"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_push_delivers_tensors_in_export_dtype(dtype):
    server = ServerProcess(Server())
    sent = push(SECONDS, dtype)
    server.pipe.send(sent.describe())
    done = sent.send()
    found = server.pipe.recv()
    assert done["tensors"] == 4
    assert done["bytes"] == sum(tensor.numel() for tensor in TENSORS.values()) * dtype.itemsize
    assert list(found) == list(TENSORS)
    for name, (values, kind) in found.items():
        assert kind == str(dtype).removeprefix("torch.")
        assert values == TENSORS[name].to(dtype).contiguous().view(torch.uint8).numpy().tobytes(), name


def test_push_times_out_if_server_never_joins():
    got = []
    sent, started = push(1.0, got=got), time.monotonic()
    with pytest.raises(VerbError, match=r"not all 1 processes of the server joined the group g within 1 s") as caught:
        sent.send()
    assert caught.value.code == "push" and not caught.value.retry
    assert time.monotonic() - started < SECONDS
    # Other ranks of the learner meet this rank at every tensor even after a failure.
    assert got == list(TENSORS)


def test_push_fails_at_once_if_server_exits():
    got = []
    server = ServerProcess(Server(takes=1))
    sent = push(SECONDS, got=got)
    server.pipe.send(sent.describe())
    first, get = sent.entries[1][0], sent.entries[1][3]

    def after_its_end():
        server.pipe.recv()
        server.process.join(SECONDS)
        return get()

    sent.entries[1] = (first, *sent.entries[1][1:3], after_its_end)
    started = time.monotonic()
    with pytest.raises(VerbError, match="exited or timed out"):
        sent.send()
    assert time.monotonic() - started < SECONDS
    assert got == list(TENSORS)


def test_push_times_out_if_server_stalls(monkeypatch):
    # More than the socket buffers hold.
    monkeypatch.setitem(TENSORS, "a", torch.zeros(1, 1 << 24))
    server = ServerProcess(Server(takes=0, hangs=True))
    sent = push(10.0)
    server.pipe.send(sent.describe())
    started = time.monotonic()
    with pytest.raises(VerbError, match="exited or timed out"):
        sent.send()
    assert time.monotonic() - started < SECONDS
    server.process.kill()


def test_in_process_store_captures_nccl_id():
    store = Noting()
    assert store.unique_id(0.01) is None
    store.set("of something else", b"x")
    assert store.add("count", 2) == 2 and store.add("count", 3) == 5
    store.set("0", bytes(range(UNIQUE_ID_BYTES)))
    assert store.unique_id(0.01) == bytes(range(UNIQUE_ID_BYTES)) == store.get("0")
    assert store.check(["0", "count"]) and not store.check(["other"])
