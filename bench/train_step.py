"""Compares one training step with PyTorch eager, in f32 or bf16, alternately in the same run.

A step is: forward over one packed sequence of 512 tokens, cross-entropy of every token except the first, backward,
AdamW, weights ready for the next step. Before timing, both sides' losses over three steps must agree.

Not measured: trees, several sequences, torch.compile, gradient clipping.
"""

import random
import sys

from turns import machine, pair, parser, take_turns


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--tokens", type=int, default=512, help="length of the sequence")
    p.add_argument("--vocabulary", type=int, default=49152, help="upper bound of token ids (exclusive)")
    arguments = p.parse_args()
    rng = random.Random(0)
    tokens = [rng.randrange(arguments.vocabulary) for _ in range(arguments.tokens)]
    ours, theirs = pair(arguments)
    print(f"{machine()}\n{ours.name} against {theirs.name}, {arguments.threads} threads, {arguments.tokens} tokens")

    for step in range(3):
        losses = [peer.ask(do="train", tokens=tokens)["loss"] for peer in (ours, theirs)]
        print(f"  warm-up, loss {losses[0]:.6f} and {losses[1]:.6f}")
        if abs(losses[0] - losses[1]) > (1e-4 if arguments.precision == "f32" else 1e-2) * abs(losses[1]):
            sys.exit(f"The losses differ in step {step}: the two sides do not compute the same thing.")

    parts: list[tuple[dict, dict]] = []

    def one_round() -> tuple[dict, dict]:
        answers = ours.ask(do="train", tokens=tokens), theirs.ask(do="train", tokens=tokens)
        parts.append((answers[0]["parts"], answers[1]["parts"]))
        return answers

    series = take_turns(arguments, one_round)
    a, b = series.medians()
    for peer, part in zip((ours, theirs), parts[-1], strict=True):
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in part.items())
        print(f"{peer.name}, last round: {phases}; peak memory {peer.peak_memory():.1f} GiB")
    print(f"training step, {arguments.tokens} tokens: {a:.3f} s against {b:.3f} s (medians)")
    print(f"ratio {series.ratio():.2f} ({series.spread()}); {arguments.tokens / a:.0f} tokens/s")
    ours.stop()
    theirs.stop()


if __name__ == "__main__":
    main()
