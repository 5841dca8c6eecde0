"""Runs an agent of `haystack-ai` over chat completions."""

from calculator import DESCRIPTION, MODEL, NAME, PARAMETERS, ROUNDS, SYSTEM, calculate, done, questions
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool

tool = Tool(
    name=NAME, description=DESCRIPTION, parameters=PARAMETERS, function=lambda expression: calculate(expression)
)
agent = Agent(
    chat_generator=OpenAIChatGenerator(model=MODEL), tools=[tool], system_prompt=SYSTEM, max_agent_steps=ROUNDS
)
messages, answer = [], ""
for question in questions():
    # The agent puts its instructions before the given messages.
    messages = [message for message in messages if not message.is_from("system")]
    messages = agent.run(messages=[*messages, ChatMessage.from_user(question)])["messages"]
    answer = messages[-1].text
done(answer)
