"""Compares all combinations of sampler (embedded engine, vLLM, SGLang) and learner (embedded engine, PyTorch) on one
recipe.

Runs the last phase of a recipe from a model trained on demonstrations, once for each combination, with one seed.
Checks that each run ends, that its success on held-out tasks is not below the 95 % interval of the first run, which
uses only the embedded engine, and that the run reports the difference between sampler and learner.

With `--kill`, kills (kill -9) `levade`, a server and a rank of the learner during each run. The run must continue on
its own, or with --resume if `levade` was killed. Prints the processor seconds of Levade, of the servers and of the
learner.

With `--shared`, vLLM and PyTorch share their devices (`placement = "colocated"`). On CPUs, vLLM's sleep mode comes
from the plugin of sleep.py, and this script runs in that plugin's Python. Otherwise the script needs no packages;
vLLM, SGLang and `levade_torch` have their own environments:

    python3 conformance/combinations.py --checkpoint runs/calculator/checkpoints/step-000006 --torch TORCH/bin/python \\
        --vllm VLLM/bin/python

Not checked: GPUs, several servers, several machines, weights over a process group.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import sglang_cpu

ROOT = Path(__file__).resolve().parent.parent
TICKS = os.sysconf("SC_CLK_TCK")
# Substrings of command lines by part of a run. The learner comes first, since paths in its command line may name
# servers.
PARTS = {"learner": ("levade_torch", "torchrun", "torch.distributed"), "server": ("vllm", "VLLM", "sglang")}
# On CPUs, vLLM 0.32 crashes on requests with a seed and a chunked prompt.
SERVER = {
    "vllm": ["--enforce-eager", "--dtype", "float32", "--no-enable-chunked-prefill"],
    "sglang": [*sglang_cpu.FLAGS, "--max-total-tokens", "16384"],
}
# Environment variables that servers on CPUs need.
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1800",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def processes() -> dict[int, tuple[int, str, float]]:
    """Returns all processes: parent, command line, processor seconds."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        found[int(entry.name)] = int(stat[1]), words, (int(stat[11]) + int(stat[12])) / TICKS
    return found


def descendants(root: int) -> dict[int, tuple[str, float]]:
    """Returns a process and all its descendants: command line, processor seconds."""
    everything, found = processes(), [root]
    for pid in found:
        found.extend(child for child, (parent, *_) in everything.items() if parent == pid)
    return {pid: everything[pid][1:] for pid in found if pid in everything}


def part_of(pid: int, root: int, words: str) -> str:
    """Returns the part of a run to which a process belongs."""
    if pid == root:
        return "levade"
    return next((part for part, names in PARTS.items() if any(name in words for name in names)), "levade")


@dataclass
class Run:
    """A combination and its results."""

    name: str
    folder: Path
    command: list[str]
    seconds: float
    spent: dict[int, tuple[str, float]] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)

    def lines(self) -> list[dict]:
        """Returns the metrics so far."""
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return []
        # The last line may be incomplete.
        complete_lines = file.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in complete_lines.splitlines() if line]

    def steps(self) -> list[dict]:
        """Returns the metrics of training steps."""
        return [line for line in self.lines() if "timing_s/step" in line]

    def follow(self, plan: dict[str, int]) -> None:
        """Runs to the end, and kills parts at the steps of a plan."""
        until, left = time.monotonic() + self.seconds, dict(plan)
        resume: list[str] = []
        if (self.folder / "recipe.toml").exists():
            # Truncates the phase. The remaining steps must suffice for all kills.
            resume = ["--resume"]
            left = {part: max(step, len(self.steps()) + 1 + index) for index, (part, step) in enumerate(plan.items())}
        while True:
            log = (self.folder.with_suffix(".log")).open("a")
            process = subprocess.Popen(
                [*self.command, *resume], stdout=log, stderr=log, env=os.environ | VARIABLES, start_new_session=True
            )
            try:
                while process.poll() is None:
                    self.look(process.pid)
                    done = len(self.steps())
                    for part in [part for part, step in left.items() if step <= done]:
                        self.kill(process.pid, part)
                        del left[part]
                    if time.monotonic() > until:
                        sys.exit(f"{self.name} did not end within {self.seconds:.0f} s; see {log.name}")
                    time.sleep(1.0)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                log.close()
            if process.returncode == -signal.SIGKILL and self.killed[-1] == "levade":
                resume = ["--resume"]
                continue
            if process.returncode:
                sys.exit(f"{self.name} ended with {process.returncode}:\n" + Path(log.name).read_text()[-3000:])
            return

    def look(self, root: int) -> None:
        """Records the processor time of the processes."""
        for pid, (words, seconds) in descendants(root).items():
            # Exited processes have no command line until they are reaped.
            part = part_of(pid, root, words) if words else self.spent.get(pid, ("levade", 0.0))[0]
            self.spent[pid] = part, seconds

    def kill(self, root: int, part: str) -> None:
        """Kills the process of a part that has used the most processor time."""
        found = [
            (seconds, pid) for pid, (words, seconds) in descendants(root).items() if part_of(pid, root, words) == part
        ]
        victim = root if part == "levade" else max(found)[1]
        os.kill(victim, signal.SIGKILL)
        self.killed.append(part)

    def processor(self) -> dict[str, float]:
        """Returns the processor seconds of each part."""
        parts = {}
        for part, seconds in self.spent.values():
            parts[part] = parts.get(part, 0.0) + seconds
        return parts


