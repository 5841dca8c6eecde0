"""Runs the `openai` package over chat completions: `whole` without streaming, or `stream` with its helper."""

import sys

from calculator import DESCRIPTION, MODEL, NAME, PARAMETERS, ROUNDS, SYSTEM, done, of_call, questions
from openai import OpenAI

client = OpenAI()
tools = [{"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}}]
messages = [{"role": "system", "content": SYSTEM}]


def ask():
    if sys.argv[1] == "whole":
        return client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
    with client.chat.completions.stream(
        model=MODEL, messages=messages, tools=tools, stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


for question in questions():
    messages.append({"role": "user", "content": question})
    for _ in range(ROUNDS):
        reply = ask()
        messages.append(reply)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": of_call(call.function.arguments)})
done(reply.content)
