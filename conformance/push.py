"""Checks weights that the PyTorch learner broadcasts into server memory (`cluster.samplers.weights = "group"`).

Starts a learner with several ranks (`levade_torch`, gloo) and real servers, and drives them through `Server`, `Router`
and the weight broadcast (the example `fleet` of the crate `levade-remote`). Checks, during generation:

- The weights came over the group, as the fleet reports.
- Completions end at the stop tokens of their requests, and continue past the end tokens of the model's files.
- The versions of tokens, and each token's log-probability under the weights of its version, against transformers on the files
  that the learner wrote for that version (`--bound`, 1e-3 in f32).
- After a kill (kill -9) of a server, or of the learner, during a push: nothing hangs, no fleet has mixed versions, and the next
  learner's weights reach all servers.

Runs in the Python of `levade_torch`; the servers have their own:

    cargo build -p levade-remote --example fleet
    TORCH/bin/python conformance/push.py --server-python VLLM/bin/python --fleet target/debug/examples/fleet

vLLM gets the plugin `python/levade_vllm`, a gloo equivalent of its NCCL backend.

Not checked: NCCL, GPUs, tensor parallelism of servers.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import sglang_cpu
from common import ROOT, Report
from samplers import CONTEXT, VOCABULARY, Fleet, Vllm, check_reply, make_tokenizer
from torch_group import Group

PLUGIN = ROOT / "python" / "levade_vllm"


# Tokens that end texts according to the model's files, but that are no stop tokens of requests.
ENDS = list(range(3, VOCABULARY, 16))


def make_model(directory: Path, width: int, layers: int) -> None:
    """Creates random weights, large enough for non-uniform distributions and for a push that takes a moment."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        # vLLM 0.32 on CPUs packs a copy of the head, and does not repack it when tied weights change.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ENDS,
        initializer_range=0.08,
    )
    directory.mkdir(parents=True)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                # Norm weights of 1 would look the same if none ever arrived.
                parameter.normal_(1.0, 0.2)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)


class Sglang(Vllm):
    """An SGLang server on CPUs."""

    label = "/model_info"

    def words(self, model: Path, python: str, args: list[str]) -> list[str]:
        """Returns the command line."""
        flags = {
            "model-path": model,
            "host": "127.0.0.1",
            "port": self.port,
            "max-total-tokens": 4096,
            "context-length": CONTEXT,
        }
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        return [python, "-m", "sglang.launch_server", *words, *sglang_cpu.FLAGS, *args]


def plugin(directory: Path, python: str) -> Path:
    """Creates a directory in which only vLLM's plugin is installed."""
    pip = ["uv", "pip", "install", "--python", python] if shutil.which("uv") else [python, "-m", "pip", "install"]
    # A build leaves files in its source directory, so the source is copied.
    source = shutil.copytree(PLUGIN, directory.with_name("plugin-source"))
    command = [*pip, "--quiet", "--no-deps", "--target", directory, source]
    subprocess.run(command, check=True, timeout=300)
    return directory


