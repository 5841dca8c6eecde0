"""Runs a code agent of `smolagents`, which appends the end of a code block and the executed code to each message."""

import os

from calculator import MODEL, ROUNDS, done, questions
from smolagents import CodeAgent, LogLevel, OpenAIModel

model = OpenAIModel(MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_tokens=96)
agent = CodeAgent(tools=[], model=model, max_steps=ROUNDS, instructions="Be brief.", verbosity_level=LogLevel.OFF)
answer = ""
for at, question in enumerate(questions()):
    answer = agent.run(question, reset=at == 0)
done(str(answer))
