"""Attacks the sandbox, by class: over HTTP against `levade sandbox serve`, as root and as an unprivileged user.

The attack programs are in crates/sandbox/tests/escapes/attacks; `prelude.py` there explains how a title states the
expected outcome. This script adds what they need on the host (sockets, a pipe, a database, a secret), attacks whose
outcome only the host can determine (whether a message reaches a service in a shared directory, whether the host can
still lock a file, how much memory is missing), and requests to the service itself. It prints a table by class and each
successful attack, and exits with code 1 if there is one.

    cargo build --release
    python3 conformance/sandbox_attacks.py                 # as root: both users; otherwise the current user
    python3 conformance/sandbox_attacks.py --only memory   # classes or titles with this text

If the script runs as root, the unprivileged user is `nobody`. It runs /usr/bin/python3, since it cannot read an
interpreter in a home directory.
"""

import argparse
import fcntl
import http.client
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ATTACKS = ROOT / "crates/sandbox/tests/escapes/attacks"
NOBODY = 65534
MEMORY, DISK = 256, 128  # Limits of a run, in MiB: --memory-mb, and its files.


def programs() -> list:
    """Yields class, expectation, title and code of every program."""
    prelude = (ATTACKS / "prelude.py").read_text()
    found = []
    for path in sorted(ATTACKS.glob("*.py")):
        if path.name == "prelude.py":
            continue
        for part in path.read_text().removeprefix("### ").split("\n### "):
            title, code = part.split("\n", 1)
            expect, name = title.split(": ", 1)
            found.append((path.stem, expect, name, prelude + "\n" + code))
    return found


