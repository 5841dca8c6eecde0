"""Runs an agent of `autogen`: `whole` without streaming, or `stream`."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from calculator import MODEL, ROUNDS, SYSTEM, calculate, done, questions


async def calculator(expression: str) -> str:
    "Evaluates an arithmetic expression with + - * / ^ and parentheses."
    return calculate(expression)


async def main():
    able = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
    client = OpenAIChatCompletionClient(model=MODEL, model_info=able | {"family": "unknown"})
    agent = AssistantAgent(
        "calc",
        model_client=client,
        tools=[calculator],
        system_message=SYSTEM,
        reflect_on_tool_use=True,
        max_tool_iterations=ROUNDS,
        model_client_stream=sys.argv[1] == "stream",
    )
    for question in questions():
        result = await agent.run(task=question)
    done(str(result.messages[-1].content))


asyncio.run(main())
