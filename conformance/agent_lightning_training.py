"""Trains a model whose attempts are made by Agent Lightning 0.3.0's own runners: the calculator must improve by it.

    python3 conformance/agent_lightning_training.py --keep DIR [--set KEY=VALUE …]

Three programs run, as recipes/agent-lightning describes:

- `levade store serve` keeps the queue of the runners, their spans, and the record of the run.
- Runners of `agentlightning==0.3.0` with their default tracer: the recipe's train.py, which does not know Levade.
- `levade train` with the recipe. Its agent is the recipe's bridge, which enqueues each attempt and returns the reward
  that the runner reported in its spans.

First, the script plays the runners itself: the bridge must return a reward, report an attempt without one, one that
failed, one that no runner ended, and one that Levade stopped. `--only-bridge` ends there, and needs no packages.

Then it checks the training:

- The last phase improved the success on held-out tasks: of the tasks whose result changed, more became right than wrong,
  by a one-sided sign test at 1 %. The script prints the success before and after with 95 % intervals (Wilson).
- Each attempt of training has one rollout that succeeded, in one attempt of Agent Lightning. Its score is the final
  reward that Agent Lightning's `find_final_reward` would read, and its spans contain as many model calls as the record.
- All rollouts have ended, and all runners made some of them.

Needs `uv`; the environment (about 1 GB) is created where `--environment` says, and kept. With the recipe's settings, a
run takes about an hour on two cores; `--set phase.1.steps=6` shortens it.
"""

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import closing
from math import comb
from pathlib import Path

