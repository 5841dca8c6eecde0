"""The processes of a group: startup, broadcast of calls, agreement on errors, and detection of failed ranks.

Calls, errors and results use their own gloo group, independent of the weights' backend. Every wait ends at the timeout
of the collectives, and its error names the unresponsive ranks.
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .errors import StartError, VerbError

BEAT_SECONDS = 1.0
# A rank without a heartbeat for this long counts as exited or stopped.
SILENT_SECONDS = 6.0


def say(text: str) -> None:
    """Prints a line to stderr."""
    print(f"levade_torch: {text}", file=sys.stderr, flush=True)


@dataclass
class Activity:
    """A rank's current activity, for error messages."""

    what: str = "starting"


class Heart(threading.Thread):
    """Reports once a second to the group's store that this process is running, and its activity."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        super().__init__(daemon=True, name="heart")
        self.store, self.rank, self.world = store, rank, world
        self.where = Activity()
        self.beats = 0

    def run(self) -> None:
        """Sends heartbeats until the process ends or the store is unreachable."""
        while True:
            try:
                self.store.set(f"beat/{self.rank}", json.dumps([self.beats, self.where.what]))
            except (RuntimeError, dist.DistError):
                return
            self.beats += 1
            time.sleep(BEAT_SECONDS)

    def _heard(self) -> dict[int, tuple[int, str]]:
        found = {}
        for rank in range(self.world):
            if self.store.check([f"beat/{rank}"]):
                found[rank] = tuple(json.loads(self.store.get(f"beat/{rank}")))
        return found

    def diagnosis(self) -> str:
        """Returns which ranks are silent, or the activity of each rank if all are running. Takes several seconds."""
        try:
            before = self._heard()
            time.sleep(SILENT_SECONDS)
            after = self._heard()
        except (RuntimeError, dist.DistError):
            return "the store of the group is gone: its first process has ended"
        silent = [rank for rank in range(self.world) if before.get(rank, (None,))[0] == after.get(rank, (None,))[0]]
        if silent:
            was = ", ".join(
                f"rank {rank} (last seen {after.get(rank, (0, 'before it started'))[1]})" for rank in silent
            )
            return f"dead or stopped: {was}"
        return "all ranks are alive: " + ", ".join(
            f"rank {rank} is {what}" for rank, (_, what) in sorted(after.items())
        )


def interface_towards(host: str) -> str | None:
    """Returns the network interface through which this machine reaches an IPv4 host, or `None` if it cannot be
    determined.
    """
    address_of = 0x8915  # SIOCGIFADDR
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # UDP `connect` sends nothing, and any port works.
            probe.connect((host, 9))
            mine = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = fcntl.ioctl(probe.fileno(), address_of, struct.pack("256s", name.encode()[:15]))
                    if request[20:24] == mine:
                        return name
    except OSError:
        pass
    return None


class Group:
    """This process as a member of the group."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        try:
            self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except KeyError as error:
            raise StartError(f"the variable {error} is not set; start with torchrun -m levade_torch") from None
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=seconds)
        # By default, gloo listens on the address of the host name, which is the loopback on many machines.
        if found := interface_towards(os.environ["MASTER_ADDR"]):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
        dist.init_process_group(backend, timeout=timeout, device_id=None if device.type == "cpu" else device)
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        # A separate prefix: a restart under the same torchrun must not read heartbeats of the previous processes.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # A separate connection: a client that waits for another rank blocks all users of the same connection.
        store = dist.PrefixStore(f"levade/{attempt}", dist.distributed_c10d._get_default_store().clone())
        self.heart = Heart(store, self.rank, self.world)
        self.heart.start()

    def broadcast(self, message: bytes | None) -> bytes:
        """Sends bytes from rank 0 to all ranks. Returns them."""
        size = torch.tensor([0 if message is None else len(message)], dtype=torch.int64)
        dist.broadcast(size, 0, group=self.control)
        if not size.item():
            return b""
        if message is not None:
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self.control)
            return message
        body = torch.empty(int(size.item()), dtype=torch.uint8)
        dist.broadcast(body, 0, group=self.control)
        return body.numpy().tobytes()

    def agree(self, error: VerbError | None) -> VerbError | None:
        """Returns the error of the first rank that has one, or None. Collective."""
        mine = (error.code, error.message) if error else None
        found: list = [None] * self.world
        dist.all_gather_object(found, mine, group=self.control)
        rank, first = next(((rank, e) for rank, e in enumerate(found) if e), (0, None))
        if first is None:
            return None
        where = "" if rank == 0 else f" (on rank {rank})"
        return VerbError(first[0], first[1] + where)


def exit_now(code: int) -> None:
    """Exits the process immediately, without cleanup."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
