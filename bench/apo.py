"""Times a phase that improves a prompt against Agent Lightning's own APO (`agentlightning==0.3.0`, `algorithm.apo`).

Both searches have the same rounds, beam and branches, the same tasks, sampling parameters and tool, and the same
scripted editor as their OpenAI endpoint, which replies after `--delay` seconds. The same checkpoint attempts the tasks:
in Levade's own process, and behind `levade serve` for Agent Lightning's runners, which play the same loop over HTTP.
Agent Lightning scores parents again in every round, and the leader once more, so Levade gets more selection tasks until
both make about as many rollouts. The script prints rollouts, requests to the editor, and seconds, without the start
of programs. Prompts differ between the programs, so scores are not compared.

    python3 bench/apo.py --model CHECKPOINT --python VENV/bin/python     # agentlightning==0.3.0, poml, openai
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPERATURE, MAX_TOKENS, MAX_TURNS = 1.0, 96, 3
BEAM, BRANCH, GRADIENT = 2, 2, 4
PROMPT = "Use the calculator."
RULES = (
    "First write only a call.",
    "An expression has only digits, parentheses and the signs + - * /.",
    "When you see the result, answer with that number and nothing else.",
    "Copy every number and every operation of the task into one expression.",
)
# What Levade adds to the system prompt for the tool, with `protocol = "hermes"` and `tool_prompt = "compact"`.
TOOLS = (
    "Tools:\ncalculator(expression: string): Evaluates an arithmetic expression with + - * / ^ and parentheses.\n"
    'Call: <tool_call>\n{"name": "<tool>", "arguments": {"<parameter>": <value>}}\n</tool_call>'
)


class Editor(ThreadingHTTPServer):
    """Replies to critiques with all rules, and to edits with a prompt that no earlier reply had."""

    daemon_threads = True

    def __init__(self, delay: float):
        super().__init__(("127.0.0.1", 0), EditorHandler)
        self.delay, self.lock, self.critiques, self.edits = delay, threading.Lock(), 0, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def reply(self, messages: list[dict]) -> str:
        text = "\n".join(json.dumps(message["content"]) for message in messages)
        is_edit = "Reply with the complete new prompt" in text or "Revise the" in text
        with self.lock:
            self.edits += is_edit
            self.critiques += not is_edit
            number = self.edits
        time.sleep(self.delay)
        if not is_edit:
            return "\n".join(f"- Say: {rule}" for rule in RULES)
        prompt = f"{PROMPT} {RULES[number % len(RULES)]} (Version {number}.)"
        return f"<prompt>{prompt}</prompt>" if "<prompt>" in text else prompt

    def counts(self) -> tuple[int, int]:
        return self.critiques, self.edits


class EditorHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": self.server.reply(body["messages"])}
        reply = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def task(rng: random.Random) -> dict:
    a, b, c = (rng.randint(10, 999) for _ in range(3))
    question = rng.choice([f"{a} - {b} * {c}", f"({a} + {b}) * {c}", f"{a} * {b} + {c}", f"{a} - {b} + {c}"])
    return {"question": f"What is {question}?", "answer": str(eval(question))}


def selection_tasks(rounds: int, val_tasks: int) -> tuple[int, int]:
    """Returns Levade's number of selection tasks that gives about as many rollouts, and Agent Lightning's rollouts."""
    children = BEAM * BRANCH
    theirs, beam = val_tasks, 1
    for _ in range(rounds):
        theirs += children * GRADIENT + (beam + children) * val_tasks + val_tasks
        beam = min(BEAM, beam + children)
    return round((theirs - rounds * children * GRADIENT) / (1 + rounds * children)), theirs


def levade(args: argparse.Namespace, folder: Path, tasks: Path) -> dict:
    editor = Editor(args.delay)
    selection, _ = selection_tasks(args.rounds, args.val_tasks)
    phase = (
        f'[{{kind="prompt", editor="editor", rounds={args.rounds}, beam_width={BEAM}, branch_factor={BRANCH}, '
        f"gradient_tasks={GRADIENT}, selection_tasks={selection}, temperature={TEMPERATURE}}}]"
    )
    changes = [
        f"model.source={args.model}",
        f'tasks=[{{kind="file", path="{tasks}"}}]',
        "eval.tasks=0",
        f'agent.system="{PROMPT}"',
        f"agent.max_tokens={MAX_TOKENS}",
        f"agent.max_turns={MAX_TURNS}",
        f"engine.concurrency={args.concurrency}",
        "engine.precision=bf16",
        f"policy.editor.url=http://127.0.0.1:{editor.server_port}/v1",
        f"phase={phase}",
    ]
    sets = [part for change in changes for part in ("--set", change)]
    start = time.monotonic()
    done = subprocess.run(
        [args.levade, "train", "recipes/apo", *sets, "--run", folder / "run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=args.timeout,
    )
    total = time.monotonic() - start
    if done.returncode != 0:
        sys.exit(f"Levade ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    seconds = sum(line["timing_s/step"] for line in lines if "prompt/candidates" in line)
    with contextlib.closing(sqlite3.connect(folder / "run/run.db")) as db:
        ((attempts,),) = db.execute("SELECT count(*) FROM attempts WHERE status = 'completed'").fetchall()
    rollouts = attempts - sum(editor.counts())
    return {"seconds": seconds, "total": total, "rollouts": rollouts, "editor": editor.counts()}


def agent_lightning(args: argparse.Namespace, folder: Path, tasks: Path) -> dict:
    editor = Editor(args.delay)
    serve = [args.levade, "serve", args.model, "--port", str(args.port), "--running", str(args.concurrency)]
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen([*serve, "--precision", "bf16"], stdout=log, stderr=log)
    try:
        gateway = f"http://127.0.0.1:{args.port}/v1"
        wait_for(f"{gateway}/models", server)
        command = [args.python, __file__, "--model", args.model, "--role", "agent-lightning", "--gateway", gateway]
        command += ["--editor", f"http://127.0.0.1:{editor.server_port}/v1", "--tasks", tasks, "--folder", folder]
        command += ["--rounds", str(args.rounds), "--val-tasks", str(args.val_tasks)]
        command += ["--concurrency", str(args.concurrency)]
        start = time.monotonic()
        with (folder / "agent-lightning.log").open("w") as log:
            # LiteLLM, which it imports, else waits for a download. Its runners are processes of their own: all of
            # the group are stopped in the end.
            env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=env)
            try:
                status = process.wait(timeout=args.timeout)
            except subprocess.TimeoutExpired:
                status = f"no result after {args.timeout:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        total = time.monotonic() - start
        if not (folder / "seconds").exists():
            sys.exit(f"Agent Lightning ended with {status}:\n{(folder / 'agent-lightning.log').read_text()[-3000:]}")
    finally:
        server.terminate()
        server.wait(timeout=60)
    calls = [int(line) for line in (folder / "rollouts").read_text().split()]
    seconds = float((folder / "seconds").read_text())
    return {
        "seconds": seconds,
        "total": total,
        "rollouts": len(calls),
        "model_calls": sum(calls),
        "editor": editor.counts(),
    }


def wait_for(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    sys.exit(f"no response from {url} within 120 s")


def run_agent_lightning(args: argparse.Namespace) -> None:
    """Runs Agent Lightning's trainer with its APO, as its documentation does. Runs in its own environment."""
    import agentlightning as agl
    from openai import AsyncOpenAI, OpenAI

    rollouts = Path(args.folder) / "rollouts"

    @agl.rollout
    def agent(task: dict, prompt_template: agl.PromptTemplate) -> float:
        client = OpenAI(base_url=args.gateway, api_key="none")
        messages = [
            {"role": "system", "content": f"{prompt_template.template}\n\n{TOOLS}"},
            {"role": "user", "content": task["question"]},
        ]
        left, text, calls = MAX_TOKENS, "", 0
        while calls < MAX_TURNS and left > 0:
            reply = client.chat.completions.create(
                model=Path(args.model).name, messages=messages, temperature=TEMPERATURE, max_tokens=left
            )
            calls += 1
            text = reply.choices[0].message.content or ""
            left -= reply.usage.completion_tokens
            call = re.search(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
            if not call:
                break
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": f"<tool_response>\n{calculate(call[1])}\n</tool_response>"})
        with rollouts.open("a") as file:
            file.write(f"{calls}\n")
        numbers = re.findall(r"-?\d+", text.replace(",", ""))
        return float(bool(numbers) and numbers[-1] == task["answer"])

    tasks = [json.loads(line) for line in Path(args.tasks).read_text().splitlines()]
    algorithm = agl.APO(
        AsyncOpenAI(base_url=args.editor, api_key="none"),
        gradient_model="editor",
        apply_edit_model="editor",
        gradient_batch_size=GRADIENT,
        val_batch_size=args.val_tasks,
        beam_width=BEAM,
        branch_factor=BRANCH,
        beam_rounds=args.rounds,
    )
    run = algorithm.run

    async def timed(*positional: object, **named: object) -> None:
        start = time.monotonic()
        await run(*positional, **named)
        (Path(args.folder) / "seconds").write_text(str(time.monotonic() - start))

    algorithm.run = timed
    trainer = agl.Trainer(
        algorithm=algorithm,
        n_runners=args.concurrency,
        initial_resources={"prompt_template": agl.PromptTemplate(template=PROMPT, engine="f-string")},
        adapter=agl.TraceToMessages(),
    )
    trainer.fit(agent, train_dataset=tasks[args.val_tasks :], val_dataset=tasks[: args.val_tasks])


def calculate(call: str) -> str:
    """Returns the result of a call, or an error."""
    try:
        expression = json.loads(call)["arguments"]["expression"]
        if not re.fullmatch(r"[\d\s()+*/.-]{1,60}", expression) or "**" in expression:
            return "error: not an expression"
        return str(eval(expression))
    except (ValueError, KeyError, TypeError, SyntaxError, ZeroDivisionError) as error:
        return f"error: {error}"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="checkpoint that knows the form of a call")
    p.add_argument("--python", help="interpreter with agentlightning==0.3.0, poml and openai")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--val-tasks", type=int, default=12, help="tasks on which Agent Lightning scores prompts")
    p.add_argument("--concurrency", type=int, default=8, help="runners of Agent Lightning, and attempts of Levade")
    p.add_argument("--delay", type=float, default=2.0, help="seconds before each reply of the editor")
    p.add_argument("--port", type=int, default=8977, help="port of `levade serve`")
    p.add_argument("--timeout", type=float, default=3600, help="maximum duration of a program, in seconds")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--only", choices=["levade", "agent-lightning"], help="run one of both")
    for name in ("role", "gateway", "editor", "tasks", "folder"):
        p.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.role:
        run_agent_lightning(args)
        return
    if not args.python and args.only != "levade":
        sys.exit("name the interpreter of Agent Lightning with --python")
    with tempfile.TemporaryDirectory(prefix="levade-bench-") as directory:
        folder = Path(directory)
        rng = random.Random(1)
        rows = [json.dumps(task(rng)) + "\n" for _ in range(400)]
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(rows))
        for name, side in (("levade", levade), ("agent-lightning", agent_lightning)):
            if args.only in (None, name):
                print(json.dumps({"side": name, **side(args, folder, tasks)}), flush=True)


if __name__ == "__main__":
    main()
