"""A LangGraph agent that stays alive: reads a question a line, several at once, and prints an answer a line.

Needs `pip install langgraph langchain-openai`.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

sys.path.insert(0, "../bring-your-own-agent")
from agent import calculate  # noqa: E402  (the calculator of the plain agent)


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression with + - * / ^ and parentheses."""
    return calculate(expression)


def answer(order):
    """The agent's answer to the question of an attempt."""
    model = ChatOpenAI(model=order["model"], base_url=order["base_url"], api_key=order["api_key"], max_retries=0)
    agent = create_react_agent(model, [calculator])
    question = {"role": "user", "content": order["task"]["question"]}
    return agent.invoke({"messages": [question]}, {"recursion_limit": 7})["messages"][-1].content


PRINTING = threading.Lock()


def attempt(order):
    try:
        said = {"attempt": order["attempt"], "answer": answer(order)}
    except Exception as error:  # one attempt that fails is not to end the others
        said = {"attempt": order["attempt"], "error": f"{type(error).__name__}: {error}"[:500]}
    with PRINTING:
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    with ThreadPoolExecutor(32) as threads:
        for line in sys.stdin:
            order = json.loads(line)
            if not order.get("stop"):
                threads.submit(attempt, order)
