"""Conversations of real clients with a model that says given texts: one root for each, and only the forks that are known.

Each client of the table starts once, against the gateway's example `scripted` (build it with
`cargo build --release -p dressage-gateway --example scripted`). The model calls a calculator beside some text, answers, calls it without text, and
answers again. The client sends its history back in its own way; the example prints how each prompt came about. Compared with the table: roots,
continued prompts, forks by reason, and replies that were continued although the client had rewritten them.

Packages are installed into `--environments` where they are not there yet.
"""

import argparse
import collections
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def call(expression):
    """A call as the scripted model writes it."""
    arguments = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


TOOLS = [f"Let me see.\n{call('12 * 3')}", "12 * 3 is 36.", call("12 + 30"), "It is 42."]
CODE = [
    "Thought: a product.\n<code>\nprint(12 * 3)\n</code>",
    "Thought: done.\n<code>\nfinal_answer(36)\n</code>",
    "Thought: a sum.\n<code>\nfinal_answer(12 + 30)\n</code>",
]
PROBED = ["Hello.", *TOOLS]
# Client, packages, program, mode, texts, roots, forks by reason, replies that are continued although rewritten.
CLIENTS = [
    ("agno chat", ["agno==3.1.10", "openai==3.57.0"], "agno_agent.py", "chat", TOOLS, 1, {}, 0),
    ("agno responses", ["agno==3.1.10", "openai==3.57.0"], "agno_agent.py", "responses", TOOLS, 1, {}, 3),
    ("agno Claude", ["agno==3.1.10", "anthropic==2.14.0"], "agno_agent.py", "messages", TOOLS, 1, {}, 0),
    ("haystack", ["haystack-ai==3.4.1"], "haystack_agent.py", "", TOOLS, 1, {}, 0),
    ("semantic-kernel", ["semantic-kernel==1.45.0"], "semantic_kernel_agent.py", "", TOOLS, 1, {}, 3),
    ("smolagents CodeAgent", ["smolagents[openai]==1.26.0"], "smolagents_code.py", "", CODE, 1, {}, 2),
    ("inspect-ai chat", ["inspect-ai==0.3.285", "openai==3.57.0"], "inspect_agent.py", "chat", TOOLS, 1, {}, 0),
    (
        "inspect-ai responses",
        ["inspect-ai==0.3.285", "openai==3.57.0"],
        "inspect_agent.py",
        "responses",
        PROBED,
        2,
        {},
        0,
    ),
    (
        "inspect-ai anthropic",
        ["inspect-ai==0.3.285", "anthropic==2.14.0"],
        "inspect_agent.py",
        "messages",
        TOOLS,
        1,
        {},
        0,
    ),
    ("langroid", ["langroid==0.69.16"], "langroid_agent.py", "", TOOLS, 1, {}, 3),
    (
        "pydantic-ai responses",
        ["pydantic-ai-slim[openai]==2.68.0"],
        "pydantic_ai_agent.py",
        "responses",
        TOOLS,
        1,
        {},
        0,
    ),
    (
        "pydantic-ai anthropic",
        ["pydantic-ai-slim[anthropic]==2.68.0"],
        "pydantic_ai_agent.py",
        "messages",
        TOOLS,
        1,
        {},
        0,
    ),
    ("strands responses", ["strands-agents[openai]==1.62.0"], "strands_agent.py", "responses", TOOLS, 1, {}, 0),
    ("strands anthropic", ["strands-agents[anthropic]==1.62.0"], "strands_agent.py", "messages", TOOLS, 1, {}, 0),
]


def interpreter(environments, packages):
    """The Python of an environment with these packages, made where it is not there."""
    folder = environments / re.sub(r"[^a-z0-9]+", "-", "-".join(packages).lower())
    python = folder / "bin/python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def environment(base, key):
    """The variables that a program finds in training."""
    passed = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    task = json.dumps({"question": "What is 12 * 3?"})
    return passed | {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": "scripted",
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": "scripted",
        "DRESSAGE_BASE_URL": base,
        "DRESSAGE_API_KEY": key,
        "DRESSAGE_MODEL": "scripted",
        "DRESSAGE_TASK": task,
        "DRESSAGE_ATTEMPT": "tried",
        "NO_PROXY": "127.0.0.1",
    }


def talk(scripted, python, program, mode, texts):
    """Runs a client against a model that says these texts: how its prompts came about, its last line, its errors."""
    server = subprocess.Popen([scripted, "127.0.0.1:0", *texts], stdout=subprocess.PIPE, text=True)
    base, key = server.stdout.readline().split()
    with tempfile.TemporaryDirectory() as home:
        variables = environment(base, key) | {"HOME": home}
        command = [python, ROOT / "conformance/clients" / program, *mode.split()]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, cwd=home)
    server.send_signal(signal.SIGINT)
    told, _ = server.communicate(timeout=60)
    found = {"roots": 0, "continued": 0, "forked": collections.Counter(), "rewritten": 0, "refused": ""}
    for line in told.splitlines():
        found["roots"] += line.startswith("Some(Began)")
        found["continued"] += line.startswith("Some(Continued)")
        if forked := re.match(r"Some\(Forked\(.*reason: (\w+)", line):
            found["forked"][forked[1]] += 1
        if rewritten := re.match(r"counts: .*altered: (\d+), extended: (\d+)", line):
            found["rewritten"] = int(rewritten[1]) + int(rewritten[2])
        if line.startswith("refused: ") and line != "refused: {}":
            found["refused"] = line
    return found, (done.stdout.strip().splitlines() or [""])[-1], done.stderr


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--environments", type=Path, required=True, help="a folder for the clients' packages")
    p.add_argument("--python", type=Path, help="an interpreter that has the packages of --only already")
    p.add_argument("--only", default="", help="clients whose names contain this")
    p.add_argument("--scripted", type=Path, default=ROOT / "target/release/examples/scripted")
    p.add_argument("--verbose", action="store_true", help="print what clients write")
    arguments = p.parse_args()
    failures = 0
    for name, packages, program, mode, texts, roots, forks, rewritten in CLIENTS:
        if arguments.only not in name:
            continue
        try:
            python = arguments.python or interpreter(arguments.environments, packages)
            found, last, errors = talk(arguments.scripted, python, program, mode, texts)
        except subprocess.SubprocessError as error:
            print(f"FAIL {name:24} {error}", flush=True)
            failures += 1
            continue
        right = (found["roots"], dict(found["forked"]), found["refused"]) == (roots, forks, "")
        right &= found["continued"] >= len(texts) - roots and found["rewritten"] >= min(rewritten, 1)
        failures += not right
        print(
            f"{'ok  ' if right else 'FAIL'} {name:24} {found['roots']} roots, {found['continued']} continued, "
            f"{dict(found['forked'])} forked, {found['rewritten']} rewritten {found['refused']} {last[:80]}",
            flush=True,
        )
        if arguments.verbose or not right:
            print(errors[-1500:], flush=True)
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()
