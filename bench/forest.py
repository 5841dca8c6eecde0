"""Compares training on a tree of attempts that share a prompt with training on the same attempts as separate
sequences.

For token ratios of about 2, 4 and 8 (tokens of all sequences over tokens of the merged tree), measures forward and
backward of cross-entropy, alternating between: Levade on the tree; Levade on sequences of the same lengths without
common prefixes, packed alike; and PyTorch on the same sequences in batches without padding, with its head computed
only for targets. Once every token is a target, and once only the tokens that an attempt does not share, as in
reinforcement learning. In the latter case the head's work does not shrink, which bounds the gain from merging. Before
timing, the tree's loss must equal that of the separate sequences on both sides.

Not measured: the optimizer step, which does not depend on the batch.
"""

import random
import statistics
import sys

from turns import machine, pair, parser

# (attempts, shared tokens, own tokens)
SHAPES = [(8, 768, 576), (8, 768, 128), (16, 896, 64)]


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--vocabulary", type=int, default=49152, help="upper bound of token ids (exclusive)")
    p.add_argument("--rows", type=int, default=2048, help="maximum number of tokens in a PyTorch batch")
    p.add_argument("--without-torch", action="store_true", help="measure only Levade")
    arguments = p.parse_args()
    rng = random.Random(0)

    def ids(n: int) -> list[int]:
        return [rng.randrange(arguments.vocabulary) for _ in range(n)]

    ours, theirs = pair(arguments)
    print(f"{machine()}\n{ours.name} against {theirs.name}, {arguments.threads} threads")
    lines = []
    for attempts, shared, own in SHAPES:
        prompt = ids(shared)
        tree = [prompt + ids(own) for _ in range(attempts)]
        # The same lengths, but different from the first token on, so that nothing merges.
        separate = [[i, *path[1:]] for i, path in enumerate(tree)]
        for first, kind in ((1, "all tokens"), (shared, "own tokens")):
            request = {"do": "forest", "first": first}
            check = ours.ask(**request, paths=separate), theirs.ask(**request, paths=separate, rows=arguments.rows)
            if abs(check[0]["loss"] - check[1]["loss"]) > 1e-2 * abs(check[1]["loss"]):
                sys.exit(f"The losses differ: {check[0]['loss']} and {check[1]['loss']}.")
            merged = ours.ask(**request, paths=tree)
            ratio = merged["path_tokens"] / merged["tokens"]
            times: list[list[float]] = [[], [], []]
            for _ in range(4 * arguments.rounds):
                answers = [ours.ask(**request, paths=tree), ours.ask(**request, paths=separate)]
                if not arguments.without_torch:
                    answers.append(theirs.ask(**request, paths=separate, rows=arguments.rows))
                if max(answer["foreign"] for answer in answers) <= arguments.disturbance:
                    for series, answer in zip(times, answers, strict=False):
                        series.append(answer["seconds"])
                if len(times[0]) == arguments.rounds:
                    break
            if len(times[0]) < 3:
                sys.exit("Too few rounds were undisturbed for a median: run this on an idle machine.")
            tree_s, apart_s, *torch_s = (statistics.median(series) for series in times if series)
            gain = statistics.median(b / a for a, b in zip(times[0], times[1], strict=True))
            line = (
                f"{attempts} × ({shared} + {own}), {kind}: {merged['path_tokens']} tokens, merged {merged['tokens']} "
                f"(ratio {ratio:.2f}): {tree_s:.2f} s against {apart_s:.2f} s apart, {gain:.2f} times as fast, "
                f"{gain / ratio:.2f} of the ratio"
            )
            if torch_s:
                line += f"; PyTorch {torch_s[0]:.2f} s, {torch_s[0] / tree_s:.1f} times"
            lines.append(f"{line}; n = {len(times[0])}")
            print(lines[-1], flush=True)
    print("\n".join(lines))
    ours.stop()
    theirs.stop()


if __name__ == "__main__":
    main()
