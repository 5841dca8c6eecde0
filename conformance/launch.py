"""Checks `levade launch` on real launchers: runs on two machines continue after kills, and end as undisturbed runs do.

Sets up launchers on one Linux host, as root: Slurm (munged, slurmctld, two slurmds), Ray (two raylets), two hosts in
network namespaces with an sshd each, or none (`local`). Launches a run of a small model with random weights, whose
learner is a group of two machines with one process each, and disturbs it during training:

- anywhere: kill -9 of a rank on the second machine (`rank`), of the second machine's part (`part`), or of the trainer
  (`trainer`); Ctrl-C and another launch (`stop`);
- `ssh`: the connection (`line`), all processes of a host (`host`), its network for a minute (`cable`);
- `slurm`: `scontrol requeue` (`requeue`), a job with higher priority on the nodes (`preempt`), a node with all its processes
  (`node`), the controller for some seconds (`controller`);
- `ray`: an actor (`actor`), a raylet (`node`), the dashboard for longer than the response timeout (`dashboard`).

Checks that each run continues, exits with code 0 on its own, and produces the checkpoints and the store of an
undisturbed run with `--on local`, bit for bit; that the logs of both machines are in `launch/`; and that no process
remains.

With `--on k8s`, renders manifests and validates them against the schemas of Kubernetes (`--validate`, the program
`kubernetes-validate`).

Not checked: more than one real host, GPUs, a Kubernetes cluster.
"""

import argparse
import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import killed
from common import ROOT, Report
from launchers.processes import MARK, Process, left_of, processes, said, wait
from launchers.ray import Ray
from launchers.slurm import Slurm
from launchers.ssh import Ssh
from launchers.tiny import RECIPE, SCORE, make_model

# Maximum time for a step after a disturbance, in seconds.
RECOVERY = 420


