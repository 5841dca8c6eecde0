"""Runs an agent of `camel-ai`."""

import os

from calculator import DESCRIPTION, MODEL, SYSTEM, calculate, done, questions
from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils.token_counting import BaseTokenCounter


class Uncounted(BaseTokenCounter):
    """Replaces the token counter, since camel only has tokenizers for its own list of models."""

    def count_tokens_from_messages(self, messages):
        return 10

    def encode(self, text):
        return [1]

    def decode(self, token_ids):
        return ""


def calculator(expression: str) -> str:
    """Evaluates.

    Args:
        expression (str): The expression, such as (12 + 7) * 3.
    """
    return calculate(expression)


calculator.__doc__ = calculator.__doc__.replace("Evaluates.", DESCRIPTION)
model = ModelFactory.create(
    token_counter=Uncounted(),
    model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
    model_type=MODEL,
    url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = ChatAgent(SYSTEM, model=model, tools=[FunctionTool(calculator)], max_iteration=3)
for question in questions():
    reply = agent.step(question)
done(reply.msgs[0].content if reply.msgs else "")