class Host:
    """Resources of the host that attacks target."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="attacked-", dir="/var/tmp"))
        self.shown = self.folder / "shown"
        self.shown.mkdir()
        (self.folder / "secret").write_text("hush")
        (self.shown / "data").write_text("rows")
        os.mkfifo(self.shown / "pipe")
        with sqlite3.connect(self.shown / "rows.db") as rows:
            rows.execute("create table t (x)")
        self.arrived, self.sockets = [], []
        self.tcp = self.listens(socket.AF_INET, ("127.0.0.1", 0))
        self.name = f"attacked-{os.getpid()}"
        self.listens(socket.AF_UNIX, "\0" + self.name)
        self.listens(socket.AF_UNIX, str(self.folder / "socket"))
        self.listens(socket.AF_UNIX, str(self.shown / "socket"))
        self.listens(socket.AF_UNIX, str(self.shown / "datagrams"), socket.SOCK_DGRAM)
        for path in [self.folder, self.shown, *self.shown.iterdir()]:
            path.chmod(0o777)
        (self.folder / "secret").chmod(0o600)
        self.ends = threading.Event()
        threading.Thread(target=self.writes, daemon=True).start()

    def listens(self, family, address, kind=socket.SOCK_STREAM):
        server = socket.socket(family, kind)
        server.bind(address)
        self.sockets.append(server)
        if kind == socket.SOCK_STREAM:
            server.listen()

        def take() -> None:
            while True:
                try:
                    self.arrived.append(
                        (server.recv(100) if kind != socket.SOCK_STREAM else server.accept()) and address
                    )
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        return server

    def writes(self) -> None:
        """Writes a secret to the pipe in the shared directory whenever a process reads the pipe."""
        while not self.ends.wait(0.05):
            try:
                pipe = os.open(self.shown / "pipe", os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b"hush")
                self.arrived.append("pipe")
                os.close(pipe)
            except OSError:
                pass

    def put_in(self, code: str) -> str:
        for mark, value in {
            "port": self.tcp.getsockname()[1], "unix": self.folder / "socket", "abstract": self.name,
            "secret": self.folder / "secret", "folder": self.folder, "shown": self.shown, "pid": os.getpid(),
            "host": socket.gethostname(),
        }.items():  # fmt: skip
            code = code.replace(f"@{mark}@", str(value))
        return code

    def close(self) -> None:
        self.ends.set()
        for server in self.sockets:
            server.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Service:
    def __init__(self, binary: Path, python: str, shown: Path, more: list) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [binary, "sandbox", "serve", "--bind", f"127.0.0.1:{self.port}", "--python", python, "--read", shown]
        command += ["--memory-mb", str(MEMORY), "--max-seconds", "60", "--concurrency", "4", *more]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | {"LEVADE_TEST_SECRET": "hush"}
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, env=environment)
        for _ in range(600):
            time.sleep(0.1)
            try:
                self.protection = json.loads(self.ask("GET", "/protection")[1])
                return
            except OSError:
                if self.process.poll() is not None:
                    break
        self.log.seek(0)
        sys.exit("the service did not start:\n" + self.log.read().decode())

    def ask(self, method: str, path: str, body=None, headers=None) -> tuple:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        status, content = response.status, response.read()
        connection.close()
        return status, content

    def run(self, code: str, seconds: float = 30, language: str = "python") -> dict:
        body = json.dumps({"code": code, "language": language, "run_timeout": seconds})
        status, content = self.ask("POST", "/run_code", body, {"content-type": "application/json"})
        if status != 200:
            raise RuntimeError(f"{status} {content[:300]}")
        return json.loads(content)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def outcome_error(expect: str, answer: dict):
    """Returns what is wrong with the outcome of a program, or nothing if the outcome matches its title."""
    result = answer.get("run_result") or {}
    out, err, code = result.get("stdout") or "", result.get("stderr") or "", result.get("return_code")
    late = result.get("status") == "TimeLimitExceeded"
    ended = f"{answer['status']} {answer['message']} code {code}, late {late}\n{out[-500:]}\n{err[-500:]}"
    if "ESCAPED" in out or answer["status"] == "SandboxError":
        return ended
    what, _, number = expect.partition(" ")
    over = "ended by the sandbox: its processes held more than" in err
    held = sum(int(line.split()[1]) for line in out.splitlines() if line.startswith("HELD "))
    right = {
        "refused": code == 0 and "refused:" in out,
        "fine": code == 0,
        "exit": code == int(number or 0) and not late,
        "signal": code == -int(number or 0),
        "late": late,
        "memory": over or "MemoryError" in err or "Cannot allocate memory" in err,
        "bounded": over
        or "MemoryError" in err
        or (code == 0 and held <= MEMORY + DISK and ("HELD" in out or "refused:" in out)),
    }
    return None if right[what] else ended


def available() -> int:
    text = Path("/proc/meminfo").read_text()
    return int(text.split("MemAvailable:")[1].split()[0]) >> 10


def host_attacks(host: Host, service: Service, programs: list):
    """Runs attacks whose outcome only the host can determine. Yields title and problem."""
    shown = host.shown

    def while_running(code: str, look, seconds: float = 3):
        """Returns the result of `look` after a program reports that it is ready, and the program's output."""
        ready = shown / "ready"
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(service.run, host.put_in(code), seconds + 5)
            time.sleep(seconds / 2)
            found = look()
            run.result()
        ready.unlink(missing_ok=True)
        return found

    def locked(path: Path, how) -> bool:
        with path.open("r+") as file:
            try:
                how(file)
            except OSError:
                return True
        return False

    exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
    take = "import fcntl, os, time\nfile = os.open('%s', os.O_RDONLY)\ntry: fcntl.%s\nexcept OSError as error: print(error)\ntime.sleep(3)"
    data = shown / "data"
    shared = take % (data, "flock(file, fcntl.LOCK_SH)")
    yield (
        "flock of a shown file reaches the host",
        while_running(shared, lambda: locked(data, lambda f: fcntl.flock(f, exclusive))),
    )
    ranges = take % (data, "lockf(file, fcntl.LOCK_SH)")
    yield (
        "a lock of a range reaches the host",
        while_running(ranges, lambda: locked(data, lambda f: fcntl.lockf(f, exclusive))),
    )
    rows = "import sqlite3, time\nc = sqlite3.connect('file:%s?mode=ro', uri=True)\nc.execute('begin'); list(c.execute('select * from t'))\ntime.sleep(3)"

    def writes() -> bool:
        try:
            with sqlite3.connect(shown / "rows.db", timeout=0.1) as base:
                base.execute("insert into t values (1)")
            return False
        except sqlite3.OperationalError:
            return True

    yield "a transaction of a run blocks the host's database", while_running(rows % (shown / "rows.db"), writes)
    lease = take % (data, "fcntl(file, 1024, fcntl.F_RDLCK)")

    def opened_late() -> bool:
        started = time.monotonic()
        data.open("r+").close()
        return time.monotonic() - started > 0.5

    yield "a lease delays the host's write", while_running(lease, opened_late)
    before = len(host.arrived)
    for path in ("socket", "datagrams"):
        for kind in ("STREAM", "DGRAM"):
            service.run(
                f"import socket\ntry: s = socket.socket(socket.AF_UNIX, socket.SOCK_{kind}); s.connect('{shown}/{path}'); s.send(b'x')\nexcept OSError: pass"
            )
    service.run(f"import socket\ntry: socket.socket(socket.AF_UNIX).connect('\\0{host.name}')\nexcept OSError: pass")
    service.run(
        f"exec 3<>/dev/tcp/127.0.0.1/{host.tcp.getsockname()[1]}; cat {shown}/pipe & echo x > {shown}/pipe", 3, "bash"
    )
    time.sleep(0.5)
    yield "a message arrives at a service of the host", host.arrived[before:]
    starts = (
        "import os, time\nseen = set()\nend = time.time() + 2\n"
        "while time.time() < end: seen |= {p for p in os.listdir('/proc') if p.isdigit()}\nprint(len(seen))"
    )
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(service.run, starts)
        for _ in range(20):
            subprocess.run(["true"])
        yield "processes of the host are seen", int(run.result()["run_result"]["stdout"]) > 3
    # Two simultaneous runs, one of which takes all that it can.
    takes = """import os, select, socket, time
kept = []
try:
    while True: kept.append(os.pipe())
except OSError: pass
for pair in kept[:50]:
    try: socket.send_fds(socket.socketpair()[0], [b'x'], list(pair))
    except OSError: pass
time.sleep(3)"""
    uses = """import asyncio, fcntl, os, subprocess, sys
pipe = os.pipe()
print(fcntl.fcntl(pipe[0], 1032))
async def main(): print((await (await asyncio.create_subprocess_exec('echo', 'hi', stdout=-1)).communicate())[0].decode().strip())
asyncio.run(main())"""
    with ThreadPoolExecutor(3) as pool:
        takers = [pool.submit(service.run, takes) for _ in range(3)]
        time.sleep(1.5)
        out = service.run(uses)["run_result"]
        yield "a run takes pipes and watches of another one", out["stdout"] != "65536\nhi\n" and out
        [taker.result() for taker in takers]
    available_before = available()
    stop = threading.Event()
    seen = []

    def watch() -> None:
        while not stop.wait(0.02):
            seen.append(available())

    threading.Thread(target=watch, daemon=True).start()
    code = next(code for _, _, name, code in programs if name == "buffers of socket pairs in many processes")
    service.run(host.put_in(code))
    stop.set()
    print(
        f"  available memory fell by {available_before - min(seen)} MiB while socket buffers were filled (limit {MEMORY} MiB; the machine has other users)"
    )
    yield "memory of the machine is taken by socket buffers", available_before - min(seen) > 8 * MEMORY


