"""The main loop of a rank. Rank 0 takes a call and broadcasts it. All ranks read it, agree that it is valid, execute
it, and agree on the result.
"""

import json
import time
import traceback

from . import wire
from .calls import Calls
from .errors import VerbError
from .group import Group, say
from .host import Host
from .verbs import ANYWHERE, VERBS, WEIGHTS_ALONE

# Interval at which an idle rank 0 broadcasts, so that other ranks notice its exit.
IDLE_SECONDS = 2.0


class Worker:
    """One rank's part in every verb. Only rank 0 has calls."""

    def __init__(self, group: Group, calls: Calls | None) -> None:
        self.group, self.calls = group, calls
        self.host: Host

    def run(self, host: Host) -> None:
        """Executes calls until the process ends. Raises errors that leave the ranks out of step."""
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
        """Records the progress of the running verb."""
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
            # Reading changes nothing and needs no other rank, so unexpected invalid input does not have to end the
            # group.
            say(traceback.format_exc())
            error = VerbError("invalid", f"the request cannot be read: {type(odd).__name__}: {odd}")
        if error := self.group.agree(error):
            return None, error
        reply = None
        if verb not in ANYWHERE:
            self.host.offload_manager.onload(name if verb in WEIGHTS_ALONE else None)
        try:
            reply = job()
        except VerbError as failed:
            error = failed
        except OSError as failed:
            error = VerbError("storage", f"{failed.filename or 'a file'}: {failed.strerror or failed}")
        return reply, self.group.agree(error)
