"""The line to the process that sends requests: one JSON object a line, each answered with another, in any order."""

import json
import os
import threading


class Line:
    """Reads requests and writes answers. `key` is the key of a request's id; a request with `stop` cancels another.

    `parse` makes a request of a line."""

    parse = staticmethod(json.loads)

    def __init__(self, requests, out, key):
        self.requests, self.out, self.key = requests, out, key
        self.lock = threading.Lock()
        self.process = os.getpid()
        # A forked process must neither answer nor hold the line.
        os.register_at_fork(after_in_child=lambda: os.close(out.fileno()))

    def __iter__(self):
        return map(self.parse, self.requests)

    def write(self, value):
        """Writes a line. A process that the user's code has forked ends here."""
        text = json.dumps(value, allow_nan=False).encode() + b"\n"
        if os.getpid() != self.process:
            os._exit(0)
        with self.lock:
            self.out.write(text)
            self.out.flush()

    def ready(self, report):
        self.write({"ready": report})

    def failed(self, why):
        """Reports that the worker cannot be used."""
        self.write({"error": why})

    def answer(self, request, said):
        try:
            self.write({self.key: request[self.key], **said})
        except (TypeError, ValueError) as error:
            self.write({self.key: request[self.key], "error": f"its answer cannot be written as JSON: {error}"})


def read_in_thread(line, take, ended):
    """Has a thread hand each request to `take`, and call `ended` after the last."""

    def read():
        for request in line:
            take(request)
        ended()

    threading.Thread(target=read, daemon=True).start()


def shown(value):
    """The beginning of a value, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def where(error, is_own):
    """The innermost place of an error's traceback in a file for which `is_own` holds, or None."""
    frame = error.__traceback__
    found = None
    while frame is not None:
        if is_own(frame.tb_frame.f_code.co_filename):
            found = (frame.tb_frame.f_code.co_filename, frame.tb_lineno)
        frame = frame.tb_next
    return found
