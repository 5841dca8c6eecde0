"""Runs an agent of `deepagents`, with its own instructions, its tools for files and plans, and a calculator."""

from calculator import DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions
from deepagents import create_deep_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError


@tool(NAME, description=DESCRIPTION)
def calculator(expression: str) -> str:
    return calculate(expression)


agent = create_deep_agent(
    model=ChatOpenAI(model=MODEL), tools=[calculator], system_prompt=SYSTEM, checkpointer=InMemorySaver()
)
settings, answer = {"configurable": {"thread_id": "one"}, "recursion_limit": 30}, ""
for question in questions():
    try:
        state = agent.invoke({"messages": [{"role": "user", "content": question}]}, settings)
        answer = state["messages"][-1].text
    except GraphRecursionError:  # after this many calls, the next question follows
        continue
done(str(answer))
