"""A tool as verl's examples have them."""

from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Gsm8kTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.instances = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        if ground_truth == "raise":
            raise ValueError("no such truth")
        instance_id = instance_id or str(uuid4())
        self.instances[instance_id] = {
            "response": "",
            "ground_truth": ground_truth,
            "reward": 0.0,
            "tries": 0,
        }
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict, mark: str = "", **kwargs: Any):
        instance = self.instances[instance_id]
        instance["response"] = parameters.get("answer", "")
        instance["tries"] += 1
        reward = await self.calc_reward(instance_id)
        penalty = 0.0 if reward > instance["reward"] else -0.05
        instance["reward"] = reward
        text = f"{instance['response']!r} gives {reward}{mark}"
        return ToolResponse(text=text), penalty, {"tries": instance["tries"]}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        instance = self.instances[instance_id]
        return 1.0 if instance["response"] == instance["ground_truth"] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.instances[instance_id]
        if self.config.get("log"):
            with open(self.config["log"], "a") as log:
                print(instance_id, file=log)
