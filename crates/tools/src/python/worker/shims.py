"""Stand-ins for the modules of verl that tools import, where verl is not installed."""

import functools
import importlib.util
import sys
import types
import uuid


class Record:
    """An object with named fields, made of a dictionary."""

    def __init__(self, **fields):
        for name, value in fields.items():
            setattr(self, name, value)

    @classmethod
    def model_validate(cls, fields):
        return cls(**{name: nested(name, value) for name, value in dict(fields).items()})

    def __getattr__(self, name):
        # Fields that may be left out.
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def model_dump(self, exclude_none=False, exclude_unset=False, **_):
        return {
            name: dumped(value)
            for name, value in vars(self).items()
            if not ((exclude_none or exclude_unset) and value is None)
        }

    def __eq__(self, other):
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self):
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        )


def nested(name, value):
    if name == "function" and isinstance(value, dict):
        return OpenAIFunctionSchema.model_validate(value)
    if name == "parameters" and isinstance(value, dict):
        return OpenAIFunctionParametersSchema.model_validate(value)
    if name == "properties" and isinstance(value, dict):
        make = OpenAIFunctionPropertySchema.model_validate
        return {key: make(item) if isinstance(item, dict) else item for key, item in value.items()}
    return value


def dumped(value):
    if isinstance(value, Record):
        return value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        return {name: dumped(item) for name, item in value.items()}
    return [dumped(item) for item in value] if isinstance(value, list) else value


class OpenAIFunctionPropertySchema(Record):
    pass


class OpenAIFunctionParametersSchema(Record):
    pass


class OpenAIFunctionSchema(Record):
    pass


class OpenAIFunctionToolSchema(Record):
    pass


class OpenAIFunctionParsedSchema(Record):
    pass


class OpenAIFunctionCallSchema(Record):
    pass


class OpenAIFunctionToolCall(Record):
    pass


class ToolResponse(Record):
    def __init__(self, text=None, image=None, video=None):
        super().__init__(text=text, image=image, video=video)

    def is_empty(self):
        return not self.text and not self.image and not self.video

    def is_text_only(self):
        return bool(self.text) and not self.image and not self.video


class AgentData(Record):
    """Facts of an attempt, as verl's loop hands them to its tools: of one attempt all calls have the same, so
    that a tool can keep in `extra_fields` what it wants to know again."""

    def __init__(self, session, row, given):
        prompt = row.get("prompt")
        super().__init__(
            messages=[dict(turn) for turn in prompt if isinstance(turn, dict)]
            if isinstance(prompt, list)
            else [],
            image_data=None,
            video_data=None,
            metrics={},
            request_id=session,
            tools_kwargs=given,
            interaction=None,
            interaction_kwargs={},
            prompt_ids=[],
            response_ids=[],
            response_mask=[],
            response_logprobs=[],
            turn_scores=[],
            tool_rewards=[],
            tool_calls=[],
            user_turns=0,
            assistant_turns=0,
            routed_experts=None,
            extra_fields={},
        )


class BaseTool:
    """The class from which tools of verl are derived."""

    def __init__(self, config, tool_schema):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self):
        return self.tool_schema

    async def create(self, instance_id=None, **kwargs):
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id, **kwargs):
        return 0.0

    async def release(self, instance_id, **kwargs):
        pass


class BaseInteraction:
    """The class from which interactions of verl are derived."""

    def __init__(self, config):
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id=None, **kwargs):
        return instance_id or str(uuid.uuid4())

    async def generate_response(self, instance_id, messages, **kwargs):
        return False, "", 0.0, {}

    async def calculate_score(self):
        return 0.0

    async def finalize_interaction(self):
        pass


def mark(function=None, **_):
    """A decorator, with options or without, that leaves a function as it is."""
    return function if callable(function) else lambda function: function


def trace(function):
    @functools.wraps(function)
    def same(*args, **kwargs):
        return function(*args, **kwargs)

    return same


def install():
    """Puts the stand-ins in place, where verl is not installed."""
    if importlib.util.find_spec("verl") is not None:
        return
    schemas = [
        OpenAIFunctionPropertySchema,
        OpenAIFunctionParametersSchema,
        OpenAIFunctionSchema,
        OpenAIFunctionToolSchema,
        OpenAIFunctionParsedSchema,
        OpenAIFunctionCallSchema,
        OpenAIFunctionToolCall,
        ToolResponse,
    ]
    modules = {
        "verl": {},
        "verl.tools": {},
        "verl.tools.base_tool": {"BaseTool": BaseTool, "ToolResponse": ToolResponse},
        "verl.tools.schemas": {schema.__name__: schema for schema in schemas},
        "verl.tools.function_tool": {"function_tool": mark},
        "verl.interactions": {},
        "verl.interactions.base": {"BaseInteraction": BaseInteraction},
        "verl.experimental": {},
        "verl.experimental.agent_loop": {},
        "verl.experimental.agent_loop.tool_agent_loop": {"AgentData": AgentData},
        "verl.utils": {},
        "verl.utils.rollout_trace": {"rollout_trace_op": trace},
    }
    modules["verl.tools.base_tool"]["OpenAIFunctionToolSchema"] = OpenAIFunctionToolSchema
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
