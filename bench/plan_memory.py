"""Compares the memory that `levade plan` predicts for a process of the PyTorch learner with its peak in a real step.

For models of four sizes with random weights: plans a recipe with a learner of two processes, starts these processes
(torchrun, gloo, f32), runs two steps over a micro-batch of the maximum size, and reads the peak resident size of each
from the kernel (VmHWM, which also counts pages of mapped files).

    VENV/bin/python bench/plan_memory.py    # an environment with levade_torch's packages; 10 GiB of memory

Not measured: GPUs, adapters, references, critics, other kinds of parallelism; the embedded engine, whose plan
`memory.py` checks.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from torch_steps import RANKS, ROOT, Group, Torchrun, inputs, train

# Hidden size, layers, heads, feed-forward, vocabulary, tokens of a micro-batch.
SIZES = {
    "25 M": (384, 8, 6, 1024, 32000, 2048),
    "134 M": (576, 30, 9, 1536, 49152, 2048),
    "110 M": (768, 12, 12, 2048, 32000, 1536),
    "317 M": (1024, 24, 16, 2816, 32000, 1024),
}
RECIPE = """
[run]
name = "memory"
[model]
source = "{model}"
context = 1024
[engine]
micro_batch_tokens = {tokens}
[[tasks]]
kind = "arithmetic"
[cluster.learner]
kind = "torch"
start = true
processes = 2
[[phase]]
kind = "rl"
steps = 1
groups = 1
group_size = 2
learning_rate = 1e-5
"""


def create_model(directory: Path, size: tuple) -> Path:
    """Creates a model of this size, with random weights and without a tokenizer."""
    hidden, layers, heads, wide, vocabulary, _ = size
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 if heads % 3 == 0 else heads // 2,
        intermediate_size=wide,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def planned(levade: Path, directory: Path, model: Path, tokens: int) -> tuple[float, str]:
    """Returns the planned GiB of a process, and the planned parts."""
    recipe = directory / "recipe.toml"
    recipe.write_text(RECIPE.format(model=model, tokens=tokens))
    command = [levade, "plan", recipe, "--config", model / "config.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"processes of PyTorch, each ([\d.]+) GiB", done.stdout)
    if not found:
        sys.exit(f"no plan:\n{done.stdout}{done.stderr}")
    return float(found[1]), done.stdout


def peak(group: Group, tokens: int, vocabulary: int) -> float:
    """Returns the GiB of the larger process after two steps."""
    rng = random.Random(0)
    for _ in range(2):
        # One micro-batch of two sequences for each rank.
        paths = [[rng.randrange(vocabulary) for _ in range(tokens // 2)] for _ in range(2 * RANKS)]
        prepared = inputs(paths, 1, 1 / (RANKS * tokens))
        train(group, [prepared[2 * rank : 2 * rank + 2] for rank in range(RANKS)], tokens)
    sizes = []
    for pid in group.processes.pids():
        status = Path(f"/proc/{pid}/status").read_text()
        sizes.append(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 2**20)
    return max(sizes)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--only", default="", help="run only the size with this name")
    p.add_argument("--verbose", action="store_true", help="print the parts of each plan")
    a = p.parse_args()
    for name, size in SIZES.items():
        if a.only not in name:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            directory, tokens = Path(scratch), size[-1]
            model = create_model(directory / "model", size)
            said, text = planned(a.levade, directory, model, tokens)
            options = {"model": model, "tokens": tokens, "no_probe": True}
            with Group(RANKS, directory / "run", Torchrun, **options) as group:
                found = peak(group, tokens, size[4])
            if a.verbose:
                print(text)
            print(
                f"{name}, {tokens} tokens: planned {said:.2f} GiB, peak {found:.2f} GiB: {said / found:.3f}", flush=True
            )


if __name__ == "__main__":
    main()
