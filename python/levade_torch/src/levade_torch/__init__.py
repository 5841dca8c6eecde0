"""Levade's learner on PyTorch: the verbs of `Learner` for Hugging Face models, over HTTP on rank 0.

Start it with torchrun: `torchrun --nproc-per-node 2 -m levade_torch --model DIR --run-root DIR ...`; README.md says how.
"""

PROTOCOL = 1
