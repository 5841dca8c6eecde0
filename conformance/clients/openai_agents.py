"""Runs `openai-agents` with a session: `chat`, `responses`, and both with streaming."""

import asyncio
import sys

from agents import (
    Agent,
    MaxTurnsExceeded,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from calculator import DESCRIPTION, MODEL, NAME, ROUNDS, SYSTEM, calculate, done, questions
from openai import AsyncOpenAI

mode = sys.argv[1]
set_tracing_disabled(True)


@function_tool(name_override=NAME, description_override=DESCRIPTION)
def calculator(expression: str) -> str:
    return calculate(expression)


async def main():
    kind = OpenAIResponsesModel if "responses" in mode else OpenAIChatCompletionsModel
    model = kind(model=MODEL, openai_client=AsyncOpenAI())
    agent = Agent(name="calc", instructions=SYSTEM, tools=[calculator], model=model)
    session, answer = SQLiteSession("one"), ""
    for question in questions():
        try:
            if "stream" in mode:
                result = Runner.run_streamed(agent, question, session=session, max_turns=ROUNDS)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(agent, question, session=session, max_turns=ROUNDS)
            answer = result.final_output
        except MaxTurnsExceeded:
            continue
    done(answer)


asyncio.run(main())
