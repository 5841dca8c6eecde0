"""Checks that the bridge to Agent Lightning's runners notices a killed runner by its heartbeats.

A `levade store serve` and the worker `recipes/agent-lightning/bridge.py` run as in a training. This script plays Levade,
which orders attempts, and three runners:

- One leases an attempt, sends two heartbeats and vanishes: the bridge reports it within the silence timeout, long before
  the timeout of the rollout, and the rollout is cancelled.
- One works for twice the silence timeout and sends heartbeats meanwhile: its reward is reported.
- One sends no heartbeats at all: it is not taken for lost.

    python3 conformance/agent_lightning_silence.py

Needs no packages, and takes 15 seconds.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SILENCE = 4.0


def call(url: str, path: str, body: object = None) -> object:
    """Sends a request to the store, and returns its response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/agl{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def lease(url: str, worker: str) -> dict:
    """Leases the next rollout."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if found := call(url, "/queues/rollouts/dequeue", {"limit": 1, "worker_id": worker}):
            return found[0]
        time.sleep(0.1)
    raise SystemExit("the bridge enqueued no rollout within 20 s")


def finish(url: str, rollout: dict, reward: float) -> None:
    """Reports a reward and the end of a rollout, as a runner does."""
    ids = {"rollout_id": rollout["rollout_id"], "attempt_id": rollout["attempt"]["attempt_id"]}
    span = ids | {
        "sequence_id": 1,
        "trace_id": "1" * 32,
        "span_id": "1" * 16,
        "parent_id": None,
        "name": "agentlightning.annotation",
        "status": {"status_code": "OK", "description": None},
        "attributes": {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": reward},
        "events": [],
        "links": [],
        "start_time": time.time(),
        "end_time": time.time(),
        "context": None,
        "parent": None,
        "resource": {"attributes": {}, "schema_url": ""},
    }
    call(url, "/spans", span)
    call(url, f"/rollouts/{ids['rollout_id']}/attempts/{ids['attempt_id']}", {"status": "succeeded"})


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade", help="binary to test")
    options = p.parse_args()
    serve = [options.levade, "store", "serve", "--db", "memory:", "--port", "0"]
    store = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True)
    bridge = None
    try:
        url = next(line for line in store.stderr if "http://" in line).split()[-1]
        threading.Thread(target=store.stderr.read, daemon=True).start()
        program = ROOT / "recipes/agent-lightning/bridge.py"
        command = [sys.executable, program, "--store", url, "--silence-seconds", str(SILENCE)]
        bridge = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def order(name: str) -> None:
            attempt = {"attempt": name, "base_url": "http://gateway", "api_key": name, "model": "m"}
            print(json.dumps(attempt | {"task": {"row": {"question": name}}}), file=bridge.stdin, flush=True)

        lines: dict[str, tuple[float, dict]] = {}
        ended = threading.Semaphore(0)

        def read() -> None:
            for text in bridge.stdout:
                line = json.loads(text)
                lines[line["attempt"]] = (time.monotonic(), line)
                ended.release()

        threading.Thread(target=read, daemon=True).start()
        rollouts = {}
        for name in ["killed", "busy", "quiet"]:
            order(name)
            rollouts[name] = lease(url, name)
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < 2 * SILENCE:
            for name in ["killed", "busy"] if elapsed < 1 else ["busy"]:
                call(url, f"/workers/{name}", {})
            time.sleep(0.5)
        for name, reward in [("busy", 0.5), ("quiet", 0.25)]:
            finish(url, rollouts[name], reward)
        for _ in range(3):
            if not ended.acquire(timeout=20):
                raise SystemExit(f"the bridge reported only {sorted(lines)} within 20 s")
        noticed, killed = lines["killed"]
        failures = []
        if "sent no heartbeat" not in killed.get("error", ""):
            failures.append(f"the killed runner was not noticed: {killed}")
        elif not SILENCE <= noticed - start <= SILENCE + 6:
            failures.append(f"the killed runner was noticed after {noticed - start:.1f} s")
        status = call(url, f"/rollouts/{rollouts['killed']['rollout_id']}")["status"]
        if status != "cancelled":
            failures.append(f"the rollout of the killed runner is {status}")
        for name, reward in [("busy", 0.5), ("quiet", 0.25)]:
            if lines[name][1].get("reward") != reward:
                failures.append(f"the runner {name} was not waited for: {lines[name][1]}")
        print(
            f"a killed runner was noticed {noticed - start:.1f} s after its last lease (limit {SILENCE:g} s of silence)"
        )
        if failures:
            raise SystemExit("FAILED: " + "; ".join(failures))
        print("passed")
    finally:
        for process in [bridge, store]:
            if process:
                process.terminate()
                process.wait(timeout=20)


if __name__ == "__main__":
    main()
