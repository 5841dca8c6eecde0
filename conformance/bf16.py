"""Compares the bf16 errors of Levade and of PyTorch under autocast, both against f32.

Both round the operands of matrix multiplications to bf16 and accumulate in f32, but autocast also rounds the results.
So they agree with each other only to a few hundredths. The check is that Levade's error is at most that of autocast:

- for the loss;
- for the gradient of every tensor, with a tolerance of 25 %;
- for the gradients by kind of tensor, as the root mean square over all layers and two batches.

The gradient of a norm can have a single dominant component (in SmolLM2 it often does), and the rounding error of a
single number is random. So the second check can fail while the third holds.

Not checked: bit-identical sampling and training in bf16, which a Rust test covers
(`crates/engine/tests/engine/parity.rs`).
"""

import math
import re
from pathlib import Path

import torch

from common import begin, parser, reference, relative, scratch, tensors, yardstick
from models import all_models
from trees import CROSS_ENTROPY, backward, paths


def gradients(model, batch: list[dict], *, autocast: bool) -> tuple[float, dict]:
    """Computes the loss and the gradient of every tensor."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, _ = backward(model, batch, CROSS_ENTROPY)
    return loss, {n: p.grad.clone() for n, p in model.named_parameters()}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    levade, report = begin(arguments)
    with scratch() as directory:
        for name, path in all_models(Path(directory), arguments.only, arguments.model):
            model = reference(path)
            kinds: dict[str, list[tuple[float, float]]] = {}
            for seed in (2, 5):
                batch = paths(model.config.vocab_size, seed=seed, longest=150)
                exact_loss, exact = gradients(model, batch, autocast=False)
                _, theirs = gradients(model, batch, autocast=True)
                out = Path(directory) / "out"
                job = {"batch": batch, "loss": CROSS_ENTROPY, "precision": "bf16"}
                loss = levade.run("gradients", path, out, **job)["loss"]
                report.check(f"{name}: loss", abs(loss - exact_loss) / abs(exact_loss), 5e-3, f"{exact_loss:.6f}")
                ours = tensors(out)
                # Skips gradients that are only rounding noise, which have no meaningful error.
                errors = {
                    n: (relative(ours[n], exact[n]), relative(theirs[n], exact[n]))
                    for n in exact
                    if yardstick(n, model) == n
                }
                worst = max(errors, key=lambda n: errors[n][0] / max(errors[n][1], 1e-6))
                ratio = errors[worst][0] / errors[worst][1]
                report.check(f"{name}: error, as a fraction of autocast's", ratio, 1.25, f"worst {worst}")
                for n, pair in errors.items():
                    kinds.setdefault(re.sub(r"\d+", "*", n), []).append(pair)
            ratios = {k: math.hypot(*(e[0] for e in v)) / math.hypot(*(e[1] for e in v)) for k, v in kinds.items()}
            worst = max(ratios, key=ratios.__getitem__)
            both = [errors for kind in kinds.values() for errors in kind]
            nearer = sum(mine < other for mine, other in both) / len(both)
            note = f"worst {worst}; {100 * nearer:.0f} % of the tensors are nearer"
            report.check(f"{name}: by kind, as a fraction of autocast's", ratios[worst], 1.0, note)
    report.finish()


if __name__ == "__main__":
    main()
