"""Runs the tests of Agent Lightning 0.3.0 against `levade store serve`, through its published client.

Agent Lightning tests its store in process. A pytest plugin (`PLUGIN` below) replaces the store with a process for each
test: `levade store serve` with a store in memory, and the unmodified client from PyPI. The script selects three test
files: raw HTTP, client and server, semantics. Without the markers `mongo` and `prometheus`, these are 239 tests. They
run twice:

- strict: with the unmodified client. Agent Lightning's own server, in a process of its own, passes 198 tests.
- adapted: the plugin removes gaps of the client, which rejects waits above 0.1 s, drops the page of a query of workers,
  raises HTTP errors instead of ValueError, and compares the name of the store with that of a class. Agent Lightning's
  own server passes 217 tests.

The other 22 tests inspect the process of the store: private methods, a changed clock, captured logs, arguments of the
constructor.

The tests are not part of this repository. `--checkout` names a checkout of
https://github.com/microsoft/agent-lightning at the tag v0.3.0:

    git clone --depth 1 --branch v0.3.0 https://github.com/microsoft/agent-lightning DIR
    python3 conformance/agent_lightning_store.py --checkout DIR

Needs `uv`. The environment (about 1 GB) is created at `--environment`, and kept.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["agentlightning==0.3.0", "pytest", "pytest-asyncio", "pytest-rerunfailures", "portpicker"]
FILES = ["tests/store/test_restful.py", "tests/store/test_client_server.py", "tests/store/test_core.py"]
BOUNDS = {"strict": 198, "adapted": 217}

PLUGIN = '''"""Replaces the in-process store of Agent Lightning by a foreign process. Loaded before conftest."""
import json, os, shlex, subprocess, time, urllib.request
import agentlightning.store as st
import agentlightning.store.client_server as cs
import agentlightning.store.memory as mem
from portpicker import pick_unused_port

COMMAND = os.environ["STORE_COMMAND"]


def spawn(port, cors=None):
    command = shlex.split(COMMAND.format(port=port))
    for origin in [cors] if isinstance(cors, str) else cors or []:
        command += ["--cors-origin", origin]
    process = subprocess.Popen(command)
    for _ in range(500):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/agl/health", timeout=1)
            break
        except Exception:
            time.sleep(0.02)

    def stop():
        process.terminate()
        process.wait()

    return stop


live = []


class ForeignStore(cs.LightningStoreClient):  # for InMemoryLightningStore
    def __init__(self, *args, scan_debounce_seconds=0, **options):
        port = pick_unused_port()
        self._stop = spawn(port)
        live.append(self)
        super().__init__(f"http://127.0.0.1:{port}")
        if os.environ.get("STORE_ADAPTED"):
            statistics = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/agl/statistics"))
            self.__class__ = type(statistics["name"], (AdaptedStore,), {})


class AdaptedStore(ForeignStore):
    async def _request_json(self, method, path, *, json=None, params=None):
        session = await self._get_session()
        async with getattr(session, method)(self.server_address + path, json=json, params=params) as response:
            if response.status < 400:
                return await response.json()
            body = await response.json(content_type=None)
        if response.status == 400 and path.endswith("/attempts/search") and (json or {}).get("limit") == 0:
            return {"items": [], "limit": 0, "offset": 0, "total": 0}
        if response.status == 400 and path.startswith("/workers/"):
            raise TypeError(str(body))
        raise ValueError(str(body.get("traceback") or body.get("detail")))

    async def wait_for_rollouts(self, *, rollout_ids, timeout=None):
        body = {"rollout_ids": rollout_ids, "timeout": timeout}
        data = await self._request_json("post", "/waits/rollouts", json=body)
        return [cs.Rollout.model_validate(rollout) for rollout in data]

    async def query_workers(self, *, limit=-1, offset=0, **options):
        original = self._request_json

        async def with_page(method, path, *, json=None, params=None):
            return await original(method, path, json={**json, "limit": limit, "offset": offset}, params=params)

        self._request_json = with_page
        try:
            return await super().query_workers(**options)
        finally:
            del self._request_json


class ForeignServer(cs.LightningStoreClient):  # for LightningStoreServer(store, host, port)
    def __init__(self, store=None, host=None, port=None, cors_allow_origins=None, **options):
        self.store, self._port, self._cors, self._stop = store, port, cors_allow_origins, None
        is_same = isinstance(store, ForeignStore) and not cors_allow_origins
        super().__init__(store.server_address_root if is_same else f"http://127.0.0.1:{port}")

    @property
    def endpoint(self):
        return self.server_address_root

    async def start(self):
        if str(self._port) in self.server_address_root:
            self._stop = spawn(self._port, self._cors)

    async def stop(self):
        await self.close()
        if self._stop:
            self._stop()


cs.LightningStoreServer = st.LightningStoreServer = ForeignServer
mem.InMemoryLightningStore = st.InMemoryLightningStore = ForeignStore


def pytest_runtest_logfinish(nodeid, location):
    while live:
        live.pop()._stop()
'''


def environment(folder: Path, packages: list[str]) -> Path:
    """Returns the Python of an environment with the packages, which is created if it does not exist."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run(["uv", "venv", "--no-config", "--python", sys.executable, str(folder)], check=True)
        subprocess.run(["uv", "pip", "install", "--no-config", "--python", str(python), *packages], check=True)
    return python


