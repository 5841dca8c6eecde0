"""Runs the `openai` package over responses: `whole`, `stream`, or `previous` with previous response ids."""

import sys

from calculator import DESCRIPTION, MODEL, NAME, PARAMETERS, ROUNDS, SYSTEM, done, of_call, questions
from openai import OpenAI

client, mode = OpenAI(), sys.argv[1]
tools = [{"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}]
items, extra = [], {}


def ask():
    asked = {"model": MODEL, "instructions": SYSTEM, "input": items, "tools": tools, **extra}
    if mode != "stream":
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


for question in questions():
    items.append({"role": "user", "content": question})
    for _ in range(ROUNDS):
        reply = ask()
        calls = [item for item in reply.output if item.type == "function_call"]
        if mode == "previous":
            items, extra = [], {"previous_response_id": reply.id}
        else:
            items += reply.output
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": of_call(call.arguments)})
        if not calls:
            break
done(reply.output_text)
