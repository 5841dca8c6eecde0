"""Moves tensors temporarily from a device to host memory, and back into the very same tensors.

Whole storages are moved. Everything that shares a storage (parameters, flat shards of FSDP2, tied weights, views)
keeps its identity, and is only empty meanwhile. On the CPU, data moves within host memory, and the original memory is
released. This shows that nothing else is kept and that no bit changes, but not that a GPU's memory then suffices.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from .learner import Learner
from .optimizer import local_shard


def storage_bytes(storage: torch.UntypedStorage) -> Tensor:
    """Returns a storage as a tensor of bytes over the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class OffloadedStorages:
    """Storages of a device whose bytes are in host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Storages by address, each with its bytes.
        self._kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @torch.no_grad()
    def offload(self, tensors: Iterable[Tensor]) -> int:
        """Moves the tensors' bytes to the host, releases the device memory, and returns the number of bytes.

        Skips storages that were moved already or are in host memory anyway.
        """
        on_gpu, moved = self.device.type != "cpu", []
        for tensor in tensors:
            storage = local_shard(tensor).untyped_storage()
            wanted = storage.device.type == self.device.type and storage.resizable() and storage.nbytes()
            if not wanted or storage._cdata in self._kept:
                continue
            there = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
            there.copy_(storage_bytes(storage), non_blocking=on_gpu)
            self._kept[storage._cdata] = storage, there
            moved.append(storage)
        if on_gpu:
            torch.cuda.synchronize(self.device)
        total = sum(storage.nbytes() for storage in moved)
        for storage in moved:
            storage.resize_(0)
        return total

    @torch.no_grad()
    def onload(self) -> int:
        """Moves all storages back. Returns the number of bytes."""
        on_gpu, total = self.device.type != "cpu", 0
        for storage, there in self._kept.values():
            storage.resize_(there.numel())
            storage_bytes(storage).copy_(there, non_blocking=on_gpu)
            total += there.numel()
        if on_gpu:
            torch.cuda.synchronize(self.device)
        self._kept.clear()
        return total


class OffloadManager:
    """The device memory of a group's learners, and the parts of it that are in host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._weights: dict[str, OffloadedStorages] = {}
        self._state = OffloadedStorages(device)

    def offload(self, learners: dict[str, Learner], keeps: str | None = None) -> int:
        """Moves weights, gradients and moments of learners to the host, except the weights of the learner `keeps`.

        Returns this rank's number of bytes.
        """
        total = self.onload(keeps) if keeps else 0
        for name, learner in learners.items():
            for module in learner.model.modules():
                if isinstance(module, FSDPModule):
                    # Makes the parameters shards again.
                    module.reshard()
            if name != keeps:
                total += self._weights.setdefault(name, OffloadedStorages(self.device)).offload(learner.weights())
            total += self._state.offload(learner.state())
        if self.device.type != "cpu":
            torch.cuda.empty_cache()
        return total

    def onload(self, only: str | None = None) -> int:
        """Moves everything back, or only the weights of one learner. Returns this rank's number of bytes."""
        if only:
            return self._weights[only].onload() if only in self._weights else 0
        return sum(storages.onload() for storages in (*self._weights.values(), self._state))
