"""Compares greedy sampling with a KV cache with transformers' generate, vLLM or llama.cpp, alternately in the same
run.

For each batch size, every round samples new random prompts (so that prefix caches do not help), lets both sides
generate 64 tokens, and measures the complete call including the prompt. The same prompts with one new token give the
time of the prompt. Greedy completions are compared too: they agree until two tokens are so close that rounding
decides.

Not measured: sampling at a temperature, long contexts, prompts that arrive during generation.
"""

import random
import statistics
from pathlib import Path

from turns import Series, machine, pair, parser, take_turns


def prompts_of(rng: random.Random, batch: int, length: int, vocabulary: int) -> list[list[int]]:
    return [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(batch)]


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Returns the fraction of tokens before the first difference in each completion."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(b)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))
    return same / total


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--batches", default="1,16,64", help="batch sizes, separated by commas")
    p.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    p.add_argument("--new", type=int, default=64, help="new tokens per completion")
    p.add_argument("--vocabulary", type=int, default=49152, help="upper bound of token ids (exclusive)")
    p.add_argument(
        "--peer",
        choices=["torch", "vllm", "llama"],
        default="torch",
        help="peer; llama generates completions one by one",
    )
    p.add_argument(
        "--peer-model",
        type=Path,
        help="model file for the peer; for llama a GGUF file in the compared precision",
    )
    arguments = p.parse_args()
    rng = random.Random(0)
    ours, theirs = pair(arguments, f"{arguments.peer}_worker.py", arguments.peer_model)
    print(f"{machine()}\n{ours.name} against {theirs.name}, {arguments.threads} threads")
    lines = []
    for batch in map(int, arguments.batches.split(",")):
        print(f"batch {batch}, prompt {arguments.prompt}, {arguments.new} new tokens")
        same: list[float] = []
        alone: list[tuple[float, float]] = []

        def both(new_tokens: int, size: int = batch) -> tuple[dict, dict]:
            prompts = prompts_of(rng, size, arguments.prompt, arguments.vocabulary)
            request = {"do": "generate", "prompts": prompts, "new_tokens": new_tokens}
            return ours.ask(**request), theirs.ask(**request)

        def one_round(both=both, same=same, alone=alone) -> tuple[dict, dict]:
            first = both(1)
            alone.append((first[0]["seconds"], first[1]["seconds"]))
            answers = both(arguments.new)
            same.append(agreement(answers[0]["tokens"], answers[1]["tokens"]))
            return answers

        both(4)
        series: Series = take_turns(arguments, one_round)
        tokens = batch * arguments.new
        a, b = series.medians()
        prompt = [statistics.median(side) for side in zip(*alone, strict=True)]
        decode = [(tokens - batch) / (whole - first) for whole, first in zip((a, b), prompt, strict=True)]
        lines.append(
            f"batch {batch}: {tokens / a:.1f} against {tokens / b:.1f} tokens/s, ratio {series.ratio():.2f} "
            f"({series.spread()})\n"
            f"  prompt alone {prompt[0]:.3f} against {prompt[1]:.3f} s; without it {decode[0]:.1f} against "
            f"{decode[1]:.1f} tokens/s, ratio {decode[0] / decode[1]:.2f}; same tokens {statistics.mean(same):.0%}"
        )
    print("\n".join(lines))
    ours.stop()
    theirs.stop()


if __name__ == "__main__":
    main()
