"""Command-line options, which are equal on every rank."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from .errors import StartError
from .lora import TARGETS, LoraOptions


@dataclass(frozen=True)
class Options:
    """All options of a group."""

    model: Path
    critic: Path | None
    reference: Path | None
    run_root: Path
    token: str
    host: str
    port: int
    port_file: Path | None
    device: str
    dtype: str
    export_dtype: str
    tp: int
    cp: int
    ep: int
    pp: int
    attention: str
    recompute: bool
    offload: bool
    lora: LoraOptions | None
    head_rows: int
    tokens: int
    max_body_mib: int
    collective_seconds: float
    threads: int
    keep_published: int
    probe: bool


def parser() -> argparse.ArgumentParser:
    """Creates the argument parser."""
    p = argparse.ArgumentParser(
        "levade_torch",
        description="Levade's learner on PyTorch. Start it with torchrun; see README.md.",
        # Forbids abbreviations: programs that check a command line look for full option names.
        allow_abbrev=False,
    )
    models = p.add_argument_group("models (folders of Hugging Face's layout with safetensors)")
    models.add_argument("--model", type=Path, required=True, help="policy to train")
    models.add_argument("--critic", type=Path, help="critic, with its own value head")
    models.add_argument("--reference", type=Path, help="frozen reference")
    models.add_argument(
        "--dtype",
        choices=("f32", "bf16"),
        default="bf16",
        help="dtype of matrix multiplications; trained weights are f32",
    )
    models.add_argument("--export-dtype", choices=("f32", "bf16"), default="bf16", help="dtype of published weights")
    models.add_argument(
        "--lora-rank", type=int, default=0, help="train an adapter of this rank instead of the policy's weights"
    )
    models.add_argument("--lora-alpha", type=float, default=32.0)
    models.add_argument("--lora-targets", default=TARGETS, help="projections, by suffixes of their names")
    models.add_argument("--lora-seed", type=int, default=0)
    models.add_argument(
        "--no-probe", dest="probe", action="store_false", help="skip the startup check of trees against sequences"
    )
    service = p.add_argument_group("service")
    service.add_argument(
        "--run-root",
        type=Path,
        required=True,
        help="root of the run, which must contain the directories of save, load and publish",
    )
    service.add_argument("--token-env", help="environment variable with the clients' token")
    service.add_argument("--token-file", type=Path, help="file with the clients' token")
    service.add_argument("--host", default="127.0.0.1")
    service.add_argument("--port", type=int, default=0, help="port; 0 selects a free one")
    service.add_argument("--port-file", type=Path, help="file that receives host:port once the service listens")
    service.add_argument("--max-body-mib", type=int, default=1024)
    service.add_argument("--keep-published", type=int, default=2, help="number of published versions to keep on disk")
    shape = p.add_argument_group("ranks and memory")
    shape.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    shape.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    shape.add_argument("--cp", type=int, default=1, help="context parallel ranks")
    shape.add_argument("--ep", type=int, default=1, help="expert parallel ranks")
    shape.add_argument("--pp", type=int, default=1, help="pipeline stages, each with a run of the layers")
    shape.add_argument(
        "--attention",
        choices=("auto", "dense", "flex"),
        default="auto",
        help="attention kernel; auto is flex on CUDA, and otherwise dense",
    )
    shape.add_argument(
        "--checkpoint-activations",
        dest="recompute",
        action="store_true",
        help="recompute activations in the backward pass",
    )
    shape.add_argument("--offload", action="store_true", help="keep weights and optimizer state in host memory")
    shape.add_argument("--head-rows", type=int, default=512, help="maximum number of rows with logits at a time")
    shape.add_argument(
        "--tokens",
        type=int,
        default=8192,
        help="maximum number of packed tokens per micro-batch, for batches without a micro-batch plan",
    )
    shape.add_argument("--threads", type=int, default=1, help="CPU threads per process")
    shape.add_argument(
        "--collective-seconds", type=float, default=600.0, help="timeout for every wait for other ranks, in seconds"
    )
    return p


def parse(arguments: list[str] | None = None) -> Options:
    """Parses the options.

    Raises `StartError` if an option is invalid.
    """
    a = parser().parse_args(arguments)
    for name in ("model", "critic", "reference"):
        directory = getattr(a, name)
        if directory is not None and not (directory / "config.json").is_file():
            raise StartError(f"--{name} {directory} is not a folder with a config.json")
    if not a.run_root.is_dir():
        raise StartError(f"--run-root {a.run_root} is not a folder")
    if not 0 < a.collective_seconds < 1e9:
        raise StartError(f"--collective-seconds {a.collective_seconds}; it must be more than 0 and finite")
    if a.lora_rank < 0 or a.head_rows < 1 or a.tokens < 1 or a.threads < 1 or a.keep_published < 1:
        raise StartError(
            "--lora-rank must not be negative; --head-rows, --tokens, --threads and --keep-published must be at least 1"
        )
    given = vars(a)
    for name in ("model", "critic", "reference", "run_root"):
        given[name] = given[name] and given[name].resolve()
    rank, alpha, targets, seed = (given.pop(f"lora_{name}") for name in ("rank", "alpha", "targets", "seed"))
    lora = LoraOptions(rank, alpha, tuple(filter(None, targets.split(","))), seed) if rank else None
    token = _token(given.pop("token_env"), given.pop("token_file"))
    return Options(**given, lora=lora, token=token)


def _token(variable: str | None, file: Path | None) -> str:
    if (variable is None) == (file is None):
        raise StartError(
            "give the token of clients by --token-env NAME or --token-file FILE; it cannot be given on the command line"
        )
    if variable is not None:
        token, where = os.environ.get(variable, ""), f"the variable {variable}"
    else:
        try:
            token, where = file.read_text().strip(), str(file)
        except OSError as error:
            raise StartError(f"cannot read --token-file {file}: {error.strerror}") from None
    if len(token) < 16:
        raise StartError(f"{where} must contain a token of at least 16 characters")
    return token
