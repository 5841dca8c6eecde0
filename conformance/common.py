"""Shared code of the checks: runs Levade's helper, loads the reference, compares and reports.

The helper is the example program `conformance` of the crate `levade-engine`. README.md describes its jobs.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
FORMAT = 1

logging.set_verbosity_error()
logging.disable_progress_bar()


def variable(name: str) -> str | None:
    """Reads the environment variable `LEVADE_NAME`, or its old name `DRESSAGE_NAME`."""
    return os.environ.get(f"LEVADE_{name}") or os.environ.get(f"DRESSAGE_{name}")


def parser(description: str) -> argparse.ArgumentParser:
    """Creates a parser with the options that all checks share."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--model",
        type=Path,
        default=variable("CONFORMANCE_MODEL"),
        help="SmolLM2-135M-Instruct as a GGUF file or directory; without it, only models with random weights are checked (env LEVADE_CONFORMANCE_MODEL)",
    )
    p.add_argument(
        "--levade",
        type=Path,
        default=variable("CONFORMANCE") or ROOT / "target/release/examples/conformance",
        help="helper binary (env LEVADE_CONFORMANCE)",
    )
    p.add_argument("--threads", type=int, default=2, help="threads of Levade and of PyTorch")
    p.add_argument("--only", default="", help="check only models whose names contain this")
    return p


@dataclass
class Levade:
    """Runs jobs on the helper binary."""

    binary: Path
    threads: int

    def run(self, mode: str, model: Path, out: Path, **job) -> dict:
        """Runs one job and returns its `result.json`. [`tensors`] reads the tensors that it wrote."""
        if not Path(self.binary).is_file():
            sys.exit(
                f"{self.binary} does not exist. Build it with\n"
                "  cargo build --release -p levade-engine --example conformance\n"
                "or name it with --levade."
            )
        out.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, "mode": mode, "model": str(model), "out": str(out), "threads": self.threads}
        path = out / "job.json"
        path.write_text(json.dumps(head | job))
        done = subprocess.run([self.binary, path], capture_output=True, text=True, timeout=1800)
        if done.returncode != 0:
            sys.exit(f"{mode} job {path} failed with code {done.returncode}:\n{done.stderr}")
        return json.loads((out / "result.json").read_text())


def tensors(out: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors that a job wrote."""
    return load_file(out / "result.safetensors")


def source(path: Path) -> dict:
    """Returns the arguments of `from_pretrained` for a GGUF file or a directory."""
    path = Path(path)
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path)}


def reference(path: Path):
    """Loads the model in transformers, in f32, with eager attention."""
    model = AutoModelForCausalLM.from_pretrained(**source(path), dtype=torch.float32, attn_implementation="eager")
    # PyTorch keeps the gradient of the padding token's embedding at 0. Levade never pads, and in some models (SmolLM2)
    # that token also ends a turn, so it is trained like any other token.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def ragged(vocabulary: int, seed: int, longest: int) -> list[list[int]]:
    """Returns sequences of random ids of different lengths that share prefixes. One is a prefix of another; one has a
    single token.
    """
    rng = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(n)]

    trunk = ids(longest // 3)
    branch = trunk + ids(longest // 4 + 1)
    tail = longest - len(branch)
    return [branch + ids(tail), branch + ids(7), trunk + ids(tail // 2), trunk, ids(longest // 2 + 3), ids(1)]


def yardstick(name: str, model) -> str:
    """Returns the tensor whose gradient is the scale for errors in the gradient of `name`: usually `name` itself.

    Without rotary embedding, a key bias adds the same to all scores of a query, so its gradient is only rounding
    noise. Its scale is the gradient of the query bias.
    """
    rotated = getattr(model.config, "no_rope_layers", None)
    found = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.k_proj\.bias", name)
    unmoved = rotated and found and not rotated[int(found[1])]
    return name.replace("k_proj", "q_proj") if unmoved else name


def relative(ours: torch.Tensor, theirs: torch.Tensor, to: torch.Tensor | None = None) -> float:
    """Returns ||a − b|| / ||b||, or divided by ||to||, in f64. 0 if both are 0, infinite if `ours` is not finite."""
    a, b = ours.double(), theirs.double()
    if not torch.isfinite(a).all():
        return float("inf")
    difference, norm = (a - b).norm().item(), (b if to is None else to.double()).norm().item()
    return difference / norm if norm > 0 else (0.0 if difference == 0 else float("inf"))


@dataclass
class Report:
    """Prints one line per comparison, and records whether all passed."""

    failures: list[str] = field(default_factory=list)
    made: int = 0

    def check(self, what: str, value: float, bound: float, note: str = "") -> None:
        """Checks that `value` is at most `bound`. NaN fails."""
        ok = value <= bound
        self._line(ok, what, f"{value:9.2e}  (at most {bound:.0e})  {note}")

    def expect(self, what: str, holds: bool, note: str = "") -> None:
        """Checks that a condition holds."""
        self._line(holds, what, note)

    def _line(self, ok: bool, what: str, rest: str) -> None:
        print(f"{'ok  ' if ok else 'FAIL'}  {what:<60} {rest}", flush=True)
        self.made += 1
        if not ok:
            self.failures.append(what)

    def finish(self) -> None:
        """Ends the program with code 0 if all checks passed, and otherwise 1. Fails if there were no checks."""
        if not self.made:
            sys.exit("Nothing was checked: no model has the text of --only in its name.")
        if self.failures:
            sys.exit(f"{len(self.failures)} of the checks failed: " + "; ".join(self.failures))
        print(f"all {self.made} checks passed")


def begin(arguments: argparse.Namespace) -> tuple[Levade, Report]:
    """Initializes a check."""
    torch.set_num_threads(arguments.threads)
    return Levade(arguments.levade, arguments.threads), Report()


def scratch() -> tempfile.TemporaryDirectory:
    """Creates a temporary directory for jobs and models, removed at the end."""
    return tempfile.TemporaryDirectory(prefix="levade-conformance-")
