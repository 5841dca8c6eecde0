"""Bodies, calls and who may ask."""

import threading

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load, save

from dressage_torch import wire
from dressage_torch.calls import Call, Calls
from dressage_torch.errors import VerbError
from dressage_torch.files import checksum, inside, read_header, write_tensors
from dressage_torch.optimiser import Params


def test_bodies_are_safetensors_both_ways():
    arrays = {
        "a": np.arange(5),
        "b": np.array([0.5, np.nan], np.float32),
        "c": np.array([1, 0], np.uint8),
        "d": np.zeros(0, np.int64),
    }
    body = wire.pack({"x": [1, None]}, arrays)
    for name, array in load(body).items():
        np.testing.assert_array_equal(array, arrays[name])
    control, found = wire.unpack(body)
    assert control == {"x": [1, None]} and set(found) == set(arrays)
    control, found = wire.unpack(save(arrays, {"json": "{}"}))
    assert control == {}
    np.testing.assert_array_equal(found["b"], arrays["b"])
    assert wire.unpack(b"") == ({}, {})


def test_bodies_that_end_early_or_lie_are_refused():
    body = wire.pack({}, {"a": np.arange(5)})
    for broken in (body[:4], body[:20], body[:-1], b"\xff" * 64):
        with pytest.raises(VerbError, match=r"safetensors|does not lie|no JSON"):
            wire.unpack(broken)
    columns = wire.Columns({"a": np.arange(5), "b": np.zeros(2, np.float32)})
    for ask, said in [
        (lambda: columns.integers("z"), "no tensor 'z'"),
        (lambda: columns.integers("b"), "takes integers"),
        (lambda: columns.floats("a"), "takes F32"),
        (lambda: columns.integers("a", 4), "shape"),
    ]:
        with pytest.raises(VerbError, match=said):
            ask()


def test_a_call_is_done_once():
    calls = Calls()
    first = calls.submit(Call("1", "policy", "train", b"x"))
    assert calls.submit(Call("1", "policy", "train", b"x")) is first
    with pytest.raises(VerbError, match="another verb or body"):
        calls.submit(Call("1", "policy", "train", b"y"))
    assert calls.next(0.0) is first and calls.next(0.0) is None
    first.answer(b"done")
    assert calls.submit(Call("1", "policy", "train", b"x")).reply == b"done"
    for n in range(2, 80):
        calls.submit(Call(str(n), "policy", "train", b""))
        calls.next(0.0).answer(b"")
    assert calls.submit(Call("1", "policy", "train", b"x")) is not first, "it was forgotten long ago"


def test_calls_that_wait_are_told_of_the_end():
    calls = Calls()
    waiting = calls.submit(Call("1", "policy", "train", b""))
    heard = []
    thread = threading.Thread(target=lambda: heard.append(waiting.done.wait(5)))
    thread.start()
    calls.stop(VerbError("failed", "rank 1 died"))
    thread.join()
    assert heard == [True] and waiting.error.message == "rank 1 died"
    with pytest.raises(VerbError, match="rank 1 died"):
        calls.submit(Call("2", "policy", "train", b""))


def test_folders_lie_under_the_root(tmp_path):
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    root = (tmp_path / "root").resolve()
    assert inside(root, str(root / "a")) == root / "a"
    for outside in (str(tmp_path), str(root / ".." / "x"), str(root / "link" / "x"), "a"):
        with pytest.raises(VerbError, match=r"not under the root|relative"):
            inside(root, outside)


def test_numbers_of_the_optimiser_are_checked():
    fine = {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": None,
    }
    assert Params.parse(fine).max_grad_norm == float("inf")
    for wrong in (fine | {"beta1": None}, fine | {"beta3": 1}, {}, [], fine | {"epsilon": "1"}):
        with pytest.raises(VerbError):
            Params.parse(wrong)


def test_files_of_tensors_are_replaced_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0), "c": torch.randn(5).bfloat16()}
    for number in range(2):
        entries = [(n, tuple(t.shape), t.dtype, lambda t=t, k=number: t + k) for n, t in tensors.items()]
        before = path.open("rb") if number else None
        write_tensors(path, entries)
        found = safetensors.torch.load_file(path)
        assert all((found[n] == t + number).all() and found[n].dtype == t.dtype for n, t in tensors.items())
        assert read_header(path) == {"a": (2, 3), "b": (0,), "c": (5,)}
    # Whoever had the first file open still reads it.
    assert len(before.read()) == path.stat().st_size and [p.name for p in tmp_path.iterdir()] == [path.name]
    before.close()
    assert checksum(path)[0] == path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VerbError, match="not written to its end"):
        read_header(path)
    got = []
    with pytest.raises(VerbError, match="cannot write"):
        write_tensors(tmp_path / "none" / "x", [("a", (1,), torch.float32, lambda: got.append(1) or torch.zeros(1))])
    assert got == [1], "other ranks wait for this one at every tensor"
