"""Runs an agent of `langroid`, which adds a field to the arguments of each call."""

import os

import tiktoken
from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions

# langroid's tokenizer only counts tokens and would be fetched from the web. Here a byte is a token.
BYTES = tiktoken.Encoding(
    "bytes", pat_str="(?s:.)", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={}
)
tiktoken.get_encoding = tiktoken.encoding_for_model = lambda _: BYTES

import langroid as lr  # noqa: E402
import langroid.language_models as lm  # noqa: E402


class Calculator(lr.ToolMessage):
    request: str = NAME
    purpose: str = DESCRIPTION
    expression: str

    def handle(self) -> str:
        return calculate(self.expression)


llm = lm.OpenAIGPTConfig(
    chat_model=MODEL, api_base=os.environ["OPENAI_BASE_URL"], chat_context_length=4096, stream=False
)
config = lr.ChatAgentConfig(llm=llm, system_message=SYSTEM, use_functions_api=True, use_tools=False, use_tools_api=True)
agent = lr.ChatAgent(config)
agent.enable_message(Calculator)
task = lr.Task(agent, interactive=False, restart=False, single_round=False)
answer = ""
for question in questions():
    said = task.run(question, turns=4)
    answer = said.content if said else ""
done(answer)
