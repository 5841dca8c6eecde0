"""A queue of verb calls from the HTTP threads to the training thread. Calls run one at a time, each exactly once.

A repeated call with the same id gets the response of the first call, or waits for it.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from .errors import VerbError, invalid_request

KEPT = 64


@dataclass
class Call:
    """A verb call on a learner: its body, and its response or error."""

    id: str
    learner: str
    verb: str
    body: bytes
    step: str = ""
    digest: bytes = b""
    done: threading.Event = field(default_factory=threading.Event)
    reply: bytes = b""
    error: VerbError | None = None

    def answer(self, reply: bytes | None, error: VerbError | None = None) -> None:
        """Completes the call."""
        self.reply, self.error, self.body = reply or b"", error, b""
        self.done.set()


class Calls:
    """Waiting calls, the running call, and the most recent completed calls."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, Call] = OrderedDict()
        self._known: OrderedDict[str, Call] = OrderedDict()
        self._running: Call | None = None
        self._since = 0.0
        self._progress = (0, 0)
        self._stopped: VerbError | None = None

    def submit(self, call: Call) -> Call:
        """Queues a call, and returns the call to wait for: `call`, or an earlier call with the same id.

        Raises `invalid` if the earlier call has another verb or body, and `stopping` or `failed` if the group is
        ending.
        """
        digest = hashlib.sha256(f"{call.learner}/{call.verb}".encode())
        digest.update(call.body)
        call.digest = digest.digest()
        with self._changed:
            if known := self._known.get(call.id):
                if known.digest != call.digest:
                    raise invalid_request(
                        f"call {call.id!r} was used before with another verb or body; give every call its own id"
                    )
                return known
            if self._stopped:
                raise self._stopped
            self._known[call.id] = self._waiting[call.id] = call
            for old in [c.id for c in self._known.values() if c.done.is_set()][: max(0, len(self._known) - KEPT)]:
                del self._known[old]
            self._changed.notify()
            return call

    def next(self, seconds: float) -> Call | None:
        """Returns the next call to run, or None if no call arrives within `seconds`."""
        with self._changed:
            self._running = None
            self._changed.wait_for(lambda: self._waiting, seconds)
            if not self._waiting:
                return None
            _, self._running = self._waiting.popitem(last=False)
            self._since, self._progress = time.monotonic(), (0, 0)
            return self._running

    def advance(self, done: int, of: int) -> None:
        """Records how many micro-batches of the running call are done."""
        self._progress = (done, of)

    def progress(self) -> dict:
        """Returns the progress of the running call, for waiting clients."""
        call, (done, of) = self._running, self._progress
        seconds = time.monotonic() - self._since if call else 0.0
        verb = call.verb if call else None
        return {
            "call": call and call.id,
            "verb": verb,
            "micro_batches_done": done,
            "of": of,
            "seconds": round(seconds, 3),
        }

    def stop(self, error: VerbError) -> None:
        """Ends all calls with `error`, and rejects later calls."""
        with self._changed:
            self._stopped = error
            calls = [self._running, *self._waiting.values()]
            self._waiting.clear()
        for call in calls:
            if call and not call.done.is_set():
                call.answer(None, error)
