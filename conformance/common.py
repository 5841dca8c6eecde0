"""What the checks share: running Levade's helper, loading the reference, comparing, reporting.

The helper is the example program `conformance` of the crate `levade-engine`; README.md describes its jobs.
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
    """A variable of the environment, `LEVADE_NAME`, or `DRESSAGE_NAME` as it was called before the project was."""
    return os.environ.get(f"LEVADE_{name}") or os.environ.get(f"DRESSAGE_{name}")


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all checks have."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--model",
        type=Path,
        default=variable("CONFORMANCE_MODEL"),
        help="SmolLM2-135M-Instruct, a GGUF file or a Hugging Face folder; without it only the "
        "random-weight models are checked (env LEVADE_CONFORMANCE_MODEL)",
    )
    p.add_argument(
        "--levade",
        type=Path,
        default=variable("CONFORMANCE") or ROOT / "target/release/examples/conformance",
        help="the helper binary (env LEVADE_CONFORMANCE)",
    )
    p.add_argument("--threads", type=int, default=2, help="threads of Levade and of PyTorch")
    p.add_argument("--only", default="", help="check only models whose name contains this")
    return p


@dataclass
class Levade:
    """Runs jobs on the helper binary."""

    binary: Path
    threads: int

    def run(self, mode: str, model: Path, out: Path, **job) -> dict:
        """Runs one job; returns its `result.json`. The tensors it wrote are read with [`tensors`]."""
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
    """The tensors that a job wrote."""
    return load_file(out / "result.safetensors")


def source(path: Path) -> dict:
    """Arguments of `from_pretrained` for a GGUF file or a folder."""
    path = Path(path)
    if path.suffix == ".gguf":
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {"pretrained_model_name_or_path": str(path)}


def reference(path: Path):
    """The model in transformers, f32, with its plainest attention."""
    model = AutoModelForCausalLM.from_pretrained(**source(path), dtype=torch.float32, attn_implementation="eager")
    # torch keeps the gradient of the padding token's embedding at 0. Levade never pads, and in some models (SmolLM2)
    # that token also ends a turn: it is a token like any other.
    model.get_input_embeddings().padding_idx = None
    return model.eval()


def ragged(vocabulary: int, seed: int, longest: int) -> list[list[int]]:
    """Sequences of random ids, of uneven lengths, that share prefixes; one is a prefix of another, one is a single
    token.
    """
    rng = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(n)]

    trunk = ids(longest // 3)
    branch = trunk + ids(longest // 4 + 1)
    tail = longest - len(branch)
    return [branch + ids(tail), branch + ids(7), trunk + ids(tail // 2), trunk, ids(longest // 2 + 3), ids(1)]


def yardstick(name: str, model) -> str:
    """The tensor whose gradient an error in that of `name` is held against: its own. A bias of keys adds the same to all
    scores of a query where positions do not turn it, so that its gradient is nothing but rounding; it is held against
    the queries'.
    """
    rotated = getattr(model.config, "no_rope_layers", None)
    found = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.k_proj\.bias", name)
    unmoved = rotated and found and not rotated[int(found[1])]
    return name.replace("k_proj", "q_proj") if unmoved else name


def relative(ours: torch.Tensor, theirs: torch.Tensor, to: torch.Tensor | None = None) -> float:
    """||a − b|| / ||b||, or by ||to||, in f64; 0 when both are 0, infinite when ours is not finite."""
    a, b = ours.double(), theirs.double()
    if not torch.isfinite(a).all():
        return float("inf")
    difference, norm = (a - b).norm().item(), (b if to is None else to.double()).norm().item()
    return difference / norm if norm > 0 else (0.0 if difference == 0 else float("inf"))


@dataclass
class Report:
    """Prints one line for each comparison and remembers whether all held."""

    failures: list[str] = field(default_factory=list)
    made: int = 0

    def check(self, what: str, value: float, bound: float, note: str = "") -> None:
        """`value` must be at most `bound` (a value that is not a number fails)."""
        ok = value <= bound
        self._line(ok, what, f"{value:9.2e}  (at most {bound:.0e})  {note}")

    def expect(self, what: str, holds: bool, note: str = "") -> None:
        """Something that holds or does not."""
        self._line(holds, what, note)

    def _line(self, ok: bool, what: str, rest: str) -> None:
        print(f"{'ok  ' if ok else 'FAIL'}  {what:<60} {rest}", flush=True)
        self.made += 1
        if not ok:
            self.failures.append(what)

    def finish(self) -> None:
        """Ends the program: code 0 when everything held, else 1; that nothing was checked is a failure, too."""
        if not self.made:
            sys.exit("Nothing was checked: no model has the text of --only in its name.")
        if self.failures:
            sys.exit(f"{len(self.failures)} of the checks failed: " + "; ".join(self.failures))
        print(f"all {self.made} checks passed")


def begin(arguments: argparse.Namespace) -> tuple[Levade, Report]:
    """What every check starts with."""
    torch.set_num_threads(arguments.threads)
    return Levade(arguments.levade, arguments.threads), Report()


def scratch() -> tempfile.TemporaryDirectory:
    """A folder for jobs and models, removed at the end."""
    return tempfile.TemporaryDirectory(prefix="levade-conformance-")
