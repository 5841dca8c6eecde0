"""Runs `litellm` as an OpenAI client, `whole` or `stream`, or as an Anthropic client, `messages`."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prevents downloads

import litellm
from calculator import DESCRIPTION, MODEL, NAME, PARAMETERS, ROUNDS, SYSTEM, done, of_call, questions

mode = sys.argv[1]
tools = [{"type": "function", "function": {"name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS}}]
messages = [{"role": "system", "content": SYSTEM}]
if mode == "messages":
    where = {"model": f"anthropic/{MODEL}", "api_base": os.environ["ANTHROPIC_BASE_URL"], "max_tokens": 128}
else:
    where = {"model": f"openai/{MODEL}", "api_base": os.environ["OPENAI_BASE_URL"]}


def ask():
    answer = litellm.completion(messages=messages, tools=tools, stream=mode == "stream", **where)
    if mode == "stream":
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0].message


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
