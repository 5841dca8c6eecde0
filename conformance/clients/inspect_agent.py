"""Runs a loop of `inspect-ai`: `chat`, `responses` (which first sends a request without tools), or `messages`."""

import asyncio
import sys

from calculator import DESCRIPTION, MODEL, SYSTEM, calculate, done, questions
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, GenerateConfig, get_model
from inspect_ai.tool import tool


@tool
def calculator():
    async def execute(expression: str) -> str:
        """Evaluates.

        Args:
            expression: The expression, such as (12 + 7) * 3.
        """
        return calculate(expression)

    return execute


calculator.__doc__ = DESCRIPTION


async def main():
    provider = "anthropic" if sys.argv[1] == "messages" else "openai"
    kinds = {} if provider == "anthropic" else {"responses_api": sys.argv[1] == "responses"}
    config = GenerateConfig(max_tokens=128, cache_prompt=False)
    model = get_model(f"{provider}/{MODEL}", config=config, **kinds)
    messages, answer = [ChatMessageSystem(content=SYSTEM)], ""
    for question in questions():
        messages.append(ChatMessageUser(content=question))
        added, output = await model.generate_loop(messages, tools=[calculator()])
        messages += added
        answer = output.completion
    done(answer)


asyncio.run(main())
