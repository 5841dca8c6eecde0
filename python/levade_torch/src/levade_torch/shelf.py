"""Tensors that leave a device for a while: their bytes go to the host's memory, and come back into the very same tensors.

What is moved are storages, so that whatever shares one (parameters, the flat shards of FSDP2, tied weights, views) stays as it is, and
only finds nothing in it meanwhile. On the CPU this is a move as well, from one place of the host's memory to another, with the
first one given back: it shows that nothing else is kept and that no bit changes, and not that a GPU's memory suffices afterwards.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from .learner import Learner
from .optimiser import local


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a tensor of bytes over the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class Shelf:
    """Storages of a device whose bytes lie in the host's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Storages by their address, each with its bytes.
        self._kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @torch.no_grad()
    def put(self, tensors: Iterable[Tensor]) -> int:
        """Moves the tensors' bytes to the host, and gives the device's memory back. Returns how many there were. What lies there
        already, or in the host's memory of its own accord, stays.
        """
        on_gpu, moved = self.device.type != "cpu", []
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            wanted = storage.device.type == self.device.type and storage.resizable() and storage.nbytes()
            if not wanted or storage._cdata in self._kept:
                continue
            there = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
            there.copy_(bytes_of(storage), non_blocking=on_gpu)
            self._kept[storage._cdata] = storage, there
            moved.append(storage)
        if on_gpu:
            torch.cuda.synchronize(self.device)
        total = sum(storage.nbytes() for storage in moved)
        for storage in moved:
            storage.resize_(0)
        return total

    @torch.no_grad()
    def take(self) -> int:
        """Moves all of them back. Returns how many bytes there were."""
        on_gpu, total = self.device.type != "cpu", 0
        for storage, there in self._kept.values():
            storage.resize_(there.numel())
            bytes_of(storage).copy_(there, non_blocking=on_gpu)
            total += there.numel()
        if on_gpu:
            torch.cuda.synchronize(self.device)
        self._kept.clear()
        return total


class Shelves:
    """What the learners of a group have on a device, and what of it lies in the host's memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._weights: dict[str, Shelf] = {}
        self._state = Shelf(device)

    def offload(self, learners: dict[str, Learner], keeps: str | None = None) -> int:
        """Moves weights, gradients and moments of learners to the host, all but the weights of the one that `keeps` names. Returns
        the bytes of this rank.
        """
        total = self.onload(keeps) if keeps else 0
        for name, learner in learners.items():
            for module in learner.model.modules():
                if isinstance(module, FSDPModule):
                    # Parameters are the shards again.
                    module.reshard()
            if name != keeps:
                total += self._weights.setdefault(name, Shelf(self.device)).put(learner.weights())
            total += self._state.put(learner.state())
        if self.device.type != "cpu":
            torch.cuda.empty_cache()
        return total

    def onload(self, only: str | None = None) -> int:
        """Moves all back, or the weights of one learner. Returns the bytes of this rank."""
        if only:
            return self._weights[only].take() if only in self._weights else 0
        return sum(shelf.take() for shelf in (*self._weights.values(), self._state))
