"""Runs an agent of `langchain`, which is a `langgraph` graph: `chat`, `stream` or `messages`."""

import sys

from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError


@tool(NAME, description=DESCRIPTION)
def calculator(expression: str) -> str:
    return calculate(expression)


match sys.argv[1]:
    case "chat":
        model = ChatOpenAI(model=MODEL)
    case "stream":
        model = ChatOpenAI(model=MODEL, streaming=True, stream_usage=True)
    case "messages":
        model = ChatAnthropic(model=MODEL, max_tokens=128)
agent = create_agent(model, [calculator], system_prompt=SYSTEM, checkpointer=InMemorySaver())
settings, answer = {"configurable": {"thread_id": "one"}, "recursion_limit": 6}, ""
for question in questions():
    try:
        state = agent.invoke({"messages": [{"role": "user", "content": question}]}, settings)
        answer = state["messages"][-1].text
    except GraphRecursionError:  # after this many calls, the next question follows
        continue
done(str(answer))
