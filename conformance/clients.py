"""Checks real clients as agents: their tokens are recorded once, and training reproduces the log-probabilities bit for
bit.

Each set-up is a program under `clients/` with a published package: a tool agent with a calculator in its own process
and two questions of a user. `[agent] kind = "program"` starts it for each attempt. One GRPO step trains on its
attempts, which get different rewards, so that the step trains on each.

Checks, from `run.db` and `metrics.jsonl`:

- The attempts are complete: no program failed, and no call was rejected.
- The sampled tokens in the tree are those of the completed calls, each segment once.
- The step trains all of them (`training/targets`), and recomputes every log-probability bit for bit
  (`training/logprob_mismatch` 0).
- A prompt that forked has a reason, which is printed.

The model must call tools sometimes. SmolLM2 does after a short training on demonstrations (`--model`, a checkpoint of
a run whose agent has the calculator of recipes/bring-your-own-agent). Missing packages are installed into
`--environments`: several GB for all.

Coding agents from npm send 10,000 to 30,000 tokens of instructions, which exceed SmolLM2's context. They use a small
model of random weights with its tokenizer, first trained on demonstrations: a teacher (a server in this script) plays
the agent through the gateway and calls its tool. With `--small`, all set-ups use this model, which takes seconds for
each.
"""

import argparse
import array
import collections
import contextlib
import http.server
import json
import os
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = {
    "openai": ["openai==3.57.0"],
    "anthropic": ["anthropic==2.14.0"],
    "litellm": ["litellm==1.110.2"],
    "langgraph": ["langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"],
    "openai-agents": ["openai-agents==0.24.0"],
    "agentscope": ["agentscope==2.0.11"],
    "autogen": ["autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"],
    "mini-swe-agent": ["mini-swe-agent==2.4.6"],
    "camel": ["camel-ai==0.2.90", "mcp<2"],
    "pydantic-ai": ["pydantic-ai-slim[openai,anthropic]==2.68.0"],
    "smolagents": ["smolagents[openai]==1.26.0"],
    "strands": ["strands-agents[openai,anthropic]==1.62.0"],
    "qwen-agent": ["qwen-agent==0.0.34", "soundfile", "python-dateutil", "tqdm"],
    "agno": ["agno==3.1.10", "openai==3.57.0", "anthropic==2.14.0"],
    "haystack": ["haystack-ai==3.4.1"],
    "semantic-kernel": ["semantic-kernel==1.45.0"],
    "inspect-ai": ["inspect-ai==0.3.285", "openai==3.57.0", "anthropic==2.14.0"],
    "langroid": ["langroid==0.69.16"],
    "adk": ["google-adk==2.13.0", "litellm==1.110.2"],
    "agent-framework": ["agent-framework-core==1.23.0", "agent-framework-openai==1.17.0"],
    "ag2": ["ag2[openai]==1.2.1"],
    "mcp-agent": ["mcp-agent[openai]==0.2.6", "mcp<2"],
    "deepagents": ["deepagents==0.7.32", "langchain-openai==1.7.4"],
    "crewai": ["crewai==1.15.30"],
    "griptape": ["griptape[drivers-prompt-openai]==1.13.0"],
    "llama-index": ["llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"],
    "openhands": ["openhands-sdk==1.58.2"],
}
# Packages that need a different Python than the one that runs this script.
INTERPRETERS = {"openhands": "python3.12"}
NODE = {
    "node": [
        "openai@6.49.0",
        "@anthropic-ai/sdk@1.14.0",
        "ai@6.0.326",
        "@ai-sdk/openai@3.0.141",
        "@ai-sdk/openai-compatible@2.0.92",
        "@ai-sdk/anthropic@3.0.140",
        "zod@4.6.7",
    ],
    "agents-js": ["@openai/agents@0.20.0", "zod@4.6.7"],
    "mastra": ["@mastra/core@0.24.9", "@ai-sdk/openai-compatible@1.0.61", "zod@4.6.7"],
    "coding": ["@openai/codex@0.169.0", "opencode-ai@1.18.33", "@anthropic-ai/claude-code@2.1.197"],
    # These need Node 22.
    "langchain-js": [
        "langchain@1.5.14",
        "@langchain/core@1.4.0",
        "@langchain/openai@1.5.8",
        "@langchain/langgraph@1.7.3",
        "zod@4.6.7",
        "node@22.23.3",
    ],
    "pi": ["@earendil-works/pi-coding-agent@0.74.2", "node@22.23.3"],
    "qwen-code": ["@qwen-code/qwen-code@0.15.10", "node@22.23.3"],
    "genkit-js": ["genkit@1.42.0", "@genkit-ai/compat-oai@1.42.0"],
    "voltagent": ["@voltagent/core@2.10.0", "@ai-sdk/openai-compatible@2.0.92", "ai@6.0.326", "zod@4.6.7"],
}
# Set-ups whose prompts exceed SmolLM2's context.
LONG = ("coding", "pi", "qwen-code", "deepagents", "openhands")
# The environment, the program, its modes.
SETUPS = [
    ("", "plain.py", [""]),
    ("openai", "openai_chat.py", ["whole", "stream"]),
    ("openai", "openai_responses.py", ["whole", "stream", "previous"]),
    ("node", "openai_chat.mjs", ["whole", "stream"]),
    ("anthropic", "anthropic_messages.py", ["whole", "stream"]),
    ("node", "anthropic_messages.mjs", ["whole", "stream"]),
    ("litellm", "litellm_chat.py", ["whole", "stream", "messages"]),
    ("langgraph", "langgraph_agent.py", ["chat", "stream", "messages"]),
    ("openai-agents", "openai_agents.py", ["chat", "chat-stream", "responses", "responses-stream"]),
    ("agentscope", "agentscope_agent.py", ["whole", "stream"]),
    ("autogen", "autogen_agent.py", ["whole", "stream"]),
    ("node", "ai_sdk.mjs", ["chat", "compatible", "compatible-stream", "responses", "messages"]),
    ("agents-js", "openai_agents.mjs", ["chat", "responses"]),
    ("mastra", "mastra_agent.mjs", [""]),
    ("camel", "camel_agent.py", [""]),
    ("qwen-agent", "qwen_agent_run.py", [""]),
    ("pydantic-ai", "pydantic_ai_agent.py", ["whole", "stream", "responses", "messages"]),
    ("smolagents", "smolagents_agent.py", [""]),
    ("smolagents", "smolagents_code.py", [""]),
    ("strands", "strands_agent.py", ["", "responses", "messages"]),
    ("agno", "agno_agent.py", ["chat", "responses", "messages"]),
    ("haystack", "haystack_agent.py", [""]),
    ("semantic-kernel", "semantic_kernel_agent.py", [""]),
    ("inspect-ai", "inspect_agent.py", ["chat", "responses", "messages"]),
    ("mini-swe-agent", "mini_swe_agent.py", ["chat"]),
    ("coding", "coding_agent.py", ["codex", "opencode", "claude"]),
    ("adk", "adk_agent.py", [""]),
    ("agent-framework", "agent_framework_agent.py", ["chat", "responses"]),
    ("ag2", "ag2_agent.py", ["chat", "responses"]),
    ("mcp-agent", "mcp_agent_run.py", [""]),
    ("deepagents", "deepagents_agent.py", [""]),
    ("crewai", "crewai_agent.py", [""]),
    ("griptape", "griptape_agent.py", [""]),
    ("llama-index", "llama_index_agent.py", ["function", "react"]),
    ("langroid", "langroid_agent.py", [""]),
    ("langchain-js", "langchain_agent.mjs", ["chat", "responses"]),
    ("genkit-js", "genkit_agent.mjs", [""]),
    ("voltagent", "voltagent_agent.mjs", [""]),
    ("openhands", "openhands_agent.py", [""]),
    ("pi", "coding_agent.py", ["pi"]),
    ("qwen-code", "coding_agent.py", ["qwen"]),
]
RECIPE = """
[run]
name = "client"
folder = "run"
checkpoint_every = 0

[model]
source = "{model}"
context = {context}
{model_keys}
[engine]
micro_batch_tokens = 2560

[[tasks]]
kind = "arithmetic"
operands = 2
min_digits = 1
max_digits = 3
words = 0.0
stories = false
train = 50

[agent]
kind = "program"
command = {command}
tools = ["calculator"]
protocol = "hermes"
tool_prompt = "compact"
max_turns = {turns}
max_tokens = 800
attempt_seconds = 900

[reward]
scorer = {{ kind = "program", from = "last_line" }}

[eval]
tasks = 0

{imitation}
[[phase]]
kind = "rl"
steps = 1
groups = 1
group_size = {attempts}
temperature = {temperature}
learning_rate = 1e-6
"""
TAUGHT = """
[policy.default]
kind = "trained"
[policy.teacher]
kind = "external"
url = "{url}"
model = "teacher"
"""
IMITATION = """
[[phase]]
kind = "sft"
demonstrations = 1
source = {{ policy = "teacher", min_score = 0.0 }}
batch = 1
epochs = {epochs}
learning_rate = 1e-2
"""


