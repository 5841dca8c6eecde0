"""Runs an agent of `qwen-agent`, which leaves calls to the API (`use_raw_api`)."""

import os

import json5
from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool(NAME)
class Calculator(BaseTool):
    description = DESCRIPTION
    parameters = [{"name": "expression", "type": "string", "description": "The expression.", "required": True}]  # noqa: RUF012

    def call(self, params, **_):
        arguments = json5.loads(params) if isinstance(params, str) else params
        return calculate(str(arguments.get("expression", "")))


llm = {
    "model": MODEL,
    "model_server": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
    "generate_cfg": {"use_raw_api": True},
}
agent = Assistant(llm=llm, function_list=[NAME], system_message=SYSTEM)
messages = []
for question in questions():
    messages.append({"role": "user", "content": question})
    *_, replies = agent.run(messages)
    messages += replies
done(str(messages[-1]["content"]))
