"""Runs an agent of Google's ADK, which reaches the endpoint through LiteLLM."""

import asyncio
import os

from calculator import DESCRIPTION, MODEL, SYSTEM, calculate, done, questions
from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

# Otherwise LiteLLM fetches model prices from the web.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


def calculator(expression: str) -> str:
    return calculate(expression)


calculator.__doc__ = DESCRIPTION
agent = Agent(name="solver", model=LiteLlm(model=f"openai/{MODEL}"), instruction=SYSTEM, tools=[calculator])


async def main():
    runner, answer = InMemoryRunner(agent=agent, app_name="solver"), ""
    session = await runner.session_service.create_session(app_name="solver", user_id="user")
    for question in questions():
        message = types.Content(role="user", parts=[types.Part(text=question)])
        async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
            if event.is_final_response() and event.content:
                answer = "".join(part.text or "" for part in event.content.parts or [])
    done(answer)


asyncio.run(main())
