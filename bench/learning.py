"""Compares learning curves with TRL's GRPO from the same model, on the same tasks, with the same settings and rewards.

The task has one turn: sums of two numbers up to 20, asked in words, each once before any repeats. A completion is
correct if its last number is. Both sides sample at the same temperature, normalize advantages within groups by the
deviation, clip alike, average over tokens, and step with AdamW at a constant rate, in f32. Each runs with every seed,
sequentially.

Prints the mean reward over every ten steps and over all steps, and the time until the mean of ten steps reaches
`--goal`. Then `levade eval` tests both final models on all tasks except one, four times each, since rewards during
training mostly reflect which tasks were sampled.

`--out` stores curves. Stored curves with the same settings are not measured again, so that seeds can be added later.
Delete the curves of a build that trains differently.

The criterion: Levade learns as TRL does if the mean of Levade's seeds over all steps lies between the minimum and
maximum of TRL's. It is a single number, since every further window would be another trial: even ten seeds miss the
range of three other seeds of the same process in 29 % of trials. For windows, prints how often a random division of
the same seeds into two sides has means at least as far apart (exact, over all divisions); below 5 % suggests a
difference. Prints the same for the final models.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from turns import KEEP_BLOCKS

ROOT = Path(__file__).resolve().parent.parent
GROUPS, GROUP_SIZE, MAX_TOKENS, TEMPERATURE, BETA2 = 8, 8, 32, 1.0, 0.99
WINDOW = 10
# Number of times that each task is given to the final models.
ASKED = 4
# A model of 135 million parameters solves a third of these sums before training, and nearly all after.
LARGEST = 20


def tasks() -> list[dict]:
    """Returns all sums. No row repeats: Levade would drop a repeated row, and TRL would train on it more often."""
    pairs = itertools.product(range(1, LARGEST + 1), repeat=2)
    return [{"question": f"What is {a} plus {b}? Say the number alone.", "answer": a + b} for a, b in pairs]


def recipe(arguments: argparse.Namespace, file: Path, seed: int) -> str:
    return f"""
