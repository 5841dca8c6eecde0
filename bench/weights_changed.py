"""Counts how many of a model's weights a step changes in bf16, the format of servers: the saving of sending only
these.

    TORCH/bin/python bench/weights_changed.py RUN/checkpoints/step-000004 RUN/checkpoints/step-000005
    TORCH/bin/python bench/weights_changed.py RUN/checkpoints/step-000005 --rate 5e-5 --beta2 0.95

With one checkpoint, the weights before its last step are computed from the stored moments. This is exact for AdamW
without decay, with any clipping. `--rate` is the learning rate of that step.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

RUN = 1024


def tensors(directory: Path, pattern: str = "model*.safetensors") -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of a directory, one at a time."""
    for path in sorted(directory.glob(pattern)):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 a file is no dict
                yield name, file.get_tensor(name)


def pairs(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the weights before and after a step."""
    if options.after:
        before = dict(tensors(options.checkpoint))
        for name, tensor in tensors(options.after):
            if name in before:
                yield before[name], tensor
        return
    directory = options.checkpoint
    steps = json.loads((directory / "optimiser.json").read_text())["steps"]
    first, second = (tensors(directory, f"optimiser.{which}.safetensors") for which in ("first", "second"))
    for (name, after), (one, m), (two, v) in zip(tensors(directory), first, second, strict=True):
        if not name == one == two:
            raise SystemExit(f"{directory}: {name} has its moments under {one} and {two}")
        m, v = m / (1 - options.beta1**steps), v / (1 - options.beta2**steps)
        yield after + options.rate * m / (v.sqrt() + options.epsilon), after


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("after", type=Path, nargs="?")
    p.add_argument("--rate", type=float)
    p.add_argument("--beta1", type=float, default=0.9)
    p.add_argument("--beta2", type=float, default=0.999)
    p.add_argument("--epsilon", type=float, default=1e-8)
    options = p.parse_args()
    if (options.after is None) == (options.rate is None):
        p.error("give a second folder, or --rate")
    torch.set_num_threads(1)
    total = changed = runs = touched = 0
    for before, after in pairs(options):
        apart = (before.bfloat16() != after.bfloat16()).flatten()
        total, changed = total + apart.numel(), changed + int(apart.sum())
        padded = torch.nn.functional.pad(apart, (0, -len(apart) % RUN)).view(-1, RUN).any(1)
        runs, touched = runs + len(padded), touched + int(padded.sum())
    print(
        f"{changed} of {total} weights differ in bf16 ({changed / total:.2%}), in {touched / runs:.2%} of runs of {RUN}"
    )


if __name__ == "__main__":
    main()