def run(mode: str, python: Path, checkout: Path, command: str, plugin: Path) -> tuple[int, int, list[str]]:
    """Runs the selected tests. Returns the number that passed, the number selected, and the names of the others."""
    # litellm would fetch a table of prices when it is imported.
    variables = os.environ | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "STORE_COMMAND": command,
        "PYTHONPATH": f".{os.pathsep}{plugin}",
    }
    if mode == "adapted":
        variables["STORE_ADAPTED"] = "1"
    arguments = [
        "-p",
        "agl_foreign",
        "-p",
        "no:cacheprovider",
        "-q",
        "-rfE",
        "--tb=no",
        *FILES,
        "-m",
        "not mongo and not prometheus",
    ]
    done = subprocess.run(
        [str(python), "-m", "pytest", *arguments], cwd=checkout, env=variables, capture_output=True, text=True
    )
    counts = {
        name: int(count)
        for count, name in re.findall(
            r"(\d+) (passed|failed|error|skipped)", done.stdout.splitlines()[-1] if done.stdout else ""
        )
    }
    if not counts:
        sys.exit(f"pytest ran no tests:\n{done.stdout}\n{done.stderr}")
    others = sorted(
        {
            line.split(" - ")[0].split(" ", 1)[1]
            for line in done.stdout.splitlines()
            if line.startswith(("FAILED ", "ERROR "))
        }
    )
    return counts.get("passed", 0), sum(counts.values()), others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="Agent Lightning at the tag v0.3.0")
    parser.add_argument("--levade", type=Path, default=ROOT / "target/release/levade", help="binary to test")
    parser.add_argument("--environment", type=Path, default=Path(tempfile.gettempdir()) / "agent-lightning-0.3.0")
    parser.add_argument("--server", help="command of another server, with {port}, instead of Levade's")
    args = parser.parse_args()
    missing = [name for name in FILES if not (args.checkout / name).exists()]
    if missing:
        sys.exit(f"{args.checkout} has no {missing[0]}; check out the tag v0.3.0")
    serve = [str(args.levade.resolve()), "store", "serve", "--host", "127.0.0.1", "--port", "{port}", "--db", "memory:"]
    command = args.server or shlex.join([*serve, "--scan-debounce-seconds", "0"]).replace("'{port}'", "{port}")
    python = environment(args.environment, PACKAGES)
    is_good = True
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "agl_foreign.py").write_text(PLUGIN)
        for mode, bound in BOUNDS.items():
            passed, selected, others = run(mode, python, args.checkout, command, Path(folder))
            is_good &= passed >= bound
            print(f"{mode}: {passed} of {selected} passed, bound {bound}: {'ok' if passed >= bound else 'FAILED'}")
            for name in others:
                print(f"  not passed: {name}")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
