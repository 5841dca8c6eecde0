"""Trains a model whose attempts are made by Agent Lightning 0.3.0's own runners: the calculator must improve by it.

    python3 conformance/agent_lightning_training.py --keep DIR [--set KEY=VALUE …]

Three programs run, as recipes/agent-lightning describes:

- `levade store serve` keeps the queue of the runners, their spans, and the record of the run.
- Runners of `agentlightning==0.3.0` with their default tracer: the recipe's train.py, which does not know Levade.
- `levade train` with the recipe. Its agent is the recipe's bridge, which enqueues each attempt and returns the reward
  that the runner reported in its spans.

Checks:

- The held-out tasks solved after the last phase are more than before it, beyond the 95 % intervals of both (Wilson).
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
from pathlib import Path

from agent_lightning_loop import PACKAGES, check, free_port, wait_for
from agent_lightning_store import environment

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes/agent-lightning"


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def stop(process: subprocess.Popen) -> None:
    """Stops a process and those that it has started, by their group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=15)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def evaluations(db: sqlite3.Connection) -> dict[str, dict]:
    """Returns the results of all evaluations, by label."""
    rows = db.execute("SELECT result FROM evals ORDER BY phase, step").fetchall()
    return {result["label"]: result["overall"] for result in (json.loads(row[0]) for row in rows)}


def shown(result: dict) -> str:
    low, high = result["success"]["low"], result["success"]["high"]
    return f"{result['correct']} of {result['tasks']} ({100 * low:.1f}–{100 * high:.1f} %)"


def check_gain(results: dict[str, dict]) -> None:
    """Checks that the last phase improved the success."""
    print("\n".join(f"    {label}: {shown(result)}" for label, result in results.items()))
    check(len(results) >= 2, f"{len(results)} evaluations were recorded")
    before, after = list(results.values())[-2:]
    check(after["success"]["low"] > before["success"]["high"], f"success rose from {shown(before)} to {shown(after)}")


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
            check(False, f"{line['rollout']} has {len(calls['calls'])} traced calls, {len(program['calls'])} are recorded")
        used.add(line["rollout"])
        scores.append(score)
    check(len(used) == len(attempts) > 0, f"{len(attempts)} attempts of training have a rollout each, {unscored} unscored")
    with closing(sqlite3.connect(f"file:{rollouts}?mode=ro", uri=True)) as store:
        rows = store.execute("SELECT id, status, tries FROM rollouts WHERE queue = 'default'").fetchall()
        made = dict(store.execute("SELECT worker, count(*) FROM tries WHERE status = 'succeeded' GROUP BY worker"))
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
    p.add_argument("--keep", type=Path, required=True, help="directory for the store, the run and all logs; must not exist")
    p.add_argument("--hours", type=float, default=3, help="maximum duration of the training")
    options = p.parse_args()
    levade, folder = options.levade.resolve(strict=True), options.keep.resolve()
    folder.mkdir(parents=True)
    python = environment(options.environment, PACKAGES)
    if not (ROOT / "recipes/calc-x/data/made-up.jsonl").exists():
        subprocess.run([sys.executable, str(ROOT / "recipes/calc-x/prepare.py")], check=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    running = []

    def start(name: str, command: list, **variables: str) -> tuple[subprocess.Popen, Path]:
        log = folder / f"{name}.log"
        # litellm and agentops would use the network.
        own = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AGENTOPS_LOG_LEVEL": "ERROR", "AGENTOPS_LOGGING_TO_FILE": "False"}
        with log.open("w") as out:
            process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder,
                env=os.environ | own | variables, start_new_session=True,
            )
        running.append(process)
        return process, log

    try:
        store, log = start("store", [levade, "store", "serve", "--port", port, "--db", folder / "rollouts.db"])
        wait_for(f"{url}/v1/agl/health", store, log)
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
        record = folder / "rollouts.runs/run.db"
        with closing(sqlite3.connect(f"file:{record}?mode=ro", uri=True)) as db:
            check_attempts(db, url, folder / "rollouts.db", options.n_runners)
            check_gain(evaluations(db))
    finally:
        for process in reversed(running):
            stop(process)


if __name__ == "__main__":
    main()
