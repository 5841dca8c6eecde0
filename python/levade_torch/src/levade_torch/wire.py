"""Bodies of requests and responses: a safetensors file with control JSON in its metadata."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import invalid_request

DTYPES = {
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("bool"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Arrays = Mapping[str, np.ndarray]


def pack(control: Any, arrays: Arrays | None = None) -> bytes:
    """Packs JSON and 1-D arrays into a body."""
    header: dict[str, Any] = {"__metadata__": {"json": json.dumps(control, allow_nan=False)}}
    parts, at = [], 0
    for name, array in (arrays or {}).items():
        part = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(part)],
        }
        parts.append(part)
        at += len(part)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *parts])


def unpack(body: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    """Unpacks JSON and arrays from a body.

    Raises `invalid` with the first inconsistency if the body is not a safetensors file.
    """
    if not body:
        return {}, {}
    size = int.from_bytes(body[:8], "little") if len(body) >= 8 else -1
    if not 0 < size <= len(body) - 8:
        raise invalid_request(
            f"the body of {len(body)} bytes is not a valid safetensors file: its header does not fit into it"
        )
    try:
        header = json.loads(body[8 : 8 + size])
        control = json.loads(header.pop("__metadata__", {}).get("json", "{}"))
    except (ValueError, AttributeError) as error:
        raise invalid_request(f"the header of the body is not valid JSON: {error}") from None
    data = memoryview(body)[8 + size :]
    return control, {name: _array(name, entry, data) for name, entry in header.items()}


def _array(name: str, entry: Any, data: memoryview) -> np.ndarray:
    try:
        dtype, shape, (start, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        count = int(np.prod(shape, dtype=np.int64))
        fits = 0 <= start <= end <= len(data) and end - start == count * dtype.itemsize
    except (KeyError, TypeError, ValueError):
        raise invalid_request(
            f"tensor {name!r} of the body is described by {entry!r}; known types: {', '.join(DTYPES)}"
        ) from None
    if not fits:
        raise invalid_request(
            f"tensor {name!r} of shape {shape} does not match its bytes {start}..{end} of {len(data)}"
        )
    return np.frombuffer(data[start:end], dtype=dtype).reshape(shape)


class Columns:
    """Arrays of a body by name, with checks of their dtype and length."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def integers(self, name: str, length: int | None = None) -> np.ndarray:
        """Returns an array of integers as I64."""
        found = self._get(name, length)
        if found.dtype.kind not in "iub":
            raise invalid_request(f"tensor {name!r} has the type {NAMES[found.dtype]}, but must have integers")
        return found.astype(np.int64)

    def floats(self, name: str, length: int | None = None) -> np.ndarray:
        """Returns an array of F32."""
        found = self._get(name, length)
        if found.dtype != np.float32:
            raise invalid_request(f"tensor {name!r} has the type {NAMES[found.dtype]}, but must be F32")
        return found

    def _get(self, name: str, length: int | None) -> np.ndarray:
        if name not in self.arrays:
            raise invalid_request(f"the body has no tensor {name!r}; it has {', '.join(sorted(self.arrays)) or 'none'}")
        found = self.arrays[name]
        if found.ndim != 1 or (length is not None and len(found) != length):
            raise invalid_request(
                f"tensor {name!r} has the shape {list(found.shape)}, but must have the shape [{'n' if length is None else length}]"
            )
        return found
