"""The loop of a rank: rank 0 takes a call and tells the others; all read it, agree that it can be done, do it, and agree that it was."""

import json
import time
import traceback

from . import wire
from .calls import Calls
from .errors import VerbError
from .group import Group, say
from .host import Host
from .verbs import ANYWHERE, VERBS, WEIGHTS_ALONE

# Rank 0 is heard of at least this often, so that its end is noticed while nothing is asked.
IDLE_SECONDS = 2.0


class Worker:
    """One rank's part in every verb. Only rank 0 has calls."""

    def __init__(self, group: Group, calls: Calls | None) -> None:
        self.group, self.calls = group, calls
        self.host: Host

    def run(self, host: Host) -> None:
        """Works until the process ends. Errors that leave the ranks out of step are raised."""
        self.host = host
        while True:
            self.group.heart.where.what = "waiting for a call"
            call = self.calls.next(IDLE_SECONDS) if self.calls else None
            message = json.dumps([call.learner, call.verb]).encode() + b"\n" + call.body if call else None
            message = self.group.broadcast(message)
            if not message:
                continue
            head, body = message.split(b"\n", 1)
            name, verb = json.loads(head)
            self.group.heart.where.what = f"in {verb} of {name}"
            start = time.monotonic()
            reply, error = self._perform(name, verb, body)
            if call:
                call.answer(reply, error)
                done = f"{error.code}: {error.message}" if error else "done"
                step = f"step {call.step}: " if call.step else ""
                say(f"{step}{verb} of {name}: {done} after {time.monotonic() - start:.2f} s")

    def advance(self, done: int, of: int) -> None:
        """Notes how far the running verb is."""
        what = self.group.heart.where.what.split(",")[0]
        self.group.heart.where.what = f"{what}, {done} of {of} micro-batches done"
        if self.calls:
            self.calls.advance(done, of)

    def _perform(self, name: str, verb: str, body: bytes) -> tuple[bytes | None, VerbError | None]:
        job = None
        error = None
        try:
            control, arrays = wire.unpack(body)
            if not isinstance(control, dict):
                raise VerbError("invalid", f"the JSON of the request is {type(control).__name__}; it must be an object")
            job = VERBS[verb](self.host, name, control, arrays)
        except VerbError as refused:
            error = refused
        except Exception as odd:
            # Reading changes nothing and meets no other rank, so that bad input which no check foresaw need not end the group.
            say(traceback.format_exc())
            error = VerbError("invalid", f"the request cannot be read: {type(odd).__name__}: {odd}")
        if error := self.group.agree(error):
            return None, error
        reply = None
        if verb not in ANYWHERE:
            self.host.shelves.onload(name if verb in WEIGHTS_ALONE else None)
        try:
            reply = job()
        except VerbError as failed:
            error = failed
        except OSError as failed:
            error = VerbError("storage", f"{failed.filename or 'a file'}: {failed.strerror or failed}")
        return reply, self.group.agree(error)
