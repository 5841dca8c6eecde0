"""Checks that the gateway continues with its recorded tokens when clients send message histories back.

Each recording contains one client's messages over a conversation with tools: `requests` has all of them, `pairs` has
the assistant messages as they were sent and as they came back. Behind a real gateway, a scripted model replays the
original completions (reasoning, content with outer white space, calls as they were written). New ids that the client
receives replace the recorded ids. Prints for each turn whether the prompt continued the recorded tokens or forked, and
the reason. Built-in cases follow: one conversation each, sent back in one other way.

Fails if a prompt forks although only formatting differs. Correct forks (several completions joined into one message,
another order) are printed with their reason.

Not checked: how a client reads a stream, which `clients.py` checks.
"""

import argparse
import copy
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Reasons for which a client that changes the content must fork.
RIGHT = {"Merged", "Reordered", "TextLost", "CallsAsText"}
NUMBER = re.compile(r"Fake-?0*(\d{4,})")
ORIGIN = re.compile(r"^(Some\(.*\)|None): \d+ tokens, then \d+$")


class Gateway:
    """The example `scripted`, which returns given texts, as one attempt sees it."""

    def __init__(self, binary, texts):
        command = [binary, "127.0.0.1:0", *texts]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.base, self.key = self.process.stdout.readline().split()

    def post(self, path, body):
        """Returns the response, or the text of the API error."""
        head = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(self.base + path, json.dumps(body).encode(), head)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"

    def close(self):
        """Returns the origins of prompts, in the order of the calls, and the other printed lines."""
        self.process.send_signal(signal.SIGINT)
        lines = self.process.communicate(timeout=60)[0].splitlines()
        origins = [found[1] for line in lines if (found := ORIGIN.match(line))]
        return [origin_of(text) for text in origins], [line for line in lines if not ORIGIN.match(line)]


def origin_of(text):
    """Parses Rust's output to `began`, `continued` or `forked at 2: Merged`."""
    fork = re.search(r"at: (\d+), reason: (\w+)", text)
    return f"forked at {fork[1]}: {fork[2]}" if fork else re.sub(r"Some\((\w+)\)", r"\1", text).lower()


def strings(value):
    """Yields all texts in a document, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def replaced(value, names):
    """Replaces ids in a document."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {key: replaced(inner, names) for key, inner in value.items()}
    return [replaced(inner, names) for inner in value] if isinstance(value, list) else value


# Recorded conversations.

THOUGHT = "  Hidden thought ✓ — step one.\n\nStep two. \n"
TEXT = "  Let me call the tool…\n\nCafé “quotes” \t\n"
FINAL = "\n The answer is **12.50**.  \n"


def completion(text, calls, reasoning=THOUGHT):
    """Returns a completion as the model writes it. `calls` are pairs of a name and JSON arguments."""
    tags = [f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {raw}}}\n</tool_call>' for name, raw in calls]
    return (f"<think>{reasoning}</think>" if reasoning else "") + (text or "") + "\n".join(tags)


def calls_in(value):
    """Yields every call in a document of any dialect: its id, its name, its JSON arguments."""
    if isinstance(value, list):
        for inner in value:
            yield from calls_in(inner)
    elif isinstance(value, dict):
        if "function" in value and "id" in value:
            yield value["id"], value["function"]["name"], value["function"]["arguments"]
        elif value.get("type") == "function_call":
            yield value["call_id"], value["name"], value["arguments"]
        elif value.get("type") == "tool_use":
            yield value["id"], value["name"], json.dumps(value["input"])
        else:
            for inner in value.values():
                yield from calls_in(inner)


def text_in(sent):
    """Returns the text of an assistant message in any dialect."""
    if isinstance(sent, dict):
        return sent["content"]
    blocks = [block for block in sent if block["type"] in ("text", "message")]
    return "".join(block["text"] if "text" in block else block["content"][0]["text"] for block in blocks)


