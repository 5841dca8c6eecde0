"""Runs an agent of Microsoft's agent-framework: `chat` or `responses`."""

import asyncio
import os
import sys

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions


@tool(name=NAME, description=DESCRIPTION)
def calculator(expression: str) -> str:
    return calculate(expression)


async def main():
    kind = {"chat": OpenAIChatCompletionClient, "responses": OpenAIChatClient}[sys.argv[1]]
    client = kind(model=MODEL, api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"])
    agent = Agent(client, SYSTEM, tools=[calculator])
    session, answer = agent.create_session(), ""
    for question in questions():
        answer = (await agent.run(question, session=session)).text
    done(answer)


asyncio.run(main())