def interpreter(environments, name, program):
    """Returns the interpreter for a set-up's program, and installs missing packages."""
    if not name:
        return sys.executable
    directory = environments / name
    if name in NODE:
        if not (directory / "node_modules").is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            install = ["npm", "install", "--prefix", directory, "--no-audit", "--no-fund", *NODE[name]]
            subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        own = directory / "node_modules/.bin/node"
        return sys.executable if program.endswith(".py") else own if own.exists() else shutil.which("node")
    python = directory / "bin/python"
    if not python.is_file():
        subprocess.run([INTERPRETERS.get(name, sys.executable), "-m", "venv", directory], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PYTHON[name]], check=True)
    return python


def with_programs(environments, name, directory):
    """Copies the programs to a directory in which JavaScript modules find their packages."""
    shutil.copytree(ROOT / "conformance/clients", directory, dirs_exist_ok=True)
    if name in NODE:
        (directory / "node_modules").symlink_to(environments / name / "node_modules")


def small_model(directory, source):
    """Creates a model of random weights that reads long prompts, with the tokenizer and chat template of `source`."""
    directory.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory)
    config = json.loads((source / "config.json").read_text())
    hidden, heads, inner = 64, 2, 128
    shape = {"hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": heads}
    shape |= {"head_dim": hidden // heads, "intermediate_size": inner, "max_position_embeddings": 1 << 17}
    (directory / "config.json").write_text(json.dumps(config | shape | {"rope_theta": 1e6}))
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    layer = "model.layers.0"
    shapes |= {f"{layer}.{name}.weight": [hidden] for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": [hidden, hidden] for name in "qkvo"}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": [inner, hidden] for name in ("gate", "up")}
    shapes[f"{layer}.mlp.down_proj.weight"] = [hidden, inner]
    rng, header, values = random.Random(1), {}, array.array("f")
    for name, shape in shapes.items():
        begin, count = 4 * len(values), shape[0] * [*shape, 1][1]
        values.extend([1.0] * count if len(shape) == 1 else (rng.uniform(-0.1, 0.1) for _ in range(count)))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, 4 * len(values)]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        values.tofile(file)


