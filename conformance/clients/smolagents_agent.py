"""Runs a tool-calling agent of `smolagents`, which writes calls and results to its history as its own texts."""

import os

from calculator import DESCRIPTION, MODEL, ROUNDS, calculate, done, questions
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """Evaluates.

    Args:
        expression: The expression, such as (12 + 7) * 3.
    """
    return calculate(expression)


calculator.description = DESCRIPTION
model = OpenAIModel(MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_tokens=96)
agent = ToolCallingAgent(
    tools=[calculator], model=model, max_steps=ROUNDS, instructions="Be brief.", verbosity_level=LogLevel.OFF
)
answer = ""
for at, question in enumerate(questions()):
    answer = agent.run(question, reset=at == 0)
done(str(answer))
