"""bf16: how far Levade and PyTorch under autocast are from f32.

Both round the operands of products to bf16 and add up in f32, but autocast also rounds what comes out, so the two do not
agree with each other to more than a few hundredths. What can be checked is that Levade is no farther from the f32 result than
autocast is: the loss; the gradient of every tensor, whose error may be at most that of autocast and a quarter more; and the gradients by
kind of tensor, as the root of the mean square over all layers and two batches, at most that of autocast. The gradient of one norm can be
all but one number (in SmolLM2 it often is), and how far a single rounded number is off is chance: the second line can fail where the third holds.

Not checked here: that sampling and training agree to the bit in bf16, which is a test (`crates/engine/tests/engine/parity.rs`).
"""

import math
import re
from pathlib import Path

import torch

from common import begin, parser, reference, relative, scratch, tensors, yardstick
from models import all_models
from trees import CROSS_ENTROPY, backward, paths


def gradients(model, batch: list[dict], *, autocast: bool) -> tuple[float, dict]:
    """Loss and the gradient of every tensor."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, _ = backward(model, batch, CROSS_ENTROPY)
    return loss, {n: p.grad.clone() for n, p in model.named_parameters()}


def main() -> None:
    arguments = parser(__doc__).parse_args()
    levade, report = begin(arguments)
    with scratch() as folder:
        for name, path in all_models(Path(folder), arguments.only, arguments.model):
            model = reference(path)
            kinds: dict[str, list[tuple[float, float]]] = {}
            for seed in (2, 5):
                batch = paths(model.config.vocab_size, seed=seed, longest=150)
                exact_loss, exact = gradients(model, batch, autocast=False)
                _, theirs = gradients(model, batch, autocast=True)
                out = Path(folder) / "out"
                job = {"batch": batch, "loss": CROSS_ENTROPY, "precision": "bf16"}
                loss = levade.run("gradients", path, out, **job)["loss"]
                report.check(f"{name}: loss", abs(loss - exact_loss) / abs(exact_loss), 5e-3, f"{exact_loss:.6f}")
                ours = tensors(out)
                # Those that are nothing but rounding have no error of their own.
                errors = {
                    n: (relative(ours[n], exact[n]), relative(theirs[n], exact[n]))
                    for n in exact
                    if yardstick(n, model) == n
                }
                worst = max(errors, key=lambda n: errors[n][0] / max(errors[n][1], 1e-6))
                share = errors[worst][0] / errors[worst][1]
                report.check(f"{name}: error, as a share of autocast's", share, 1.25, f"worst {worst}")
                for n, pair in errors.items():
                    kinds.setdefault(re.sub(r"\d+", "*", n), []).append(pair)
            shares = {k: math.hypot(*(e[0] for e in v)) / math.hypot(*(e[1] for e in v)) for k, v in kinds.items()}
            worst = max(shares, key=shares.__getitem__)
            both = [errors for kind in kinds.values() for errors in kind]
            nearer = sum(mine < other for mine, other in both) / len(both)
            note = f"worst {worst}; {100 * nearer:.0f} % of the tensors are nearer"
            report.check(f"{name}: by kind, as a share of autocast's", shares[worst], 1.0, note)
    report.finish()


if __name__ == "__main__":
    main()
