"""A scripted editor of prompts: a server that speaks the chat-completions protocol.

It stands in for a large model. A critique is a list of advice, one line for each kind of mistake
in the attempts that it reads, and a rewrite adds a rule to the prompt for each line of advice, or
for the first one if the request asks for one change. It knows nothing about the tasks.

Usage: python3 editor.py [PORT]
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EXAMPLE = (
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "(12 + 30) * 2"}}\n'
    "</tool_call>"
)

# Kinds of mistakes: the advice, the rule that follows it, and whether an attempt shows it. An
# attempt is given as its text, the number of its calls, and the results of its tools.
MISTAKES = [
    (
        "The agent computes in its head. Show the exact form of a call.",
        f"Never compute yourself. First write only a call, in exactly this form:\n{EXAMPLE}",
        lambda text, calls, results: calls == 0,
    ),
    (
        "Calls fail. Say what an expression may contain.",
        "An expression has only digits, parentheses and the signs + - * /.",
        lambda text, calls, results: any("error" in result.lower() for result in results),
    ),
    (
        "The agent does not report the result. Say how to answer.",
        "When you see the result, answer with that number and nothing else.",
        lambda text, calls, results: bool(results) and results[-1] not in after_results(text),
    ),
    (
        "The expression is not what the task asks for. Say how to build it.",
        "Copy every number and every operation of the task into one expression.",
        lambda text, calls, results: bool(results) and results[-1] in after_results(text),
    ),
]


def after_results(text):
    """Returns the text after the last result of a tool."""
    return text.rsplit("Tool result:", 1)[-1].split("\n", 1)[-1]


def critique(attempts):
    """Returns the advice for the attempts that do not have the score 1, most frequent first."""
    counts = dict.fromkeys([advice for advice, _, _ in MISTAKES], 0)
    for text in re.split(r"^## Attempt \d+$", attempts, flags=re.MULTILINE)[1:]:
        score = re.search(r"^Score: (.*)$", text, re.MULTILINE)
        if score and score[1] == "1":
            continue
        calls = len(re.findall(r"^Tool call:", text, re.MULTILINE))
        results = re.findall(r"^Tool result: (.*)$", text, re.MULTILINE)
        for advice, _, shows in MISTAKES:
            counts[advice] += shows(text, calls, results)
    found = sorted((advice for advice in counts if counts[advice]), key=lambda a: -counts[a])
    return "\n".join(f"- {advice}" for advice in found) or "- Nothing: all attempts succeed."


def rewrite(prompt, advice, is_one_change):
    """Returns the prompt with the rules that it lacks."""
    rules = [rule for line, rule, _ in MISTAKES if line in advice and rule not in prompt]
    if is_one_change:
        rules = rules[:1]
    kept = [] if prompt.startswith("(The agent has no") else [prompt]
    return "\n".join(kept + rules)


def answer(request):
    """Returns the reply to a request for a critique or for a new prompt."""
    # The section of the prompt comes first; its title names the text that the phase improves.
    prompt = re.split(r"^# .*\n\n", request, maxsplit=1, flags=re.MULTILINE)[1]
    if "\n\n# Advice\n\n" in prompt:
        prompt, advice = prompt.split("\n\n# Advice\n\n", 1)
        return f"<prompt>{rewrite(prompt, advice, 'one change' in request)}</prompt>"
    return critique(prompt.split("\n\n# Attempts\n\n", 1)[1])


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = answer(body["messages"][-1]["content"])
        message = {"role": "assistant", "content": content}
        reply = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body.get("model", "editor"),
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8765
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
