"""Runs an agent of `pydantic-ai` over chat completions (`whole` or `stream`), `responses`, or `messages` (Anthropic's
API).
"""

import asyncio
import sys

from calculator import DESCRIPTION, MODEL, NAME, ROUNDS, SYSTEM, calculate, done, questions
from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits


def model(mode):
    if mode == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel

        return AnthropicModel(MODEL, provider="anthropic")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    return (OpenAIResponsesModel if mode == "responses" else OpenAIChatModel)(MODEL, provider="openai")


agent = Agent(model(sys.argv[1]), system_prompt=SYSTEM)


@agent.tool_plain(name=NAME, description=DESCRIPTION)
def calculator(expression: str) -> str:
    return calculate(expression)


async def main():
    history, answer = [], ""
    for question in questions():
        asked = {"message_history": history, "usage_limits": UsageLimits(request_limit=ROUNDS)}
        try:
            if sys.argv[1] == "stream":
                async with agent.run_stream(question, **asked) as result:
                    answer = await result.get_output()
            else:
                result = await agent.run(question, **asked)
                answer = result.output
            history = result.all_messages()
        except UsageLimitExceeded:  # after this many calls, the next question follows
            continue
    done(answer)


asyncio.run(main())
