"""Measures learning curves of algorithms and of asynchronous attempts, from one checkpoint.

Trains `recipes/calculator` without its phase on demonstrations, from `--model` (a checkpoint after that phase), once
for each variant and seed, and prints the success on held-out tasks over time. Finished runs are not repeated, and
stopped runs resume.

With `--slow-tools`, measures the cost of waiting for tools instead: rollouts per minute at η = 0 and η = 1 with tools
that take a given number of seconds, in steps of `--groups` groups. η = 1 can gain at most the fraction of a step in
which η = 0 leaves the processor idle (`perf/idle_fraction`).
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# PPO's critic has its own learning rate. With one update per step every ratio is 1, and MINIRL would equal RLOO bit
# for bit. So the two algorithms that clip by trust regions and complete attempts take several updates.
ALGORITHMS = {
    "grpo": {},
    "ppo": {"critic": {"learning_rate": 1e-4, "warmup": 2}},
    "rloo": {},
    "minirl": {"mini_batches": 4},
    "gspo": {"mini_batches": 4},
}


def toml(value: object) -> str:
    """Returns a value as TOML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def phase(arguments: argparse.Namespace, algorithm: str, staleness: int) -> dict:
    keys = {
        "kind": "rl",
        "algorithm": algorithm,
        "steps": arguments.steps,
        "groups": 8,
        "group_size": 8,
        "temperature": 1.2,
        "learning_rate": arguments.learning_rate,
        "staleness": staleness,
        "optimiser": {"beta2": 0.95, "warmup": 4, "schedule": "cosine", "min_lr_ratio": 0.1},
    }
    if staleness:
        # Ratios refer to the weights at the start of the step. Tokens of older weights are weighted by their distance.
        keys |= {"proximal": "recompute", "correction": {"bound": {"kind": "clamp", "high": 2.0}}}
    return keys | ALGORITHMS[algorithm]


def train(arguments: argparse.Namespace, name: str, keys: dict, seed: int, *changes: str) -> list[dict]:
    """Runs a variant to its end. Returns its metrics."""
    directory = arguments.out / f"{name}-seed{seed}"
    command = [arguments.levade, "train", ROOT / "recipes/calculator", "--run", directory]
    sets = [
        f"model.source={arguments.model.resolve()}",
        f"run.seed={seed}",
        f"engine.precision={arguments.precision}",
        "eval.unseen_wordings=0",
        "run.keep=1",
        f"phase=[{toml(keys)}]",
        *changes,
    ]
    command += [part for change in sets for part in ("--set", change)]
    done = directory / "done"
    if not done.exists():
        if (directory / "recipe.toml").exists():
            command.append("--resume")
        arguments.out.mkdir(parents=True, exist_ok=True)
        with (arguments.out / f"{directory.name}.log").open("a") as log:
            status = subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL).returncode
        if status != 0:
            sys.exit(f"{directory.name} ended with {status}; see {log.name}")
        done.touch()
        # No run resumes from these checkpoints, which take gigabytes.
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def curve(lines: list[dict]) -> dict[int, float]:
    return {line["step"]: line["eval/success"] for line in lines if "eval" in line}


def minutes(lines: list[dict]) -> float:
    return sum(line.get("timing_s/step", 0.0) for line in lines) / 60


def row(name: str, curves: list[dict[int, float]]) -> str:
    cells = []
    for step in sorted(curves[0]):
        values = [100 * one[step] for one in curves if step in one]
        spread = f" ({min(values):.0f}–{max(values):.0f})" if len(values) > 1 else ""
        cells.append(f"{statistics.mean(values):.1f}{spread}")
    return f"| {name} | " + " | ".join(cells) + " |"


def slow_tools(arguments: argparse.Namespace, groups: int) -> None:
    """Prints rollouts per minute at η = 0 and η = 1 with steps of `groups` groups."""
    rates = []
    for staleness in (0, 1):
        # The same step for both.
        keys = phase(arguments, "grpo", 0) | {"groups": groups, "steps": 32, "staleness": staleness}
        wait = [f"agent.{key}={arguments.slow_tools}" for key in ("tool_delay", "tool_delay_least")]
        lines = train(arguments, f"slow-{groups}-{staleness}", keys, 1, *wait, "eval.tasks=0")
        # Skips the first steps, which fill the queue of asynchronous attempts.
        steps = [line["timing_s/step"] for line in lines if line.get("kind") == "grpo"][2:]
        rollouts = groups * keys["group_size"]
        rates.append(rollouts * 60 / statistics.mean(steps))
        print(
            f"{rollouts} rollouts a step, η = {staleness}: {rates[-1]:.1f} rollouts a minute, {len(steps)} steps",
            flush=True,
        )
    print(f"{rollouts} rollouts a step: ratio {rates[1] / rates[0]:.2f}", flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--model", type=Path, required=True, help="checkpoint directory of a model trained on demonstrations"
    )
    p.add_argument("--out", type=Path, required=True, help="directory of the runs")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--precision", choices=["f32", "bf16"], default="bf16")
    p.add_argument("--steps", type=int, default=60)
    p.add_argument(
        "--learning-rate",
        type=float,
        default=1e-5,
        help="learning rate; larger ones destabilize attempts that run four steps ahead",
    )
    p.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of GRPO; the other algorithms use the first"
    )
    p.add_argument("--slow-tools", type=float, help="duration of a tool call, in seconds; measures rollouts per minute")
    p.add_argument(
        "--groups", type=int, nargs="+", default=[8], help="groups of eight rollouts per step, with --slow-tools"
    )
    arguments = p.parse_args()

    if arguments.slow_tools:
        for groups in arguments.groups:
            slow_tools(arguments, groups)
        return

    evaluation = (f"eval.every={arguments.steps // 6}", "eval.tasks=100")
    table = []
    for staleness in (0, 1, 4):
        runs = [
            train(arguments, f"grpo-{staleness}", phase(arguments, "grpo", staleness), seed, *evaluation)
            for seed in arguments.seeds
        ]
        table.append(row(f"grpo, η = {staleness}", [curve(lines) for lines in runs]))
        oldest = max(line.get("training/staleness/max", 0.0) for lines in runs for line in lines)
        print(f"{table[-1]} {statistics.mean(map(minutes, runs)):.1f} min, oldest token {oldest:.0f}", flush=True)
    for algorithm in list(ALGORITHMS)[1:]:
        lines = train(arguments, algorithm, phase(arguments, algorithm, 0), arguments.seeds[0], *evaluation)
        table.append(row(algorithm, [curve(lines)]))
        print(f"{table[-1]} {minutes(lines):.1f} min", flush=True)


if __name__ == "__main__":
    main()
