"""Checks bodies, calls and authorization."""

import http.client
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load, save

from levade_torch import wire
from levade_torch.calls import Call, Calls
from levade_torch.errors import VerbError
from levade_torch.files import checksum, read_header, resolve_directory, write_tensors
from levade_torch.optimizer import OptimizerParams
from levade_torch.server import Service, serve
from levade_torch.verbs import VERBS, _check_paths
from levade_torch.worker import Worker


def test_bodies_round_trip_through_safetensors():
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


def test_unpack_rejects_truncated_or_inconsistent_bodies():
    body = wire.pack({}, {"a": np.arange(5)})
    for broken in (body[:4], body[:20], body[:-1], b"\xff" * 64):
        with pytest.raises(VerbError, match=r"safetensors|does not match|not valid JSON"):
            wire.unpack(broken)
    columns = wire.Columns({"a": np.arange(5), "b": np.zeros(2, np.float32)})
    for ask, message in [
        (lambda: columns.integers("z"), "no tensor 'z'"),
        (lambda: columns.integers("b"), "must have integers"),
        (lambda: columns.floats("a"), "must be F32"),
        (lambda: columns.integers("a", 4), "shape"),
    ]:
        with pytest.raises(VerbError, match=message):
            ask()


def test_repeated_call_runs_once():
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


def test_waiting_calls_get_error_when_group_stops():
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


def test_unexpected_read_error_is_reported_and_group_continues(monkeypatch):
    worker = Worker(SimpleNamespace(agree=lambda error: error), None)
    worker.host = None

    def stumbles(*_asked):
        raise RecursionError("too deep")

    monkeypatch.setitem(VERBS, "plan", stumbles)
    reply, error = worker._perform("policy", "plan", wire.pack({}))
    assert reply is None and error.code == "invalid" and "RecursionError: too deep" in error.message


def test_batch_check_names_ids_outside_vocabulary():
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=10, max_position_embeddings=99))
    host = SimpleNamespace(learners={"policy": SimpleNamespace(model=model)})
    with pytest.raises(VerbError, match="path 1 has token ids from -3 to 4, but the vocabulary has 10"):
        _check_paths(host, "policy", SimpleNamespace(tokens=[np.array([0, 9]), np.array([4, -3])]))


def test_request_without_token_is_rejected():
    calls = Calls()
    service = Service("t" * 16, calls, 100)
    service.description = lambda: {"learners": {"policy": {}}}
    server = serve(service, "127.0.0.1", 0, None)
    threading.Thread(target=lambda: calls.next(5.0).answer(b"done"), daemon=True).start()
    mine = {"authorization": "Bearer " + "t" * 16, "x-levade-call": "1"}
    older = {"authorization": mine["authorization"], "x-dressage-call": "1", "x-dressage-step": "3"}
    plan = "/v1/learners/policy/plan"
    try:
        for method, path, body, headers, status, closes in [
            ("GET", "/health", None, {}, 200, False),
            ("GET", "/v1/describe", None, {}, 401, False),
            ("GET", "/v1/describe", None, mine, 200, False),
            ("GET", "/v1/nothing", None, mine, 404, False),
            ("POST", plan, b"x", {"authorization": "Bearer wrong"}, 401, True),
            ("POST", plan, b"x" * 101, {}, 413, True),
            ("POST", plan, b"x", {"authorization": mine["authorization"]}, 400, False),
            ("POST", plan, b"x", mine, 200, False),
            ("POST", plan, b"x", older, 200, False),
        ]:
            connection = http.client.HTTPConnection(*server.server_address, timeout=10)
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            response.read()
            assert (response.status, response.getheader("connection") == "close") == (status, closes), (path, headers)
            connection.close()
    finally:
        server.shutdown()
        server.server_close()


def test_directory_outside_run_root_is_rejected(tmp_path):
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    root = (tmp_path / "root").resolve()
    assert resolve_directory(root, str(root / "a")) == root / "a"
    for outside in (str(tmp_path), str(root / ".." / "x"), str(root / "link" / "x"), "a"):
        with pytest.raises(VerbError, match=r"outside the root|relative"):
            resolve_directory(root, outside)


def test_optimizer_params_reject_invalid_numbers():
    fine = {
        "learning_rate": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": None,
    }
    assert OptimizerParams.parse(fine).max_grad_norm == float("inf")
    for wrong in (fine | {"beta1": None}, fine | {"beta3": 1}, {}, [], [1], None, fine | {"epsilon": "1"}):
        with pytest.raises(VerbError):
            OptimizerParams.parse(wrong)


def test_write_tensors_replaces_files_atomically(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0), "c": torch.randn(5).bfloat16()}
    for number in range(2):
        entries = [(n, tuple(t.shape), t.dtype, lambda t=t, k=number: t + k) for n, t in tensors.items()]
        before = path.open("rb") if number else None
        write_tensors(path, entries)
        found = safetensors.torch.load_file(path)
        assert all((found[n] == t + number).all() and found[n].dtype == t.dtype for n, t in tensors.items())
        assert read_header(path) == {"a": (2, 3), "b": (0,), "c": (5,)}
    # A reader that had opened the first file still reads it.
    assert len(before.read()) == path.stat().st_size and [p.name for p in tmp_path.iterdir()] == [path.name]
    before.close()
    assert checksum(path)[0] == path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(VerbError, match="is truncated"):
        read_header(path)
    got = []
    with pytest.raises(VerbError, match="cannot write"):
        write_tensors(tmp_path / "none" / "x", [("a", (1,), torch.float32, lambda: got.append(1) or torch.zeros(1))])
    assert got == [1], "other ranks wait for this one at every tensor"