[run]
name = "learning"
seed = {seed}
checkpoint_every = 0
[model]
source = "{arguments.model.resolve()}"
context = 256
[engine]
threads = {arguments.threads}
micro_batch_tokens = 4096
[[tasks]]
kind = "file"
path = "{file}"
held_out = 0
[agent]
max_turns = 1
max_tokens = {MAX_TOKENS}
[eval]
tasks = 0
[[phase]]
kind = "rl"
steps = {arguments.steps}
groups = {GROUPS}
group_size = {GROUP_SIZE}
temperature = {TEMPERATURE}
learning_rate = {arguments.learning_rate}
[phase.optimizer]
beta2 = {BETA2}
"""


def levade(arguments: argparse.Namespace, directory: Path, seed: int, verb: str, *more: str | Path) -> str:
    """Returns the output of `levade VERB RECIPE …`."""
    file = directory / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks()))
    (directory / "recipe.toml").write_text(recipe(arguments, file, seed))
    command = [arguments.levade, verb, directory / "recipe.toml", *more]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"levade {verb} failed: {done.stderr[-2000:]}")
    return done.stdout


def success_rate(arguments: argparse.Namespace, directory: Path, seed: int, model: Path) -> float:
    """Returns a model's fraction of correct completions at the training temperature.

    Covers all tasks except the one that a recipe reserves for training.
    """
    count = len(tasks()) - 1
    keys = [
        f"tasks.0.held_out={count}",
        f"eval.tasks={count}",
        f"eval.samples={ASKED}",
        f"eval.temperature={TEMPERATURE}",
    ]
    changes = [word for key in keys for word in ("--set", key)]
    output = levade(arguments, directory, seed, "eval", "--model", model, "--json", *changes)
    return json.loads(output)["overall"]["success"]["estimate"]


def train_levade(arguments: argparse.Namespace, directory: Path, seed: int) -> tuple[list[dict], Path]:
    run = directory / f"run-{seed}"
    levade(arguments, directory, seed, "train", "--run", run)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [
        {"reward": line["critic/score/mean"], "seconds": line["timing_s/step"]} for line in lines if "eval" not in line
    ]
    return steps, run


def train_trl(arguments: argparse.Namespace, directory: Path, seed: int) -> tuple[list[dict], Path]:
    model = directory / f"trl-{seed}"
    job = {
        "save": str(model),
        "threads": arguments.threads,
        "seed": seed,
        "steps": arguments.steps,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE,
        "learning_rate": arguments.learning_rate,
        "beta2": BETA2,
        "tasks": tasks(),
    }
    path = directory / f"job-{seed}.json"
    path.write_text(json.dumps(job))
    command = [arguments.python, ROOT / "bench/trl_learner.py", arguments.model, path]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | KEEP_BLOCKS)
    if done.returncode != 0:
        sys.exit(f"TRL failed: {done.stderr[-2000:]}")
    # TRL also prints its own dictionaries.
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')], model


def measure(arguments: argparse.Namespace, directory: Path, name: str, seed: int) -> dict:
    """Measures a curve: `steps` with reward and seconds each, and `last`, the final model's fraction of correct
    completions.
    """
    steps, model = {"Levade": train_levade, "TRL": train_trl}[name](arguments, directory, seed)
    last = success_rate(arguments, directory, seed, model)
    shutil.rmtree(model)
    return {"steps": steps, "last": last}


def load_or_measure(arguments: argparse.Namespace, directory: Path, name: str, seed: int) -> dict:
    """Returns a curve, from `--out` if it is stored there. A curve of an earlier version of this file has no `last`."""
    if arguments.out is None:
        return measure(arguments, directory, name, seed)
    settings = {
        "steps": arguments.steps,
        "learning_rate": arguments.learning_rate,
        "model": arguments.model.resolve().name,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        "temperature": TEMPERATURE,
        "beta2": BETA2,
        "tasks": len(tasks()),
    }
    file = arguments.out / f"{name.lower()}-{seed}.json"
    if file.exists():
        kept = json.loads(file.read_text())
        if kept["settings"] != settings:
            sys.exit(f"{file} was measured with {kept['settings']}, not with {settings}: give --out another folder")
        return kept
    curve = measure(arguments, directory, name, seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"settings": settings} | curve))
    part.rename(file)
    return curve


def mean_of(lines: list[dict], steps: range) -> float:
    """Returns the mean reward over some steps of a curve, in percent."""
    return statistics.mean(100 * lines[step]["reward"] for step in steps)


def windows(steps: int, length: int) -> list[range]:
    return [range(at, min(at + length, steps)) for at in range(0, steps, length)]


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def time_to(lines: list[dict], goal: float) -> float | None:
    """Returns the seconds until the mean of the last ten rewards reaches the goal."""
    for end in range(WINDOW, len(lines) + 1):
        if statistics.mean(line["reward"] for line in lines[end - WINDOW : end]) >= goal:
            return sum(line["seconds"] for line in lines[:end])
    return None


def split_probability(one: list[float], other: list[float]) -> float:
    """Returns the fraction of all divisions of these values, with these side sizes, whose means lie at least as far
    apart.
    """
    values, size = one + other, len(one)

    def mean_distance(chosen: tuple[int, ...]) -> float:
        inside = sum(values[index] for index in chosen)
        return abs(inside / size - (sum(values) - inside) / len(other))

    found = mean_distance(tuple(range(size)))
    all_of = [mean_distance(chosen) for chosen in itertools.combinations(range(len(values)), size)]
    return sum(distance >= found - 1e-9 for distance in all_of) / len(all_of)


def compare(what: str, ours: list[float], theirs: list[float]) -> bool:
    """Prints the means of both sides, in percent. Returns whether Levade's lies between the minimum and maximum of
    TRL's seeds.
    """
    sides = " % against ".join(f"{statistics.mean(side):.1f} ± {standard_error(side):.1f}" for side in (ours, theirs))
    low, high = min(theirs), max(theirs)
    spread = f"({low:.1f}–{high:.1f}); by chance {split_probability(theirs, ours):.0%}"
    print(f"{what:<13}: {sides} % {spread}")
    return low <= statistics.mean(ours) <= high


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    p.add_argument("--python", default=sys.executable, help="Python interpreter with trl")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    p.add_argument(
        "--more",
        type=int,
        nargs="*",
        default=[],
        help="additional seeds only for Levade, which takes a tenth of the time",
    )
    p.add_argument("--out", type=Path, help="directory for the curves")
    p.add_argument("--window", type=int, default=WINDOW, help="steps per average in the comparison")
    p.add_argument("--learning-rate", type=float, default=1e-5)
    p.add_argument("--goal", type=float, default=0.75)
    arguments = p.parse_args()
    with tempfile.TemporaryDirectory(prefix="levade-learning-") as directory:
        found: dict[str, list[dict]] = {"Levade": [], "TRL": []}
        both = [(seed, name) for seed in arguments.seeds for name in found]
        for seed, name in both + [(seed, "Levade") for seed in arguments.more]:
            curve = load_or_measure(arguments, Path(directory), name, seed)
            found[name].append(curve)
            lines = curve["steps"]
            means = " ".join(f"{mean_of(lines, steps):.0f}" for steps in windows(len(lines), WINDOW))
            last = f"last model {100 * curve['last']:.1f} %; " if "last" in curve else ""
            reached = time_to(lines, arguments.goal)
            when = f"{reached / 60:.1f} min" if reached else "never"
            step = statistics.median(line["seconds"] for line in lines)
            print(
                f"{name:<9} seed {seed}: {means} %; {last}{step:.1f} s a step; {arguments.goal:.0%} after {when}",
                flush=True,
            )
    sides = [found["Levade"], found["TRL"]]
    lasts = [[100 * curve["last"] for curve in side if "last" in curve] for side in sides]
    if all(lasts):
        compare("last models", *lasts)
    whole = range(arguments.steps)
    for steps in [*windows(arguments.steps, arguments.window), whole]:
        means = [[mean_of(curve["steps"], steps) for curve in side] for side in sides]
        within = compare(f"steps {steps.start + 1:>3}–{steps.stop}", *means)
    print(f"over all steps, our mean lies {'within' if within else 'outside of'} the spread of TRL's seeds")


if __name__ == "__main__":
    main()