class Teacher(http.server.BaseHTTPRequestHandler):
    """Chat completions of a teacher that calls the client's shell or calculator twice per question, and then answers."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": "It is 42."}
        functions = [tool["function"] for tool in body.get("tools") or []]
        named = [
            (function, key)
            for key in ("expression", "cmd", "command")
            for function in functions
            if key in function["parameters"].get("properties", {})
        ]
        # Every client keeps its own messages, so they count the calls.
        if named and sum(message["role"] == "assistant" for message in body["messages"]) % 3 < 2:
            function, key = named[0]
            required = function["parameters"].get("required", [])
            arguments = dict.fromkeys(required, "echo") | {key: "40 + 2" if key == "expression" else "echo 42"}
            call = {"name": function["name"], "arguments": json.dumps(arguments)}
            message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": call}],
            }
        finish = "tool_calls" if "tool_calls" in message else "stop"
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choices = [{"index": 0, "message": message, "finish_reason": finish}]
        answer = {"id": "1", "object": "chat.completion", "model": "teacher", "choices": choices, "usage": usage}
        answer = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def teacher():
    """Starts a teacher on a free port. Yields its base URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Teacher)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


def run(arguments, environment, program, mode, directory):
    """Trains a step with a client. Returns the reason for a failure, if any."""
    directory.mkdir(parents=True)
    command = [str(interpreter(arguments.environments, environment, program)), program, *mode.split()]
    with_programs(arguments.environments, environment, directory)
    small = arguments.small or environment in LONG
    filled = {"command": json.dumps(command), "attempts": arguments.attempts, "turns": 12}
    if small:
        small_model(directory / "model", arguments.model)
        filled |= {"model": directory / "model", "context": 1 << 16, "temperature": 0.8}
        filled["imitation"] = IMITATION.format(epochs=arguments.epochs)
    else:
        context = 2560 if environment == "mini-swe-agent" else 1536
        filled |= {"model": arguments.model, "model_keys": "lora = { rank = 1 }\n", "context": context}
        filled |= {"temperature": 1.1, "imitation": ""}
    with teacher() as url:
        if small:
            filled["model_keys"] = TAUGHT.format(url=url)
        (directory / "recipe.toml").write_text(RECIPE.format(**filled))
        train = [arguments.levade, "train", "recipe.toml", "--log", "info", "--log-file", "log.txt"]
        done = subprocess.run(train, cwd=directory, capture_output=True, text=True, timeout=3600, env=os.environ)
    return None if done.returncode == 0 else (done.stderr.strip() or done.stdout).splitlines()[-1]


