"""Compares the speed of two builds of the engine, alternately in the same run.

Both execute the same requests: a training step of 512 tokens, and greedy completions at two batch sizes. Prints the
ratio of the speed of `--levade` to that of `--before`.
"""

import random
from pathlib import Path

from turns import levade, machine, parser, take_turns


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--before", type=Path, required=True, help="bench binary of the other build")
    p.add_argument("--vocabulary", type=int, default=49152, help="upper bound of token ids (exclusive)")
    arguments = p.parse_args()
    after = levade(arguments, arguments.model)
    arguments.levade = arguments.before
    before = levade(arguments, arguments.model)
    print(f"{machine()}\n{after.name}, {arguments.threads} threads")
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(arguments.vocabulary) for _ in range(count)]

    def requests(batch: int | None) -> dict:
        if batch is None:
            return {"do": "train", "tokens": ids(512)}
        return {"do": "generate", "prompts": [ids(64) for _ in range(batch)], "new_tokens": 64}

    lines = []
    for what, batch in [
        ("training step, 512 tokens", None),
        ("completions, batch 1", 1),
        ("completions, batch 16", 16),
    ]:
        print(what)
        turn = 0

        def one_round(batch=batch) -> tuple[dict, dict]:
            nonlocal turn
            turn += 1
            request = requests(batch)
            if turn % 2:
                return after.ask(**request), before.ask(**request)
            other = before.ask(**request)
            return after.ask(**request), other

        one_round()
        series = take_turns(arguments, one_round)
        lines.append(f"{what}: {series.ratio():.3f} ({series.spread()})")
    after.stop()
    before.stop()
    print("\n".join(lines))


if __name__ == "__main__":
    main()