def success(lines: list[dict]) -> tuple[float, float, tuple[float, float]]:
    """Returns the success on held-out tasks before and after, with the 95 % interval of the latter."""
    found = [line for line in lines if "eval/success" in line]
    if len(found) < 2:
        sys.exit(f"{len(found)} evaluations were recorded, and one before and one after are needed")
    last = found[-1]
    return found[0]["eval/success"], last["eval/success"], (last["eval/success_low"], last["eval/success_high"])


def recipe_keys(sampler: str, learner: str, options: argparse.Namespace) -> dict[str, str]:
    """Returns the recipe keys of a sampler and a learner. Texts and lists in JSON are valid TOML."""
    keys = {}
    if sampler != "embedded":
        keys["cluster.samplers"] = (
            f'{{kind = "{sampler}", start = true, python = {json.dumps(getattr(options, sampler))}, '
            f"args = {json.dumps(SERVER[sampler])}, environment = {json.dumps(list(VARIABLES))}, start_seconds = 1800}}"
        )
    if options.shared and (sampler, learner) == ("vllm", "torch"):
        keys["cluster.placement"] = "shared"
    if learner != "embedded":
        keys["cluster.learner"] = (
            f'{{kind = "torch", start = true, python = {json.dumps(options.torch)}, processes = 2}}'
        )
    return keys


