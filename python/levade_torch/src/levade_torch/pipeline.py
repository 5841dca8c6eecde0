"""Pipeline stages: the order of their passes, and their communication.

Every stage holds a run of the model's layers. Hidden states go down from stage to stage, and gradients go up. Each
direction has its own process group, so that neither waits for the other. Both sides know the shapes, since all stages
lay out the same micro-batches.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from .files import Entry

FORWARD, BACKWARD = "forward", "backward"


def order(batches: int, size: int, stage: int) -> Iterator[tuple[str, int]]:
    """Returns the passes of a stage over micro-batches in 1F1B order.

    A stage starts with as many forward passes as there are stages below it, and then alternates forward and backward
    passes. So it holds the activations of at most `size - stage` micro-batches.
    """
    ahead = min(batches, size - 1 - stage)
    yield from ((FORWARD, number) for number in range(ahead))
    for number in range(batches - ahead):
        yield FORWARD, ahead + number
        yield BACKWARD, number
    yield from ((BACKWARD, number) for number in range(batches - ahead, batches))


@dataclass
class Direction:
    """One direction between neighboring stages. Keeps sent tensors until they have arrived, at most `most` at a time."""

    group: dist.ProcessGroup | None = None
    most: int = 0
    sent: deque = field(default_factory=deque)

    def send(self, tensor: Tensor, stage: int) -> None:
        """Sends a tensor to a stage without waiting for its arrival."""
        tensor = tensor.detach().contiguous()
        self.sent.append((dist.isend(tensor, group=self.group, group_dst=stage), tensor))
        self.drain(self.most)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, stage: int) -> Tensor:
        """Waits for the next tensor from a stage."""
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, group=self.group, group_src=stage)
        return tensor

    def drain(self, left: int = 0) -> None:
        """Waits until at most `left` sent tensors have not arrived."""
        while len(self.sent) > left:
            self.sent.popleft()[0].wait()


@dataclass
class Pipeline:
    """The stages through which this rank's micro-batches go, and the index of this stage."""

    size: int = 1
    stage: int = 0
    down: Direction = field(default_factory=Direction)
    up: Direction = field(default_factory=Direction)

    @staticmethod
    def of(size: int, world: int, rank: int, seconds: float) -> "Pipeline":
        """Joins the groups of this process. Ranks of a stage are neighbors. Collective over all processes."""
        if size == 1:
            return Pipeline()
        per_stage, found = world // size, None
        for offset in range(per_stage):
            members = list(range(offset, world, per_stage))
            groups = [dist.new_group(members, timeout=timedelta(seconds=seconds)) for _ in range(2)]
            if rank in members:
                found = Pipeline(size, members.index(rank), *(Direction(group, size) for group in groups))
        return found

    @property
    def first(self) -> bool:
        """Whether this stage receives tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage has the heads."""
        return self.stage == self.size - 1

    def states(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Receives the next hidden states [rows, width] from the previous stage; None on the first stage."""
        return None if self.first else self.down.receive((rows, width), dtype, device, self.stage - 1)

    def hand_down(self, states: Tensor) -> None:
        """Sends hidden states to the next stage."""
        self.down.send(states, self.stage + 1)

    def gradient(self, states: Tensor) -> Tensor | None:
        """Receives the next gradient of sent hidden states; None on the last stage, where gradients start."""
        return None if self.last else self.up.receive(states.shape, states.dtype, states.device, self.stage + 1)

    def hand_up(self, gradient: Tensor) -> None:
        """Sends the gradient of hidden states to the previous stage."""
        self.up.send(gradient, self.stage - 1)

    def drain(self) -> None:
        """Waits until all sent tensors have arrived."""
        self.down.drain()
        self.up.drain()

    def gather(self, value) -> list:
        """Gathers one value per stage, in stage order. Collective over all stages."""
        if self.size == 1:
            return [value]
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self.down.group)
        return found

    def share(self, tensor: Tensor, stage: int) -> Tensor:
        """Broadcasts a tensor from `stage`. On other stages, `tensor` provides shape and dtype. Collective over all
        stages.
        """
        if self.size > 1:
            dist.broadcast(tensor, group=self.down.group, group_src=stage)
        return tensor

    def sum_ends(self, tensor: Tensor, device: torch.device) -> None:
        """Adds the tensors of the first and the last stage in place. Both get the same bits."""
        if self.first:
            self.down.send(tensor.to(device), self.size - 1)
            other = self.up.receive(tensor.shape, tensor.dtype, device, self.size - 1)
        else:
            other = self.down.receive(tensor.shape, tensor.dtype, device, 0)
            self.up.send(tensor.to(device), 0)
        # The sent tensor may be this very memory.
        self.drain()
        tensor.add_(other.to(tensor.device))

    def join(self, entries: list[Entry], device: torch.device) -> list[Entry]:
        """Joins the entries of all stages, in stage order; the first entry of a name counts. All ranks get each tensor
        at once.
        """
        if self.size == 1:
            return entries
        own = {name: get for name, _, _, get in entries}
        joined: dict[str, Entry] = {}
        for stage, stage_entries in enumerate(self.gather([entry[:3] for entry in entries])):
            for name, shape, dtype in stage_entries:
                get = partial(self._get, own.get(name), stage, shape, dtype, device)
                joined.setdefault(name, (name, shape, dtype, get))
        return list(joined.values())

    def _get(self, get, stage: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if stage == self.stage:
            return self.share(get().detach().to(device, dtype).contiguous(), stage)
        return self.share(torch.empty(shape, dtype=dtype, device=device), stage)
