"""Compares logits with transformers in f32.

Checks, for the given model and for random-weight configurations of every family (single and sharded files, f32, f16
and bf16 weights, every RoPE scaling, sliding windows, layers without rotary embedding): the logits after every token
of sequences of different lengths agree to 1e-3 absolute. Levade merges the sequences into a tree; transformers runs
each separately. Some sequences are longer than the original context of the RoPE scaling.

Not checked: sampling (its distribution, its KV cache), gradients, text.
"""

from pathlib import Path

import torch

from common import begin, parser, ragged, reference, scratch, tensors
from models import all_models

BOUND = 1e-3


def main() -> None:
    arguments = parser(__doc__).parse_args()
    levade, report = begin(arguments)
    with scratch() as directory, torch.inference_mode():
        for name, path in all_models(Path(directory), arguments.only, arguments.model):
            model = reference(path)
            sequences = ragged(model.config.vocab_size, seed=1, longest=200)
            out = Path(directory) / "out"
            levade.run("logits", path, out, sequences=sequences)
            ours = tensors(out)
            worst, spread, agree, rows = 0.0, 0.0, 0, 0
            for i, sequence in enumerate(sequences):
                theirs = model(torch.tensor([sequence])).logits[0]
                mine = ours[f"logits.{i}"]
                if mine.shape != theirs.shape:
                    report.expect(f"{name}: shape of sequence {i}", False, f"{mine.shape} not {theirs.shape}")
                    continue
                # A maximum over NaNs would go unnoticed.
                difference = (mine - theirs).abs().nan_to_num(nan=float("inf"))
                worst = max(worst, difference.max().item())
                spread = max(spread, theirs.std().item())
                agree += (mine.argmax(-1) == theirs.argmax(-1)).sum().item()
                rows += len(sequence)
            report.check(name, worst, BOUND, f"std {spread:.1f}, same best token {agree}/{rows}")
    report.finish()


if __name__ == "__main__":
    main()
