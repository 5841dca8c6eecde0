"""Compares rendered chat templates with transformers, character by character.

Renders the snippets of `templates.json`, one for each part of Jinja and Python that templates use, and every template
in the given directories and files (`*.jinja`: TRL's own are in `trl/chat_templates`, published ones in llama.cpp's
`models/templates`), both in transformers' Jinja environment and in Levade. Renderings vary system message, tools,
calls and results, reasoning, content in parts, `enable_thinking`, and the generation prompt. Both may also reject: a
template that raises for a conversation must raise in both, with any message.

Prints how many renderings agree, and each difference by name. `templates.json` also stores transformers' output for
each snippet (null if it raises), so that Levade's own tests need no Python. If the stored output differs from the
current one, the check fails; `--record` updates it.

Not checked: the tokens of the text (`checkpoint.py` checks them), and options that only image processors have.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

from transformers.utils import chat_template_utils

ROOT = Path(__file__).resolve().parent.parent
RECORD = json.loads(Path(__file__).with_name("templates.json").read_text())
NOW = RECORD["now"]
SPECIAL = RECORD["variables"]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches the web.\nReturns titles & links, <b>not</b> “pages”.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": 'What to look for: it\'s "text".'},
                    "limit": {"type": "integer", "minimum": 1, "default": 5},
                    "ratio": {"type": ["number", "null"], "maximum": 1.0, "default": 1e-05},
                    "kind": {"type": "string", "enum": ["news", "é"]},
                    "items": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
                },
                "required": ["query"],
            },
            "return": {"type": "string"},
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]


def call(name: str, arguments: dict, id: str = "call_123") -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": " Be brief.\n"}
USER = {"role": "user", "content": "What's new — <|im_end|> & {{ this }}?"}
REPLY = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nNothing. "}
REASONED = {"role": "assistant", "content": "Nothing.", "reasoning_content": "Hm.\n\nWell."}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call("search", {"query": 'it\'s "é"\n', "limit": 3, "ratio": 0.5, "items": [{"a": True}, None]})],
}
TWO_CALLS = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "Two.",
    "tool_calls": [call("now", {}, "call_124"), call("search", {"query": "x"}, "call_125")],
}


def result(content: str, id: str = "call_123", name: str = "search") -> dict:
    return {"role": "tool", "name": name, "tool_call_id": id, "content": content}


CONVERSATIONS: dict[str, list[dict]] = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, REPLY, USER],
    "reasoned": [USER, REASONED, USER],
    "answered": [USER, REASONED],
    "call": [SYSTEM, USER, CALLS, result('{"title": "A"}')],
    "called": [USER, CALLS, result("[1, 2]"), {"role": "assistant", "content": "One."}, USER],
    "two calls": [
        USER,
        TWO_CALLS,
        result("12:00", "call_124", "now"),
        result("y", "call_125"),
    ],
    "parts": [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]},
    ],
}


def renderings(source: str):
    """Yields every rendering of a template: a name and the arguments."""
    for name, messages in CONVERSATIONS.items():
        for tools in (None, TOOLS):
            for prompt in (True, False):
                choices = [{}]
                if "enable_thinking" in source:
                    choices = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
                for more in choices:
                    label = [
                        name,
                        "tools" if tools else "",
                        "prompt" if prompt else "",
                        *(str(v) for v in more.values()),
                    ]
                    yield " ".join(filter(None, label)), messages, tools, prompt, {**SPECIAL, **more}


class Clock(datetime):
    """The fixed time that both sides get."""

    @classmethod
    def now(cls, tz=None):
        moment = datetime.fromtimestamp(NOW, UTC)
        return cls(*moment.timetuple()[:6])


def theirs(source: str, messages, tools, prompt, variables) -> dict:
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **variables
        )
        return {"text": rendered[0]}
    except Exception as error:  # any error in a template
        return {"error": f"{type(error).__name__}: {error}"}


def ours(binary: Path, jobs: list) -> list[dict]:
    lines = []
    for source, messages, tools, prompt, variables in jobs:
        job = {
            "template": source,
            "messages": chat_template_utils._alias_reasoning_fields(messages),
            "tools": tools,
            "add_generation_prompt": prompt,
            "variables": variables,
            "now": NOW,
        }
        lines.append(json.dumps(job))
    done = subprocess.run([binary], input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{binary} failed:\n{done.stderr}")
    return [json.loads(line) for line in done.stdout.split("\n") if line]


def difference(a: dict, b: dict) -> str | None:
    """Describes how two outcomes differ. Returns None if they agree."""
    if "error" in a or "error" in b:
        return (
            None if "error" in a and "error" in b else f"transformers: {str(a)[:160]}\n      Levade:     {str(b)[:160]}"
        )
    if a["text"] == b["text"]:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a["text"], b["text"], strict=False)) if x != y), None)
    at = min(len(a["text"]), len(b["text"])) if at is None else at
    here = slice(max(0, at - 20), at + 60)
    return f"transformers: {a['text'][here]!r}\n      Levade:     {b['text'][here]!r}"


def compare(name: str, jobs: dict[str, tuple], binary: Path, verbose: bool) -> tuple[int, int, int]:
    """Compares renderings by name. Returns how many agree, how many both reject, and how many there are."""
    agree = refused = 0
    shown = 0
    for (label, job), got in zip(jobs.items(), ours(binary, list(jobs.values())), strict=True):
        wanted = theirs(*job)
        found = difference(wanted, got)
        agree += found is None
        refused += found is None and "error" in wanted
        if found is not None and (verbose or shown < 2):
            print(f"  {name}: {label}\n      {found}")
            shown += 1
    return agree, refused, len(jobs)


def recorded(jobs: dict[str, tuple], write: bool) -> list[str]:
    """Returns the snippets whose stored output differs from transformers, after updating it if `write` is set."""
    stale = []
    for name, job in jobs.items():
        text = theirs(*job).get("text")
        snippet = RECORD["snippets"][name]
        if write:
            snippet["text"] = text
        elif "text" not in snippet or snippet["text"] != text:
            stale.append(name)
    if write:
        path = Path(__file__).with_name("templates.json")
        path.write_text(json.dumps(RECORD, ensure_ascii=True, indent=1) + "\n")
    return stale


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("paths", nargs="*", type=Path, help="templates, or directories with *.jinja files")
    p.add_argument("--snippets", type=Path, help="names and templates that replace templates.json")
    p.add_argument("--record", action="store_true", help="store transformers' output for the snippets")
    p.add_argument("--render", type=Path, default=ROOT / "target/release/examples/render", help="helper binary")
    p.add_argument("--only", default="", help="check only names that contain this")
    p.add_argument("--verbose", action="store_true", help="print every difference instead of two per template")
    arguments = p.parse_args()
    os.environ["TZ"] = "UTC"
    snippets = {name: snippet["template"] for name, snippet in RECORD["snippets"].items()}
    if arguments.snippets:
        snippets = json.loads(arguments.snippets.read_text())
    files = [f for path in arguments.paths for f in (sorted(path.rglob("*.jinja")) if path.is_dir() else [path])]

    with mock.patch.object(chat_template_utils, "datetime", Clock):
        jobs = {
            name: (source, RECORD["messages"], None, True, SPECIAL)
            for name, source in snippets.items()
            if arguments.only in name
        }
        stale = [] if arguments.snippets else recorded(jobs, arguments.record)
        if stale:
            print(f"not what transformers prints now: {', '.join(stale)}")
        agree, refused, total = compare("snippet", jobs, arguments.render, True)
        print(f"snippets: {agree} of {total} agree, {refused} of them by refusing")
        differ = total - agree + len(stale)
        checked = whole = renders = renders_agree = 0
        for file in files:
            if arguments.only not in str(file):
                continue
            source = file.read_text()
            jobs = {label: (source, *rest) for label, *rest in renderings(source)}
            name = f"{file.parent.name}/{file.name}"
            agree, refused, total = compare(name, jobs, arguments.render, arguments.verbose)
            print(f"{name}: {agree} of {total} agree, {refused} of them by refusing")
            checked += 1
            whole += agree == total
            differ += total - agree
            renders += total
            renders_agree += agree
        if files:
            print(f"templates: {whole} of {checked} agree in all, {renders_agree} of {renders} renderings")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
