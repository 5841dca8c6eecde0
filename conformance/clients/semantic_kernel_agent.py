"""Runs an agent of `semantic-kernel`, which drops the text of a message that also contains calls."""

import asyncio

from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Plugin:
    @kernel_function(name=NAME, description=DESCRIPTION)
    def calculator(self, expression: str) -> str:
        return calculate(expression)


async def main():
    service = OpenAIChatCompletion(ai_model_id=MODEL)
    agent = ChatCompletionAgent(service=service, name="agent", instructions=SYSTEM, plugins=[Plugin()])
    thread, answer = None, ""
    for question in questions():
        response = await agent.get_response(messages=question, thread=thread)
        thread, answer = response.thread, str(response.content)
    done(answer)


asyncio.run(main())
