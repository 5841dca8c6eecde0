"""Compares a GRPO step over a group of rollouts of several turns with TRL, alternately in the same run.

A step is: 8 rollouts of 4 turns over one prompt of 1,000 tokens, with 32 sampled tokens and 16 context tokens per
turn, then one update with the clipped loss. Both sample exactly the requested number of tokens, so that lengths are
equal. TRL samples with transformers and a cache that persists between turns, and trains on as many sequences at a time
as fit into memory, accumulating their gradients. Levade computes the prompt once and trains on the tree. Prints the
seconds of sampling, of training, and of both.

Not measured: tools, rewards, several groups.
"""

import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

from turns import Peer, levade, machine, parser


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--prompt", type=int, default=1000)
    p.add_argument("--rollouts", type=int, default=8)
    p.add_argument("--turns", type=int, default=4)
    p.add_argument("--new", type=int, default=32, help="sampled tokens per turn")
    p.add_argument("--given", type=int, default=16, help="context tokens between two turns")
    p.add_argument("--side-by-side", type=int, default=2, help="sequences per TRL batch; 8 need more than 20 GiB")
    p.add_argument("--vocabulary", type=int, default=49152, help="upper bound of token ids (exclusive)")
    arguments = p.parse_args()
    rng = random.Random(0)
    job = {name: getattr(arguments, name) for name in ("rollouts", "turns", "new", "given")}
    job |= {"prompt": [rng.randrange(2, arguments.vocabulary) for _ in range(arguments.prompt)]}
    rounds = 4 * arguments.rounds + 1
    options = {"threads": arguments.threads, "precision": arguments.precision}
    ours = levade(arguments, arguments.model)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "job.json"
        path.write_text(json.dumps(job | options | {"steps": rounds, "side_by_side": arguments.side_by_side}))
        worker = Path(__file__).with_name("trl_worker.py")
        theirs = Peer.listen([arguments.python, worker, arguments.model, path])
        print(f"{machine()}\n{ours.name} against {theirs.name}, {arguments.threads} threads")
        parts = {"sampling": [], "training": [], "seconds": []}
        for number in range(rounds):
            # A new prompt each round, so that prefix caches do not help.
            prompt = [number + 2, *job["prompt"][1:]]
            pair = ours.ask(do="group", **job | {"prompt": prompt}), theirs.ask(do="step")
            if pair[0]["mismatched"] > 0:
                sys.exit(f"{pair[0]['mismatched']} log-probabilities were not found again by training.")
            disturbed = max(answer["foreign"] for answer in pair) > arguments.disturbance
            note = "   warm-up" if number == 0 else "   dropped" if disturbed else ""
            print(f"  {pair[0]['seconds']:8.3f} s {pair[1]['seconds']:8.3f} s{note}", flush=True)
            if not note:
                for part, values in parts.items():
                    values.append((pair[0][part], pair[1][part]))
            if len(parts["seconds"]) == arguments.rounds:
                break
        if len(parts["seconds"]) < 3:
            sys.exit("Too few rounds were undisturbed for a median: run this on an idle machine.")
        drawn = arguments.rollouts * arguments.turns * arguments.new
        for part, values in parts.items():
            a, b = (statistics.median(side) for side in zip(*values, strict=True))
            ratios = sorted(theirs_s / ours_s for ours_s, theirs_s in values)
            print(
                f"{'together' if part == 'seconds' else part}: {a:.2f} s against {b:.2f} s, {drawn / a:.1f} against "
                f"{drawn / b:.1f} drawn tokens/s, ratio {statistics.median(ratios):.1f} ({ratios[0]:.1f}–{ratios[-1]:.1f}, "
                f"n = {len(ratios)})"
            )
        ours.stop()
        theirs.stop()


if __name__ == "__main__":
    main()
