"""Sends chat completions over `urllib`, without any client package."""

import json
import os
import urllib.request

from calculator import DESCRIPTION, MODEL, NAME, PARAMETERS, ROUNDS, SYSTEM, done, of_call, questions

tools = [{"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}}]
messages = [{"role": "system", "content": SYSTEM}]


def ask():
    body = json.dumps({"model": MODEL, "messages": messages, "tools": tools}).encode()
    head = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]


for question in questions():
    messages.append({"role": "user", "content": question})
    for _ in range(ROUNDS):
        reply = ask()
        messages.append(reply)
        if not reply.get("tool_calls"):
            break
        for call in reply["tool_calls"]:
            result = of_call(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
done(reply["content"])
