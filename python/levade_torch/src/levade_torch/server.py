"""The HTTP service on rank 0: authorizes requests, parses them and sends responses. worker.py executes the verbs."""

import contextlib
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .calls import Call, Calls
from .errors import StartError, VerbError, invalid_request
from .verbs import VERBS

TENSORS = "application/x-safetensors"
# Timeout of a client that stalls during a request or a response.
SOCKET_SECONDS = 60.0


class Service:
    """State that handlers share."""

    def __init__(self, token: str, calls: Calls, max_bytes: int) -> None:
        self.token, self.calls, self.max_bytes = token.encode(), calls, max_bytes
        self.description = None
        self._asked = 0
        self._answered = threading.Condition()

    def describe(self) -> dict:
        """Returns the description. Raises `busy` while models load."""
        if self.description is None:
            raise VerbError("busy", "the group is still loading its models; try again")
        return self.description()

    @contextlib.contextmanager
    def answering(self):
        """Guards a request whose response must not be lost when the process ends."""
        with self._answered:
            self._asked += 1
        try:
            yield
        finally:
            with self._answered:
                self._asked -= 1
                self._answered.notify_all()

    def drain(self, seconds: float) -> None:
        """Waits up to `seconds` until no response is pending."""
        with self._answered:
            self._answered.wait_for(lambda: not self._asked, seconds)

    def allows(self, header: str | None) -> bool:
        """Returns whether a request has the token."""
        given = (header or "").removeprefix("Bearer ").encode()
        return hmac.compare_digest(given, self.token)


class Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    protocol_version = "HTTP/1.1"
    server_version = "levade_torch"
    sys_version = ""
    timeout = SOCKET_SECONDS
    service: Service

    def do_GET(self) -> None:
        """Handles health, description and progress."""
        routes = {"/v1/describe": self.service.describe, "/v1/progress": self.service.calls.progress}
        if self.path == "/health":
            return self._json(200, {"ok": True})
        try:
            self._authorise()
            if self.path not in routes:
                raise VerbError("unknown", f"unknown path {self.path}; available paths: /health, {', '.join(routes)}")
            self._json(200, routes[self.path]())
        except VerbError as error:
            self._refuse(error)

    def do_POST(self) -> None:
        """Executes a verb of a learner, and responds when it is done."""
        with self.service.answering():
            self._verb()

    def _verb(self) -> None:
        try:
            body = self._body()
            call = self.service.calls.submit(self._call(body))
        except VerbError as error:
            return self._refuse(error)
        call.done.wait()
        if call.error:
            return self._refuse(call.error)
        self._send(200, TENSORS, call.reply)

    def _call(self, body: bytes) -> Call:
        parts = self.path.strip("/").split("/")
        if len(parts) != 4 or parts[:2] != ["v1", "learners"]:
            raise VerbError("unknown", f"unknown path {self.path}; verbs are at /v1/learners/NAME/VERB")
        _, _, learner, verb = parts
        learners = self.service.describe()["learners"]
        if learner not in learners:
            raise VerbError("unknown", f"unknown learner {learner!r}; available learners: {', '.join(learners)}")
        if verb not in VERBS:
            raise VerbError("unknown", f"unknown verb {verb!r}; available verbs: {', '.join(VERBS)}")
        # The alternative header names date from before the project was called Levade.
        name = self.headers.get("x-levade-call") or self.headers.get("x-dressage-call")
        if not name or len(name) > 200:
            raise invalid_request(
                "the header x-levade-call must contain the id of the call, at most 200 characters long"
            )
        step = self.headers.get("x-levade-step") or self.headers.get("x-dressage-step", "")
        return Call(name, learner, verb, body, step[:40])

    def _authorise(self) -> None:
        if not self.service.allows(self.headers.get("authorization")):
            raise VerbError(
                "unauthorised", "the header authorization must contain the token of this group, as `Bearer TOKEN`"
            )

    def _body(self) -> bytes:
        """Reads the body of an authorized request.

        Reads nothing if the body is too large or its length is unknown. After an incomplete read, the connection
        closes.
        """
        closes, self.close_connection = self.close_connection, True
        length = self.headers.get("content-length")
        if length is None or not length.isdigit():
            raise invalid_request("the request has no header content-length")
        if int(length) > self.service.max_bytes:
            raise VerbError(
                "too_large",
                f"the body has {length} bytes, but the maximum is {self.service.max_bytes}; raise --max-body-mib",
            )
        self._authorise()
        body = self.rfile.read(int(length))
        if len(body) != int(length):
            raise invalid_request(f"the body ended after {len(body)} of {length} bytes")
        self.close_connection = closes
        return body

    def _refuse(self, error: VerbError) -> None:
        self._json(error.status, error.json())

    def _json(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            if self.close_connection:
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            # The client has disconnected; the response stays with the call.
            self.close_connection = True

    def log_message(self, *_arguments) -> None:
        """Disables request logging; the worker logs verbs."""


class Server(ThreadingHTTPServer):
    """Serves each connection in its own thread. These threads do not keep the process running."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_arguments) -> None:
        """Ignores broken connections."""


def serve(service: Service, host: str, port: int, port_file: Path | None) -> Server:
    """Listens in background threads, and writes `host:port` to a file.

    Raises `StartError` if the port is in use or the file cannot be written.
    """
    handler = type("BoundHandler", (Handler,), {"service": service})
    try:
        server = Server((host, port), handler)
    except OSError as error:
        raise StartError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or 0 for a free one"
        ) from None
    threading.Thread(target=server.serve_forever, daemon=True, name="http").start()
    if port_file:
        address = f"{host}:{server.server_address[1]}\n"
        try:
            partial = port_file.with_name(f".{port_file.name}.part")
            partial.write_text(address)
            partial.rename(port_file)
        except OSError as error:
            raise StartError(f"cannot write {port_file}: {error.strerror}") from None
    return server
