"""Runs a coding agent from npm in an empty directory, with two prompts in one session: `codex`, `opencode`, `claude`,
`pi` or `qwen`.

The agent uses its own shell, instructions and tools.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calculator import MODEL, done, questions

PROGRAMS = Path(__file__).resolve().parent / "node_modules/.bin"
CODEX = """\
model = "{model}"
model_provider = "here"
check_for_update_on_startup = false

[model_providers.here]
name = "here"
base_url = "{base}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


def codex(home):
    """Returns the commands of the first and the later questions, and the environment."""
    (home / "config.toml").write_text(CODEX.format(model=MODEL, base=os.environ["OPENAI_BASE_URL"]))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return ["codex", "exec", *options], ["codex", "exec", "resume", "--last", *options], {"CODEX_HOME": str(home)}


def opencode(home):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": os.environ["OPENAI_BASE_URL"], "apiKey": os.environ["OPENAI_API_KEY"]},
        "models": {MODEL: {"limit": {"context": 60000, "output": 512}}},
    }
    config = {"provider": {"here": provider}, "model": f"here/{MODEL}", "share": "disabled", "autoupdate": False}
    (home / "opencode.json").write_text(json.dumps(config))
    environment = {
        "OPENCODE_CONFIG": str(home / "opencode.json"),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "XDG_DATA_HOME": str(home / "data"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_STATE_HOME": str(home / "state"),
    }
    return ["opencode", "run"], ["opencode", "run", "--continue"], environment


def claude(home):
    environment = {
        "CLAUDE_CONFIG_DIR": str(home),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "512",
        "DISABLE_AUTOUPDATER": "1",
    }
    # All of its tools would take 25,000 tokens.
    command = ["claude", "--model", MODEL, "--tools", "Bash", "--allowedTools", "Bash", "-p"]
    return command, [*command, "--continue"], environment


def pi(home):
    provider = {"baseUrl": os.environ["OPENAI_BASE_URL"], "apiKey": os.environ["OPENAI_API_KEY"]}
    provider |= {"api": "openai-completions", "models": [{"id": MODEL}]}
    directory = home / ".pi/agent"
    directory.mkdir(parents=True)
    (directory / "models.json").write_text(json.dumps({"providers": {"here": provider}}))
    command = ["pi", "--offline", "--provider", "here", "--model", MODEL]
    return [*command, "-p"], [*command, "--continue", "-p"], {"PI_CODING_AGENT_DIR": str(directory)}


def qwen(home):
    (home / ".qwen").mkdir()
    (home / ".qwen/settings.json").write_text(json.dumps({"general": {"disableAutoUpdate": True}}))
    command = ["qwen", "--auth-type", "openai", "--model", MODEL, "--yolo", "--telemetry=false"]
    return [*command, "-p"], [*command, "--continue", "-p"], {}


PREPARED = {"codex": codex, "opencode": opencode, "claude": claude, "pi": pi, "qwen": qwen}
with tempfile.TemporaryDirectory() as directory:
    home, work = Path(directory, "home"), Path(directory, "work")
    home.mkdir()
    work.mkdir()
    first, later, environment = PREPARED[sys.argv[1]](home)
    # Some agents need a different Node than this machine's.
    path = f"{PROGRAMS}:{os.environ['PATH']}"
    environment = os.environ | {"HOME": str(home), "PATH": path} | environment
    answer = ""
    for at, question in enumerate(questions()):
        name, *options = later if at else first
        command = [PROGRAMS / name, *options, f"Print the result of this with the shell: {question}"]
        # Some agents wait for a standard input that is no terminal.
        asked = subprocess.run(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
        )
        if asked.returncode:
            sys.exit(f"{name} ended with {asked.returncode}: {asked.stdout[-1500:]}{asked.stderr[-1500:]}")
        answer = asked.stdout.strip()
done(answer[-200:])
