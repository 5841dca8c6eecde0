"""Directories and files of weights: only under the root of the run, flushed to disk, with checksums."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from torch import Tensor

from .errors import VerbError, invalid_request

CHUNK = 1 << 20
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
# Additional files of a model that samplers and tokenizers read.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "generation_config.json",
)

# Name, shape and dtype of a tensor, and a function that returns the tensor on this rank.
Entry = tuple[str, tuple[int, ...], torch.dtype, Callable[[], Tensor]]


def storage_error(error: OSError, what: str, path: Path) -> VerbError:
    """Creates the error of a file that cannot be read or written."""
    return VerbError("storage", f"cannot {what} {path}: {error.strerror or error}")


def resolve_directory(root: Path, directory: str) -> Path:
    """Resolves an absolute directory under the root of the run, following links.

    Raises `invalid` if the directory is outside the root or the path is relative.
    """
    path = Path(directory)
    if not path.is_absolute():
        raise invalid_request(f"the folder {directory!r} is relative; give an absolute path")
    resolved = path.resolve()
    if not resolved.is_relative_to(root):
        raise invalid_request(f"the folder {directory} is outside the root of the run, {root}")
    return resolved


def flush(path: Path) -> None:
    """Flushes a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value) -> None:
    """Writes JSON and flushes the file."""
    path.write_text(json.dumps(value, indent=2) + "\n")
    flush(path)


class Writer:
    """Writes the files of a save or a publication on one rank; on other ranks `directory` is None.

    All ranks go through every file to its end, since they meet at each tensor. The first failure is stored, nothing is
    written after it, and `finish` raises it.
    """

    def __init__(self, directory: Path | None) -> None:
        self.folder, self.names = directory, []
        self.failed: VerbError | None = None

    @property
    def writes(self) -> bool:
        """Whether this rank writes, and no write has failed yet."""
        return self.folder is not None and self.failed is None

    @contextmanager
    def attempt(self, what: str, path: Path) -> Iterator[None]:
        """Stores the error of the enclosed operation if it is the first failure."""
        try:
            yield
        except OSError as error:
            # The error of a write to an open file contains no name; the error of an open does.
            self.failed = self.failed or storage_error(error, what, Path(error.filename or path))
        except VerbError as error:
            self.failed = self.failed or error

    def json(self, name: str, make: Callable[[], Any]) -> None:
        """Writes JSON. `make` is called only on the writing rank."""
        self.names.append(name)
        if self.writes:
            with self.attempt("write", self.folder / name):
                write_json(self.folder / name, make())

    def tensors(self, name: str, entries: Iterable[Entry]) -> None:
        """Writes a safetensors file. All ranks get all tensors."""
        self.names.append(name)
        path = self.folder / name if self.writes else None
        with self.attempt("write", path or Path(name)):
            write_tensors(path, entries)

    def finish(self) -> list[str]:
        """Returns the file names. Call it when ranks no longer wait for each other.

        Raises the first failure.
        """
        if self.failed:
            raise self.failed
        return self.names


def write_tensors(path: Path | None, entries: Iterable[Entry]) -> None:
    """Writes a safetensors file, one tensor after another.

    All ranks take part in getting a tensor; the rank with a `path` writes. Raises `storage` after all tensors were
    fetched.
    """
    entries = list(entries)
    header: dict = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape, dtype, _ in entries:
        size = int(torch.Size(shape).numel()) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    failed, file = None, None
    # A model that was loaded from a file may still map it (mmap). So the file is replaced, never overwritten.
    partial = path and path.with_name(f".{path.name}.part")
    try:
        file = partial.open("wb") if partial else None
        if file:
            file.write(len(head).to_bytes(8, "little") + head)
    except OSError as error:
        failed = error
    # Other ranks wait for this rank at every tensor, so the loop continues after a failed write.
    for _, _, dtype, get in entries:
        tensor = get()
        try:
            if file and not failed and tensor.numel():
                # Copies the tensor: PyTorch could no longer release memory that numpy has referenced (offload.py).
                copy = tensor.to("cpu", dtype, copy=True).contiguous()
                file.write(copy.view(torch.uint8).numpy().data)
        except OSError as error:
            failed = error
    try:
        if file and not failed:
            file.flush()
            os.fsync(file.fileno())
        if file:
            file.close()
        if file and not failed:
            partial.replace(path)
    except OSError as error:
        failed = failed or error
    if failed:
        if file:
            # An incomplete file would only waste space.
            with suppress(OSError):
                partial.unlink()
        raise storage_error(failed, "write", Path(failed.filename or path))


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the tensors in a safetensors file.

    Raises `storage` if the file cannot be read or is truncated.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 1 << 28)))
            header.pop("__metadata__", None)
            wanted = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if wanted != (there := path.stat().st_size):
                raise VerbError("storage", f"{path} is truncated: it has {there} of {wanted} bytes")
    except OSError as error:
        raise storage_error(error, "read", path) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VerbError("storage", f"{path} is not a valid safetensors file: {error}") from None
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def copy_companions(source: Path, directory: Path) -> list[str]:
    """Copies tokenizer and templates of a model. Returns the file names."""
    names = sorted({path.name for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file()})
    for name in names:
        shutil.copyfile(source / name, directory / name)
        flush(directory / name)
    return names


def checksum(path: Path) -> tuple[int, int]:
    """Returns the size in bytes and the CRC-32C of a file."""
    size, found = 0, google_crc32c.Checksum()
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            size += len(part)
            found.update(part)
    return size, int.from_bytes(found.digest(), "big")


def create_manifest(directory: Path, content, names: Iterable[str]) -> dict:
    """Returns the `Manifest` of new files: location, content, and each file with size and checksum."""
    files = []
    for name in sorted(names):
        size, crc = checksum(directory / name)
        files.append({"name": name, "bytes": size, "crc32c": crc})
    return {"place": {"local": str(directory)}, "content": content, "files": files}


def list_published(directory: Path) -> Iterator[tuple[int, Path]]:
    """Returns the published versions in a directory, in ascending order."""
    found = (path for path in directory.glob("v*") if path.name[1:].isdigit() and path.is_dir())
    yield from sorted((int(path.name[1:]), path) for path in found)


def remove_old(directory: Path, keep: int, newest: int) -> None:
    """Removes publications until `keep` are left, and incomplete files of killed processes.

    The newest publication always stays. The publication before it goes last, since samplers may still read it.
    Versions above the newest were abandoned when the run returned to a checkpoint; they go first.
    """
    for path in directory.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)
    others = [
        (path.stat().st_mtime_ns, version, path) for version, path in list_published(directory) if version != newest
    ]
    before = max(others, default=None)
    others.sort(key=lambda other: (other is before, other[1] < newest, other[1]))
    for _, _, path in others[: max(0, len(others) - (keep - 1))]:
        shutil.rmtree(path, ignore_errors=True)
