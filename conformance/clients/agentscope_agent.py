"""Runs an agent of `agentscope`: `stream`, or `whole` without streaming."""

import asyncio
import os
import sys

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit
from calculator import MODEL, SYSTEM, calculate, done, questions


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression with + - * / ^ and parentheses.

    Args:
        expression (str): The expression, such as (12 + 7) * 3.
    """
    return calculate(expression)


async def main():
    key = OpenAICredential(api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"])
    model = OpenAIChatModel(credential=key, model=MODEL, stream=sys.argv[1] == "stream")
    state = AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS))
    toolkit = Toolkit(tools=[FunctionTool(calculator)])
    agent = Agent(name="calc", system_prompt=SYSTEM, model=model, toolkit=toolkit, state=state)
    for question in questions():
        reply = await agent.reply(UserMsg(name="user", content=question))
    done(str(reply.get_text_content()))


asyncio.run(main())