from agent_lightning_loop import PACKAGES, check, free_port, wait_for
from agent_lightning_store import environment

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes/agent-lightning"
# Name of the runner that the script plays.
PLAYED = "played"


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def post(url: str, body: object) -> object:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def check_bridge(url: str) -> None:
    """Gives orders to the bridge, plays their runners, and compares the lines that it prints."""
    command = [sys.executable, str(RECIPE / "bridge.py"), "--store", url, "--seconds", "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bridge:
        names = ["rewarded", "silent", "failed", "hung", "stopped"]

        def order(name: str, **fields: object) -> None:
            bridge.stdin.write(json.dumps({"attempt": f"attempt {name}/1", **fields}) + "\n")
            bridge.stdin.flush()

        for name in names:
            endpoint = {"base_url": f"http://{name}/v1", "api_key": f"key-{name}", "model": "m"}
            order(name, **endpoint, task={"id": name, "question": "?", "row": {"name": name}})
        rollouts, deadline = {}, time.monotonic() + 30
        while len(rollouts) < len(names):
            if time.monotonic() > deadline:
                check(False, f"the bridge has enqueued only {sorted(rollouts)} within 30 s")
            time.sleep(0.05)
            for leased in post(f"{url}/v1/agl/queues/rollouts/dequeue", {"limit": 10, "worker_id": PLAYED}):
                rollouts[leased["input"]["name"]] = leased
        for name, leased in rollouts.items():
            llm = get(f"{url}/v1/agl/resources/{leased['resources_id']}")["resources"]["main_llm"]
            want = {"resource_type": "llm", "endpoint": f"http://{name}/v1", "api_key": f"key-{name}", "model": "m"}
            if any(llm[key] != value for key, value in want.items()):
                check(False, f"the resources of {name} are {llm}")
        first = rollouts["rewarded"]
        span = {"rollout_id": first["rollout_id"], "attempt_id": first["attempt"]["attempt_id"], "sequence_id": 1}
        span |= {"trace_id": "1" * 32, "span_id": "1" * 16, "parent_id": None, "name": "agentlightning.annotation"}
        span |= {"status": {"status_code": "OK", "description": None}, "events": [], "links": [], "context": None}
        span |= {"attributes": {"agentlightning.reward.0.name": "reward", "agentlightning.reward.0.value": 0.25}}
        span |= {"start_time": 1.0, "end_time": 2.0, "parent": None, "resource": {"attributes": {}, "schema_url": ""}}
        post(f"{url}/v1/agl/spans", span)
        order("stopped", stop=True)
        for name, status in (("rewarded", "succeeded"), ("silent", "succeeded"), ("failed", "failed")):
            tried = f"{rollouts[name]['rollout_id']}/attempts/{rollouts[name]['attempt']['attempt_id']}"
            post(f"{url}/v1/agl/rollouts/{tried}", {"status": status})
        lines = {
            line["attempt"].split()[1][:-2]: line for line in (json.loads(bridge.stdout.readline()) for _ in names)
        }
        bridge.stdin.close()
    check(lines["rewarded"].get("reward") == 0.25, f"the bridge returns a reward: {lines['rewarded']}")
    silent = lines["silent"]
    check("problem" in silent and not {"reward", "error"} & silent.keys(), f"and none without one: {silent}")
    for name, text in (("failed", f"failed by {PLAYED}"), ("hung", f"timeout by {PLAYED}"), ("stopped", "was stopped")):
        check(text in lines[name].get("error", ""), f"{name}: {lines[name].get('error')}")
    stopped = get(f"{url}/v1/agl/rollouts/{rollouts['stopped']['rollout_id']}")
    check(stopped["status"] == "cancelled", f"the rollout of the stopped attempt is {stopped['status']}")


def stop(process: subprocess.Popen) -> None:
    """Stops a process and those that it has started, by their group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def shown(result: dict) -> str:
    low, high = result["success"]["low"], result["success"]["high"]
    return f"{result['correct']} of {result['tasks']} ({100 * low:.1f}–{100 * high:.1f} %)"


def sign_test(gained: int, lost: int) -> float:
    """Returns the probability of at least `gained` of the changes, if gains and losses were equally likely."""
    changed = gained + lost
    return sum(comb(changed, count) for count in range(gained, changed + 1)) / 2**changed


def check_gain(db: sqlite3.Connection) -> None:
    """Checks that the last phase improved the success."""
    rows = db.execute("SELECT phase, step, result FROM evals ORDER BY phase, step").fetchall()
    results = [(phase, step, json.loads(result)) for phase, step, result in rows]
    print("\n".join(f"    {result['label']}: {shown(result['overall'])}" for _, _, result in results))
    check(len(results) >= 2, f"{len(results)} evaluations were recorded")
    solved = []
    for phase, step, _ in results[-2:]:
        sql = """SELECT json_extract(task, '$.id'), score = 1 FROM attempts
                 WHERE purpose = 'eval' AND status = 'completed' AND phase = ? AND step = ?"""
        solved.append(dict(db.execute(sql, (phase, step)).fetchall()))
    before, after = solved
    check(before.keys() == after.keys(), f"both evaluations have the same {len(before)} tasks")
    gained = sum(after[task] and not before[task] for task in before)
    lost = sum(before[task] and not after[task] for task in before)
    p = sign_test(gained, lost)
    check(p < 0.01, f"{gained} tasks were gained and {lost} lost in the last phase (p = {p:.2g})")


def check_attempts(db: sqlite3.Connection, url: str, rollouts: Path, runners: int) -> None:
    """Compares the attempts of training with the rollouts and their spans."""
    sql = "SELECT outcome, score FROM attempts WHERE purpose = 'train' AND status = 'completed'"
    attempts = [(json.loads(outcome), score) for outcome, score in db.execute(sql)]
    used, scores, unscored = set(), [], 0
    for outcome, score in attempts:
        program = outcome["evidence"]["program"]
        line = json.loads(program["last_line"] or "{}")
        if "rollout" not in line:
            check(False, f"an attempt has no rollout: {json.dumps(program)[:500]}")
        calls = get(f"{url}/v1/agl/rollouts/{line['rollout']}/calls")
        if score is None:
            unscored += 1
        elif calls["final_reward"] != score:
            check(False, f"{line['rollout']} has the reward {calls['final_reward']}, but the attempt the score {score}")
        if len(calls["calls"]) != len(program["calls"]):
            check(
                False, f"{line['rollout']} has {len(calls['calls'])} traced calls, {len(program['calls'])} are recorded"
            )
        used.add(line["rollout"])
        scores.append(score)
    check(
        len(used) == len(attempts) > 0, f"{len(attempts)} attempts of training have a rollout each, {unscored} unscored"
    )
    with closing(sqlite3.connect(f"file:{rollouts}?mode=ro", uri=True)) as store:
        rows = store.execute("SELECT id, status, tries FROM rollouts WHERE queue = 'default'").fetchall()
        sql = "SELECT worker, count(*) FROM tries WHERE status = 'succeeded' AND worker <> ? GROUP BY worker"
        made = dict(store.execute(sql, (PLAYED,)))
    open_ones = [row for row in rows if row[1] not in ("succeeded", "failed", "cancelled")]
    by_status = {status: sum(row[1] == status for row in rows) for status in {row[1] for row in rows}}
    check(not open_ones, f"all {len(rows)} rollouts have ended: {by_status}")
    again = [row for row in rows if row[0] in used and (row[1] != "succeeded" or row[2] != 1)]
    check(not again, "each of the attempts' rollouts succeeded in one attempt of Agent Lightning")
    check(len(made) == runners, f"{len(made)} of {runners} runners made rollouts: {sorted(made.values())}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade", help="the binary")
    p.add_argument("--environment", type=Path, default=Path(tempfile.gettempdir()) / "agent-lightning-0.3.0")
    p.add_argument("--n-runners", type=int, default=10)
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change of the recipe; repeatable")
    p.add_argument("--only-bridge", action="store_true", help="check only the bridge")
    p.add_argument(
        "--keep", type=Path, required=True, help="directory for the store, the run and all logs; must not exist"
    )
    p.add_argument("--hours", type=float, default=3, help="maximum duration of the training")
    options = p.parse_args()
    levade, folder = options.levade.resolve(strict=True), options.keep.resolve()
    folder.mkdir(parents=True)
    python = None if options.only_bridge else environment(options.environment, PACKAGES)
    if not (ROOT / "recipes/calc-x/data/made-up.jsonl").exists():
        subprocess.run([sys.executable, str(ROOT / "recipes/calc-x/prepare.py")], check=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    running = []

    def start(name: str, command: list, **variables: str) -> tuple[subprocess.Popen, Path]:
        log = folder / f"{name}.log"
        # litellm and agentops would use the network.
        own = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "AGENTOPS_LOG_LEVEL": "ERROR",
            "AGENTOPS_LOGGING_TO_FILE": "False",
        }
        with log.open("w") as out:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=folder,
                env=os.environ | own | variables,
                start_new_session=True,
            )
        running.append(process)
        return process, log

    try:
        store, log = start("store", [levade, "store", "serve", "--port", port, "--db", folder / "rollouts.db"])
        wait_for(f"{url}/v1/agl/health", store, log)
        check_bridge(url)
        if options.only_bridge:
            return
        script = [python, RECIPE / "train.py", "--external-store-address", url, "--n-runners", options.n_runners]
        start("runners", script, AGL_MANAGED_STORE="0", AGL_CURRENT_ROLE="runner")
        bridge = f'agent.command=["python3", "bridge.py", "--store", "{url}"]'
        changes = [part for change in [bridge, *options.set] for part in ("--set", change)]
        begun = time.monotonic()
        train, log = start("train", [levade, "train", RECIPE, "--store", url, "--run", folder / "run", *changes])
        try:
            code = train.wait(options.hours * 3600)
        except subprocess.TimeoutExpired:
            code = f"nothing within {options.hours} h"
        text = "" if code == 0 else log.read_text()[-2000:]
        check(code == 0, f"the training ended with {code} after {(time.monotonic() - begun) / 60:.1f} minutes{text}")
        record = folder / "rollouts.db.runs/run.db"
        with closing(sqlite3.connect(f"file:{record}?mode=ro", uri=True)) as db:
            check_attempts(db, url, folder / "rollouts.db", options.n_runners)
            check_gain(db)
    finally:
        for process in reversed(running):
            stop(process)


if __name__ == "__main__":
    main()
