"""Runs an agent of `crewai` twice, with its messages as the history."""

import contextlib
import os

from calculator import DESCRIPTION, MODEL, NAME, ROUNDS, calculate, done, questions
from crewai import LLM, Agent
from crewai.tools import tool

# crewai prints event reports late.
stdout = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


@tool(NAME)
def calculator(expression: str) -> str:
    """Evaluates."""
    return calculate(expression)


calculator.description = DESCRIPTION
llm = LLM(model=f"openai/{MODEL}", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(role="Solver", goal="Answer", backstory="Brief.", llm=llm, tools=[calculator], max_iter=ROUNDS)
messages = []
for question in questions():
    messages.append({"role": "user", "content": question})
    answer = agent.kickoff(messages).raw
    messages.append({"role": "assistant", "content": answer})
with contextlib.redirect_stdout(stdout):
    done(answer)
