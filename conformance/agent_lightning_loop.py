"""Runs a full rollout loop: Levade's store and gateway with the runners, the tracer and the agent API of Agent Lightning.

Three programs run, none of them changed for this check:

- `levade store serve` keeps tasks, leases, resources and spans in a file.
- `levade serve` responds to the model calls, over OpenAI's API.
- Runners of `agentlightning==0.3.0` (this script with `--role runner`) start as Agent Lightning's documentation
  describes: `AGL_MANAGED_STORE=0 AGL_CURRENT_ROLE=runner … --n-runners N`. Their agent uses OpenAI's SDK and emits
  rewards; their tracer (AgentOps by default, or `--tracer otel`) sends spans to the store.

The script itself is the algorithm: it publishes the gateway as resource `main_llm`, enqueues tasks, waits, and reads spans.
Checks:

- Every rollout succeeds, in one attempt; each attempt has spans in the order of their sequence ids.
- Agent Lightning's own `find_final_reward` returns the reward that the agent computed for the task. `GET …/calls` of
  Levade returns the same reward, and the same model calls.
- A second wave of tasks runs while the store is killed and restarted: no rollout is lost, and none runs twice. Spans
  that a runner cannot send are lost, because its exporter drops them. Their rollouts are unscored, and counted.

    python3 conformance/agent_lightning_loop.py --model DIR

Needs `uv`. The environment (about 1 GB) is created at `--environment`, and kept.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# agentops 0.4.21, the default tracer of 0.3.0, exports nothing with newer versions of OpenTelemetry.
PACKAGES = ["agentlightning==0.3.0", "openai", "opentelemetry-sdk==1.38.0", "opentelemetry-exporter-otlp==1.38.0"]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade", help="binary to test")
    p.add_argument("--model", help="model that the gateway serves: a directory or a file")
    p.add_argument("--environment", type=Path, default=Path(tempfile.gettempdir()) / "agent-lightning-0.3.0")
    p.add_argument("--tracer", choices=["agentops", "otel"], default="agentops")
    p.add_argument("--n-runners", type=int, default=10)
    p.add_argument("--tasks", type=int, default=20, help="number of tasks of each wave")
    p.add_argument("--keep", type=Path, help="directory for the store and all logs, instead of a temporary one")
    p.add_argument("--role", choices=["runner", "algorithm"], help="internal: what this process runs")
    p.add_argument("--external-store-address", help="internal: URL of the store")
    p.add_argument("--gateway", help="internal: URL of the gateway")
    p.add_argument("--restart", help="internal: file whose creation restarts the store")
    return p.parse_args()


def expected_reward(task: dict) -> float:
    """Returns the reward of a task. It depends on the task alone, so that a mix-up of rollouts is seen."""
    return task["number"] / 8


def run_runner(args: argparse.Namespace) -> None:
    """Runs Agent Lightning's runners, as a user's training script starts them."""
    import agentlightning as agl
    from openai import OpenAI

    @agl.rollout
    def agent(task: dict, llm: agl.LLM) -> None:
        client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none")
        for turn in range(2):
            client.chat.completions.create(
                model=llm.model,
                messages=[{"role": "user", "content": f"{task['question']} (turn {turn})"}],
                max_tokens=8,
            )
        agl.emit_reward({"task": expected_reward(task), "style": 0.25}, primary_key="task")

    tracer = agl.AgentOpsTracer() if args.tracer == "agentops" else agl.OtelTracer()
    store = agl.LightningStoreClient(args.external_store_address)
    trainer = agl.Trainer(n_runners=args.n_runners, store=store, tracer=tracer, strategy="cs")
    trainer.fit(agent, train_dataset=[])


def get(url: str) -> object:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def get_calls(args: argparse.Namespace, rollout_id: str) -> dict:
    """Returns the model calls and the rewards that Levade reads from the spans of a rollout."""
    return get(f"{args.external_store_address}/v1/agl/rollouts/{rollout_id}/calls")


def check(condition: bool, text: str) -> None:
    print(f"{'ok' if condition else 'FAILED'}: {text}", flush=True)
    if not condition:
        sys.exit(1)


async def wave(store, args: argparse.Namespace, name: str, restart: bool) -> None:
    """Enqueues tasks, waits for them and checks their spans."""
    import agentlightning as agl

    tasks = [{"number": n, "question": f"What is {n} plus {n}?"} for n in range(args.tasks)]
    restart_seen = restart
    start = time.monotonic()
    rollouts = [await store.enqueue_rollout(input=task, mode="train") for task in tasks]
    ids = [rollout.rollout_id for rollout in rollouts]
    while True:
        finished = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
        if len(finished) == len(ids):
            break
        if time.monotonic() - start > 240:
            check(False, f"{name}: {len(finished)} of {len(ids)} rollouts finished within 240 s")
        if restart and len(finished) >= len(ids) // 4:
            Path(args.restart).touch()
            restart = False
        await asyncio.sleep(0.5)
    seconds = time.monotonic() - start
    attempts, calls, lost = 0, 0, 0
    for task, rollout_id in zip(tasks, ids, strict=True):
        rollout = await store.get_rollout_by_id(rollout_id)
        tries = await store.query_attempts(rollout_id)
        attempts += len(tries)
        spans = await store.query_spans(rollout_id, attempt_id="latest")
        numbers = [span.sequence_id for span in spans]
        if restart_seen and rollout.status == "succeeded" and agl.find_final_reward(spans) is None:
            # Their exporter drops spans that it could not send. Such a rollout is unscored.
            check(
                get_calls(args, rollout_id)["final_reward"] is None,
                f"{name}: {rollout_id} lost spans and has no reward",
            )
            lost += 1
            continue
        if rollout.status != "succeeded" or numbers != sorted(set(numbers)) or not spans:
            check(False, f"{name}: {rollout_id} is {rollout.status} with spans {numbers}")
        if agl.find_final_reward(spans) != expected_reward(task):
            check(
                False,
                f"{name}: the reward of {rollout_id} is {agl.find_final_reward(spans)}, not {expected_reward(task)}",
            )
        ours = get_calls(args, rollout_id)
        triplets = agl.TracerTraceToTriplet().adapt(spans)
        if ours["final_reward"] != expected_reward(task) or len(ours["calls"]) != len(triplets):
            check(False, f"{name}: Levade reads {json.dumps(ours)[:600]}, Agent Lightning {len(triplets)} calls")
        for call, triplet in zip(ours["calls"], triplets, strict=True):
            if call["reward"] != triplet.reward or call["response_id"] != triplet.metadata["response_id"]:
                check(
                    False,
                    f"{name}: Levade reads {json.dumps(call)[:600]}, Agent Lightning {triplet.reward} for {triplet.metadata}",
                )
        calls += len(triplets)
    check(attempts == len(ids), f"{name}: {len(ids)} rollouts in {attempts} attempts succeeded in {seconds:.1f} s")
    # OtelTracer records no calls of OpenAI's client unless the agent instruments it.
    expected_calls = 2 * (len(ids) - lost) if args.tracer == "agentops" else 0
    check(calls == expected_calls, f"{name}: both readers find the same {calls} model calls with the same rewards")
    check(lost <= args.n_runners, f"{name}: {lost} rollouts are unscored because their runner could not send spans")


async def algorithm(args: argparse.Namespace) -> None:
    """Runs two waves of tasks. During the second one, the store restarts."""
    import agentlightning as agl

    store = agl.LightningStoreClient(args.external_store_address)
    model = get(f"{args.gateway}/v1/models")["data"][0]["id"]
    await store.add_resources({"main_llm": agl.LLM(endpoint=f"{args.gateway}/v1", model=model)})
    await wave(store, args, "first wave", restart=False)
    await wave(store, args, "wave with a restart of the store", restart=True)
    workers = await store.query_workers()
    check(len(workers) == args.n_runners, f"{len(workers)} of {args.n_runners} runners are known to the store")
    await store.close()


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    """Waits until a server answers at `url`, for at most 60 s."""
    start = time.monotonic()
    while True:
        try:
            urllib.request.urlopen(url, timeout=1)
            return
        except OSError:
            if process.poll() is not None or time.monotonic() - start > 60:
                sys.exit(f"no server at {url}:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def orchestrate(args: argparse.Namespace, folder: Path) -> int:
    """Starts the programs, restarts the store on request, and returns the exit status of the algorithm."""
    sys.path.insert(0, str(ROOT / "conformance"))
    from agent_lightning_store import environment

    python = environment(args.environment, PACKAGES)
    store_port, gateway_port = free_port(), free_port()
    store_url, gateway_url = f"http://127.0.0.1:{store_port}", f"http://127.0.0.1:{gateway_port}"
    restart = folder / "restart"
    running: list[subprocess.Popen] = []

    def start(name: str, command: list, **variables: str) -> tuple[subprocess.Popen, Path]:
        log = folder / f"{name}.log"
        with log.open("a") as out:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdout=out if name != "algorithm" else None,
                stderr=out,
                # litellm and agentops would use the network.
                env=os.environ
                | {
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                    "AGENTOPS_LOG_LEVEL": "ERROR",
                    "AGENTOPS_LOGGING_TO_FILE": "False",
                }
                | variables,
                start_new_session=True,
            )
        running.append(process)
        return process, log

    def start_store() -> subprocess.Popen:
        db = folder / "rollouts.db"
        process, log = start("store", [args.levade.resolve(), "store", "serve", "--port", store_port, "--db", db])
        wait_for(f"{store_url}/v1/agl/health", process, log)
        return process

    common = ["--external-store-address", store_url, "--gateway", gateway_url, "--n-runners", args.n_runners]
    common += ["--tasks", args.tasks, "--tracer", args.tracer, "--restart", restart]
    try:
        # The runners start first, and wait for the store.
        store = start_store()
        gateway, log = start("gateway", [args.levade.resolve(), "serve", args.model, "--port", gateway_port])
        wait_for(f"{gateway_url}/v1/models", gateway, log)
        start(
            "runners", [python, __file__, "--role", "runner", *common], AGL_MANAGED_STORE="0", AGL_CURRENT_ROLE="runner"
        )
        algorithm, _ = start("algorithm", [python, __file__, "--role", "algorithm", *common])
        while algorithm.poll() is None:
            if restart.exists():
                restart.unlink()
                store.kill()
                store.wait()
                store = start_store()
            time.sleep(0.05)
        return algorithm.returncode
    finally:
        for process in reversed(running):
            try:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=10)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    args = arguments()
    if args.role == "runner":
        run_runner(args)
    elif args.role == "algorithm":
        asyncio.run(algorithm(args))
    else:
        if not args.model:
            sys.exit("name the model of the gateway with --model")
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            sys.exit(orchestrate(args, folder))


if __name__ == "__main__":
    main()
