"""Checks sleep mode on a real vLLM server, as Levade uses it for colocated devices (`placement = "colocated"`).

On CPUs, vLLM rejects `--enable-sleep-mode`. This check adds sleep mode with a plugin that vLLM loads. A sleeping
worker forgets its weights and cache (they become NaN), and exits if it must compute without them, as on a GPU. Routes,
scheduler, labels and weight loading are vLLM's own. Checks:

- Without the plugin, the server reports why it does not start; without the flag, `/server_info` reports that.
- While asleep, the server responds to queries but to no requests, keeps its label, and reports that it sleeps.
- The order of wake-up: memory of the weights, directory, label, cache, resume. Afterwards, log-probabilities match
  transformers.
- A server can be woken twice, put to sleep twice, and woken with its initial weights.

    VLLM/bin/python conformance/sleep.py

Not checked: the memory of a GPU, SGLang.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

from common import Report
from samplers import VOCABULARY, Vllm, logprobs_of, make_model, make_tokenizer

PLUGIN = """
def register():
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker
    type(current_platform).is_sleep_mode_available = lambda self: True

    def sleep(self, level=1):
        assert level == 2, "this plugin keeps nothing"
        for tensor in [*self.model_runner.model.parameters(), *self.model_runner.kv_caches]:
            tensor.data.fill_(float("nan"))
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags=None):
        self.asleep -= set(tags or ("weights", "kv_cache"))
        for cache in self.model_runner.kv_caches if "kv_cache" in (tags or ["kv_cache"]) else ():
            cache.data.zero_()

    def execute_model(self, *rest, **options):
        assert not getattr(self, "asleep", None), f"it computes without its {self.asleep}"
        return execute(self, *rest, **options)

    execute = CPUWorker.execute_model
    CPUWorker.sleep, CPUWorker.wake_up, CPUWorker.execute_model = sleep, wake_up, execute_model
"""


def write_plugin(directory: Path) -> None:
    """Writes the plugin as if installed, in a directory on Python's search path."""
    information = directory / "levade_sleep-1.0.dist-info"
    information.mkdir(parents=True)
    (directory / "levade_sleep.py").write_text(PLUGIN)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: levade-sleep\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[vllm.general_plugins]\nlevade_sleep = levade_sleep:register\n")