def last_line(line):
    """Returns the last line of a program, if it got that far."""
    try:
        return json.loads(line)
    except (TypeError, ValueError):
        return {}


def sampled_of(db, attempt):
    """Returns the completions of an attempt: turn, agent, preceding ids, own ids, number of log-probabilities."""
    rows = db.execute(
        "SELECT s.id, parent, after, kind, turn, agent, coalesce(s.tokens, p.tokens), length(logprobs) / 4 FROM segments s "
        "LEFT JOIN prompts p ON p.id = s.prompt WHERE attempt = ? ORDER BY s.id",
        (attempt,),
    )
    paths, lengths, sampled = {None: ()}, {}, []
    for segment, parent, after, kind, turn, agent, blob, logprobs in rows:
        tokens, before = struct.unpack(f"<{len(blob) // 4}I", blob), paths[parent]
        if after is not None:
            # The number of the parent's own tokens that precede.
            above = len(before) - lengths[parent]
            before = before[: above + after]
        paths[segment], lengths[segment] = before + tokens, len(tokens)
        if kind == "sampled":
            sampled.append((turn, agent, before, tokens, logprobs))
    return sampled


def check_run(directory):
    """Returns the counts of a recorded run, and its errors."""
    db = sqlite3.connect(f"file:{directory / 'run/run.db'}?mode=ro", uri=True)
    rows = db.execute("SELECT id, outcome, status FROM attempts WHERE purpose = 'train'").fetchall()
    counts, forked, wrong, targets, distinct = collections.Counter(), collections.Counter(), [], 0, set()
    for attempt, outcome, status in rows:
        outcome = json.loads(outcome)
        program = outcome.get("evidence", {}).get("program", {})
        segments = sampled_of(db, attempt)
        sampled, turns = sum(len(tokens) for *_, tokens, _ in segments), {turn for turn, *_ in segments}
        # Some clients test with a call whether the model responds. The gateway assigns it to an untrained agent.
        learned = [(before, tokens) for _, agent, before, tokens, _ in segments if not agent.endswith(".probe")]
        if outcome.get("error"):
            wrong.append(outcome["error"])
        if program.get("refused"):
            wrong.append(f"refused: {program['refused']}")
        if status != "completed" and not outcome.get("error"):
            wrong.append(f"an attempt is {status}: {outcome['finish']}")
        if sampled != outcome["sampled_tokens"] or any(len(tokens) != logprobs for *_, tokens, logprobs in segments):
            wrong.append(f"{sampled} sampled tokens in the tree, {outcome['sampled_tokens']} were drawn")
        if not len(segments) == len(turns) == outcome["turns"]:
            wrong.append(f"{len(segments)} completions in the tree, but {outcome['turns']} completed calls")
        forks = program.get("forks", {})
        counts["attempts"] += 1
        counts["calls"] += outcome["turns"]
        counts["began"] += forks.get("began", 0)
        counts["continued"] += forks.get("continued", 0)
        counts["trimmed"] += forks.get("trimmed", 0)
        counts["tokens"] += sampled
        counts["tool calls"] += last_line(program.get("last_line")).get("tools", 0)
        forked.update(forks.get("forked", {}))
        if status == "completed":
            targets += sum(len(tokens) for _, tokens in learned)
            distinct.update(before + tokens[: at + 1] for before, tokens in learned for at in range(len(tokens)))
            counts["probes"] += len(segments) - len(learned)
        if (
            forks.get("began", 0) + forks.get("continued", 0) + sum(forks.get("forked", {}).values())
            != outcome["turns"]
        ):
            wrong.append(f"{outcome['turns']} calls, but {forks}")
    metrics = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    last = [line for line in metrics if "training/logprob_mismatch" in line]
    if not last:
        return counts, forked, [*wrong, "nothing was trained"]
    mismatch, trained = last[-1]["training/logprob_mismatch"], last[-1]["training/targets"]
    if mismatch != 0:
        wrong.append(f"{mismatch:.0f} log-probabilities differ, by up to {last[-1]['training/logprob_mismatch_max']}")
    # Tokens that attempts share are computed once.
    if not len(distinct) <= trained <= targets:
        wrong.append(f"{trained:.0f} of {len(distinct)} tokens were trained")
    return counts, forked, wrong


