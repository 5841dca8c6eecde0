"""Runs an agent of `mcp-agent` with a local function as its tool."""

import asyncio
import os

from calculator import DESCRIPTION, MODEL, SYSTEM, calculate, done, questions
from mcp_agent.agents.agent import Agent
from mcp_agent.app import MCPApp
from mcp_agent.config import LoggerSettings, OpenAISettings, Settings
from mcp_agent.workflows.llm.augmented_llm import RequestParams
from mcp_agent.workflows.llm.augmented_llm_openai import OpenAIAugmentedLLM


def calculator(expression: str) -> str:
    return calculate(expression)


calculator.__doc__ = DESCRIPTION
endpoint = OpenAISettings(
    api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"], default_model=MODEL
)
app = MCPApp("solver", settings=Settings(openai=endpoint, logger=LoggerSettings(type="none")))


async def main():
    answer = ""
    async with app.run(), Agent(name="solver", instruction=SYSTEM, functions=[calculator]) as agent:
        model = await agent.attach_llm(OpenAIAugmentedLLM)
        for question in questions():
            answer = await model.generate_str(question, RequestParams(model=MODEL, max_iterations=3))
    done(answer)


asyncio.run(main())
