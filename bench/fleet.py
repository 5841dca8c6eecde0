"""Compares the step times that `levade plan --fleet` simulates with those of real runs.

Measures the engine separately (passes of 1 to 64 sequences over prompts of two lengths), and fits the time of a prompt
token, of a pass, and of a sequence in a pass. Runs the recipe for a few steps in several settings (groups, tools that
take seconds, asynchronous attempts), and simulates their steps. The steps of the first two settings also give the time
of a trained token and of an optimizer step; all settings use these figures. The shape of attempts comes from the store
of each run: number and length of completions, number of prompt tokens and of trained tokens. Prints both times and
their ratio.

Not checked: several samplers, a learner on another machine, weight transfers.
"""

import argparse
import json
import os
import random
import sqlite3
import statistics
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turns import ROOT, levade, machine, parser

SETTINGS = {
    "4 groups of 4": {"groups": 4, "group_size": 4},
    "8 groups of 8": {"groups": 8, "group_size": 8},
    "8 groups of 8, tools of 3 s": {"groups": 8, "group_size": 8, "tool": 3.0},
    "8 groups of 8, tools of 3 s, a step ahead": {"groups": 8, "group_size": 8, "tool": 3.0, "staleness": 1},
}

# Metric of the number of tokens on which a step trains.
LEARNT = "training/forward_tokens"


def service(peer) -> dict[str, float]:
    """Returns the seconds of the parts, by least squares over requests of several sizes, with medians of three each."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(49152) for _ in range(count)]

    rows, seconds = [], []
    for prompt in (32, 256):
        for batch in (1, 4, 16, 64):
            for tokens in (8, 40):
                durations = [
                    peer.ask(do="generate", prompts=[ids(prompt) for _ in range(batch)], new_tokens=tokens)["seconds"]
                    for _ in range(3)
                ]
                rows.append([batch * prompt, tokens, tokens * batch])
                seconds.append(statistics.median(durations))
    prompt, batch, sequence = fit(rows, seconds)
    return {"prompt": prompt, "batch": batch, "sequence": sequence, "publish": 0.0}


def fit(rows: list[list[float]], seconds: list[float]) -> list[float]:
    """Fits the seconds of each column. Minimizes relative errors, so that short and long requests count equally."""
    weights = 1 / np.array(seconds)
    fitted, *_ = np.linalg.lstsq(np.array(rows) * weights[:, None], np.array(seconds) * weights, rcond=None)
    return [max(float(value), 0.0) for value in fitted]


def lengths(run: Path) -> list[int]:
    """Returns the number of sampled tokens of every trained attempt."""
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as db:
        query = (
            "select sum(length(segments.tokens) / 4) from segments join attempts on attempts.id = segments.attempt "
            "where kind = 'sampled' and purpose = 'train' group by attempts.id"
        )
        return [row[0] for row in db.execute(query)]


@dataclass
class Real:
    """A run of a setting."""

    name: str
    keys: list[str]
    setting: dict
    steps: list[dict]
    tokens: list[int]
    load: float

    def mean(self, metric: str) -> float:
        """Returns the mean of a metric over steps."""
        return statistics.mean(step[metric] for step in self.steps)

    def simulator_options(self) -> list[str]:
        """Returns the options that describe the attempts to the simulator."""
        attempts = self.setting["groups"] * self.setting["group_size"]
        mean = statistics.mean(self.tokens)
        # A group's prompt is computed once, and its tool results once per attempt.
        first = self.mean("prompt_length/mean")
        whole = self.mean("perf/total_num_tokens") / attempts
        prompt = first + self.setting["group_size"] * max(whole - first - mean, 0)
        values = {
            "prompt": round(prompt),
            "reply": round(mean),
            "turns": max(round(self.mean("num_turns/mean")), 1),
            "learnt": self.mean(LEARNT) / (attempts * mean + self.setting["groups"] * prompt),
            "spread": statistics.pstdev(self.tokens) / mean,
            "tool": self.setting.get("tool", 0.0),
        }
        return [str(part) for key, value in values.items() for part in (f"--{key}", value)]


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--binary", type=Path, default=ROOT / "target/release/levade", help="levade binary")
    p.add_argument("--recipe", type=Path, default=ROOT / "recipes/calculator")
    p.add_argument("--service", type=Path, help="previously measured engine times, as JSON")
    p.add_argument("--steps", type=int, default=5, help="steps of each setting; the first is excluded")
    a = p.parse_args()
    if a.service:
        found = json.loads(a.service.read_text())
    else:
        peer = levade(a, a.model)
        found = service(peer)
        peer.stop()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as directory:
        runs = []
        for name, setting in SETTINGS.items():
            runs.append(run(a, name, setting, Path(directory) / name.replace(" ", "-")))
            print(f"{name}: {runs[-1].mean('timing_s/step'):.1f} s", flush=True)
        trained = [step for one in runs[:2] for step in one.steps]
        seconds = [step["timing_s/update_actor"] for step in trained]
        found["learn"], found["update"] = fit([[step[LEARNT], 1] for step in trained], seconds)
        print("seconds: " + ", ".join(f"{name} {value:.6f}" for name, value in found.items()))
        (Path(directory) / "service.json").write_text(json.dumps(found))
        for one in runs:
            command = [
                a.binary,
                "plan",
                a.recipe,
                *one.keys,
                "--fleet",
                "1",
                "--service",
                Path(directory) / "service.json",
            ]
            output = subprocess.run([*command, *one.simulator_options()], capture_output=True, text=True, check=False)
            line = next((line for line in output.stdout.splitlines() if line.split()[:2] == ["1", "1"]), None)
            if line is None:
                raise SystemExit(f"no plan:\n{output.stdout}{output.stderr}")
            simulated, real = float(line.split()[3]), one.mean("timing_s/step")
            print(
                f"{one.name}: a step of {statistics.mean(one.tokens):.0f} tokens in {one.mean('num_turns/mean'):.1f} replies took "
                f"{real:.1f} s, simulated {simulated:.1f} s: {simulated / real:.2f} (n = {len(one.steps)}, load {one.load:.1f})"
            )


def run(a: argparse.Namespace, name: str, setting: dict, into: Path) -> Real:
    """Runs a setting with only the last phase of the recipe."""
    last = len(tomllib.loads((a.recipe / "recipe.toml").read_text())["phase"]) - 1
    keys = {
        "run.skip_phases": last,
        "model.source": a.model.resolve(),
        "engine.threads": a.threads,
        "eval.tasks": 0,
        f"phase.{last}.steps": a.steps,
        f"phase.{last}.groups": setting["groups"],
        f"phase.{last}.group_size": setting["group_size"],
        f"phase.{last}.staleness": setting.get("staleness", 0),
        "agent.tool_delay": setting.get("tool", 0.0),
        "agent.min_tool_delay": setting.get("tool", 0.0),
        "run.checkpoint_every": 0,
    }
    sets = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    log = into.with_suffix(".log")
    with log.open("w") as out:
        done = subprocess.run([a.binary, "train", a.recipe, "--run", into, *sets], stdout=out, stderr=out, check=False)
    if done.returncode:
        raise SystemExit(f"the run ended with {done.returncode}:\n{log.read_text()[-3000:]}")
    lines = [json.loads(line) for line in (into / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line][1:]
    return Real(name, sets, setting, steps, lengths(into), os.getloadavg()[0])


if __name__ == "__main__":
    main()
