"""Compares AdamW steps after gradient clipping with PyTorch in f32.

Checks, for random-weight configurations, after six steps over two micro-batches each, with a varying learning rate and
a norm bound that is active on every other step: the saved weights agree with torch.optim.AdamW to 1e-5 relative per
tensor, the movement from the initial weights agrees to 1e-3, and every step reports the gradient norm before clipping
to 1e-4. Weight decay applies to matrices, and not to norms and biases.

Adam divides a gradient by its own magnitude. If a gradient is as small as the rounding of its sum, the step has the
sign of the rounding error. An epsilon of 1e-4 avoids this: it is large compared with such rounding, and small compared
with most gradients.

Not checked: the given model (the checks of gradients cover it), learning-rate schedules.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from common import begin, parser, reference, relative, scratch, yardstick
from models import all_models
from trees import CROSS_ENTROPY, backward, f32, paths

STEPS = 6
BETAS, EPSILON, DECAY = (f32(0.9), f32(0.95)), f32(1e-4), f32(0.1)


def train(model) -> tuple[list[dict], list[float]]:
    """Trains in PyTorch. Returns the job's steps and the gradient norms. Every other step is clipped to half its norm."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON)
    steps, norms = [], []
    for number in range(STEPS):
        batches = [paths(model.config.vocab_size, seed, longest=90) for seed in (10 + number, 50 + number)]
        optimiser.zero_grad()
        for batch in batches:
            backward(model, batch, CROSS_ENTROPY)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        bound = f32(norm * (0.5 if number % 2 == 0 else 10.0))
        torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
        rate = f32(1e-3 * (number + 1) / STEPS)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        norms.append(norm)
        optim = {
            "learning_rate": rate,
            "beta1": BETAS[0],
            "beta2": BETAS[1],
            "epsilon": EPSILON,
            "weight_decay": DECAY,
            "max_grad_norm": bound,
        }
        steps.append({"batches": batches, "loss": CROSS_ENTROPY, "optim": optim})
    return steps, norms


def main() -> None:
    arguments = parser(__doc__).parse_args()
    levade, report = begin(arguments)
    with scratch() as directory:
        for name, path in all_models(Path(directory), arguments.only, None):
            model = reference(path)
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            steps, norms = train(model)
            out = Path(directory) / "out"
            result = levade.run("steps", path, out, steps=steps)
            reported = [step["grad_norm"] for step in result["steps"]]
            drift = max(abs(a / b - 1.0) for a, b in zip(reported, norms, strict=True))
            report.check(f"{name}: gradient norms", drift, 1e-4, f"{norms[0]:.3f} … {norms[-1]:.3f}")
            ours = load_file(out / "checkpoint" / "model.safetensors")
            theirs = {n: p.detach() for n, p in model.named_parameters()}
            if ours.keys() != theirs.keys():
                report.expect(f"{name}: names", False, str(sorted(ours.keys() ^ theirs.keys())))
                continue
            weights = max(relative(ours[n], theirs[n]) for n in theirs)
            ways = {n: theirs[n] - before[n] for n in theirs}
            moved = max(relative(ours[n] - before[n], ways[n], ways[yardstick(n, model)]) for n in theirs)
            report.check(f"{name}: weights", weights, 1e-5)
            report.check(f"{name}: movement", moved, 1e-3)
    report.finish()


if __name__ == "__main__":
    main()