def report(name, counts, forked, wrong):
    """Prints the result of a set-up. Returns whether there was an error."""
    summary = ", ".join(f"{count} {what}" for what, count in counts.items())
    reasons = "".join(f", forked {count} {reason}" for reason, count in forked.items())
    print(f"{'FAIL' if wrong else 'ok  '} {name:36} {summary}{reasons}", *wrong, sep="\n       ", flush=True)
    return bool(wrong)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, help="a checkpoint that calls the calculator")
    p.add_argument("--environments", type=Path, help="directory for the clients' packages")
    p.add_argument("--folder", type=Path, help="directory for the runs; correct runs are removed")
    p.add_argument("--attempts", type=int, default=4, help="attempts per client")
    p.add_argument("--small", action="store_true", help="use the small model for all set-ups")
    p.add_argument("--epochs", type=int, default=30, help="epochs on demonstrations, for the small model")
    p.add_argument("--keep", action="store_true", help="keep the directories of all runs")
    p.add_argument("--only", default="", help="set-ups whose names contain this")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--check", type=Path, metavar="FOLDER", help="check the run in FOLDER/run, and start nothing")
    arguments = p.parse_args()
    if arguments.check:
        sys.exit(int(report(arguments.check.name, *check_run(arguments.check))))
    for name in ("model", "environments", "folder", "levade"):
        if getattr(arguments, name) is None:
            p.error(f"--{name} is needed")
        setattr(arguments, name, getattr(arguments, name).resolve())
    failures = 0
    for environment, program, modes in SETUPS:
        for mode in modes:
            name = f"{program} {mode}".strip()
            if arguments.only not in name:
                continue
            directory = arguments.folder / name.replace(" ", "-")
            shutil.rmtree(directory, ignore_errors=True)
            try:
                why = run(arguments, environment, program, mode, directory)
            except subprocess.SubprocessError as error:
                why = str(error)
            found = check_run(directory) if (directory / "run/metrics.jsonl").is_file() else ({}, {}, [])
            wrong = report(name, *found[:2], [why, *found[2]] if why else found[2])
            failures += wrong
            if not wrong and not arguments.keep:
                shutil.rmtree(directory)
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()