def untied(checkpoint: Path, into: Path) -> Path:
    """Writes a model whose head is untied from its embedding: on CPUs, vLLM keeps the old head of a tied model."""
    if into.exists():
        return into
    config = json.loads((checkpoint / "config.json").read_text())
    if not config.get("tie_word_embeddings"):
        return checkpoint
    half = into.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    for file in checkpoint.iterdir():
        if not file.name.startswith(("optimiser", "model")):
            shutil.copy(file, half)
    (half / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with (checkpoint / "model.safetensors").open("rb") as source, (half / "model.safetensors").open("wb") as out:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        base, end = source.tell(), source.seek(0, os.SEEK_END)
        head = dict(header["model.embed_tokens.weight"])
        first, last = head["data_offsets"]
        head["data_offsets"] = [end - base, end - base + last - first]
        encoded_header = json.dumps(header | {"lm_head.weight": head}).encode()
        encoded_header += b" " * (-len(encoded_header) % 8)
        out.write(len(encoded_header).to_bytes(8, "little") + encoded_header)
        for at, count in ((base, end - base), (base + first, last - first)):
            source.seek(at)
            out.write(source.read(count))
    half.rename(into)
    return into


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--binary", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--recipe", type=Path, default=ROOT / "recipes/calculator")
    p.add_argument(
        "--checkpoint", type=Path, required=True, help="safetensors checkpoint of a model trained on demonstrations"
    )
    p.add_argument("--torch", help="Python interpreter with levade_torch")
    p.add_argument("--vllm", help="Python interpreter with vLLM")
    p.add_argument("--sglang", help="Python interpreter with SGLang")
    p.add_argument("--only", default="", help="combinations whose names contain this, and the embedded one")
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--tasks", type=int, default=100, help="number of held-out tasks")
    p.add_argument("--set", action="append", default=[], help="additional recipe keys")
    p.add_argument("--kill", action="store_true", help="kill each part once during each run")
    p.add_argument("--shared", action="store_true", help="colocate vLLM and PyTorch on the same devices")
    p.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="directory of the runs; finished runs are reused, and other runs resume",
    )
    p.add_argument("--seconds", type=float, default=4 * 3600, help="timeout of a run, in seconds")
    options = p.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.shared:
        from sleep import write_plugin

        if not (options.folder / "plugin").exists():
            write_plugin(options.folder / "plugin")
        VARIABLES["PYTHONPATH"] = str(options.folder / "plugin")
    if options.sglang:
        VARIABLES.update(sglang_cpu.variables(options.folder / "driver"))
    samplers = ["embedded", *(name for name in ("vllm", "sglang") if getattr(options, name))]
    learners = ["embedded", *(["torch"] if options.torch else [])]
    names = [(sampler, learner) for sampler in samplers for learner in learners]
    chosen = [names[0], *(pair for pair in names[1:] if options.only in "+".join(pair))]
    last_phase = len(tomllib.loads((options.recipe / "recipe.toml").read_text())["phase"]) - 1
    bounds, failures = None, 0
    for sampler, learner in chosen:
        name = f"{sampler}+{learner}"
        keys = {
            **recipe_keys(sampler, learner, options),
            "run.skip_phases": last_phase,
            "model.source": untied(options.checkpoint.resolve(), options.folder / "untied"),
            f"phase.{last_phase}.steps": options.steps,
            "eval.tasks": options.tasks,
            "run.checkpoint_every": 5,
        }
        sets = [f"{key}={value}" for key, value in keys.items()] + options.set
        directory = options.folder / name
        command = [str(options.binary), "train", str(options.recipe), "--run", str(directory)]
        run = Run(name, directory, [*command, *(part for key in sets for part in ("--set", key))], options.seconds)
        started = time.monotonic()
        parts = [
            "levade",
            *(["server"] if sampler != "embedded" else []),
            *(["learner"] if learner != "embedded" else []),
        ]
        plan = {part: 3 + options.steps * index // (len(parts) + 1) for index, part in enumerate(parts)}
        ended = directory.with_suffix(".ended")
        if not ended.exists():
            run.follow(plan if options.kill else {})
            took = {"seconds": time.monotonic() - started, "processor": run.processor(), "killed": run.killed}
            ended.write_text(json.dumps(took))
        took = json.loads(ended.read_text())
        first, last, own = success(run.lines())
        bounds = bounds or own
        steps = run.steps()
        differs = {
            key: max(step[key] for step in steps if key in step) for key in MISMATCH if any(key in s for s in steps)
        }
        good = bounds[0] <= last and len(steps) == options.steps and (differs or name == "embedded+embedded")
        failures += not good
        spent = ", ".join(f"{part} {seconds:.0f}" for part, seconds in sorted(took["processor"].items()))
        killed = f" · killed: {', '.join(took['killed'])}" if took["killed"] else ""
        interval, embedded = (f"{100 * least:.1f}–{100 * most:.1f}" for least, most in (own, bounds))
        found = ", ".join(f"{re.sub('.*/', '', key)} {value:.2g}" for key, value in differs.items())
        print(
            f"{'ok  ' if good else 'FAIL'}  {name}: {len(steps)} steps in {took['seconds']:.0f} s, success {100 * first:.0f} → "
            f"{100 * last:.0f} % (n = {options.tasks}; {interval}, embedded {embedded}) · largest of a "
            f"step: {found or 'no difference'} · processor seconds: {spent}{killed}",
            flush=True,
        )
    sys.exit(bool(failures))


MISMATCH = (
    "training/logprob_mismatch_max",
    "rollout_corr/log_diff_max",
    "rollout_corr/log_diff_mean",
    "rollout_corr/kl",
)


if __name__ == "__main__":
    main()
