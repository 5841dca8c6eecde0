"""Broadcasts weights into the memory of a sampling server.

For one push to one server, rank 0 opens a separate process group, which the server's workers join as ranks 1 and up.
It broadcasts one tensor after another; all ranks of the learner take part in gathering each tensor. Every wait has a
deadline, and an expired deadline closes only that group.
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
# Rendezvous through a store that rank 0 serves, as in torch.distributed, or through an NCCL unique ID that rank 0
# passes on.
STORE, UNIQUE_ID = "store", "unique_id"
# Poll interval of a GPU broadcast.
LOOK_SECONDS = 0.0005


def push_error(message: str) -> VerbError:
    """Creates the error of a failed push, which does not affect the learner."""
    return VerbError("push", message)


@dataclass(frozen=True)
class PushRequest:
    """A group to open: `ranks` processes including this one, for a server that is reached at the host `peer`.

    Members have `seconds` to join, and the same time to receive all weights.
    """

    name: str
    backend: str
    rendezvous: str
    ranks: int
    peer: str
    seconds: float


def group_store(store: dist.Store, name: str, device: str) -> dist.Store:
    """Returns the part of a store that `torch.distributed` uses for a group of this name.

    Servers create the group in addition to their default group.
    """
    return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))


def address_for_peer(peer: str) -> str:
    """Returns the address at which `peer` reaches this machine. Sends nothing."""
    try:
        found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError as error:
        raise push_error(f"the learner cannot reach the server's host {peer!r}: {error.strerror or error}") from None


class Sender:
    """Rank 0's side of a group. Members join in the background."""

    def __init__(self, wanted: PushRequest, device: torch.device) -> None:
        self.wanted = wanted
        self.device = device if wanted.backend == "nccl" else torch.device("cpu")
        self.group: dist.Backend | None = None
        # An NCCL group that is not complete yet.
        self.begun: dist.Backend | None = None
        self.why = ""
        self.rendezvous_info: dict = {}
        timeout = timedelta(seconds=wanted.seconds)
        if wanted.rendezvous == UNIQUE_ID:
            self.store: dist.Store = Noting()
        else:
            address = address_for_peer(wanted.peer)
            store = dist.TCPStore(address, 0, wanted.ranks, True, timeout, wait_for_workers=False)
            self.rendezvous_info = {"address": address, "port": store.port}
            self.store = group_store(store, wanted.name, "cpu" if wanted.backend == "gloo" else "cuda")
        self.thread = threading.Thread(target=self._join, daemon=True, name=f"push {wanted.name}")
        self.thread.start()
        if wanted.rendezvous == UNIQUE_ID:
            found = self.store.unique_id(wanted.seconds)
            if found is None:
                raise push_error(
                    f"NCCL returned no unique ID within {wanted.seconds:g} s{self.why and ': ' + self.why}"
                )
            self.rendezvous_info = {"unique_id": base64.b64encode(found).decode()}

    def _join(self) -> None:
        """Returns when all members have joined."""
        wanted = self.wanted
        timeout = timedelta(seconds=wanted.seconds)
        try:
            if wanted.backend == "gloo":
                self.group = dist.ProcessGroupGloo(self.store, 0, wanted.ranks, timeout)
                return
            torch.cuda.set_device(self.device)
            # NCCL's own watchdog would end the process, so waits here have their own deadline and abort the group.
            group = self.begun = dist.ProcessGroupNCCL(self.store, 0, wanted.ranks, timedelta(days=365))
            if wanted.rendezvous == UNIQUE_ID:
                # vLLM's communicators start with an all-reduce of one element.
                self._wait(group, group.allreduce([torch.zeros(1, device=self.device)]), wanted.seconds)
            self.group = group
        except (RuntimeError, dist.DistError, VerbError) as error:
            self.why = str(error)

    def wait_joined(self) -> None:
        """Waits until all members have joined.

        Raises `push` if they do not join in time.
        """
        self.thread.join(self.wanted.seconds)
        if self.group is None:
            ranks, seconds = self.wanted.ranks - 1, self.wanted.seconds
            why = self.why or "no process connected"
            raise push_error(
                f"not all {ranks} processes of the server joined the group {self.wanted.name} within {seconds:g} s: {why}"
            )

    def broadcast(self, tensor: Tensor, seconds: float) -> None:
        """Broadcasts a tensor to all members.

        Raises `push` if a member has exited or is late.
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
            raise push_error(
                f"a process of the server exited or timed out in the group {self.wanted.name}: {error}"
            ) from None

    @staticmethod
    def _wait(group: dist.Backend, work: dist.Work, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > until:
                group.abort()
                raise push_error(f"a process of the server did not take part in the broadcast within {seconds:g} s")
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Closes the group. Members that still wait in it get an error."""
        if self.begun is not None:
            self.begun.abort()
        self.group = self.begun = None


@dataclass
class Push:
    """An open push on one rank. All ranks have equal `entries`, and rank 0 has the sender."""

    wanted: PushRequest
    entries: list[Entry]
    sender: Sender | None = None

    def describe(self) -> dict:
        """Returns what a server must know: the rendezvous, and the tensors in their order."""
        return {
            "meeting": self.sender.rendezvous_info,
            "names": [name for name, _, _, _ in self.entries],
            "dtypes": [str(dtype).removeprefix("torch.") for _, _, dtype, _ in self.entries],
            "shapes": [list(shape) for _, shape, _, _ in self.entries],
        }

    @torch.no_grad()
    def send(self) -> dict | None:
        """Sends all tensors. Collective; rank 0 gets their number, bytes and seconds.

        Raises `push` on rank 0 after all ranks have finished.
        """
        why, sent, started = None, 0, time.monotonic()
        if self.sender:
            try:
                self.sender.wait_joined()
            except VerbError as error:
                why = error
        until = time.monotonic() + self.wanted.seconds
        # Other ranks wait for this rank at every tensor, so the loop continues after the server has failed.
        for _, _, dtype, get in self.entries:
            tensor = get()
            if not self.sender or why or not tensor.numel():
                continue
            try:
                full = tensor.detach().to(self.sender.device, dtype).contiguous()
                self.sender.broadcast(full, until - time.monotonic())
                sent += full.nbytes
            except VerbError as error:
                why = error
        if not self.sender:
            return None
        self.sender.close()
        if why:
            raise why
        return {"tensors": len(self.entries), "bytes": sent, "seconds": time.monotonic() - started}
