"""Errors that clients receive."""

# HTTP status of every error code.
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
    """A rejected or failed verb. `code` is part of the protocol; `message` names the value and the remedy."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.code]

    @property
    def retry(self) -> bool:
        """Whether the client can retry the same call unchanged."""
        return self.status in (500, 503)

    def json(self) -> dict:
        """Returns the body of the response."""
        return {"error": {"code": self.code, "message": self.message, "retry": self.retry}}


def invalid_request(message: str) -> VerbError:
    """Creates the error of a request or batch that cannot be processed."""
    return VerbError("invalid", message)


class StartError(Exception):
    """A reason why the group cannot start, which the user can fix. Every affected rank prints it."""
