"""NCCL's unique ID, for members of a group that are handed it instead of a store."""

import threading

import torch.distributed as dist

# Bytes of `ncclUniqueId`.
UNIQUE_ID_BYTES = 128


class Noting(dist.Store):
    """A store of one process that notes the unique ID which rank 0 of a group puts into it for the others."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._id: bytes | None = None

    def set(self, key, value) -> None:
        """Keeps a value."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._held[key] = value
            if self._id is None and len(value) == UNIQUE_ID_BYTES:
                self._id = value
            self._changed.notify_all()

    def get(self, key) -> bytes:
        """Waits for a value."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._held)
            return self._held[key]

    def add(self, key, value) -> int:
        """Counts."""
        with self._changed:
            total = int(self._held.get(key, b"0")) + value
            self._held[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def check(self, keys) -> bool:
        """Whether all values are there."""
        with self._changed:
            return all(key in self._held for key in keys)

    def wait(self, keys, timeout=None) -> None:
        """Waits for values."""
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._held for key in keys), timeout and timeout.total_seconds())

    def unique_id(self, seconds: float) -> bytes | None:
        """The unique ID; None where none came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._id is not None, seconds)
            return self._id
