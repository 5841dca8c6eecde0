"""Two builds of the binary sample and train the same bits: toy recipes of every kind of caller, run with both.

Each recipe is trained by both binaries, one after the other, in directories of their own. Compared are the weights of the last
checkpoint, the tokens, log-probabilities and versions of every segment, and status, score and outcome of every attempt.
Left out of outcomes are times, process ids and the names of files. Recipes in which the clock decides (`staleness`, several
completions of one call) are not here: two runs of one build differ. Then a run of `--before` that stopped after some steps is
resumed by `--after`, and replayed by it.

    python conformance/bits.py --before OLD --after target/release/levade --model FOLDER

The model is a small one with a chat template that calls the calculator, such as the tests of the command line train. No GPU, no
network. Two minutes on two cores. `--only NAME` runs one recipe, `--keep FOLDER` keeps the directories.
"""

import argparse
import hashlib
import json
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

BASE = """
[run]
name = "bits"
folder = "run"
[model]
source = "./model"
{model}
[engine]
concurrency = 4
micro_batch_tokens = 600
[[tasks]]
{tasks}
{policies}
[agent]
{agent}
max_turns = {turns}
max_tokens = 110
attempt_seconds = 60
{agents}
[reward]
malformed_call = -0.1
unfinished = -0.2
{reward}
[eval]
tasks = 2
[[phase]]
{phase}
"""
ARITHMETIC = 'kind = "arithmetic"\noperands = 2\nmin_digits = 1\nmax_digits = 2\nwords = 0.0\ntrain = 200'
ROWS = 'kind = "file"\npath = "rows.jsonl"\nheld_out = 2'
TOOLS = 'tools = ["calculator"]\ntool_prompt = "compact"'
RL = 'kind = "rl"\nsteps = {steps}\ngroups = 3\ngroup_size = 4\nlearning_rate = 1e-3\n'
TRAINED = '[policy.first]\nkind = "trained"\n[policy.second]\nkind = "trained"\n'
PROGRAM = 'kind = "program"\ncommand = ["python3", "program.py"]'
EXTERNAL = '[policy.default]\nkind = "trained"\n[policy.other]\nkind = "external"\nbase_urls = ["{url}/v1"]\nmodel = "toy"\n'


def recipe(**parts) -> str:
    """The recipe with these parts in the place of the calculator's."""
    defaults = {"model": "", "tasks": ARITHMETIC, "policies": "", "agent": TOOLS, "agents": "", "reward": "", "turns": 3}
    return BASE.format(**{**defaults, "phase": RL.format(steps=3), **parts})


