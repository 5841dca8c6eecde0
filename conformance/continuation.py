"""Compares continued conversations with full renders of the chat template.

Runs several turns under every template in the given directories and files (`*.jinja`, as for `templates.py`):
questions and answers, with instructions, with tool calls and results, with reasoning, sent back as most clients do
(without reasoning). Each completion has the form that the template's model would write. Every prompt after the first
completion must start with the recorded ids. In addition, the prompt must equal the template's render of the full
history (with reasoning and calls in their own fields, or as the model wrote them); exactly if not, the store must
count the turn as drift.

Prints for each family how many prompts equal the full render, how many are drift, and each violation. Conversations
that the template rejects, or whose calls have no known format, are skipped and counted.

Not checked: tokenizers (each byte is a token, in addition to special tokens), and whether a prompt equals
transformers' output (`templates.py`). Needs no packages.
"""

import argparse
import collections
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPECIAL = re.compile(
    r"<\|[^<>|{}'\"\s]{1,40}\|>|<｜[^<>{}'\"]{1,40}｜>|\[/?[A-Z_]{3,}\]|</?(?:start|end)_of_\w+>|<\|?/?[A-Z_]{3,}\|?>"
    r"|<turn\|>|<\|turn>|\[e~\[|\]~!?b\[|\]~b\]"
)
FAMILY = re.compile(
    "qwen|llama|gemma|mi[xns]+tral|cohere|command|phi|nemotron|deepseek|lfm|granite|glm|gpt-?oss|kimi|minimax|smollm"
)
SAME = {"gptoss": "gpt-oss", "mixtral": "mistral", "ministral": "mistral", "command": "cohere"}
ENDS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<|endoftext|>",
    "<|return|>",
]

TOOLS = [
    {
        "name": "search",
        "description": "Searches.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    }
]


def say(role: str, content: str, **more) -> dict:
    return {"say": {"role": role, "content": content, **more}}


def reply(content: str, thought: str | None = None, queries: tuple = ()) -> dict:
    calls = [
        {
            "id": f"call{at}",
            "type": "function",
            "function": {"name": "search", "arguments": json.dumps({"query": query})},
        }
        for at, query in enumerate(queries)
    ]
    message = {"role": "assistant", "content": content}
    return {
        "reply": message
        | ({"reasoning_content": thought} if thought else {})
        | ({"tool_calls": calls} if calls else {})
    }


def result(content: str) -> dict:
    return say("tool", content, tool_call_id="call", name="search")


QUESTIONS = [
    say("user", "One?"),
    reply("1."),
    say("user", "Two?"),
    reply("2 — so."),
    say("user", " Three? "),
    reply("3"),
    say("user", "?"),
    reply("!"),
]
THOUGHTS = [
    say("user", "One?"),
    reply("1.", "Hm."),
    say("user", "Two?"),
    reply("2.", "So\n\nthen."),
    say("user", "Three?"),
    reply("3."),
]
CALLED = [
    say("user", "What is new?"),
    reply("", None, ("news",)),
    result("Nothing."),
    reply("Let me see.", None, ("more",)),
    result('{"a": 1}'),
    reply("Nothing."),
    say("user", "And now?"),
    reply("", None, ("now",)),
    result("12:00"),
    reply("Noon."),
]
THOUGHT_CALLED = [
    say("user", "What is new?"),
    reply("", "I look.", ("news",)),
    result("Nothing."),
    reply("Nothing.", "Well."),
    say("user", "And now?"),
    reply("", "Again.", ("now",)),
    result("12:00"),
    reply("Noon.", "So."),
]
CONVERSATIONS = {
    "questions": (QUESTIONS, []),
    "instructions": ([say("system", "Be brief."), *QUESTIONS], []),
    "thoughts": (THOUGHTS, []),
    "tools at hand": ([say("system", "Be brief."), *QUESTIONS], TOOLS),
    "calls": (CALLED, TOOLS),
    "calls and instructions": ([say("system", "Be brief."), *CALLED], TOOLS),
    "thoughts and calls": (THOUGHT_CALLED, TOOLS),
}


def family(path: Path) -> str:
    found = FAMILY.search(path.name.lower())
    return SAME.get(found[0], found[0]) if found else "others"


def jobs(source: str) -> dict[str, dict]:
    """Yields every conversation with a template, by name."""
    special = sorted(set(SPECIAL.findall(source)))
    eos = next((end for end in ENDS if end in special), "</s>")
    choices = {"": {}}
    if "enable_thinking" in source:
        choices = {" thinking": {"enable_thinking": True}, " not thinking": {"enable_thinking": False}}
    base = {"template": source, "special": special, "bos": "<s>", "eos": eos}
    return {
        name + label: base | {"steps": steps, "tools": tools, "variables": variables}
        for name, (steps, tools) in CONVERSATIONS.items()
        for label, variables in choices.items()
    }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("paths", nargs="+", type=Path, help="templates, or directories with *.jinja files")
    p.add_argument("--binary", type=Path, default=ROOT / "target/release/examples/continuation", help="helper binary")
    p.add_argument("--only", default="", help="check only names that contain this")
    p.add_argument("--verbose", action="store_true", help="also print skipped conversations")
    arguments = p.parse_args()
    files = [f for path in arguments.paths for f in (sorted(path.rglob("*.jinja")) if path.is_dir() else [path])]
    sources = {}
    for file in files:
        if arguments.only in str(file):
            sources.setdefault(file.read_text(), file)
    counts = collections.defaultdict(collections.Counter)
    broken = 0
    for source, file in sources.items():
        asked = jobs(source)
        lines = "\n".join(json.dumps(job) for job in asked.values())
        done = subprocess.run([arguments.binary], input=lines, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{arguments.binary} failed with {file}:\n{done.stderr}")
        count = counts[family(file)]
        count["templates"] += 1
        for name, line in zip(asked, done.stdout.splitlines(), strict=True):
            answer = json.loads(line)
            if "error" in answer:
                count["left out"] += 1
                if arguments.verbose:
                    print(f"{file.parent.name}/{file.name}: {name}: {answer['error']}")
                continue
            count["conversations"] += 1
            for turn, prompt in enumerate(answer, 1):
                kind = "fork" if prompt["fork"] else "drift" if prompt["drift"] else "equal"
                count[kind] += 1
                if prompt["fork"] or prompt["equal"] == bool(prompt["drift"]):
                    count["broken"] += 1
                    broken += 1
                    print(f"{file.parent.name}/{file.name}: {name}: turn {turn}: {prompt}")
    kinds = ["templates", "conversations", "left out", "equal", "drift", "broken"]
    total = sum(counts.values(), collections.Counter())
    print("family".ljust(12), *(kind.rjust(13) for kind in kinds))
    for name, count in [*sorted(counts.items()), ("all", total)]:
        print(name.ljust(12), *(str(count[kind]).rjust(13) for kind in kinds))
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
