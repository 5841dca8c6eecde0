"""Lets runners of Agent Lightning 0.3 make the attempts of a run.

Levade starts this program as a worker and writes a line of JSON for each attempt. The program enqueues a rollout in the
store, whose input is the row of the task. Its resources `main_llm` are the endpoint and the key of this attempt, so that
Levade records every token. When a runner has ended the rollout, the program prints the reward in the rollout's spans:
what the agent returned or emitted.

A rollout without a reward is unscored. One that failed, or that no runner has ended within --seconds, is an error, and
the recipe decides how often the attempt is repeated. So is one whose runner has sent no heartbeat for --silence-seconds:
runners send one every 10 seconds, also while they make an attempt. Needs no packages.
"""

import argparse
import hashlib
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

# Maximum time of a request that waits for the end of a rollout. A stopped attempt ends within it.
HOLD = 2
ENDED = ("succeeded", "failed", "cancelled")


class Store:
    """Client of the store. Repeats requests while the store is unreachable: each of them can be repeated."""

    def __init__(self, url: str, patience: float) -> None:
        self.url, self.patience = url.rstrip("/") + "/v1/agl", patience
        # Proxies of this machine are not for the store.
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def call(self, path: str, body: object = None) -> object:
        headers = {"content-type": "application/json"}
        if key := os.environ.get("LEVADE_STORE_KEY"):
            headers["x-api-key"] = key
        data = None if body is None else json.dumps(body).encode()
        start = time.monotonic()
        while True:
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with self.opener.open(request, timeout=30) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                why = f"status {error.code}: {error.read()[:300].decode(errors='replace')}"
                if error.code < 500:
                    raise RuntimeError(f"the store at {self.url} rejects {path} with {why}") from None
            except (OSError, ValueError) as error:
                why = str(error)
            if time.monotonic() - start > self.patience:
                raise RuntimeError(f"the store at {self.url} could not be used for {self.patience:.0f} s: {why}")
            time.sleep(0.5)


class Liveness:
    """Heartbeats of the runner that makes a rollout. Their times are compared with each other only, not with a clock."""

    def __init__(self, store: Store, rollout_id: str, silence: float) -> None:
        self.store, self.rollout_id, self.silence = store, rollout_id, silence
        self.last: tuple[str, float] | None = None
        self.since = time.monotonic()

    def lost_runner(self) -> str | None:
        """Returns the runner that has sent no heartbeat for too long, or None. Some runners send none at all."""
        latest = self.store.call(f"/rollouts/{self.rollout_id}/attempts/latest")
        name = latest and latest["worker_id"]
        worker = name and self.store.call(f"/workers/{urllib.parse.quote(name, safe='')}")
        beat = (name, worker["last_heartbeat_time"]) if worker and worker["last_heartbeat_time"] else None
        if beat != self.last:
            self.last, self.since = beat, time.monotonic()
        return name if beat and time.monotonic() - self.since > self.silence else None


def make(store: Store, order: dict, seconds: float, silence: float, stopped: threading.Event) -> dict:
    """Makes an attempt. Returns the line for Levade."""
    name = order["attempt"]
    llm = {"resource_type": "llm", "endpoint": order["base_url"], "api_key": order["api_key"], "model": order["model"]}
    # The key of the session is new in each try. Runners put ids into URLs as they are, and names have spaces and slashes.
    key = hashlib.sha256(f"{name}/{order['api_key']}".encode()).hexdigest()[:24]
    resources = store.call(f"/resources/rs-{key}", {"main_llm": llm})["resources_id"]
    rollout = {
        "input": order["task"]["row"] or order["task"],
        # A runner gets validation tasks by another method only if the agent defines one.
        "mode": "train",
        "resources_id": resources,
        "config": {"timeout_seconds": seconds},
        "metadata": {"levade_attempt": name},
        "idempotency_key": key,
    }
    rollout_id = store.call("/queues/rollouts/enqueue", {"rollouts": [rollout]})[0]["rollout_id"]
    liveness = Liveness(store, rollout_id, silence)
    while True:
        if stopped.is_set():
            store.call(f"/rollouts/{rollout_id}", {"status": "cancelled"})
            return {"attempt": name, "error": "the attempt was stopped"}
        if found := store.call("/waits/rollouts", {"rollout_ids": [rollout_id], "timeout": HOLD}):
            break
        if silence and (lost := liveness.lost_runner()):
            store.call(f"/rollouts/{rollout_id}", {"status": "cancelled"})
            why = f"the runner {lost} sent no heartbeat for {silence:g} s; the rollout {rollout_id} is cancelled"
            return {"attempt": name, "error": why}
    status = found[0]["status"]
    if status != "succeeded":
        tries = store.call(f"/rollouts/{rollout_id}/attempts")["items"]
        last = (
            f"its last attempt is {tries[-1]['status']} by {tries[-1]['worker_id']}" if tries else "no runner took it"
        )
        return {"attempt": name, "error": f"the rollout {rollout_id} is {status}: {last}; see the log of the runner"}
    trace = store.call(f"/rollouts/{rollout_id}/calls")
    line = {"attempt": name, "rollout": rollout_id, "traced_calls": len(trace["calls"])}
    if trace["final_reward"] is None:
        return line | {"problem": trace.get("problem") or "the spans contain no reward"}
    return line | {"reward": trace["final_reward"]}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--store", required=True, metavar="URL", help="store of the runners: levade store serve")
    p.add_argument("--seconds", type=float, default=300, help="timeout of a rollout; below agent.attempt_seconds")
    p.add_argument("--silence-seconds", type=float, default=60, help="timeout for a runner's heartbeat; 0 for none")
    p.add_argument("--wait-seconds", type=float, default=300, help="timeout for an unreachable store")
    options = p.parse_args()
    store = Store(options.store, options.wait_seconds)
    printing = threading.Lock()
    stops: dict[str, threading.Event] = {}

    def attempt(order: dict, stopped: threading.Event) -> None:
        try:
            line = make(store, order, options.seconds, options.silence_seconds, stopped)
        except Exception as error:  # a failed attempt must not end the others
            line = {"attempt": order["attempt"], "error": f"{type(error).__name__}: {error}"[:500]}
        with printing:
            stops.pop(order["attempt"], None)
            print(json.dumps(line), flush=True)

    for text in sys.stdin:
        order = json.loads(text)
        if order.get("stop"):
            with printing:
                if stopped := stops.get(order["attempt"]):
                    stopped.set()
            continue
        stops[order["attempt"]] = stopped = threading.Event()
        threading.Thread(target=attempt, args=(order, stopped), daemon=True).start()


if __name__ == "__main__":
    main()
