"""Runs an agent of `ag2`: `chat` or `responses`."""

import asyncio
import os
import sys

from ag2 import Agent, tool
from ag2.config import OpenAIConfig, OpenAIResponsesConfig
from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions


@tool(name=NAME, description=DESCRIPTION)
def calculator(expression: str) -> str:
    return calculate(expression)


async def main():
    kind = {"chat": OpenAIConfig, "responses": OpenAIResponsesConfig}[sys.argv[1]]
    config = kind(model=MODEL, api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"])
    first, later = questions()
    agent = Agent("solver", prompt=SYSTEM, config=config, tools=[calculator])
    said = await agent.ask(first)
    said = await said.ask(later)
    done(str(said.body))


asyncio.run(main())
