"""Runs an agent of `strands-agents` with streaming: `chat`, `responses` or `messages`."""

import os
import sys

from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException


@tool(name=NAME, description=DESCRIPTION)
def calculator(expression: str) -> str:
    """Evaluates.

    Args:
        expression: The expression, such as (12 + 7) * 3.
    """
    return calculate(expression)


def model(mode):
    where = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    if mode == "responses":
        from strands.models.openai_responses import OpenAIResponsesModel

        return OpenAIResponsesModel(client_args=where, model_id=MODEL)
    if mode == "messages":
        from strands.models.anthropic import AnthropicModel

        return AnthropicModel(model_id=MODEL, max_tokens=128)
    return OpenAIModel(client_args=where, model_id=MODEL)


agent = Agent(
    model=model(sys.argv[1] if len(sys.argv) > 1 else "chat"),
    tools=[calculator],
    system_prompt=SYSTEM,
    callback_handler=None,
)
answer = ""
for question in questions():
    try:
        answer = str(agent(question))
    except MaxTokensReachedException:  # the truncated reply stays in the history
        continue
done(answer)
