"""Compares gradients on the merged tree with PyTorch on each sequence, in f32.

Checks, for the given model and for every random-weight configuration: the loss to 1e-5 of its terms, and the gradient
of every tensor to 1e-4, as ||a − b|| / ||b||. Losses: cross-entropy, and PPO's clipped loss (single and dual clip,
terms inside and beyond the bounds) with each KL estimator. Sequences have different lengths and share prefixes, shared
tokens are targets of several sequences with different terms, and one sequence is trained at another temperature.

Not checked: the optimizer (optimizer.py), losses that the engine rejects.
"""

from pathlib import Path

from common import Report, begin, parser, reference, relative, scratch, tensors, yardstick
from models import all_models
from trees import CROSS_ENTROPY, backward, grpo, off_policy, paths

LOSSES = {
    "cross-entropy": CROSS_ENTROPY,
    "clip, k3": grpo("k3"),
    "dual clip, k2": grpo("k2", dual=1.5),
    "clip, k1": grpo("k1"),
}


def compare(report: Report, what: str, ours: dict, model) -> None:
    """Prints one line for the tensor with the largest error."""
    theirs = {name: p.grad for name, p in model.named_parameters()}
    missing, extra = theirs.keys() - ours.keys(), ours.keys() - theirs.keys()
    if missing or extra:
        report.expect(f"{what}: names", False, f"missing {sorted(missing)}, unknown {sorted(extra)}")
    wrong = [name for name in theirs.keys() & ours.keys() if ours[name].shape != theirs[name].shape]
    if wrong:
        report.expect(f"{what}: shapes", False, str(sorted(wrong)))
    errors = {
        n: relative(ours[n], theirs[n], theirs[yardstick(n, model)])
        for n in theirs.keys() & ours.keys()
        if n not in wrong
    }
    if errors:
        worst = max(errors, key=errors.__getitem__)
        report.check(f"{what}: {len(errors)} tensors", errors[worst], 1e-4, f"worst {worst}")


def main() -> None:
    arguments = parser(__doc__).parse_args()
    levade, report = begin(arguments)
    with scratch() as directory:
        for name, path in all_models(Path(directory), arguments.only, arguments.model):
            model = reference(path)
            for kind, loss in LOSSES.items():
                batch = paths(model.config.vocab_size, seed=2, longest=150)
                if loss is not CROSS_ENTROPY:
                    off_policy(model, batch, loss, seed=3)
                model.zero_grad()
                theirs, magnitude = backward(model, batch, loss)
                out = Path(directory) / "out"
                ours = levade.run("gradients", path, out, batch=batch, loss=loss)["loss"]
                report.check(f"{name}, {kind}: loss", abs(ours - theirs) / magnitude, 1e-5, f"{theirs:.6f}")
                compare(report, f"{name}, {kind}", tensors(out), model)
    report.finish()


if __name__ == "__main__":
    main()