def service_attacks(service: Service):
    """Sends requests to the service itself. Yields title and problem."""
    body = json.dumps({"code": "print(1)", "language": "python"})
    own = f"127.0.0.1:{service.port}"
    good = {"content-type": "application/json", "host": own}
    for title, headers, expected in [
        ("a client of its own", {}, 200),
        ("another name of this machine", {"host": f"localhost:{service.port}"}, 200),
        ("a host that a page can rebind", {"host": f"evil.example:{service.port}"}, 403),
        ("a host that contains its own", {"host": f"127.0.0.1.evil.example:{service.port}"}, 403),
        ("a foreign origin", {"origin": "http://evil.example"}, 403),
        ("an origin without a name", {"origin": "null"}, 403),
        ("an origin at another port", {"origin": "http://127.0.0.1:1"}, 403),
        ("a page of another site", {"sec-fetch-site": "cross-site"}, 403),
        ("text/plain", {"content-type": "text/plain"}, 415),
        ("a form", {"content-type": "application/x-www-form-urlencoded"}, 415),
        ("multipart", {"content-type": "multipart/form-data; boundary=x"}, 415),
        ("no content type", {"content-type": ""}, 415),
        ("text/plain that calls itself JSON", {"content-type": "text/plain; application/json"}, 415),
    ]:
        for path in ("/run_code", "/run_jupyter"):
            sent = body if path == "/run_code" else json.dumps({"cells": ["1"]})
            status = service.ask("POST", path, sent, good | headers)[0]
            yield f"{title} at {path}", status != expected and status
    for title, fields in [
        ("a day", {"run_timeout": 86400}), ("just above the maximum", {"run_timeout": 60.001}),
        ("no number", {"run_timeout": "NaN"}), ("below zero", {"run_timeout": -1}),
        ("a file outside", {"files": {"../x": "eA=="}}), ("an absolute file", {"files": {"/etc/x": "eA=="}}),
        ("a fetch outside", {"fetch_files": ["../../etc/passwd"]}),
    ]:  # fmt: skip
        status = service.ask("POST", "/run_code", json.dumps(json.loads(body) | fields), good)[0]
        yield f"{title} is rejected", status != 422 and status
    status = service.ask("POST", "/run_jupyter", json.dumps({"cells": ["1"], "total_timeout": 1e9}), good)[0]
    yield "cells for years are rejected", status != 422 and status
    sessions = {
        "cells": [
            "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()",
            "1",
        ],
        "total_timeout": 20,
    }
    status, content = service.ask("POST", "/run_jupyter", json.dumps(sessions), good)
    yield "a running thread ends with its session", status != 200 and content
    shrinks = (
        "import resource, sys\nopen('out', 'wb').write(bytes(1 << 20))\nfor kind in range(16):\n"
        "    try: resource.prlimit(1, kind, (0, 0))\n    except OSError: pass\nsys.exit(3)"
    )
    fields = {"code": shrinks, "language": "python", "fetch_files": ["out"]}
    answer = json.loads(service.ask("POST", "/run_code", json.dumps(fields), good)[1])
    yield (
        "a failed run makes the service fail",
        (answer["status"], list(answer["files"])) != ("Failed", ["out"]) and answer,
    )