class Recording:
    def __init__(self, path):
        document = json.loads(path.read_text())
        self.name = document["client"]
        self.path = "/" + document["path"].partition("?")[0].split("/", 2)[2]
        self.pairs = document["pairs"]
        left_out = not isinstance(document["requests"], list)
        requests = self.from_pairs() if left_out else document["requests"]
        self.requests = [self.sendable(request) for request in requests]
        self.numbers, seen = [], set()
        for request in self.requests[1:]:
            new = [found[1] for text in strings(request) if (found := NUMBER.search(text)) and found[1] not in seen]
            self.numbers.append(new[0] if new else None)
            seen.update(new)
        self.numbers.append(None)

    def from_pairs(self):
        """Rebuilds the requests of Claude Code, whose recording contains only the pairs."""
        messages = [{"role": "user", "content": [{"type": "text", "text": "Say hi."}]}]
        messages.append({"role": "system", "content": "Be brief."})
        requests = []
        for pair in [*self.pairs, None]:
            sent = copy.deepcopy(messages)
            last = sent[-1]["content"]
            if isinstance(last, list):
                last[-1]["cache_control"] = {"type": "ephemeral"}
            requests.append({"messages": sent, "max_tokens": 2048, "tools": ["Bash"]})
            if pair is None:
                return requests
            messages.append(pair["returned"])
            ids = [block["id"] for block in pair["returned"]["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": id, "content": "hi"} for id in ids]
            messages.append({"role": "user", "content": results or "Again, please."})
        return requests

    def sendable(self, request):
        """Completes a request that the recording abridged: tools given only by name, streams, schemas given as lists."""
        request = {**request, "model": "scripted", "stream": False}
        request.pop("stream_options", None)

        def tool(found):
            if isinstance(found, dict):
                function = found.get("function", {})
                if isinstance(function.get("parameters"), list):  # from qwen-agent; no endpoint accepts it
                    return {**found, "function": {**function, "parameters": {"type": "object", "properties": {}}}}
                return found
            if "/messages" in self.path:
                return {"name": found, "input_schema": {"type": "object", "properties": {}}}
            if "/responses" in self.path:
                return {"type": "function", "name": found, "parameters": {"type": "object", "properties": {}}}
            return {"type": "function", "function": {"name": found}}

        return request | {"tools": [tool(found) for found in request["tools"]]} if request.get("tools") else request

    def texts(self):
        """Returns the original completions as the model writes them."""
        raw, texts_alone = {}, []
        for pair in self.pairs:
            calls = list(calls_in(pair["sent"]))
            for at, (id, name, arguments) in enumerate(calls):
                raw[id] = (name, pair["raw_args"][at] if pair["raw_args"] else arguments)
            if not calls:
                texts_alone.append(text_in(pair["sent"]))
        texts = []
        for number in self.numbers:
            found = {}
            for id, name, arguments in calls_in(self.requests):
                if number and (match := NUMBER.search(id)) and match[1] == number:
                    # `pairs` omits the calls of clients that join several messages into one.
                    found[id] = raw.get(id, (name, arguments))
            text = [None, TEXT][len(found) - 1] if found else (texts_alone.pop(0) if texts_alone else FINAL)
            texts.append(completion(text, found.values()))
        return texts

    def names(self, number, answer):
        """Maps recorded ids to the ids in a response."""
        if "choices" in answer:
            calls = answer["choices"][0]["message"].get("tool_calls") or []
            return {f"call_Fake-{number}_{at}": call["id"] for at, call in enumerate(calls)}
        names, count = {f"resp_Fake{number}": answer["id"]}, 0
        for item in answer.get("content") or answer["output"]:
            match item["type"]:
                case "tool_use":
                    names[f"toolu_Fake{number}_{count}"] = item["id"]
                    count += 1
                case "thinking":
                    names[f"SIGfake+/{number}=="] = item["signature"]
                case "reasoning":
                    names[f"rs_Fake{number}"] = item["id"]
                    if item.get("encrypted_content"):
                        names[f"ENC+fake/{number}=="] = item["encrypted_content"]
                    names["sum ✓ "] = "\n\n".join(part["text"] for part in item["summary"])
                case "message":
                    names[f"msg_Fake{number}"] = item["id"]
                case "function_call":
                    names[f"fc_Fake{number}_{count}"] = item["id"]
                    names[f"call_Fake-{number}_{count}"] = item["call_id"]
                    count += 1
        return names

    def replay(self, binary):
        """Returns the origin of each prompt, and the first error, if any."""
        gateway, names, fault = Gateway(binary, self.texts()), {}, None
        for request, number in zip(self.requests, self.numbers, strict=True):
            answer = gateway.post(self.path, replaced(request, names))
            if isinstance(answer, str):
                fault = fault or answer
                break
            if number:
                names |= self.names(number, answer)
        origins, rest = gateway.close()
        return origins, fault, rest


