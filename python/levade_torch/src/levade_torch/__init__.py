"""Levade's learner on PyTorch: implements the verbs of `Learner` for Hugging Face models, over HTTP on rank 0.

Start it with torchrun: `torchrun --nproc-per-node 2 -m levade_torch --model DIR --run-root DIR ...`. README.md
describes the options.
"""

PROTOCOL = 1