def attack(arguments) -> int:
    """Runs all attacks as the user of this process. Returns the number of successful attacks."""
    host, found = Host(), programs()
    through, table = [], {}
    service = Service(arguments.levade, arguments.python, host.shown, arguments.more)

    def count(kind: str, name: str, wrong) -> None:
        row = table.setdefault(kind, [0, 0])
        row[0] += 1
        if wrong:
            row[1] += 1
            through.append(f"{kind}: {name}\n    {str(wrong).strip()}")

    try:
        print(
            f"uid {os.getuid()}, {service.protection['protection']} protection, memory by {service.protection.get('memory')}",
            flush=True,
        )

        def one(program):
            kind, expect, name, code = program
            seconds = 2 if expect == "late" else 45
            try:
                return kind, name, outcome_error(expect, service.run(host.put_in(code), seconds))
            except (RuntimeError, OSError) as error:
                return kind, name, f"the service: {error}"

        chosen = [p for p in found if arguments.only in f"{p[0]}: {p[2]}"]
        # Runs programs one by one, since an attack that exhausts a resource would take it from another.
        for program in chosen:
            count(*one(program))
        if arguments.only in "between host and runs":
            for name, wrong in host_attacks(host, service, found):
                count("between host and runs", name, wrong)
        if arguments.only in "service":
            for name, wrong in service_attacks(service):
                count("service", name, wrong)
    finally:
        service.stop()
        host.close()
    print(f"{'class':<24}{'attacks':>8}{'through':>9}")
    for kind, (number, bad) in sorted(table.items()):
        print(f"{kind:<24}{number:>8}{bad:>9}")
    print(f"{'all':<24}{sum(n for n, _ in table.values()):>8}{len(through):>9}", flush=True)
    for one_through in through:
        print("THROUGH", one_through)
    return len(through)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade", help="levade binary")
    p.add_argument("--python", help="interpreter for the programs [default: this one; /usr/bin/python3 for nobody]")
    p.add_argument("--only", default="", help="classes or titles with this text")
    p.add_argument("--as", dest="user", choices=["both", "root", "nobody", "self"], default="both")
    p.add_argument("--more", nargs="*", default=[], help="additional options of the service, such as --no-cgroup")
    arguments, options = p.parse_known_args()
    arguments.more += options
    if os.getuid() or arguments.user in ("root", "self"):
        arguments.python = arguments.python or sys.executable
        sys.exit(1 if attack(arguments) else 0)
    bad = False
    if arguments.user == "both":
        bad = subprocess.run([sys.executable, *sys.argv, "--as", "root"]).returncode != 0
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        # `nobody` can read neither a checkout in a home directory nor its build output.
        home = Path(home)
        shutil.copy(arguments.levade, home / "levade")
        shutil.copytree(ATTACKS, home / "crates/sandbox/tests/escapes/attacks")
        (home / "conformance").mkdir()
        shutil.copy(__file__, home / "conformance/sandbox_attacks.py")
        for path in [home, *home.rglob("*")]:
            path.chmod(0o755)
        python = arguments.python or "/usr/bin/python3"
        command = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", python]
        command += [home / "conformance/sandbox_attacks.py", "--as", "self", "--levade", home / "levade"]
        command += ["--python", python, "--only", arguments.only, "--more", *arguments.more]
        environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
        bad = subprocess.run(command, env=environment, cwd="/").returncode != 0 or bad
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