class Launched:
    """A launched run, observed from outside."""

    def __init__(self, arguments: argparse.Namespace, directory: Path, run: str, on: str, options: list[str]) -> None:
        self.run, self.log = directory / run, directory / f"{run}.log"
        self.command = [
            str(arguments.levade),
            "launch",
            str(directory / "recipe.toml"),
            "--on",
            on,
            "--run",
            str(self.run),
        ]
        self.command += ["--restarts", "9", *options]

    def start(self, variables: dict[str, str]) -> None:
        self.variables = variables
        with self.log.open("ab") as log:
            environment = os.environ | variables
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def steps(self) -> int:
        """Returns the measured steps."""
        try:
            lines = (self.run / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return 0
        return sum("eval" not in json.loads(line) for line in lines if line.endswith("}"))

    def reaches(self, steps: int, seconds: float) -> float:
        """Waits for a step. Returns the waiting time."""

        def there() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"the launch ended with code {self.process.returncode} after {self.steps()} steps")
            return self.steps() >= steps

        return wait(f"step {steps}; there are {self.steps()}", there, seconds)

    def part(self, what: str) -> list[Process]:
        """Returns the processes of a kind."""
        here = str(self.run)

        def is_one(one: Process) -> bool:
            match what:
                case "trainer":
                    return one.words[1:2] == ("train",) and here in one.command
                case "part":
                    return one.words[1:3] == ("cluster", "join") and here in one.words
                case _:
                    rank = one.variable("RANK") if "levade_torch" in one.words and here in one.words else None
                    return rank == "1" and "torch.distributed.run" not in one.words

        return [one for one in processes() if is_one(one)]

    def kill(self, what: str) -> None:
        """Kills (kill -9) a part of the run, which must exist."""
        wait(f"the {what} to be there", lambda: self.part(what), 60)
        for one in self.part(what):
            one.kill()

    def stop(self) -> None:
        """Interrupts the run with Ctrl-C, and launches it again."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(120)
        if code != 130:
            raise RuntimeError(f"Ctrl-C: code {code}, not 130")
        took = wait("the run's processes to end", lambda: not self.own(), 60)
        print(f"      launched again {took:.0f} s after the launch had ended", flush=True)
        self.start(self.variables)

    def own(self) -> list[Process]:
        """Returns all processes of the run, with any parent."""
        return [one for one in processes() if str(self.run) in one.command and one.pid != os.getpid()]


@contextmanager
def cluster(arguments: argparse.Namespace, directory: Path, mark: str):
    """Sets up the launcher, and removes it afterwards."""
    match arguments.on:
        case "slurm":
            there = Slurm(directory, mark)
        case "ray":
            there = Ray(directory, mark, arguments.ray)
        case "ssh":
            there = Ssh(directory, mark)
        case _:
            yield None
            return
    for program in there.needs:
        if shutil.which(program) is None:
            sys.exit(f"{program} is missing; README.md lists what to install")
    try:
        there.start()
        yield there
    finally:
        there.stop()


def disturb(report: Report, run: Launched, name: str, kill) -> None:
    """Disturbs a run in one way, and waits until it has finished another step."""
    before = run.steps()
    kill()
    took = run.reaches(max(before, run.steps()) + 1, RECOVERY)
    report.expect(f"{name}: the run continues", True, f"at step {before}; next step {took:.0f} s later")


def compare(report: Report, calm: Path, run: Path) -> None:
    """Compares every checkpoint and the store."""
    names = [sorted(path.name for path in (directory / "checkpoints").glob("step-*")) for directory in (calm, run)]
    report.expect(
        "both runs have checkpoints of the same steps", names[0] == names[1], f"{len(names[1])} of {len(names[0])}"
    )
    files = [path for name in names[0] for path in (calm / "checkpoints" / name).glob("*.safetensors")]
    other = [run / path.relative_to(calm) for path in files]
    equal = [
        there.exists() and filecmp.cmp(path, there, shallow=False) for path, there in zip(files, other, strict=True)
    ]
    report.expect("weights and moments, bit for bit", all(equal) and files != [], f"{sum(equal)} of {len(equal)} files")
    try:
        killed.compare(calm, run)
        report.expect("the store", True)
    except SystemExit as why:
        report.expect("the store", False, str(why))


def check_logs(report: Report, run: Path, further: tuple[str, ...]) -> None:
    """Checks the logs of the machines."""
    for name, text in [
        ("node-0.log", "learner"),
        ("node-1.log", "starting processes"),
        *((name, "") for name in further),
    ]:
        path = run / "launch" / name
        found = path.read_text(errors="replace") if path.is_file() else ""
        report.expect(f"launch/{name}", text in found and found != "", f"{len(found.splitlines())} lines")


def launched(arguments: argparse.Namespace, report: Report, directory: Path) -> None:
    """Compares an undisturbed run with disturbed ones."""
    mark = directory.name
    os.environ[MARK] = mark
    calm = Launched(arguments, directory, "calm", "local", [])
    # Reuses the undisturbed run of an earlier launcher in this directory.
    complete_marker = directory / "calm.whole"
    if not complete_marker.exists():
        calm.start({})
        code = calm.process.wait(1800)
        report.expect("an undisturbed run, --on local", code == 0, f"code {code}, {calm.steps()} steps")
        if code:
            return
        complete_marker.touch()
    with cluster(arguments, directory, mark) as there:
        run = Launched(arguments, directory, f"run-{arguments.on}", arguments.on, there.options() if there else [])
        kills = {what: lambda what=what: run.kill(what) for what in ("rank", "part", "trainer")}
        kills |= there.kills if there else {}
        kills["stop"] = run.stop
        unknown = set(arguments.kills or ()) - set(kills)
        if unknown:
            sys.exit(f"--kills {', '.join(unknown)}: {arguments.on} has {', '.join(kills)}")
        run.start(there.variables if there else {})
        try:
            took = run.reaches(2, RECOVERY)
            print(f"      two steps after {took:.0f} s", flush=True)
            for name in arguments.kills or kills:
                disturb(report, run, f"{arguments.on}, {name}", kills[name])
            code = run.process.wait(900)
            report.expect(f"{arguments.on}: the run ends", code == 0, f"code {code}")
            took = wait("the run's processes to end", lambda: not run.own(), 60)
            report.expect(f"{arguments.on}: its processes end", True, f"{took:.0f} s later")
        except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as why:
            report.expect(f"{arguments.on}: no unexpected error", False, str(why))
        finally:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
            for one in run.own():
                one.kill()
        check_logs(report, run.run, there.logs if there else ())
    if not report.failures:
        compare(report, calm.run, run.run)
    # Supervisors take some seconds to end their processes.
    deadline = time.monotonic() + 15
    while (left := left_of(mark, directory)) and time.monotonic() < deadline:
        time.sleep(0.5)
    report.expect("no process remains", not left, "; ".join(one.command[:60] for one in left))
    for one in left:
        one.kill()


def manifests(arguments: argparse.Namespace, report: Report, directory: Path) -> None:
    """Renders and validates manifests for Kubernetes."""
    options = ["--image", "registry/levade:1", "--claim", f"runs:{directory}", "--namespace", "ml", "--dry-run"]
    run = Launched(arguments, directory, "k8s", "k8s", options)
    text = said(*run.command)
    rendered = text.split("job.yaml\n", 1)[1].split("\n$ ")[0]
    for kind, key in (("Service", "publishNotReadyAddresses"), ("Job", "backoffLimit")):
        (document,) = (part for part in rendered.split("---\n") if f'"kind": "{kind}"' in part)
        for wrong in ("", f"{key}s"):
            path = directory / "document.yaml"
            path.write_text(document.replace(f'"{key}"', f'"{wrong}"') if wrong else document)
            done = subprocess.run([arguments.validate, "--strict", path], capture_output=True, text=True)
            said_so = done.stdout + done.stderr
            if wrong:
                report.expect(f"a {kind} with {wrong} is rejected", done.returncode != 0 and wrong in said_so)
            else:
                report.expect(f"the {kind} is valid", done.returncode == 0, said_so.strip()[-60:])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--on", required=True, choices=["local", "ssh", "slurm", "ray", "k8s"])
    p.add_argument(
        "--kills", nargs="*", metavar="KILL", help="kills from the list above, in this order; all if omitted"
    )
    p.add_argument("--steps", type=int, default=150, help="steps of the run, of about a second each")
    p.add_argument(
        "--folder",
        type=Path,
        help="directory for all files, with a short path, usable for all launchers; a temporary one if omitted",
    )
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--python", default=sys.executable, help="Python interpreter of the learner")
    p.add_argument(
        "--ray", type=Path, default=ROOT / ".ray/bin/ray", help="executable `ray` of an environment with ray[default]"
    )
    p.add_argument("--validate", default="kubernetes-validate", help="executable of kubernetes-validate")
    arguments = p.parse_args()
    # A signal also removes everything that was set up.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("told to end"))
    report = Report()
    directory = arguments.folder or Path(tempfile.mkdtemp(prefix="launch-", dir="/tmp"))
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "model").exists():
        make_model(directory / "model")
    python = directory / "python"
    source = ROOT / "python/levade_torch/src"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={source} PYTHONDONTWRITEBYTECODE=1 exec {arguments.python} "$@"\n')
    python.chmod(0o755)
    (directory / "recipe.toml").write_text(
        RECIPE.format(model=directory / "model", python=python, steps=arguments.steps)
    )
    (directory / "score.py").write_text(SCORE)
    start = time.monotonic()
    (manifests if arguments.on == "k8s" else launched)(arguments, report, directory)
    print(f"      {time.monotonic() - start:.0f} s in all; in {directory}", flush=True)
    if not report.failures and arguments.folder is None:
        shutil.rmtree(directory)
    report.finish()


if __name__ == "__main__":
    main()
