"""Compares a critic's value head and value loss, in f32 on the merged tree, with PyTorch in f64 on each sequence.

Checks, for the given model and for every random-weight configuration: the clipped value loss to 1e-5 of its terms, and
the gradient of every tensor of the model and of the head to 1e-4. The reference uses f64, because through 30 layers
PyTorch's f32 gradients of this loss have an error of similar size. The note states this error for the tensor in which
it is largest.

Not checked: advantages, which the engine does not compute.
"""

import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common import begin, parser, reference, relative, scratch, tensors, yardstick
from models import all_models
from trees import f32, paths

CLIP = f32(0.2)
LOSS = {"policy": {"value": {"clip": CLIP}}, "kl": None}


def values(model, head: dict, path: dict) -> torch.Tensor:
    """Computes the value of the state before every target of one sequence."""
    states = model.model(torch.tensor([path["tokens"]]), use_cache=False).last_hidden_state[0]
    index = torch.tensor([t["index"] for t in path["targets"]])
    return states[index - 1] @ head["value_head.weight"][0] + head["value_head.bias"]


def backward(model, head: dict, batch: list[dict]) -> tuple[float, float, dict]:
    """Returns the sum of the losses, the sum of their magnitudes, and the gradient of every tensor."""
    total = magnitude = 0.0
    model.zero_grad()
    for one in (p for p in batch if p["targets"]):
        found = values(model, head, one)
        terms = [t["term"] for t in one["targets"]]
        weight, returns, old = (
            torch.tensor([t[k] for t in terms], dtype=found.dtype) for k in ("weight", "returns", "value")
        )
        near = torch.minimum(torch.maximum(found, old - CLIP), old + CLIP)
        losses = weight * 0.5 * torch.maximum((found - returns) ** 2, (near - returns) ** 2)
        losses.sum().backward()
        total += losses.detach().double().sum().item()
        magnitude += losses.detach().double().abs().sum().item()
    gradients = {n: p.grad for n, p in model.named_parameters()} | {n: p.grad for n, p in head.items()}
    return total, magnitude, gradients


def main() -> None:
    arguments = parser(__doc__).parse_args()
    levade, report = begin(arguments)
    with scratch() as directory:
        for name, path in all_models(Path(directory), arguments.only, arguments.model):
            model = reference(path).double()
            torch.manual_seed(3)
            hidden = model.config.hidden_size
            head = {"value_head.weight": torch.randn(1, hidden) * 0.1, "value_head.bias": torch.randn(1)}
            save_file(head, Path(directory) / "head.safetensors")
            head = {n: p.double().requires_grad_() for n, p in head.items()}
            batch = paths(model.config.vocab_size, seed=2, longest=150)
            rng = random.Random(9)
            for one in (p for p in batch if p["targets"]):
                found = values(model, head, one).tolist()
                for target, value in zip(one["targets"], found, strict=True):
                    target["term"]["returns"] = f32(value + rng.gauss(0.0, 1.0))
                    target["term"]["value"] = f32(value + rng.gauss(0.0, 0.3))
            total, magnitude, wanted = backward(model, head, batch)
            theirs = {n: p.detach().float().requires_grad_() for n, p in head.items()}
            theirs = backward(reference(path), theirs, batch)[2]
            out = Path(directory) / "out"
            job = {"batch": batch, "loss": LOSS, "value_head": str(Path(directory) / "head.safetensors")}
            ours = levade.run("gradients", path, out, **job)["loss"]
            report.check(f"{name}: loss", abs(ours - total) / magnitude, 1e-5, f"{total:.6f}")
            gradients = tensors(out) | load_file(out / "value_head.safetensors")
            # A value does not depend on the language model head.
            errors = {
                n: relative(g, wanted[n], wanted[yardstick(n, model)])
                if wanted[n] is not None
                else g.abs().max().item()
                for n, g in gradients.items()
            }
            worst = max(errors, key=errors.__getitem__)
            torch_is_off = max(
                relative(theirs[n], g, wanted[yardstick(n, model)]) for n, g in wanted.items() if g is not None
            )
            note = f"worst {worst}; PyTorch in f32: {torch_is_off:.1e}"
            report.check(f"{name}: {len(errors)} tensors", errors[worst], 1e-4, note)
    report.finish()


if __name__ == "__main__":
    main()
