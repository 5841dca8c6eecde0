"""Runs the `anthropic` package: `whole` without streaming, or `stream` with its helper."""

import sys

from anthropic import Anthropic
from calculator import DESCRIPTION, MODEL, NAME, PARAMETERS, ROUNDS, SYSTEM, calculate, done, questions

client = Anthropic()
tools = [{"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}]
messages = []


def ask():
    asked = {"model": MODEL, "max_tokens": 128, "system": SYSTEM, "messages": messages, "tools": tools}
    if sys.argv[1] == "whole":
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


for question in questions():
    messages.append({"role": "user", "content": question})
    for _ in range(ROUNDS):
        reply = ask()
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        results = [(call.id, calculate(call.input.get("expression", ""))) for call in calls]
        results = [{"type": "tool_result", "tool_use_id": id, "content": result} for id, result in results]
        messages.append({"role": "user", "content": results})
done("".join(block.text for block in reply.content if block.type == "text"))