# Built-in cases.

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}, "note": {"type": "string"}},
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
RAW = [
    '{"b":  2, "a": 1.50, "note": "caf\\u00e9 — é\\/\\"x\\" \\u2713"}',
    '{ "a" : 3 , "b" : 4.0}',
    '{"a":10,"b":2.50}',
]
REPLIES = [
    completion("  Two at once…\n\n", [("add", RAW[0]), ("add", RAW[1])]),
    completion(None, [("add", RAW[2])]),
    completion("\n It is **12.50**. \t\n", []),
    completion("Bye. \n\n", []),
]


def assistants(change):
    """Creates a case that changes the assistant messages."""

    def kind(messages, tools):
        changed = []
        for message in messages:
            # One message may become several, or none.
            found = change(message) if message["role"] == "assistant" else message
            changed.extend(found if isinstance(found, list) else [found])
        return changed, tools

    return kind


def of_role(role, change):
    """Creates a case that changes the messages of a role."""
    return lambda messages, tools: ([change(m) if m["role"] == role else m for m in messages], tools)


def arguments(write):
    """Creates a case that changes the format of arguments. `write` gets the parsed document."""

    def call(found):
        document = json.loads(found["function"]["arguments"])
        return found | {"function": found["function"] | {"arguments": write(document)}}

    return assistants(lambda m: m | {"tool_calls": [call(c) for c in m["tool_calls"]]} if "tool_calls" in m else m)


def floats(document):
    return {key: float(value) if isinstance(value, int) else value for key, value in document.items()}


def integers_for_whole_floats(document):
    """Writes floats without a fraction as integers, as JavaScript does."""
    is_whole = lambda value: isinstance(value, float) and value == int(value)  # noqa: E731
    return {key: int(value) if is_whole(value) else value for key, value in document.items()}


def without(*fields):
    return lambda message: {key: value for key, value in message.items() if key not in fields}


def with_reasoning(cut):
    """Changes the reasoning, under both of its names."""

    def change(message):
        found = cut(message.get("reasoning_content") or "")
        return message | {"reasoning_content": found, "reasoning": found}

    return change


def parts(message):
    return message | {"content": [{"type": "text", "text": message["content"]}] if message["content"] else []}


