"""Runs agents of Agent Lightning 0.1 and the tests of 1.0 against `levade store serve`.

Version 0.1 is the published package `agentlightning==0.1.2`, unmodified. Its trainer pulls tasks (`GET /task`), reads
resources and posts reports (`POST /rollout`), in two worker processes. Checks: each task is executed once; rewards and
triplets come back as the agent returned them; a failed agent is retried, and an empty report is never a reward.

Version 1.0 runs its own tests of the routes of rollouts and events (`tests/server/test_endpoints.py`) over HTTP. The
tests are not part of this repository: `--checkout` names a checkout of
https://github.com/microsoft/agent-lightning at the tag v1.0.0. Without it, this part is skipped. Four of the 14 tests
are left out: they test the registry of models and the proxy, which belong to a gateway. One test is known to fail: it
expects `next_after` to be an index, which is a cursor here.

    python3 conformance/agent_lightning_clients.py --checkout DIR

Needs `uv`. The environments are created below `--environment`, and kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "conformance"))

OLD = ["agentlightning==0.1.2", "opentelemetry-sdk==1.38.0", "opentelemetry-exporter-otlp==1.38.0"]
NEW = ["pytest", "httpx"]
# Without the routes of a gateway, and with one that expects an index for a cursor.
LEFT_OUT = ["test_model_endpoints", "test_proxy"]
KNOWN = ["test_terminal_rollouts_cursor_pagination"]

AGENT = """
import sys
from agentlightning.litagent import LitAgent
from agentlightning.trainer import Trainer
from agentlightning.types import Triplet, Rollout


class Agent(LitAgent):
    def training_rollout(self, task, rollout_id, resources):
        llm = resources["main_llm"]
        assert llm.endpoint == "http://gateway/v1", llm
        number = task["number"]
        if task.get("marker"):
            # The first execution fails, the second one succeeds.
            import os
            if not os.path.exists(task["marker"]):
                open(task["marker"], "w").close()
                raise ValueError("planned failure")
        if number % 2:
            return number / 8
        triplets = [
            Triplet(
                prompt={"token_ids": [1, number]},
                response={"token_ids": [turn]},
                reward=float(turn),
                metadata={"response_id": f"{number}-{turn}", "agent_name": "wolf"},
            )
            for turn in range(2)
        ]
        return triplets



if __name__ == "__main__":
    from agentlightning.tracer.base import BaseTracer
    from contextlib import contextmanager

    class Silent(BaseTracer):
        @contextmanager
        def trace_context(self, name=None):
            yield
        def get_last_trace(self):
            return []

    Trainer(n_workers=2, max_tasks=int(sys.argv[2]), tracer=Silent()).fit(Agent(), sys.argv[1])
"""

CONFTEST = """
import os
import pytest, httpx

AGL_KEY = os.environ["STORE_KEY"]
MODEL_NAME = "test-model"


@pytest.fixture
def client():
    import subprocess, socket, time, shlex
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(shlex.split(os.environ["STORE_COMMAND"]) + ["--port", str(port), "--api-key", AGL_KEY])
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}")
    for _ in range(500):
        try:
            client.get("/healthz")
            break
        except httpx.TransportError:
            time.sleep(0.02)
    yield client
    client.close()
    process.terminate()
    process.wait()


@pytest.fixture
def auth_headers():
    return {"Authorization": f"Bearer {AGL_KEY}"}