RECIPES = {
    "calculator": recipe(phase=RL.format(steps=20)),
    "kl-and-ppo": recipe(
        phase='kind = "rl"\nalgorithm = "ppo"\nsteps = 3\ngroups = 6\ngroup_size = 2\nlearning_rate = 1e-3\n'
        'kl = { estimator = "k3", coefficient = 0.01 }\n'
    ),
    "lora-two-policies": recipe(
        model="lora = { rank = 4 }",
        policies=TRAINED,
        tasks=ROWS,
        agent='policy = "first"\n' + TOOLS,
        agents='[agent.checker]\npolicy = "second"',
    ),
    "sub-agent": recipe(
        agent='tools = ["calculator", "clerk"]\ntool_prompt = "compact"',
        agents='[agent.clerk]\nmax_turns = 1\nmax_tokens = 30\nsystem = "Answer."\ntools = []\n'
        '[[tool]]\nname = "clerk"\nkind = "agent"\nagent = "clerk"\ndescription = "Sums."',
    ),
    "condense": recipe(
        agent='tools = ["long"]\ntool_prompt = "compact"',
        agents='[agent.brief]\nmax_turns = 1\nmax_tokens = 20\ntools = []\n'
        '[[tool]]\nname = "long"\nkind = "python"\nfile = "long.py"\ncondense = { agent = "brief", above = 20 }',
    ),
    "summaries": recipe(
        agent=TOOLS + '\nmax_context_tokens = 430\ncontext = { kind = "summarise", tokens = 20, train = true }'
    ),
    "drop-oldest": recipe(agent=TOOLS + '\nmax_context_tokens = 430\ncontext = "drop_oldest"'),
    "truncate-middle": recipe(agent=TOOLS + '\nmax_context_tokens = 430\ncontext = "truncate_middle"'),
    "prompt-truncation": recipe(agent=TOOLS + '\nmax_prompt_tokens = 150\ntruncation = "middle"'),
    "forking-program": recipe(agent=PROGRAM, turns=8),
    "program-two-agents": recipe(
        policies=TRAINED, turns=8, agent='policy = "first"\n' + PROGRAM, agents='[agent.critic]\npolicy = "second"'
    ),
    "program-summaries": recipe(
        turns=8, agent=PROGRAM + '\nmax_context_tokens = 200\ncontext = { kind = "summarise", tokens = 20 }'
    ),
    "written-teacher": recipe(
        tasks=ROWS.replace("rows", "plain"), phase='kind = "sft"\ndemonstrations = 6\nbatch = 3\nlearning_rate = 1e-3\nsource = { field = "replies" }\n'
    ),
    "external-teacher": recipe(
        policies=EXTERNAL,
        phase='kind = "sft"\ndemonstrations = 2\nbatch = 2\nlearning_rate = 1e-3\nsource = { policy = "other", least_score = -10.0, tasks = 24 }\n',
    ),
    "external-opponent": recipe(policies=EXTERNAL, turns=8, agent=PROGRAM, agents='[agent.critic]\npolicy = "other"'),
    "mixture": recipe(policies=TRAINED, agent='policy = [{ name = "first", share = 0.5 }, { name = "second", share = 0.5 }]\n' + TOOLS),
    "several-scorers": recipe(
        reward='scorers = [{ name = "own", kind = "python", file = "score.py" }, { name = "numeric", kind = "numeric" }]'
    ),
}
# A program that calls the model in several turns, changes its history, and streams.
PROGRAM_PY = '''
import json, os, urllib.request
base, key, model = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["OPENAI_MODEL"]
task = json.loads(os.environ.get("LEVADE_TASK") or os.environ["DRESSAGE_TASK"])
def ask(messages, agent=None, **more):
    url = base + "/chat/completions" if agent is None else base[:-3] + "/agent/" + agent + "/v1/chat/completions"
    head = {"authorization": "Bearer " + key, "content-type": "application/json"}
    body = {"model": model, "messages": messages, "max_tokens": 24, **more}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=60) as answer:
        return answer.read().decode()
def text(body):
    return json.loads(body)["choices"][0]["message"]["content"] or ""
history = [{"role": "user", "content": task["question"]}]
first = text(ask(history))
second = text(ask(history + [{"role": "assistant", "content": first}, {"role": "user", "content": "And?"}]))
edited = text(ask([{"role": "user", "content": "Once more: " + task["question"]}]))
ask(history + [{"role": "assistant", "content": first}, {"role": "user", "content": "Well?"}], stream=True)
try:
    ask([{"role": "user", "content": "Is it " + first + "?"}], agent="critic", temperature=0)
except Exception:
    pass
print(json.dumps({"answer": second}))
'''
LONG_PY = '''
def long(expression: str) -> str:
    """Explains at length.

    Args:
        expression: what to explain.
    """
    return "It is said that " + expression + " is what it is. " * 3
'''
SCORE_PY = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 7 / 7
'''


def write(folder: Path, model: Path, text: str, url: str) -> None:
    """Writes a recipe with all that it needs."""
    folder.mkdir(parents=True)
    shutil.copytree(model, folder / "model")
    (folder / "recipe.toml").write_text(text.replace("{url}", url))
    for name, content in [("program.py", PROGRAM_PY), ("long.py", LONG_PY), ("score.py", SCORE_PY)]:
        (folder / name).write_text(content)
    rows = []
    for i in range(40):
        a, b = i + 3, 7 * i % 40 + 2
        call = {"function": {"name": "calculator", "arguments": {"expression": f"{a} + {b}"}}}
        replies = [{"role": "assistant", "content": "", "tool_calls": [call]}, f"{a + b}"]
        rows.append({"question": f"What is {a} + {b}?", "answer": a + b, "replies": replies})
        if i % 2 == 0:
            rows[-1]["agent_name"] = "checker"
    for name in ("rows", "plain"):
        if name == "plain":
            rows = [{key: value for key, value in row.items() if key != "agent_name"} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(binary: str, folder: Path, *arguments: str) -> None:
    """Runs a recipe, or resumes a run."""
    command = [binary, "train", *(arguments or ("recipe.toml",))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} in {folder} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def plain(value):
    """An outcome without what differs from run to run."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if key not in {"seconds", "pid"}}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"[0-9a-f]{12,}|/tmp/\S+|127\.0\.0\.1:\d+|\d+(\.\d+)?m?s\b|levade|dressage", "…", value)
    return value


def recorded(folder: Path) -> tuple[dict, dict]:
    """Attempts and files of a run, by name."""
    attempts = {}
    db = sqlite3.connect(f"file:{folder}/run/run.db?mode=ro", uri=True)
    db.row_factory = sqlite3.Row
    for row in db.execute("SELECT * FROM attempts"):
        row = dict(row)
        key = "/".join(str(row[column]) for column in ("purpose", "phase", "step", "grp", "sample", "number"))
        attempt = {column: row[column] for column in ("name", "status", "score", "reward")}
        attempt["outcome"] = plain(json.loads(row["outcome"]))
        segments = db.execute(
            "SELECT parent, after, kind, turn, agent, policy, s.tokens, p.tokens, logprobs, versions, temperature "
            "FROM segments s LEFT JOIN prompts p ON p.id = s.prompt WHERE attempt = ? ORDER BY s.id",
            (row["id"],),
        )
        attempts[key] = {**attempt, "segments": [tuple(segment) for segment in segments]}
    files = {}
    last = sorted((folder / "run/checkpoints").iterdir())[-1]
    for path in sorted(last.rglob("*.safetensors")):
        files[str(path.relative_to(last))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return attempts, files


def trained(folder: Path) -> tuple[dict, dict]:
    """The same without evaluations, which a run also makes at its end."""
    attempts, files = recorded(folder)
    return {key: attempt for key, attempt in attempts.items() if key.startswith("train/")}, files


def difference(before: tuple[dict, dict], after: tuple[dict, dict]) -> str | None:
    """The first difference between two runs, in words."""
    (attempts, files), (others, other_files) = before, after
    if attempts.keys() != others.keys():
        return f"{len(attempts)} attempts before, {len(others)} after, {len(attempts.keys() & others.keys())} in both"
    for key, attempt in attempts.items():
        for field, value in attempt.items():
            if value != others[key][field]:
                if field == "segments":
                    places = zip(value, others[key][field], strict=False)
                    value = next((pair for pair in places if pair[0] != pair[1]), (len(value), len(others[key][field])))
                    return f"{field} of {key}: {str(value)[:600]}"
                return f"{field} of {key}: {str(value)[:900]}\n    after: {str(others[key][field])[:900]}"
    if files != other_files:
        return f"weights: {[name for name in files if files[name] != other_files.get(name)]}"
    return None


def served(binary: str, model: Path) -> tuple[subprocess.Popen, str]:
    """A server of the model, as an external policy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary, "serve", f"toy={model}", "--port", str(port), "--temperature", "0", "--max-tokens", "40"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            urllib.request.urlopen(url + "/health", timeout=1)
            return process, url
        except OSError:
            time.sleep(0.1)
    process.kill()
    sys.exit("the server of the external policy did not start within 30 s")


def main() -> None:
    """Runs all recipes."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--before", required=True, help="the binary of the commit before")
    p.add_argument("--after", required=True, help="the binary now")
    p.add_argument("--model", type=Path, required=True, help="a small model")
    p.add_argument("--only", default="", help="recipes whose names contain this")
    p.add_argument("--keep", type=Path, help="an empty directory for the runs")
    args = p.parse_args()
    binaries = {"before": str(Path(args.before).resolve()), "after": str(Path(args.after).resolve())}
    root, wrong = args.keep or Path(tempfile.mkdtemp(prefix="bits-")), 0
    server, url = served(binaries["before"], args.model.resolve())
    try:
        for name, text in RECIPES.items():
            if args.only not in name:
                continue
            start, found = time.monotonic(), None
            try:
                for which, binary in binaries.items():
                    write(root / name / which, args.model, text, url)
                    train(binary, root / name / which)
                before, after = (recorded(root / name / which) for which in binaries)
                found = difference(before, after)
                tokens = sum(len(one["segments"]) for one in before[0].values())
                size = f"{len(before[0])} attempts, {tokens} segments"
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                found, size = str(error), "-"
            wrong += found is not None
            print(f"{name:20} {'same' if found is None else 'DIFFERS'}  {size}, {time.monotonic() - start:.0f} s", flush=True)
            if found:
                print(f"    {found}", flush=True)
        if args.only in "resume":
            folder = root / "resume"
            write(folder, args.model, recipe(phase=RL.format(steps=6)), url)
            shutil.copytree(folder, root / "whole")
            train(binaries["before"], root / "whole")
            train(binaries["before"], folder, "recipe.toml", "--set", "phase.0.steps=3")
            train(binaries["after"], folder, "run", "--resume", "--set", "phase.0.steps=6")
            found = difference(trained(root / "whole"), trained(folder))
            print(f"{'resume':20} {'same' if found is None else 'DIFFERS: ' + found}")
            replayed = subprocess.run([binaries["after"], "replay", root / "whole/run"], capture_output=True, text=True)
            print(f"{'replay':20} {replayed.stdout.strip().splitlines()[-1] if replayed.stdout else replayed.stderr}")
            wrong += found is not None or replayed.returncode != 0
    finally:
        server.terminate()
        server.wait()
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