class Trial:
    """A learner, servers, and the fleet program between them."""

    def __init__(self, options: argparse.Namespace, root: Path, report: Report) -> None:
        self.options, self.root, self.report = options, root, report
        self.probe = make_tokenizer(root / "tokenizer")
        self.model = root / "model"
        make_model(self.model, options.width, options.layers)
        for file in (root / "tokenizer").iterdir():
            shutil.copy(file, self.model)
        self.starts, self.version, self.number = 0, 0, 0
        self.models: dict = {}
        self.group: Group | None = None
        self.fleet: Fleet | None = None
        self.servers = [self.server(i) for i in range(options.servers)]

    def server(self, number: int) -> Vllm:
        """Starts a server."""
        o, log = self.options, self.root / f"{self.options.kind}-{number}.log"
        if o.kind == "sglang":
            variables = sglang_cpu.variables(self.root / "driver")
            return Sglang(self.model, log, o.server_args.split(), o.server_python, variables | {"PYTHONPATH": ""})
        target = self.root / "plugin" if number else plugin(self.root / "plugin", o.server_python)
        args = ["--weight-transfer-config", json.dumps({"backend": "gloo"}), *o.server_args.split()]
        return Vllm(self.model, log, args, o.server_python, {"PYTHONPATH": str(target)})

    def start(self, in_flight: str) -> None:
        """Starts a learner from its initial weights, and a fleet to which it publishes."""
        self.starts += 1
        directory = self.root / f"run-{self.starts}"
        self.group = Group(self.options.processes, directory, model=self.model, keep_published=100).wait()
        address = self.group.port_file.read_text().strip()
        learner = {"url": f"http://{address}", "token": self.group.token, "weights": "group"}
        seconds = self.options.seconds
        self.fleet = Fleet(
            self.options.fleet, self.servers, in_flight, self.probe, seconds, kind=self.options.kind, learner=learner
        )
        for _ in self.servers:
            looked = self.fleet.hear(seconds, looked=None)
            self.report.expect("a server is recognized", "what" in looked, json.dumps(looked)[:200])

    def stop(self) -> None:
        """Stops the fleet and the learner."""
        if self.fleet:
            self.fleet.close()
        if self.group:
            self.group.stop()
        self.fleet = self.group = None

    def prompt(self) -> list[int]:
        """Returns random tokens."""
        return [random.randrange(VOCABULARY) for _ in range(40)]

    def learn(self) -> None:
        """Takes a training step that is large enough to change every number."""
        paths = [self.prompt() for _ in range(2)]
        self.fleet.tell(do="learn", paths=paths, rate=2e-3)
        trained = self.fleet.hear(self.options.seconds, learnt=None)
        if trained["learnt"] is None:
            self.report.expect("a training step succeeds", False, trained["error"])

    def publish(self) -> int:
        """Starts a publication."""
        self.version += 1
        self.fleet.tell(do="publish", version=self.version)
        return self.version

    def published(self, version: int) -> Path:
        """Returns the directory that the learner wrote for a version."""
        return self.group.root / "published" / "policy" / f"v{version}"

    def remember(self, version: int) -> None:
        """Loads the weights of a version, as the learner wrote them."""
        if self.published(version).exists():
            directory = self.published(version)
            self.models[version] = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def ask(self, tokens: int, min_version: int = 0) -> tuple[int, list[int]]:
        """Starts a completion."""
        self.number += 1
        asked = self.prompt()
        self.fleet.sample(self.number, asked, min_version, max_tokens=tokens, temperature=1.0)
        return self.number, asked

    def check(self, what: str, number: int, asked: list[int], tokens: int, bound: float) -> list:
        """Waits for a completion, and compares it with the weights of its reported versions. Returns the versions."""
        reply = self.fleet.hear(self.options.seconds, reply=number)
        runs = [(run["version"], run["len"]) for run in reply.get("versions", [])]
        complete = len(reply.get("tokens", [])) == tokens
        worst = check_reply(self.models, reply, asked, 1.0) if complete else 9.0
        self.report.check(
            f"{what}: log-probabilities of a completion", worst, bound, f"{runs} {reply.get('error', '')}"
        )
        return runs

    def ends(self) -> None:
        """Checks that completions end at the request's stop tokens, and not at those of the model's files."""
        for stops in (list(range(0, VOCABULARY, 8)), [VOCABULARY - 1]):
            self.number += 1
            asked, tokens = self.prompt(), 200
            self.fleet.sample(self.number, asked, max_tokens=tokens, temperature=1.0, stop_ids=stops)
            reply = self.fleet.hear(self.options.seconds, reply=self.number)
            drawn = reply.get("tokens", [])
            stopped = [at for at, token in enumerate(drawn) if token in stops]
            complete = reply.get("finish") == "length" and len(drawn) == tokens and not stopped
            good = complete or (reply.get("finish") == "stop_id" and stopped == [len(drawn) - 1])
            passed = sum(token in ENDS for token in drawn)
            what = f"a completion ends at one of {len(stops)} tokens"
            self.report.expect(what, good, f"{len(drawn)} tokens, {passed} the model's ends {reply.get('error', '')}")
            self.report.check(
                f"{what}: log-probabilities", check_reply(self.models, reply, asked, 1.0), self.options.bound
            )

    def pushes(self, in_flight: str) -> None:
        """Pushes weights during generation."""
        seconds = self.options.seconds
        self.start(in_flight)
        version = self.publish()
        adopted = self.fleet.hear(seconds, adopted=version)
        self.report.expect(f"weights are updated ({in_flight})", adopted["error"] is None, json.dumps(adopted))
        self.remember(version)
        self.ends()
        crossed = 0
        for _ in range(self.options.pushes):
            self.learn()
            asked = [self.ask(400) for _ in range(2)]
            time.sleep(random.uniform(0.2, 1.0))
            version, started = self.publish(), time.monotonic()
            adopted = self.fleet.hear(seconds, adopted=version)
            took = time.monotonic() - started
            self.remember(version)
            what = f"push {version} ({in_flight})"
            self.report.expect(
                f"{what}: weights are updated", adopted["error"] is None, f"{took:.1f} s {json.dumps(adopted)}"
            )
            # Cached keys and values come from the old weights, so log-probabilities under the new weights differ from
            # transformers.
            bound = self.options.bound if in_flight == "recompute" else 9.0
            crossed += sum(len(self.check(what, *one, 400, bound)) > 1 for one in asked)
            runs = self.check(f"{what}, afterwards", *self.ask(20, version), 20, self.options.bound)
            self.report.expect(
                f"{what}: later tokens are sampled with the new weights",
                [run[0] for run in runs] == [version],
                str(runs),
            )
        sent, missed = adopted["pushes"]
        wanted = (1 + self.options.pushes) * len(self.servers)
        self.report.expect(
            f"all weights came over the group ({in_flight})",
            (sent, missed) == (wanted, 0),
            f"{sent} sent, {missed} not",
        )
        self.report.expect(f"completions across a push ({in_flight})", crossed > 0, f"{crossed} completions")
        self.stop()

    def sending(self, opened: int) -> None:
        """Waits until the learner has opened more than `opened` groups."""
        until = time.monotonic() + self.options.seconds
        while self.opened() <= opened and time.monotonic() < until:
            time.sleep(0.005)

    def opened(self) -> int:
        """Returns how many groups the learner has opened."""
        return len(re.findall("push_open of policy: done", self.group.log.read_text()))

    def settle(self, what: str) -> None:
        """Waits until all servers serve, with weights of the same version."""
        until = time.monotonic() + self.options.seconds
        while True:
            self.fleet.tell(do="members")
            members = self.fleet.hear(self.options.seconds, members=None)["members"]
            if all(member["health"] == "serving" for member in members) or time.monotonic() > until:
                break
            time.sleep(1.0)
        route = getattr(self.servers[0], "label", "/weight_info")
        labels = []
        for server in self.servers:
            with urllib.request.urlopen(server.url + route, timeout=60) as answer:
                labels.append(json.load(answer)["weight_version"])
        pure = all(label.startswith(f"levade-{self.version}-") for label in labels)
        self.report.expect(f"{what}: no fleet has mixed versions", pure, f"{labels} {[m['health'] for m in members]}")

    def kills_of_servers(self) -> None:
        """Kills a server during a push."""
        self.start("recompute")
        version = self.publish()
        self.fleet.hear(self.options.seconds, adopted=version)
        self.remember(version)
        for kill in range(self.options.kills):
            what = f"a server killed in push {self.version + 1}"
            self.learn()
            asked = self.ask(200)
            victim, opened = self.servers[kill % len(self.servers)], self.opened()
            version, started = self.publish(), time.monotonic()
            self.sending(opened)
            time.sleep(random.uniform(0.0, self.options.moment))
            victim.kill()
            time.sleep(1.0)
            victim.start()
            adopted = self.fleet.hear(self.options.seconds, adopted=version)
            self.remember(version)
            took = time.monotonic() - started
            self.report.expect(
                f"{what}: the run continues", adopted["error"] is None, f"{took:.1f} s {json.dumps(adopted)}"
            )
            self.check(what, *asked, 200, self.options.bound)
            self.settle(what)
            runs = self.check(f"{what}, afterwards", *self.ask(20, version), 20, self.options.bound)
            self.report.expect(
                f"{what}: completions come from the newest weights", [run[0] for run in runs] == [version], str(runs)
            )
        self.stop()

    def kills_of_learners(self) -> None:
        """Kills the learner during a push, and starts another."""
        for _ in range(self.options.learner_kills):
            self.start("recompute")
            version = self.publish()
            self.fleet.hear(self.options.seconds, adopted=version)
            self.remember(version)
            self.learn()
            asked = self.ask(200)
            what, opened = f"the learner killed in push {self.version + 1}", self.opened()
            version, started = self.publish(), time.monotonic()
            self.sending(opened)
            time.sleep(random.uniform(0.0, self.options.moment))
            self.group.processes.kill()
            adopted = self.fleet.hear(self.options.seconds, adopted=version)
            took = time.monotonic() - started
            self.remember(version)
            self.report.expect(
                f"{what} does not hang", took < self.options.seconds, f"{took:.1f} s {json.dumps(adopted)}"
            )
            self.check(what, *asked, 200, self.options.bound)
            self.settle(what)
            runs = self.check(f"{what}, afterwards", *self.ask(20, version), 20, self.options.bound)
            self.report.expect(
                f"{what}: completions come from the newest weights", [run[0] for run in runs] == [version], str(runs)
            )
            self.stop()
        if self.options.learner_kills:
            self.start("recompute")
            version = self.publish()
            adopted = self.fleet.hear(self.options.seconds, adopted=version)
            self.remember(version)
            good = adopted["error"] is None and adopted["pushes"] == [len(self.servers), 0]
            self.report.expect("the next learner's weights come over the group", good, json.dumps(adopted))
            self.check("with the next learner", *self.ask(20, version), 20, self.options.bound)
            self.settle("with the next learner")
            self.stop()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--fleet", type=Path, default=ROOT / "target/debug/examples/fleet", help="helper binary")
    p.add_argument("--kind", choices=["vllm", "sglang"], default="vllm")
    p.add_argument("--server-python", default=sys.executable, help="Python interpreter of the servers")
    p.add_argument("--server-args", default="", help="additional arguments of the servers")
    p.add_argument("--servers", type=int, default=1)
    p.add_argument("--processes", type=int, default=2, help="number of learner ranks")
    p.add_argument("--width", type=int, default=256, help="hidden size of the model")
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--in-flight", choices=["recompute", "keep"], nargs="*", default=["recompute", "keep"])
    p.add_argument("--pushes", type=int, default=4, help="number of pushes during generation, per mode")
    p.add_argument("--kills", type=int, default=2, help="number of pushes during which a server is killed")
    p.add_argument("--learner-kills", type=int, default=2, help="number of pushes during which the learner is killed")
    p.add_argument(
        "--moment", type=float, default=0.15, help="maximum time from the start of a push to the kill, in seconds"
    )
    p.add_argument(
        "--bound", type=float, default=1e-3, help="bound of the difference between server and transformers, in nats"
    )
    p.add_argument("--seconds", type=float, default=300, help="timeout of any wait, in seconds")
    options = p.parse_args()
    torch.set_num_threads(1)
    random.seed(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = Path(tempfile.mkdtemp(prefix="levade-push-"))
    report = Report()
    trial = Trial(options, root, report)
    try:
        for server in trial.servers:
            print(f"{options.kind} answers after {server.wait(options.seconds):.0f} s", flush=True)
        for in_flight in options.in_flight:
            trial.pushes(in_flight)
        if options.kills:
            trial.kills_of_servers()
        trial.kills_of_learners()
    finally:
        if trial.group:
            trial.group.stop()
        for server in trial.servers:
            server.kill()
    print(f"logs are in {root}" if report.failures else "")
    report.finish()
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