def two_parts(message):
    text = message["content"] or ""
    halves = [text[: len(text) // 2], text[len(text) // 2 :]]
    return message | {"content": [{"type": "text", "text": half} for half in halves]}


def split(message):
    """Splits text and calls into two messages."""
    if not message.get("tool_calls") or not message["content"]:
        return message
    return [without("tool_calls")(message), {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}]


def by_call(message):
    """Puts the first call with the text, and each other call into its own message."""
    if len(message.get("tool_calls") or []) < 2:
        return message
    first, *others = message["tool_calls"]
    return [message | {"tool_calls": [first]}, *({"role": "assistant", "tool_calls": [call]} for call in others)]


def as_text(message):
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return {"role": "assistant", "content": completion(message["content"], calls, reasoning=None)}


def merged(messages, tools):
    """Joins the messages before the first answer into one, followed by their tool results."""
    replies = [m for m in messages if m["role"] == "assistant"]
    one = replies[0] | {"tool_calls": [call for reply in replies[:2] for call in reply["tool_calls"]]}
    results = [m for m in messages if m["role"] == "tool"]
    return [*messages[:2], one, *results, *messages[messages.index(replies[2]) :]], tools


def reordered(messages, tools):
    """Puts the answer before the call that led to it."""
    changed = list(messages)
    at = next(at for at, m in enumerate(changed) if m["role"] == "assistant" and not m.get("tool_calls"))
    changed.insert(5, changed.pop(at))
    return changed, tools


def blocks(found):
    """Splits a user message into parts with cache markers."""
    if isinstance(found["content"], list):
        return found
    return found | {"content": [{"type": "text", "text": found["content"], "cache_control": {"type": "ephemeral"}}]}


EXTRA = {"refusal": None, "annotations": [], "parsed": None, "audio": None, "function_call": None, "logprobs": None}
# Each case with its expected result.
KINDS = {
    "as it came": (lambda messages, tools: (messages, tools), "continued"),
    "fields in another order": (assistants(lambda m: dict(reversed(m.items()))), "continued"),
    "content null where it is empty": (assistants(lambda m: m | {"content": m["content"] or None}), "continued"),
    "content empty where it is null": (assistants(lambda m: m | {"content": m["content"] or ""}), "continued"),
    "no content where it is null": (assistants(lambda m: m if m["content"] else without("content")(m)), "continued"),
    "content of a line end where it is null": (
        assistants(lambda m: m | {"content": m["content"] or "\n"}),
        "continued",
    ),
    "further fields": (assistants(lambda m: m | EXTRA), "continued"),
    "a name": (assistants(lambda m: m | {"name": "helper"}), "continued"),
    "tool_calls [] and null": (assistants(lambda m: m | {"tool_calls": m.get("tool_calls") or []}), "continued"),
    "tool_calls null": (assistants(lambda m: m | {"tool_calls": m.get("tool_calls")}), "continued"),
    "calls with an index": (
        assistants(lambda m: m | {"tool_calls": [c | {"index": i} for i, c in enumerate(m.get("tool_calls") or [])]}),
        "continued",
    ),
    "content in a part": (assistants(parts), "continued"),
    "content in two parts": (assistants(two_parts), "continued"),
    "content trimmed": (assistants(lambda m: m | {"content": (m["content"] or "").strip()}), "continued"),
    "content trimmed at its end": (assistants(lambda m: m | {"content": (m["content"] or "").rstrip()}), "continued"),
    "arguments compact": (arguments(lambda d: json.dumps(d, separators=(",", ":"))), "continued"),
    "arguments with escapes": (arguments(lambda d: json.dumps(d, ensure_ascii=True)), "continued"),
    "arguments without escapes": (arguments(lambda d: json.dumps(d, ensure_ascii=False)), "continued"),
    "arguments in lines": (arguments(lambda d: json.dumps(d, indent=2)), "continued"),
    "arguments with keys sorted": (arguments(lambda d: json.dumps(d, sort_keys=True)), "continued"),
    "2 as 2.0": (arguments(lambda d: json.dumps(floats(d))), "continued"),
    "4.0 as 4": (arguments(lambda d: json.dumps(integers_for_whole_floats(d))), "continued"),
    "1.5 as 15e-1": (arguments(lambda d: json.dumps(d).replace("1.5", "15e-1")), "continued"),
    "no thought": (assistants(without("reasoning_content", "reasoning")), "continued"),
    "the thought under one name": (assistants(without("reasoning")), "continued"),
    "the thought under the other name": (assistants(without("reasoning_content")), "continued"),
    "an empty thought": (assistants(with_reasoning(lambda text: "")), "continued"),
    "the last chunk of the thought": (assistants(with_reasoning(lambda text: text[len(text) // 2 :])), "continued"),
    "the first chunk of the thought": (assistants(with_reasoning(lambda text: text[: len(text) // 2])), "continued"),
    "the thought trimmed": (assistants(with_reasoning(str.strip)), "continued"),
    "the thought in tags within the content": (
        assistants(
            lambda m: without("reasoning_content", "reasoning")(
                m | {"content": f"<think>{m['reasoning_content']}</think>{m['content'] or ''}"}
            )
        ),
        "continued",
    ),
    "calls as the model wrote them": (assistants(as_text), "continued"),
    "text and calls in two messages": (assistants(split), "continued"),
    "each call in a message of its own": (assistants(by_call), "continued"),
    "developer for system": (of_role("system", lambda m: m | {"role": "developer"}), "continued"),
    "the system prompt in a part": (of_role("system", parts), "continued"),
    "a user's message in parts, cached": (of_role("user", blocks), "continued"),
    "results in parts": (of_role("tool", parts), "continued"),
    "results with the tool's name": (of_role("tool", lambda m: m | {"name": "add"}), "continued"),
    "results without ids": (of_role("tool", without("tool_call_id")), "continued"),
    "tools with keys in another order": (
        lambda messages, tools: (
            messages,
            [{"function": dict(reversed(t["function"].items())), "type": "function"} for t in tools],
        ),
        "continued",
    ),
    "the text beside calls left out": (
        assistants(lambda m: m | {"content": None} if m.get("tool_calls") else m),
        "continued",
    ),
    "the text beside calls and their ids left out": (
        assistants(
            lambda m: (
                m | {"content": None, "tool_calls": [c | {"id": ""} for c in m["tool_calls"]]}
                if m.get("tool_calls")
                else m
            )
        ),
        "TextLost",
    ),
    "arguments with a further member": (arguments(lambda d: json.dumps(d | {"request": "add"})), "continued"),
    "an argument spaced otherwise": (
        arguments(lambda d: json.dumps(d | ({"note": d["note"].replace(" ", "  ")} if "note" in d else {}))),
        "continued",
    ),
    "text appended to the answer": (
        assistants(lambda m: m if m.get("tool_calls") else m | {"content": m["content"].strip() + "\n</code>"}),
        "continued",
    ),
    "calls as prose": (
        assistants(lambda m: {"role": "assistant", "content": "I called add."} if m.get("tool_calls") else m),
        "CallsAsText",
    ),
    "two replies as one message": (merged, "Merged"),
    "another order": (reordered, "Reordered"),
    "another call": (arguments(lambda d: json.dumps(d | {"a": 11})), "CallsEdited"),
    # Completions with calls are recognized by their ids, even with changed reasoning; the answer is not.
    "another thought": (assistants(with_reasoning(lambda text: "Something else.")), "ThoughtEdited"),
    "another answer": (
        assistants(lambda m: m if m.get("tool_calls") else m | {"content": "It is 13."}),
        "ReplyEdited",
    ),
}


def origin_after(binary, change):
    """Returns the origin of the second question's prompt, if the client changes all preceding messages."""
    gateway = Gateway(binary, REPLIES)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 2 and 1.5."}]
    for _ in range(3):
        answer = gateway.post("/v1/chat/completions", {"model": "scripted", "messages": messages, "tools": TOOLS})
        if isinstance(answer, str):
            raise SystemExit(f"the gateway refuses a plain history: {answer}")
        messages.append(answer["choices"][0]["message"])
        for call in messages[-1].get("tool_calls") or []:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3.5"})
    messages.append({"role": "user", "content": "Again, please."})
    messages, tools = change(copy.deepcopy(messages), TOOLS)
    answer = gateway.post("/v1/chat/completions", {"model": "scripted", "messages": messages, "tools": tools})
    origins, _ = gateway.close()
    return answer if isinstance(answer, str) else origins[-1]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recordings", type=Path, nargs="?", help="directory of recordings; without it, only built-in cases")
    p.add_argument("--only", default="", help="recordings and cases whose names contain this")
    p.add_argument(
        "--scripted", type=Path, default=ROOT / "target/debug/examples/scripted", help="binary of the gateway's example"
    )
    arguments = p.parse_args()
    if not arguments.scripted.is_file():
        sys.exit(f"{arguments.scripted} does not exist; cargo build -p levade-gateway --example scripted")
    wrong = calls = continued = 0
    paths = sorted(arguments.recordings.glob("*.json")) if arguments.recordings else []
    for path in paths:
        recording = Recording(path)
        if arguments.only not in recording.name:
            continue
        origins, fault, _ = recording.replay(arguments.scripted)
        forks = [origin for origin in origins if origin.startswith("forked")]
        bad = [origin for origin in forks if origin.rpartition(" ")[2] not in RIGHT]
        ok = not bad and not fault and len(origins) == len(recording.requests)
        wrong, calls, continued = wrong + (not ok), calls + len(origins), continued + origins.count("continued")
        print(f"{'ok  ' if ok else 'FAIL'} {recording.name:28} {', '.join(origins)}{(fault and f'; {fault}') or ''}")
    if paths:
        print(f"{calls} prompts, {continued} continued")
    for name, (change, expected) in KINDS.items():
        if arguments.only not in name:
            continue
        found = origin_after(arguments.scripted, change)
        ok = found.rpartition(" ")[2] == expected
        wrong += not ok
        print(f"{'ok  ' if ok else 'FAIL'} {name:44} {found}{'' if ok else f'; expected {expected}'}")
    sys.exit(min(wrong, 1))


if __name__ == "__main__":
    main()
