"""NCCL's unique ID, for group members that receive it directly instead of through a store."""

import threading

import torch.distributed as dist

# Size of `ncclUniqueId`, in bytes.
UNIQUE_ID_BYTES = 128


class Noting(dist.Store):
    """An in-process store that captures the unique ID which rank 0 of a group stores for the other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._id: bytes | None = None

    def set(self, key, value) -> None:
        """Stores a value."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._held[key] = value
            if self._id is None and len(value) == UNIQUE_ID_BYTES:
                self._id = value
            self._changed.notify_all()

    def get(self, key) -> bytes:
        """Waits for a value and returns it."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._held)
            return self._held[key]

    def add(self, key, value) -> int:
        """Adds to a counter and returns its value."""
        with self._changed:
            total = int(self._held.get(key, b"0")) + value
            self._held[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def check(self, keys) -> bool:
        """Returns whether all values are present."""
        with self._changed:
            return all(key in self._held for key in keys)

    def wait(self, keys, timeout=None) -> None:
        """Waits until all values are present."""
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._held for key in keys), timeout and timeout.total_seconds())

    def unique_id(self, seconds: float) -> bytes | None:
        """Returns the unique ID, or None if none arrives within `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._id is not None, seconds)
            return self._id
