"""Weights straight into the memory of a server that samples.

Rank 0 opens a process group of its own for one push to one server, whose workers join it as ranks 1 and up, and broadcasts tensor
after tensor; all ranks of the learner take part in making each whole. Whatever becomes of the server, every wait ends at a deadline
that ends that group alone.
"""

import base64
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import VerbError
from .files import Entry
from .unique_id import Noting

BACKENDS = ("gloo", "nccl")
# Rendezvous over a store that rank 0 serves, as torch.distributed has it, or over a unique ID of NCCL's that is handed on.
STORE, UNIQUE_ID = "store", "unique_id"
# How often a broadcast on the GPU is looked at.
LOOK_SECONDS = 0.0005


def failed(message: str) -> VerbError:
    """A push that came to nothing. The learner has lost nothing by it."""
    return VerbError("push", message)


@dataclass(frozen=True)
class Wanted:
    """A group to open: of `ranks` processes with this one, for a server that is reached at the host `peer`. Its members have
    `seconds` to join, and as many to take all weights.
    """

    name: str
    backend: str
    rendezvous: str
    ranks: int
    peer: str
    seconds: float


def prefixed(store: dist.Store, name: str, device: str) -> dist.Store:
    """The part of a store that `torch.distributed` gives a group of this name which was made beside the default one, as servers
    do it.
    """
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))


def address_towards(peer: str) -> str:
    """The address by which this machine is reached from a host. Nothing is sent."""
    try:
        found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError as error:
        raise failed(f"no way from the learner to the server's host {peer!r}: {error.strerror or error}") from None


class Sender:
    """Rank 0's side of a group. Members join while other things are done."""

    def __init__(self, wanted: Wanted, device: torch.device) -> None:
        self.wanted = wanted
        self.device = device if wanted.backend == "nccl" else torch.device("cpu")
        self.group: dist.Backend | None = None
        # One of NCCL's that is not complete yet.
        self.begun: dist.Backend | None = None
        self.why = ""
        self.told: dict = {}
        timeout = timedelta(seconds=wanted.seconds)
        if wanted.rendezvous == UNIQUE_ID:
            self.store: dist.Store = Noting()
        else:
            address = address_towards(wanted.peer)
            store = dist.TCPStore(address, 0, wanted.ranks, True, timeout, wait_for_workers=False)
            self.told = {"address": address, "port": store.port}
            self.store = prefixed(store, wanted.name, "cpu" if wanted.backend == "gloo" else "cuda")
        self.thread = threading.Thread(target=self._join, daemon=True, name=f"push {wanted.name}")
        self.thread.start()
        if wanted.rendezvous == UNIQUE_ID:
            found = self.store.unique_id(wanted.seconds)
            if found is None:
                raise failed(f"NCCL gave no unique ID within {wanted.seconds:g} s{self.why and ': ' + self.why}")
            self.told = {"unique_id": base64.b64encode(found).decode()}

    def _join(self) -> None:
        """Returns once all members are there."""
        wanted = self.wanted
        timeout = timedelta(seconds=wanted.seconds)
        try:
            if wanted.backend == "gloo":
                self.group = dist.ProcessGroupGloo(self.store, 0, wanted.ranks, timeout)
                return
            torch.cuda.set_device(self.device)
            # Its own watchdog would end the process: waits here have a deadline, and end the group.
            group = self.begun = dist.ProcessGroupNCCL(self.store, 0, wanted.ranks, timedelta(days=365))
            if wanted.rendezvous == UNIQUE_ID:
                # vLLM's communicators begin with one element's sum.
                self._wait(group, group.allreduce([torch.zeros(1, device=self.device)]), wanted.seconds)
            self.group = group
        except (RuntimeError, dist.DistError, VerbError) as error:
            self.why = str(error)

    def joined(self) -> None:
        """Waits until all members have joined.

        Raises `push` when they do not in time.
        """
        self.thread.join(self.wanted.seconds)
        if self.group is None:
            ranks, seconds = self.wanted.ranks - 1, self.wanted.seconds
            why = self.why or "nobody came"
            raise failed(
                f"not all {ranks} processes of the server joined {self.wanted.name} within {seconds:g} s: {why}"
            )

    def broadcast(self, tensor: Tensor, seconds: float) -> None:
        """Sends a tensor to all members.

        Raises `push` when one is gone or late.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=max(seconds, 0.001))
        try:
            work = self.group.broadcast([tensor], options)
            if self.wanted.backend == "nccl":
                self._wait(self.group, work, seconds)
            else:
                work.wait()
        except (RuntimeError, dist.DistError) as error:
            raise failed(f"a process of the server in {self.wanted.name} is gone or late: {error}") from None

    @staticmethod
    def _wait(group: dist.Backend, work: dist.Work, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > until:
                group.abort()
                raise failed(f"a process of the server did not take part within {seconds:g} s")
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Ends the group: who still waits in it is told."""
        if self.begun is not None:
            self.begun.abort()
        self.group = self.begun = None


@dataclass
class Push:
    """Weights on their way, on one rank: `entries` are alike on all ranks, and rank 0 has the sender."""

    wanted: Wanted
    entries: list[Entry]
    sender: Sender | None = None

    def told(self) -> dict:
        """What a server has to know: where to join, and which tensors come in which order."""
        return {
            "meeting": self.sender.told,
            "names": [name for name, _, _, _ in self.entries],
            "dtypes": [str(dtype).removeprefix("torch.") for _, _, dtype, _ in self.entries],
            "shapes": [list(shape) for _, shape, _, _ in self.entries],
        }

    @torch.no_grad()
    def send(self) -> dict | None:
        """Sends all tensors. All ranks do this at once; rank 0 gets their number, bytes and seconds.

        Raises `push` on rank 0 once all ranks are through.
        """
        why, sent, begun = None, 0, time.monotonic()
        if self.sender:
            try:
                self.sender.joined()
            except VerbError as error:
                why = error
        until = time.monotonic() + self.wanted.seconds
        # Whatever happens to the server, other ranks wait for this one at every tensor.
        for _, _, dtype, get in self.entries:
            tensor = get()
            if not self.sender or why or not tensor.numel():
                continue
            try:
                whole = tensor.detach().to(self.sender.device, dtype).contiguous()
                self.sender.broadcast(whole, until - time.monotonic())
                sent += whole.nbytes
            except VerbError as error:
                why = error
        if not self.sender:
            return None
        self.sender.close()
        if why:
            raise why
        return {"tensors": len(self.entries), "bytes": sent, "seconds": time.monotonic() - begun}
