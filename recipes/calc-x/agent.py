"""Agent Lightning's Calc-X agent: AutoGen with the calculator of an MCP server.

It stays alive, since AutoGen takes seconds to load: it reads a line of JSON for each attempt, and prints one when it is
done. Needs `pip install autogen-agentchat "autogen-ext[openai,mcp]" mcp-server-calculator`.
"""

import asyncio
import json
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams

CALCULATOR = StdioServerParams(command=sys.executable, args=["-m", "mcp_server_calculator"], read_timeout_seconds=60)
SYSTEM = "Answer with the calculator's help."
ABLE = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


async def answer(order, calculator):
    """The agent's answer to the question of an attempt."""
    model = OpenAIChatCompletionClient(
        model=order["model"], base_url=order["base_url"], api_key=order["api_key"], model_info=ABLE, max_retries=0
    )
    agent = AssistantAgent(
        "calc",
        model_client=model,
        workbench=calculator,
        system_message=SYSTEM,
        reflect_on_tool_use=False,
        max_tool_iterations=3,
    )
    result = await agent.run(task=order["task"]["question"])
    await model.close()
    return str(result.messages[-1].content)


async def attempt(order, calculator):
    try:
        said = {"attempt": order["attempt"], "answer": " ".join((await answer(order, calculator)).split())}
    except Exception as error:  # one attempt that fails is not to end the others
        said = {"attempt": order["attempt"], "error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(said), flush=True)


async def main():
    under_way = {}
    # The calculator keeps nothing, so one server does for all attempts of this process.
    async with McpWorkbench(CALCULATOR) as calculator:
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            name = order["attempt"]
            if order.get("stop"):
                if running := under_way.get(name):
                    running.cancel()
                continue
            under_way[name] = asyncio.create_task(attempt(order, calculator))
            under_way[name].add_done_callback(lambda _, name=name: under_way.pop(name, None))


if __name__ == "__main__":
    asyncio.run(main())
