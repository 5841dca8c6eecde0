"""Errors that a client is told of."""

# The HTTP status of every code.
STATUS = {
    "invalid": 400,
    "unauthorised": 401,
    "unknown": 404,
    "cut": 409,
    "too_large": 413,
    "no_value_head": 422,
    "storage": 422,
    "push": 424,
    "failed": 500,
    "busy": 503,
    "stopping": 503,
}


class VerbError(Exception):
    """A verb that is refused or has failed. `code` is the protocol's, `message` names the value and the way out."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.code]

    @property
    def retry(self) -> bool:
        """Whether the same call may succeed later, with nothing changed by its caller."""
        return self.status in (500, 503)

    def json(self) -> dict:
        """The body of a reply."""
        return {"error": {"code": self.code, "message": self.message, "retry": self.retry}}


def invalid(message: str) -> VerbError:
    """A request or a batch that cannot be served as it stands."""
    return VerbError("invalid", message)


class StartError(Exception):
    """A group that cannot start, for a reason that its user can mend. Every rank that it stops prints it."""