"""


def request(url: str, body: object = None) -> object:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=30
    ) as response:
        return json.load(response)


def check(condition: bool, text: str) -> bool:
    print(f"{'ok' if condition else 'FAILED'}: {text}", flush=True)
    return condition


def old_agents(args: argparse.Namespace, python: Path, folder: Path) -> bool:
    """Runs the trainer of 0.1.2 against a store, and checks what comes back."""
    from agent_lightning_loop import free_port, wait_for

    (folder / "agent.py").write_text(AGENT)
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", folder / "store.log"
    with log.open("w") as out:
        store = subprocess.Popen(
            [args.levade.resolve(), "store", "serve", "--port", str(port), "--db", str(folder / "r.db")],
            stdout=out,
            stderr=out,
        )
    try:
        wait_for(f"{url}/v1/agl/health", store, log)
        llm = {"resource_type": "llm", "endpoint": "http://gateway/v1", "model": "m", "sampling_parameters": {}}
        request(f"{url}/v1/agl/resources", {"main_llm": llm})
        retry = {"max_attempts": 2, "retry_condition": ["failed"]}
        tasks = [{"input": {"number": n}, "mode": "train"} for n in range(8)]
        tasks.append({"input": {"number": 9, "marker": str(folder / "marker")}, "mode": "train", "config": retry})
        rollouts = request(f"{url}/v1/agl/queues/rollouts/enqueue", {"rollouts": tasks})
        with (folder / "agent.log").open("w") as out:
            agents = subprocess.Popen([python, "agent.py", url, "5"], cwd=folder, stdout=out, stderr=out)
        ids = [rollout["rollout_id"] for rollout in rollouts]
        end = time.monotonic() + 120
        while (
            len(request(f"{url}/v1/agl/waits/rollouts", {"rollout_ids": ids, "timeout": 1})) < len(ids)
            and time.monotonic() < end
            and store.poll() is None
        ):
            pass
        agents.terminate()
        agents.wait(20)
        is_good = True
        for task, rollout_id in zip(tasks, ids, strict=True):
            number = task["input"]["number"]
            rollout = request(f"{url}/v1/agl/rollouts/{rollout_id}")
            read = request(f"{url}/v1/agl/rollouts/{rollout_id}/calls")
            tokens = [
                (call["prompt_token_ids"], call["response_token_ids"], call["reward"], call["agent"])
                for call in read["calls"]
            ]
            calls = [([1, number], [turn], float(turn), "wolf") for turn in range(2)] if number % 2 == 0 else []
            # The runner of 0.1 takes the last triplet's reward as the final one.
            reward = 1.0 if number % 2 == 0 else number / 8
            tries = 2 if "marker" in task["input"] else 1
            found = (rollout["status"], rollout.get("attempt", {}).get("sequence_id"), read["final_reward"], tokens)
            if found != ("succeeded", tries, reward, calls):
                is_good = check(False, f"0.1: task {number}: {found}, expected {('succeeded', tries, reward, calls)}")
        if not is_good:
            print((folder / "agent.log").read_text()[-3000:])
        return check(
            is_good,
            f"0.1: {len(ids)} tasks of the client of 0.1.2 came back with their rewards and triplets, one after a retry",
        )
    finally:
        store.terminate()
        store.wait()


def new_tests(args: argparse.Namespace, python: Path, folder: Path) -> bool:
    """Runs the tests of 1.0 against a store for each test."""
    tests = folder / "tests/server"
    tests.mkdir(parents=True)
    for package in (folder / "tests", tests):
        (package / "__init__.py").touch()
    (tests / "conftest.py").write_text(CONFTEST)
    source = (args.checkout / "tests/server/test_endpoints.py").read_text()
    (tests / "test_endpoints.py").write_text(
        source.replace("from fastapi.testclient import TestClient", "from httpx import Client as TestClient")
    )
    command = f"{args.levade.resolve()} store serve --db memory:"
    variables = os.environ | {"STORE_COMMAND": command, "STORE_KEY": "test-secret-key", "PYTHONPATH": "."}
    chosen = " and ".join(f"not {name}" for name in LEFT_OUT)
    tests_command = [python, "-m", "pytest", "-q", "--tb=line", "-rA", "-k", chosen, "tests/server"]
    done = subprocess.run(tests_command, cwd=folder, env=variables, capture_output=True, text=True)
    named: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "ERROR": []}
    for line in done.stdout.splitlines():
        state, _, rest = line.partition(" ")
        if state in named:
            named[state].append(rest.split("::")[1].split(" ")[0])
    bad = [name for name in named["FAILED"] + named["ERROR"] if name not in KNOWN]
    if bad or not named["PASSED"]:
        print(done.stdout[-3000:], done.stderr[-2000:])
    return check(
        bool(named["PASSED"]) and not bad,
        f"1.0: {len(named['PASSED'])} tests passed; not passed: {named['FAILED'] + named['ERROR']}",
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade", help="binary to test")
    p.add_argument("--checkout", type=Path, help="Agent Lightning at the tag v1.0.0")
    p.add_argument("--environment", type=Path, default=Path(tempfile.gettempdir()) / "agent-lightning-clients")
    args = p.parse_args()
    from agent_lightning_store import environment

    is_good = True
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "old").mkdir()
        (Path(temporary) / "new").mkdir()
        is_good &= old_agents(args, environment(args.environment / "old", OLD), Path(temporary) / "old")
        if args.checkout:
            is_good &= new_tests(args, environment(args.environment / "new", NEW), Path(temporary) / "new")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
