"""Runs an agent of `griptape` with native tools and its conversation memory."""

import os

from calculator import DESCRIPTION, MODEL, SYSTEM, calculate, done, questions
from griptape.artifacts import TextArtifact
from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
from griptape.rules import Rule
from griptape.structures import Agent
from griptape.tokenizers import SimpleTokenizer
from griptape.tools import BaseTool
from griptape.utils.decorators import activity
from schema import Literal, Schema


class Calculator(BaseTool):
    @activity(config={"description": DESCRIPTION, "schema": Schema({Literal("expression"): str})})
    def calculate(self, params: dict) -> TextArtifact:
        return TextArtifact(calculate(params["values"]["expression"]))


driver = OpenAiChatPromptDriver(
    model=MODEL,
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    use_native_tools=True,
    # griptape would fetch its own tokenizer from the web.
    tokenizer=SimpleTokenizer(characters_per_token=4, max_input_tokens=2048, max_output_tokens=512),
    max_tokens=128,
)
agent = Agent(prompt_driver=driver, tools=[Calculator()], rules=[Rule(SYSTEM)])
answer = ""
for question in questions():
    answer = str(agent.run(question).output.value)
done(answer)
