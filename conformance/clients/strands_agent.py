"""An agent of `strands-agents`, which streams."""

import os

from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions
from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool(name=NAME, description=DESCRIPTION)
def calculator(expression: str) -> str:
    """Evaluates.

    Args:
        expression: The expression, such as (12 + 7) * 3.
    """
    return calculate(expression)


where = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
agent = Agent(
    model=OpenAIModel(client_args=where, model_id=MODEL),
    tools=[calculator],
    system_prompt=SYSTEM,
    callback_handler=None,
)
answer = ""
for question in questions():
    answer = str(agent(question))
done(answer)
