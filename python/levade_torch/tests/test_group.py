"""Checks on which address processes of a group listen, and how long they wait for each other."""

import multiprocessing
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from levade_torch.group import interface_towards
from levade_torch.mesh import limit_waits

WAIT, ABSENT = 2.0, 12.0


def test_interface_towards_localhost_is_loopback():
    assert interface_towards("127.0.0.1") in {name for _, name in socket.if_nameindex()}


def test_interface_towards_invalid_address_is_none():
    assert interface_towards("no.such.host.invalid") is None


def rank(number: int, directory: str, found) -> None:
    """Waits in a mesh's group for the other rank, which never joins."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", world_size=2, rank=number)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("fsdp", "tp"))
    limit_waits(timedelta(seconds=WAIT))
    if number:
        time.sleep(ABSENT)
        return
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=mesh.get_group("fsdp"))
        found.put(None)
    except RuntimeError:
        found.put(time.monotonic() - started)


def test_mesh_group_wait_respects_timeout(tmp_path):
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    ranks = [context.Process(target=rank, args=(number, str(tmp_path), found), daemon=True) for number in range(2)]
    for one in ranks:
        one.start()
    seconds = found.get(timeout=120)
    for one in ranks:
        one.kill()
    assert seconds is not None and WAIT / 2 < seconds < ABSENT / 2
