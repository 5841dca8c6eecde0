"""Compares vLLM servers as samplers with transformers on the same weights.

Starts real servers with a small model of random weights, and drives them through `Server` and `Router` (the example
`fleet` of the crate `levade-remote`). Checks:

- Log-probabilities of completions, at temperature 1 and others, against transformers (`--bound`, 1e-3 in f32).
- Weights pushed during generation: the versions of tokens, and each token's log-probability under the weights of its version.
- A server killed (kill -9) during a push and restarted: no fleet has mixed versions, and nothing hangs.
- An incomplete weight directory is rejected before a server is notified.

Run it with the Python of an environment that has vLLM (it also needs torch, transformers and tokenizers):

    cargo build -p levade-remote --example fleet
    VLLM/bin/python conformance/samplers.py --fleet target/debug/examples/fleet

Not checked: GPUs, tensor parallelism, adapters, SGLang.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from queue import Empty, Queue

VOCABULARY, CONTEXT = 320, 512
TEXT = "A farmer has 17 cows, buys 25 more, and sells 8 of them."


def make_tokenizer(directory: Path) -> list[int]:
    """Creates a byte-level tokenizer. Returns the tokens of the probe's text."""
    from transformers import PreTrainedTokenizerFast

    from byte_level import byte_level

    tokenizer = byte_level()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return tokenizer.encode(TEXT).ids


def make_model(directory: Path, seed: int, probe: list[int]) -> None:
    """Creates random weights, large enough for non-uniform distributions, and the learner's `probe.json`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    directory.mkdir(parents=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    logprobs = logprobs_of(model, probe, 1, 1.0)
    (directory / "probe.json").write_text(json.dumps({"tokens": probe, "logprobs": logprobs}))


def logprobs_of(model, path: list[int], start: int, temperature: float) -> list[float]:
    """Computes the log-probabilities of `path[start:]`."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([path])).logits[0].float() / temperature
    scores = torch.log_softmax(logits, -1)
    return [scores[i - 1, path[i]].item() for i in range(start, len(path))]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Vllm:
    """A vLLM server that can be killed with all its processes, and restarted at its address."""

    def __init__(
        self, model: Path, log: Path, args: list[str], python: str = sys.executable, variables: dict | None = None
    ):
        self.port, self.log, self.variables = free_port(), log, variables or {}
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = self.words(model, python, args)
        self.start()

    def words(self, model: Path, python: str, args: list[str]) -> list[str]:
        """Returns the command line."""
        return [
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--served-model-name",
            "m",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--dtype",
            "float32",
            "--max-model-len",
            str(CONTEXT),
            "--logprobs-mode",
            "processed_logprobs",
            "--enable-prefix-caching",
            "--enable-scale-out",
            "--enforce-eager",
            *args,
        ]

    def start(self) -> None:
        environment = dict(os.environ)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment |= {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Compiling the sampler takes minutes on few cores.
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1800",
        } | self.variables
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, seconds: float) -> float:
        started = time.time()
        while time.time() - started < seconds:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return time.time() - started
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.5)
        sys.exit(f"{type(self).__name__} did not start; see {self.log}:\n" + "".join(self.log.open().readlines()[-15:]))


class Fleet:
    """The example program `fleet`, and its output lines."""

    def __init__(self, binary: Path, servers: list[Vllm], in_flight: str, probe: list[int], seconds: float, **more):
        self.process = subprocess.Popen([binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.said, self.kept = Queue(), []
        threading.Thread(target=self.listen, daemon=True).start()
        self.tell(
            **{
                "kind": "vllm",
                "urls": [s.url for s in servers],
                "vocabulary": VOCABULARY,
                "context": CONTEXT,
                "in_flight": in_flight,
                "tolerance": 0.05,
                "text": TEXT,
                "tokens": probe,
                "silent_seconds": seconds,
                "adopt_seconds": seconds,
            }
            | more
        )

    def listen(self) -> None:
        for line in self.process.stdout:
            self.said.put(json.loads(line))

    def tell(self, **command) -> None:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self, seconds: float, **wanted) -> dict:
        """Returns the next line with these keys and values (any value for None). Other lines are kept for later."""

        def fits(line: dict) -> bool:
            return all(k in line and v in (None, line[k]) for k, v in wanted.items())

        until = time.time() + seconds
        for i, line in enumerate(self.kept):
            if fits(line):
                return self.kept.pop(i)
        while True:
            try:
                line = self.said.get(timeout=max(0.0, until - time.time()))
            except Empty:
                sys.exit(f"HANGS: nothing with {wanted} within {seconds} s; heard {self.kept}")
            if fits(line):
                return line
            self.kept.append(line)

    def sample(self, number: int, prompt: list[int], least: int = 0, **params) -> None:
        self.tell(
            do="sample",
            id=number,
            request={
                "id": str(number),
                "policy": "",
                "least_version": least,
                "seed": 1,
                "stream": number,
                "prompt": prompt,
                "params": params,
            },
        )

    def adopt(self, version: int, directory: Path) -> None:
        self.tell(do="adopt", version=version, folder=str(directory))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=60)


