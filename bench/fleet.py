"""The simulated fleet beside a real run: does `dressage plan --fleet` say how long a step takes?

Measures the engine alone (passes of 1 to 32 sequences over prompts of two lengths) and fits from that how long a token of a prompt, a pass and a sequence in
it take. Runs the recipe for a few steps in each of some settings (groups, tools that take seconds, attempts that run ahead), and lets the simulator say how
long their steps take. The first setting also says how long a token takes to learn from; the others use its figure. What attempts are like is taken from the
record of each run: how many replies they have, how long these are, how many tokens are prompts and how many are learnt from. Prints both and their ratio.

Not here: several samplers, a learner elsewhere, weights on their way.
"""

import json
import os
import random
import sqlite3
import statistics
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from turns import ROOT, dressage, machine, parser

SETTINGS = {
    "4 groups of 4": {"groups": 4, "group_size": 4},
    "8 groups of 8": {"groups": 8, "group_size": 8},
    "8 groups of 8, tools of 3 s": {"groups": 8, "group_size": 8, "tool": 3.0},
    "8 groups of 8, tools of 3 s, a step ahead": {"groups": 8, "group_size": 8, "tool": 3.0, "staleness": 1},
}


def service(peer) -> dict[str, float]:
    """Seconds of the parts, by least squares over requests of several sizes, medians of three each."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(49152) for _ in range(count)]

    rows, seconds = [], []
    for prompt in (32, 256):
        for batch in (1, 4, 16, 32):
            for tokens in (8, 40):
                asked = [
                    peer.ask(do="generate", prompts=[ids(prompt) for _ in range(batch)], new_tokens=tokens)["seconds"]
                    for _ in range(3)
                ]
                rows.append([batch * prompt, tokens, tokens * batch])
                seconds.append(statistics.median(asked))
    # Relative errors count: short requests say as much as long ones.
    weights = 1 / np.array(seconds)
    fitted, *_ = np.linalg.lstsq(np.array(rows) * weights[:, None], np.array(seconds) * weights, rcond=None)
    prompt, batch, sequence = (max(float(value), 0.0) for value in fitted)
    return {"prompt": prompt, "batch": batch, "sequence": sequence, "update": 0.0, "publish": 0.0}


def lengths(run: Path) -> list[int]:
    """Sampled tokens of every attempt that was trained."""
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as db:
        query = (
            "select sum(length(segments.tokens) / 4) from segments join attempts on attempts.id = segments.attempt "
            "where kind = 'sampled' and purpose = 'train' group by attempts.id"
        )
        return [row[0] for row in db.execute(query)]


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--binary", type=Path, default=ROOT / "target/release/dressage", help="the program")
    p.add_argument("--recipe", type=Path, default=ROOT / "recipes/calculator")
    p.add_argument("--checkpoint", type=Path, required=True, help="a model that has imitated, so that it calls tools")
    p.add_argument("--service", type=Path, help="seconds that were measured before, as JSON")
    p.add_argument("--steps", type=int, default=5, help="of each setting; the first is left out")
    a = p.parse_args()
    if a.service:
        found = json.loads(a.service.read_text())
    else:
        peer = dressage(a, a.checkpoint)
        found = service(peer)
        peer.stop()
    print(f"{machine()}\nseconds: " + ", ".join(f"{name} {value:.6f}" for name, value in found.items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        seconds = Path(folder) / "service.json"
        text = (a.recipe / "recipe.toml").read_text()
        # The last phase alone.
        before, *phases = text.split("[[phase]]")
        work = Path(folder) / "recipe.toml"
        work.write_text(before + "[[phase]]" + phases[-1])
        for name, setting in SETTINGS.items():
            run = Path(folder) / name.replace(" ", "-")
            keys = {
                "model.source": a.checkpoint.resolve(),
                "engine.threads": a.threads,
                "eval.tasks": 0,
                "phase.0.steps": a.steps,
                "phase.0.groups": setting["groups"],
                "phase.0.group_size": setting["group_size"],
                "phase.0.staleness": setting.get("staleness", 0),
                "agent.tool_delay": setting.get("tool", 0.0),
                "agent.tool_delay_least": setting.get("tool", 0.0),
                "run.checkpoint_every": 0,
            }
            sets = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
            log = run.with_suffix(".log")
            with log.open("w") as out:
                done = subprocess.run(
                    [a.binary, "train", work, "--run", run, *sets], stdout=out, stderr=out, check=False
                )
            if done.returncode:
                raise SystemExit(f"the run ended with {done.returncode}:\n{log.read_text()[-3000:]}")
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            steps = [line for line in lines if "timing_s/step" in line][1:]
            tokens = lengths(run)
            mean = statistics.mean(tokens)
            turns = statistics.mean(step["num_turns/mean"] for step in steps)
            learnt = statistics.mean(step["training/forward_tokens"] for step in steps)
            if "learn" not in found:
                found["learn"] = sum(step["timing_s/update_actor"] for step in steps) / (learnt * len(steps))
                print(f"a learnt token takes {found['learn']:.6f} s", flush=True)
                seconds.write_text(json.dumps(found))
            groups, size = setting["groups"], setting["group_size"]
            # A group's prompt is computed once, and what its tools say for each attempt.
            first = statistics.mean(step["prompt_length/mean"] for step in steps)
            whole = statistics.mean(step["perf/total_num_tokens"] for step in steps) / (groups * size)
            prompt = first + size * max(whole - first - mean, 0)
            share = learnt / (groups * (size * mean + prompt))
            told = [
                "--prompt",
                round(prompt),
                "--reply",
                round(mean),
                "--turns",
                max(round(turns), 1),
                "--learnt",
                share,
            ]
            told += ["--spread", statistics.pstdev(tokens) / mean, "--tool", setting.get("tool", 0.0)]
            command = [a.binary, "plan", work, *sets, "--fleet", 1, "--service", seconds, *told]
            said = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
            line = next((line for line in said.stdout.splitlines() if line.split()[:2] == ["1", "1"]), None)
            if line is None:
                raise SystemExit(f"no plan:\n{said.stdout}{said.stderr}")
            simulated = float(line.split()[3])
            real = statistics.mean(step["timing_s/step"] for step in steps)
            load = os.getloadavg()[0]
            print(
                f"{name}: a step of {mean:.0f} tokens in {turns:.1f} replies took {real:.1f} s, simulated {simulated:.1f} s: "
                f"{simulated / real:.2f} (n = {len(steps)}, load {load:.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
