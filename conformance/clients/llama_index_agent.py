"""Runs an agent of `llama-index`: `function` with tool calls, or `react` with calls as text."""

import asyncio
import os
import sys

from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.memory import Memory
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def calculator(expression: str) -> str:
    return calculate(expression)


async def main():
    model = OpenAILike(
        model=MODEL,
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )
    kind = {"function": FunctionAgent, "react": ReActAgent}[sys.argv[1]]
    tool = FunctionTool.from_defaults(calculator, name=NAME, description=DESCRIPTION)
    agent = kind(tools=[tool], llm=model, system_prompt=SYSTEM)
    memory, answer = Memory.from_defaults(session_id="one"), ""
    for question in questions():
        answer = str(await agent.run(question, memory=memory))
    done(answer)


asyncio.run(main())
