"""Compares the roots and forks of real clients' conversations with a table, under a scripted model.

Each client of the table starts once, against the gateway's example `scripted` (build it with `cargo build --release -p
levade-gateway --example scripted`). The model writes text with a calculator call, answers, writes a call without text,
and answers again. The client sends its history back in its own way. The example prints the origin of each prompt.

Compares with the table: roots, continued prompts, forks by reason, and completions that were continued although the
client had rewritten them. Missing packages are installed into `--environments`.
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

from clients import ROOT, interpreter, with_programs


def call(expression):
    """Returns a call as the scripted model writes it."""
    arguments = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


TOOLS = [f"Let me see.\n{call('12 * 3')}", "12 * 3 is 36.", call("12 + 30"), "It is 42."]
CODE = [
    "Thought: a product.\n<code>\nprint(12 * 3)\n</code>",
    "Thought: done.\n<code>\nfinal_answer(36)\n</code>",
    "Thought: a sum.\n<code>\nfinal_answer(12 + 30)\n</code>",
]
PROBED = ["Hello.", *TOOLS]
# For pydantic-ai's stream, which ends at the first text.
BARE = [call("12 * 3"), *TOOLS[1:]]
# The text format of llama-index's ReActAgent, whose prompt asks for JSON.
REACT = [
    'Thought: a product.\nAction: calculator\nAction Input: {"expression": "12 * 3"}',
    "Thought: done.\nAnswer: 36",
    'Thought: a sum.\nAction: calculator\nAction Input: {"expression": "12 + 30"}',
    "Thought: done.\nAnswer: 42",
]
# An answer without a call, after which qwen-code's memory agent sends a request.
MEMORY = ["12 * 3 is 36.", "Nothing to keep.", "It is 42.", "Nothing to keep."]
# For griptape, which names the tool together with its function.
NAMED = [text.replace('"calculator"', '"Calculator_calculate"') for text in TOOLS]


def shelled(tool):
    """Returns the texts for a coding agent whose shell tool is `tool`."""
    command = f'"{tool}", "arguments": {{"command": "echo 42"'
    return [re.sub(r'"calculator", "arguments": \{"expression": "[^"]*"', command, text) for text in TOOLS]


# Client, environment of `clients.py`, program and mode, texts, roots, forks by reason, and prompts that continue a
# rewritten completion.
CLIENTS = [
    ("agno chat", "agno", "agno_agent.py chat", TOOLS, 1, {}, 0),
    ("agno responses", "agno", "agno_agent.py responses", TOOLS, 1, {}, 3),
    ("agno Claude", "agno", "agno_agent.py messages", TOOLS, 1, {}, 0),
    ("haystack", "haystack", "haystack_agent.py", TOOLS, 1, {}, 0),
    ("semantic-kernel", "semantic-kernel", "semantic_kernel_agent.py", TOOLS, 1, {}, 3),
    ("smolagents CodeAgent", "smolagents", "smolagents_code.py", CODE, 1, {}, 2),
    ("inspect-ai chat", "inspect-ai", "inspect_agent.py chat", TOOLS, 1, {}, 0),
    ("inspect-ai responses", "inspect-ai", "inspect_agent.py responses", PROBED, 2, {}, 0),
    ("inspect-ai anthropic", "inspect-ai", "inspect_agent.py messages", TOOLS, 1, {}, 0),
    ("langroid", "langroid", "langroid_agent.py", TOOLS, 1, {}, 3),
    ("pydantic-ai chat stream", "pydantic-ai", "pydantic_ai_agent.py stream", BARE, 1, {}, 0),
    ("pydantic-ai responses", "pydantic-ai", "pydantic_ai_agent.py responses", TOOLS, 1, {}, 0),
    ("pydantic-ai anthropic", "pydantic-ai", "pydantic_ai_agent.py messages", TOOLS, 1, {}, 0),
    ("strands responses", "strands", "strands_agent.py responses", TOOLS, 1, {}, 0),
    ("strands anthropic", "strands", "strands_agent.py messages", TOOLS, 1, {}, 0),
    ("adk", "adk", "adk_agent.py", TOOLS, 1, {}, 0),
    ("agent-framework chat", "agent-framework", "agent_framework_agent.py chat", TOOLS, 1, {}, 0),
    ("agent-framework responses", "agent-framework", "agent_framework_agent.py responses", TOOLS, 1, {}, 0),
    ("ag2 chat", "ag2", "ag2_agent.py chat", TOOLS, 1, {}, 0),
    ("ag2 responses", "ag2", "ag2_agent.py responses", TOOLS, 1, {}, 0),
    ("mcp-agent", "mcp-agent", "mcp_agent_run.py", TOOLS, 1, {}, 0),
    ("deepagents", "deepagents", "deepagents_agent.py", TOOLS, 1, {}, 0),
    # crewai phrases the newest question differently from earlier ones, and drops their calls.
    ("crewai", "crewai", "crewai_agent.py", TOOLS, 1, {"Edited": 1}, 2),
    # griptape's memory keeps only questions and answers.
    ("griptape", "griptape", "griptape_agent.py", NAMED, 1, {"Shortened": 1}, 0),
    ("llama-index function", "llama-index", "llama_index_agent.py function", TOOLS, 1, {}, 0),
    # It writes call arguments with Python quotes, and joins the completions for a question into one message.
    ("llama-index react", "llama-index", "llama_index_agent.py react", REACT, 1, {"CompletionEdited": 3}, 0),
    ("langchain.js chat", "langchain-js", "langchain_agent.mjs chat", TOOLS, 1, {}, 0),
    ("langchain.js responses", "langchain-js", "langchain_agent.mjs responses", TOOLS, 1, {}, 0),
    ("genkit", "genkit-js", "genkit_agent.mjs", TOOLS, 1, {}, 3),
    # voltagent wraps tool results after one turn.
    ("voltagent", "voltagent", "voltagent_agent.mjs", TOOLS, 1, {"Edited": 1}, 0),
    ("openhands", "openhands", "openhands_agent.py", TOOLS, 1, {}, 0),
    ("codex", "coding", "coding_agent.py codex", shelled("exec_command"), 1, {}, 0),
    ("claude-code", "coding", "coding_agent.py claude", shelled("Bash"), 1, {}, 0),
    ("pi", "pi", "coding_agent.py pi", shelled("bash"), 1, {}, 0),
    ("qwen-code", "qwen-code", "coding_agent.py qwen", shelled("run_shell_command"), 1, {}, 0),
    # qwen-code starts a memory agent after an answer without calls. The second memory agent extends the first one's
    # history.
    ("qwen-code memory", "qwen-code", "coding_agent.py qwen", MEMORY, 2, {"Edited": 1}, 0),
]


def environment(base, key):
    """Returns the environment variables that a program has in training."""
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
        "LEVADE_BASE_URL": base,
        "LEVADE_API_KEY": key,
        "LEVADE_MODEL": "scripted",
        "LEVADE_TASK": task,
        "LEVADE_ATTEMPT": "tried",
        "NO_PROXY": "127.0.0.1",
    }


def run_client(arguments, installed, program, texts):
    """Runs a client against a model that says `texts`. Returns the origins of its prompts, its last line, and errors."""
    name, *mode = program.split()
    python = arguments.python or interpreter(arguments.environments, installed, name)
    server = subprocess.Popen([arguments.scripted, "127.0.0.1:0", *texts], stdout=subprocess.PIPE, text=True)
    base, key = server.stdout.readline().split()
    with tempfile.TemporaryDirectory() as home:
        variables = environment(base, key) | {"HOME": home}
        with_programs(arguments.environments, installed, Path(home, "programs"))
        command = [python, Path(home, "programs", name), *mode]
        try:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, cwd=home)
        finally:
            server.send_signal(signal.SIGINT)
            printed, _ = server.communicate(timeout=60)
    found = {"roots": 0, "continued": 0, "forked": collections.Counter(), "rewritten": 0, "refused": ""}
    for line in printed.splitlines():
        if origin := re.match(r"Some\((\w+)(?:\(.*reason: (\w+))?", line):
            kind, reason = origin.groups()
            if kind not in ("Started", "Continued", "Forked"):
                raise RuntimeError(f"{arguments.scripted} prints an unknown origin of a prompt: {line}")
            found["roots"] += kind == "Started"
            found["continued"] += kind == "Continued"
            if reason:
                found["forked"][reason] += 1
        if rewritten := re.match(r"counts: .*altered: (\d+), extended: (\d+)", line):
            found["rewritten"] = int(rewritten[1]) + int(rewritten[2])
        if line.startswith("refused: ") and line != "refused: {}":
            found["refused"] = line
    return found, (done.stdout.strip().splitlines() or [""])[-1], done.stderr


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--environments", type=Path, required=True, help="directory for the clients' packages")
    p.add_argument("--python", type=Path, help="interpreter that already has the packages of --only")
    p.add_argument("--only", default="", help="clients whose names contain this")
    p.add_argument("--scripted", type=Path, default=ROOT / "target/release/examples/scripted")
    p.add_argument("--verbose", action="store_true", help="print what clients write")
    arguments = p.parse_args()
    arguments.environments = arguments.environments.resolve()
    failures = 0
    for name, installed, program, texts, roots, forks, rewritten in CLIENTS:
        if arguments.only not in name:
            continue
        try:
            found, last, errors = run_client(arguments, installed, program, texts)
        except subprocess.SubprocessError as error:
            print(f"FAIL {name:24} {error}", flush=True)
            failures += 1
            continue
        right = (found["roots"], dict(found["forked"]), found["refused"]) == (roots, forks, "")
        right &= found["continued"] >= len(texts) - roots - sum(forks.values()) and found["rewritten"] >= min(
            rewritten, 1
        )
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
