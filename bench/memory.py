"""Compares Levade's peak memory with the memory that it plans at startup, for several sizes and a sequence of 16,384
tokens.

Each size runs in its own process: it loads a model with room for micro-batches of `batch` tokens, trains two steps on
a sequence of `path` tokens, and samples until the cache is full. Models have random weights, except for the one given
with `--model`. The peak resident size must be within a tenth of the plan.

Not measured: the memory of other programs.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from turns import levade, machine, parser

# name, configuration, micro-batch, sequence, cache in MiB
SIZES = [
    ("21 M", LlamaConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
                         vocab_size=49152, max_position_embeddings=4096, tie_word_embeddings=True), 4096, 4096, 64),
    ("SmolLM2-135M", None, 1024, 1024, 64),
    ("SmolLM2-135M", None, 4096, 4096, 256),
    ("Qwen2.5-0.5B", Qwen2Config(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                                 vocab_size=151936, max_position_embeddings=4096, tie_word_embeddings=True), 1024, 1024, 64),
]  # fmt: skip


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--long", action="store_true", help="run only the sequence of 16,384 tokens")
    arguments = p.parse_args()
    print(machine())
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="levade-memory-") as scratch:
        sizes = SIZES
        if arguments.long:
            config = AutoConfig.from_pretrained(arguments.model)
            config.max_position_embeddings = 16384
            sizes = [("SmolLM2-135M, context 16,384", config, 2048, 16384, 64)]
        for number, (name, config, batch, path, cache) in enumerate(sizes):
            directory = arguments.model
            if config is not None:
                directory = Path(scratch) / str(number)
                AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
            worst = max(worst, measure(arguments, name, directory, batch, path, cache))
    if worst > 0.1:
        sys.exit(f"a plan is off by {worst:.0%}")


def measure(arguments, name: str, directory: Path, batch: int, path: int, cache: int) -> float:
    """Trains and samples. Returns the deviation of the peak from the plan, as a fraction of the plan."""
    peer = levade(arguments, directory, context=path, batch_tokens=batch, kv_memory_mb=cache)
    rng = random.Random(0)
    vocabulary = json.loads((Path(directory) / "config.json").read_text())["vocab_size"]
    tokens = [rng.randrange(vocabulary) for _ in range(path)]
    losses = [peer.ask(do="train", tokens=tokens) for _ in range(2)]
    # Uses new prompts until the cache has been full.
    length = min(path, 1024) - 8
    for _ in range(8):
        prompts = [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(8)]
        peer.ask(do="generate", prompts=prompts, new_tokens=2)
    peak, planned = peer.peak_memory(), peer.loaded["planned"] / (1 << 30)
    off = abs(peak - planned) / planned
    print(
        f"{name}, {arguments.precision}: path {path}, micro-batch {batch}, cache {cache} MiB: peak {peak:.2f} GiB, planned {planned:.2f} "
        f"({peak / planned - 1:+.1%}); step {losses[-1]['seconds']:.1f} s, loss {losses[0]['loss']:.3f} then {losses[1]['loss']:.3f}\n"
        f"  {peer.loaded['plan']}",
        flush=True,
    )
    peer.stop()
    return off


if __name__ == "__main__":
    main()
