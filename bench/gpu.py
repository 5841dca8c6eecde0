"""Measures what PyTorch and transformers reach on an NVIDIA GPU: the reference for Levade's future CUDA device.

Uses random weights of three shapes, in bf16 with scaled-dot-product attention. A training step is forward, mean
cross-entropy, backward and fused AdamW on bf16 weights with bf16 moments, eager and compiled, for several packed
lengths. Generation is greedy, from prompts of 128 tokens. Prints medians of several rounds after a warm-up, with the
fraction of the device's dense bf16 peak that the step's matrix multiplications reach.

`--device cpu` runs the smallest cases on any machine, to test the script itself. Not measured: Levade.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

SHAPES = {
    "SmolLM2-135M": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "Qwen2.5-1.5B": Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
}  # fmt: skip
# Dense bf16 TFLOP/s, by device name.
PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device: str, rounds: int, work) -> float:
    """Returns the median seconds of `work`, after two warm-up rounds."""
    seconds = []
    for round_ in range(rounds + 2):
        sync(device)
        start = time.perf_counter()
        work()
        sync(device)
        if round_ >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def products(model, config, rows: int, length: int) -> float:
    """Returns the floating-point operations of one step's matrix multiplications over `rows` sequences of `length`
    tokens.

    These are 6 per weight and token, plus attention.
    """
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    weights += config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    attention = 6 * config.num_hidden_layers * config.hidden_size * length  # causal: half of 12
    return float(rows * length) * (6 * weights + attention)


def train(arguments, name: str, rows: int, length: int, compiled: bool) -> dict:
    config = SHAPES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").to(
        arguments.device
    )
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    run = torch.compile(model) if compiled else model
    ids = torch.randint(config.vocab_size, (rows, length), device=arguments.device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        logits = run(input_ids=ids, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        optimiser.step()

    seconds = timed(arguments.device, arguments.rounds, step)
    flops = products(model, config, rows, length)
    return {"seconds": seconds, "tokens_per_s": rows * length / seconds, "tflops": flops / seconds / 1e12}


def generate(arguments, name: str, batch: int, new: int) -> dict:
    config = SHAPES[name]
    torch.manual_seed(0)
    model = (
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        .to(arguments.device)
        .eval()
    )
    model.generation_config.eos_token_id = None
    ids = torch.randint(config.vocab_size, (batch, 128), device=arguments.device)

    def reply() -> None:
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )

    seconds = timed(arguments.device, max(1, arguments.rounds // 2), reply)
    return {"seconds": seconds, "tokens_per_s": batch * new / seconds}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = p.parse_args()
    small = arguments.device == "cpu"
    device = "CPU" if small else torch.cuda.get_device_name()
    peak = next((peak for name, peak in PEAKS.items() if name in device), None)
    print(f"{device}, torch {torch.__version__}")
    found = []

    def note(what: str, figures: dict) -> None:
        share = f", {figures['tflops'] / peak:.0%} of peak" if peak and "tflops" in figures else ""
        print(f"{what}: {1e3 * figures['seconds']:.1f} ms, {figures['tokens_per_s']:.0f} tokens/s{share}", flush=True)
        found.append({"what": what} | figures)

    for name in ["SmolLM2-135M"] if small else SHAPES:
        for rows, length in [(1, 64)] if small else [(1, 512), (1, 2048), (8, 2048)]:
            for compiled in [False] if small else [False, True]:
                kind = "compiled" if compiled else "eager"
                note(f"{name}, step of {rows} × {length}, {kind}", train(arguments, name, rows, length, compiled))
                torch.compiler.reset()
        for batch in [1] if small else [1, 64, 256]:
            new = 8 if small else 128
            note(f"{name}, generate, batch {batch}, {new} new", generate(arguments, name, batch, new))
        if not small:
            print(f"  peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
            torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "figures": found}, indent=1))


if __name__ == "__main__":
    main()
