"""Runs an agent of `agno`: `chat`, `responses`, or `messages` (Anthropic's API)."""

import sys

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIChat, OpenAIResponses
from agno.tools import tool
from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions


@tool(name=NAME, description=DESCRIPTION)
def calculator(expression: str) -> str:
    return calculate(expression)


MODELS = {
    "chat": lambda: OpenAIChat(id=MODEL),
    "responses": lambda: OpenAIResponses(id=MODEL),
    "messages": lambda: Claude(id=MODEL, max_tokens=128),
}
agent = Agent(
    model=MODELS[sys.argv[1]](),
    tools=[calculator],
    instructions=SYSTEM,
    db=InMemoryDb(),
    add_history_to_context=True,
    telemetry=False,
)
answer = ""
for question in questions():
    answer = agent.run(question, session_id="one").content
done(str(answer))