class ServerClient:
    """A client that calls a server's routes as Levade does."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url, self.seconds = url, seconds

    def ask(self, method: str, path: str, body: dict | None = None, seconds: float | None = None):
        """Returns status and JSON response."""
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds or self.seconds) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def call(self, method: str, path: str, body: dict | None = None):
        """Returns the response of a call that must succeed."""
        status, answer = self.ask(method, path, body)
        assert status == 200, f"{path} answers {status}: {answer}"
        return answer

    def label(self) -> str:
        """Returns the label of the server's weights."""
        return self.call("GET", "/weight_info")["weight_version"]

    def sleep(self) -> None:
        """Puts the server to sleep, as `crates/remote/src/server/vllm.rs` does."""
        self.call("POST", "/pause?mode=abort")
        self.call("POST", "/sleep?level=2&mode=abort")
        self.call("POST", "/update_weight_version", {"new_version": "levade-asleep"})

    def read(self, directory: Path | None, label: str) -> None:
        """Loads the weights of a directory, or the initial weights."""
        call = {"weights_path": str(directory or self.call("GET", "/v1/models")["data"][0]["root"])}
        self.call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": call, "timeout": self.seconds})
        self.call("POST", "/reset_prefix_cache")
        self.call("POST", "/update_weight_version", {"new_version": label})

    def wake(self, directory: Path | None, label: str) -> None:
        """Wakes the server, as `crates/remote/src/server/vllm.rs` does."""
        self.call("POST", "/wake_up?tags=weights")
        self.read(directory, label)
        self.call("POST", "/wake_up?tags=kv_cache")
        self.call("POST", "/resume")

    def sample(self, prompt: list[int], salt: str) -> tuple[list[int], list[float]]:
        """Samples a completion of twelve tokens."""
        params = {
            "max_tokens": 12,
            "temperature": 1.0,
            "seed": 5,
            "logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
        }
        body = {"model": "m", "token_ids": prompt, "cache_salt": salt, "sampling_params": params}
        choice = self.call("POST", "/inference/v1/generate", body)["choices"][0]
        return choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--bound", type=float, default=1e-3, help="bound of the difference between vLLM and transformers, in nats"
    )
    p.add_argument("--seconds", type=float, default=600, help="timeout of any wait, in seconds")
    p.add_argument("--without", action="store_true", help="also start the server with the flag and without the plugin")
    options = p.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    random.seed(1)
    root = Path(tempfile.mkdtemp(prefix="levade-sleep-"))
    probe = make_tokenizer(root / "tokenizer")
    for version in range(3):
        make_model(root / f"v{version}", version, probe)
    models = [AutoModelForCausalLM.from_pretrained(root / f"v{v}", dtype=torch.float32) for v in range(3)]
    served = root / "served"
    shutil.copytree(root / "v0", served)
    for file in (root / "tokenizer").iterdir():
        shutil.copy(file, served)
    write_plugin(root / "plugin")
    report = Report()
    flag = ["--enable-sleep-mode"]
    if options.without:
        plain = Vllm(served, root / "plain.log", flag)
        plain.process.wait(timeout=options.seconds)
        why = "Sleep mode is not supported on current platform." in (root / "plain.log").read_text()
        report.expect("on CPUs, the server reports why it does not start", why, f"exit code {plain.process.returncode}")
    server = Vllm(served, root / "vllm.log", flag, variables={"PYTHONPATH": str(root / "plugin")})
    try:
        print(f"vLLM answers after {server.wait(options.seconds):.0f} s", flush=True)
        client = ServerClient(server.url, options.seconds)

        def check(what: str, version: int, salt: str) -> None:
            prompt = [random.randrange(VOCABULARY) for _ in range(40)]
            tokens, logprobs = client.sample(prompt, salt)
            expected = logprobs_of(models[version], prompt + tokens, len(prompt), 1.0)
            worst = max(abs(a - b) for a, b in zip(expected, logprobs, strict=True))
            report.expect(what, worst < options.bound, f"{worst:.1e} nats at most over {len(tokens)} tokens")

        config = client.call("GET", "/server_info?config_format=json")["vllm_config"]["model_config"]
        report.expect(
            "the server reports the flag", config.get("enable_sleep_mode") is True, str(config.get("enable_sleep_mode"))
        )
        check("before any sleep", 0, "a")
        for round_, version in enumerate([1, 2, 1]):
            client.sleep()
            if round_ == 1:
                client.sleep()
            report.expect("the label while asleep", client.label() == "levade-asleep", client.label())
            asleep = client.call("GET", "/is_sleeping")["is_sleeping"]
            report.expect("the server reports that it sleeps", asleep is True, str(asleep))
            late = []

            def draws(late=late) -> None:
                late.append(client.sample([1, 2, 3], "late"))

            waiting = threading.Thread(target=draws, daemon=True)
            waiting.start()
            waiting.join(5)
            report.expect("a request waits while the server sleeps", not late, f"{len(late)} answers")
            client.wake(root / f"v{version}", f"v{version}")
            report.expect("the label after waking", client.label() == f"v{version}", client.label())
            asleep = client.call("GET", "/is_sleeping")["is_sleeping"]
            report.expect("the server is awake", asleep is False, str(asleep))
            waiting.join(options.seconds)
            report.expect("the waiting request gets its response", len(late) == 1, f"{len(late)} answers")
            check(f"weights {version} after sleep {round_ + 1}", version, f"s{round_}")
        # Waking a part that is awake changes nothing.
        client.call("POST", "/wake_up?tags=weights")
        client.call("POST", "/wake_up?tags=kv_cache")
        check("after it was woken once more", 1, "t")
        client.sleep()
        client.wake(None, "as started")
        check("with the weights that it was started with", 0, "u")
        client.sleep()
        server.kill()
        server.start()
        server.wait(options.seconds)
        report.expect(
            "a restarted server is recognized by its label", client.label() != "levade-asleep", client.label()
        )
        check("and samples with its initial weights", 0, "v")
    finally:
        server.kill()
    print(f"logs are in {root}" if report.failures else "")
    report.finish()
    shutil.rmtree(root)


if __name__ == "__main__":
    sys.exit(main())
