"""bf16: how far Dressage and PyTorch under autocast are from f32.

Both round the operands of products to bf16 and add up in f32, but autocast also rounds what comes out, so the two do not
agree with each other to more than a few hundredths. What can be checked is that Dressage is no farther from the f32 result than
autocast is: the loss, and the gradient of every tensor, whose error may be at most that of autocast and a quarter more.

Not checked here: that sampling and training agree to the bit in bf16, which is a test (`crates/engine/tests/parity.rs`).
"""

from pathlib import Path

import torch
from common import begin, parser, reference, relative, scratch, tensors
from models import all_models
from trees import CROSS_ENTROPY, backward, paths


def main() -> None:
    arguments = parser(__doc__).parse_args()
    dressage, report = begin(arguments)
    with scratch() as folder:
        for name, path in all_models(Path(folder), arguments.only, arguments.model):
            model = reference(path)
            batch = paths(model.config.vocab_size, seed=2, longest=150)

            def gradients(autocast: bool, model=model, batch=batch) -> tuple[float, dict]:
                model.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss, _ = backward(model, batch, CROSS_ENTROPY)
                return loss, {n: p.grad.clone() for n, p in model.named_parameters()}

            exact_loss, exact = gradients(False)
            _, theirs = gradients(True)
            out = Path(folder) / "out"
            job = {"batch": batch, "loss": CROSS_ENTROPY, "precision": "bf16"}
            loss = dressage.run("gradients", path, out, **job)["loss"]
            report.check(f"{name}: loss", abs(loss - exact_loss) / abs(exact_loss), 5e-3, f"{exact_loss:.6f}")
            ours = tensors(out)
            errors = {n: (relative(ours[n], exact[n]), relative(theirs[n], exact[n])) for n in exact}
            worst = max(errors, key=lambda n: errors[n][0] / max(errors[n][1], 1e-6))
            mine, other = (sorted(e[i] for e in errors.values())[len(errors) // 2] for i in (0, 1))
            note = f"worst {worst}; medians {mine:.1e}, autocast {other:.1e}"
            report.check(f"{name}: error, as a share of autocast's", errors[worst][0] / errors[worst][1], 1.25, note)
    report.finish()


if __name__ == "__main__":
    main()