def check_reply(models: dict, reply: dict, prompt: list[int], temperature: float) -> float:
    """Returns the largest difference between a completion's log-probabilities and those of the weights that sampled
    each token.
    """
    path, start, worst = prompt + reply["tokens"], len(prompt), 0.0
    for run in reply["versions"]:
        expected = logprobs_of(models[run["version"]], path[: start + run["len"]], start, temperature)
        found = reply["logprobs"][start - len(prompt) : start - len(prompt) + run["len"]]
        worst = max([worst, *(abs(a - b) for a, b in zip(expected, found, strict=True))])
        start += run["len"]
    assert start == len(path), reply["versions"]
    return worst


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--fleet", type=Path, default=Path("target/debug/examples/fleet"), help="helper binary")
    p.add_argument("--servers", type=int, default=1)
    p.add_argument("--pushes", type=int, default=6, help="number of pushes during generation")
    p.add_argument("--kills", type=int, default=2, help="number of pushes during which a server is killed")
    p.add_argument(
        "--bound", type=float, default=1e-3, help="bound of the difference between vLLM and transformers, in nats"
    )
    p.add_argument("--seconds", type=float, default=600, help="timeout of any wait, in seconds")
    p.add_argument("--in-flight", choices=["recompute", "keep"], nargs="*", default=["recompute", "keep"])
    p.add_argument("--vllm-args", default="", help="additional arguments of the servers")
    options = p.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    random.seed(1)
    root = Path(tempfile.mkdtemp(prefix="levade-samplers-"))
    probe = make_tokenizer(root / "tokenizer")
    versions = 1 + options.pushes * len(options.in_flight) + options.kills + 1
    for version in range(versions + 1):
        make_model(root / f"v{version}", version, probe)
    models = {v: AutoModelForCausalLM.from_pretrained(root / f"v{v}", dtype=torch.float32) for v in range(versions + 1)}
    served = root / "served"
    shutil.copytree(root / "v0", served)
    for file in (root / "tokenizer").iterdir():
        shutil.copy(file, served)
    servers = [Vllm(served, root / f"vllm-{i}.log", options.vllm_args.split()) for i in range(options.servers)]
    failed = []

    def report(what: str, good: bool, detail: str) -> None:
        print(f"{'ok  ' if good else 'FAIL'} {what}: {detail}", flush=True)
        if not good:
            failed.append(what)

    def prompt() -> list[int]:
        return [random.randrange(VOCABULARY) for _ in range(40)]

    try:
        for server in servers:
            print(f"vLLM answers after {server.wait(options.seconds):.0f} s", flush=True)
        version = 0
        for in_flight in options.in_flight:
            fleet = Fleet(options.fleet, servers, in_flight, probe, options.seconds)
            for _ in servers:
                looked = fleet.hear(options.seconds, looked=None)
                report("a server is recognized", "what" in looked, json.dumps(looked))
            version += 1
            fleet.adopt(version, root / f"v{version}")
            adopted = fleet.hear(options.seconds, adopted=version)
            report("weights are updated", adopted["error"] is None, json.dumps(adopted))
            for number, temperature in enumerate([1.0, 0.7, 1.4]):
                asked = prompt()
                fleet.sample(number, asked, max_tokens=60, temperature=temperature, top_logprobs=2)
                reply = fleet.hear(options.seconds, reply=number)
                worst = check_reply(models, reply, asked, temperature) if "tokens" in reply else 9.0
                detail = f"{worst:.1e} nats at most over {len(reply.get('tokens', []))} tokens {reply.get('error', '')}"
                report(f"log-probabilities at temperature {temperature}", worst < options.bound, detail)
            asked = prompt()
            fleet.sample(90, asked, max_tokens=0, temperature=1.0, prompt_logprobs=1)
            found = fleet.hear(options.seconds, reply=90)
            expected = logprobs_of(models[version], asked, 1, 1.0)
            worst = max(abs(a - b) for a, b in zip(expected, found["prompt_logprobs"], strict=True))
            report("log-probabilities of a prompt", worst < options.bound, f"{worst:.1e} nats at most")
            spans = []
            for push in range(options.pushes - 1):
                asked = prompt()
                number = 100 + push
                fleet.sample(number, asked, max_tokens=400, temperature=1.0)
                time.sleep(random.uniform(0.2, 1.5))
                version += 1
                fleet.adopt(version, root / f"v{version}")
                adopted = fleet.hear(options.seconds, adopted=version)
                reply = fleet.hear(options.seconds, reply=number)
                good = adopted["error"] is None and "tokens" in reply
                worst = check_reply(models, reply, asked, 1.0) if good else 9.0
                spans.append([(run["version"], run["len"]) for run in reply.get("versions", [])])
                # Cached keys and values come from the old weights, so log-probabilities under the new weights differ
                # from transformers.
                bound = options.bound if in_flight == "recompute" else 9.0
                report(
                    f"a push during generation ({in_flight})", worst < bound, f"{spans[-1]}, {worst:.1e} nats {adopted}"
                )
            crossed = sum(len(runs) > 1 for runs in spans)
            report(f"completions across a push ({in_flight})", crossed > 0, f"{crossed} of {len(spans)}")
            half = root / "half"
            shutil.copytree(root / "v0", half)
            weights = half / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1000])
            fleet.adopt(999, half)
            refused = fleet.hear(options.seconds, adopted=999)["error"]
            shutil.rmtree(half)
            report("an incomplete directory is rejected", bool(refused), str(refused)[-160:])
            fleet.sample(91, asked, max_tokens=4, temperature=1.0)
            reply = fleet.hear(options.seconds, reply=91)
            report(
                "the server then samples as before",
                reply.get("versions", [{}])[0].get("version") == version,
                str(reply.get("error")),
            )
            if in_flight != options.in_flight[-1]:
                fleet.close()
        for kill in range(options.kills):
            asked, number = prompt(), 200 + kill
            fleet.sample(number, asked, max_tokens=300, temperature=1.0)
            time.sleep(random.uniform(0.1, 0.5))
            version += 1
            victim = servers[kill % len(servers)]
            fleet.adopt(version, root / f"v{version}")
            time.sleep(random.choice([0.0, 0.05, 0.2]))
            victim.kill()
            time.sleep(1.0)
            victim.start()
            adopted = fleet.hear(options.seconds, adopted=version)
            reply = fleet.hear(options.seconds, reply=number)
            good = adopted["error"] is None and "tokens" in reply and len(reply["tokens"]) == 300
            detail = [(run["version"], run["len"]) for run in reply.get("versions", [])]
            report("a push with kill -9", good, f"{detail} {adopted['error']} {reply.get('error', '')}")
            until = time.time() + options.seconds
            while True:
                fleet.tell(do="members")
                members = fleet.hear(options.seconds, members=None)["members"]
                if all(member["health"] == "serving" for member in members) or time.time() > until:
                    break
                time.sleep(1.0)
            labels = [json.load(urllib.request.urlopen(f"{s.url}/weight_info"))["weight_version"] for s in servers]
            pure = all(label.startswith(f"levade-{version}-") for label in labels)
            report("all servers have the newest weights", pure, f"{labels} {[m['health'] for m in members]}")
            fleet.sample(number + 50, asked, version, max_tokens=20, temperature=1.0)
            reply = fleet.hear(options.seconds, reply=number + 50)
            worst = check_reply(models, reply, asked, 1.0) if "tokens" in reply else 9.0
            report(
                "log-probabilities of all servers", worst < options.bound, f"{worst:.1e} nats {reply.get('error', '')}"
            )
        fleet.close()
    finally:
        for server in servers:
            server.kill()
    if failed:
        sys.exit(f"{len(failed)} failed; logs are in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
