"""Tools: functions, and classes of which each attempt has an instance of its own."""

import contextlib
import difflib
import enum
import inspect
import json
import sys
import weakref

from levade_worker import answers, schema, shims

# Keywords of JSON schemas, of which slips are put right.
KEYWORDS = (
    "type",
    "description",
    "properties",
    "required",
    "items",
    "enum",
    "default",
    "additionalProperties",
    "anyOf",
    "oneOf",
    "allOf",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "title",
    "examples",
    "const",
    "not",
    "$ref",
    "$defs",
    "uniqueItems",
    "nullable",
)
# Python's names of types, which many write for those of JSON schemas.
TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
    "None": "null",
}
# Where those who make tools of functions keep the function.
INSIDE = ("func", "coroutine", "fn", "forward", "__wrapped__", "entrypoint")


async def finished(value):
    """The answer of a call, given at once or later, as a whole or item by item."""
    if inspect.isasyncgen(value):
        return await answers.later_items_of(value)
    return await value if inspect.isawaitable(value) else value


def drawn(value):
    """The answer of a call, with the items of a generator, whose code is the call's."""
    return answers.items_of(value) if inspect.isgenerator(value) else value


def is_later(function):
    """Whether a function gives something to wait for."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


class Function:
    """A function: no call knows of others."""

    stateful = False

    def __init__(self, name, function):
        self.name, self.function = name, function
        self.parameters, self.description = schema.parameters_of(function)
        is_plain = inspect.isfunction(function) or inspect.ismethod(function)
        call = function if is_plain else type(function).__call__
        self.is_async = is_later(inspect.unwrap(call))

    def call(self, arguments):
        """Begins a call, which gives the answer or something to wait for."""
        positional, named = schema.bind(self.function, arguments)
        return drawn(self.function(*positional, **named))


def is_function(value):
    """Whether a value is a function, also one that a decorator of the standard library wraps (`lru_cache`)."""
    return inspect.isfunction(value) or (
        callable(value) and not inspect.isclass(value) and type(value).__module__ == "functools"
    )


def of_function(name, value):
    if not is_function(value):
        inner = next(
            (found for found in (getattr(value, at, None) for at in INSIDE) if callable(found)), None
        )
        if inner is not None and not inspect.isclass(value):
            value, name = inner, name_of(value, name)
    if not callable(value):
        raise schema.Unusable(f"it is {value!r}, and no function")
    return Function(name, value)


def name_of(value, name):
    """The name that somebody has given a tool who made it of a function."""
    given = getattr(value, "name", None)
    return given if isinstance(given, str) and given else name


def is_class(value):
    """Whether a class is one of tools, which are created, executed and released."""
    return (
        inspect.isclass(value) and callable(getattr(value, "execute", None)) and value is not shims.BaseTool
    )


class Stateful:
    """An object that makes an instance for each attempt, under a name of its own."""

    stateful = True
    # A result may be (response, reward, metrics).
    gives_reward = True
    has_del = False

    def __init__(self, tool, description, name):
        self.tool = tool
        function = description.get("function", description)
        self.name = str(function.get("name") or getattr(tool, "name", "") or name)
        self.description = str(function.get("description") or "")
        self.parameters = mended(function.get("parameters") or {"type": "object", "properties": {}})
        execute = inspect.unwrap(tool.execute)
        self.is_async = inspect.iscoroutinefunction(execute)
        self.takes_instance = len(positional(execute)) >= 2 or hasattr(tool, "create")
        # What has the state of an attempt: this tool alone.
        self.holder = self

    async def open(self, session, given, _row, run):
        created = await run(
            lambda: self.create(session, given), is_coroutine(getattr(self.tool, "create", None))
        )
        return self.instance(session, created), None

    async def evaluate(self, instance, given, run):
        found = getattr(self.tool, "calc_reward", None)
        return await run(lambda: self.reward(instance, given), is_coroutine(found))

    async def close(self, instance, given, run):
        await run(lambda: self.release(instance, given), is_coroutine(getattr(self.tool, "release", None)))

    def create(self, session, given):
        if not hasattr(self.tool, "create"):
            return session
        return self.tool.create(session, **creating(self.tool.create, kwargs_of(given, "create_kwargs")))

    def instance(self, session, created):
        """The name of the instance: that which `create` gives (first), or else the one that was proposed."""
        if isinstance(created, tuple) and created:
            created = created[0]
        return session if created is None else created

    def call(self, instance, arguments, given, told):
        named = {**told_of(self.tool.execute, told), **kwargs_of(given, "execute_kwargs")}
        if not self.takes_instance:
            return self.tool.execute(schema.plain(arguments), **named)
        return self.tool.execute(instance, schema.plain(arguments), **named)

    def reward(self, instance, given):
        if not hasattr(self.tool, "calc_reward"):
            return None
        return self.tool.calc_reward(instance, **kwargs_of(given, "calc_reward_kwargs"))

    def release(self, instance, given):
        if not hasattr(self.tool, "release"):
            return None
        return self.tool.release(instance, **kwargs_of(given, "release_kwargs"))


# Field of a row with the calls after which a fresh object has the expected state.
ACTIONS = "expected_actions"
# Methods of a class of tools that begin and end an attempt, and so are no tools.
LIFECYCLE = ("reset", "close", "calc_reward", "final_state")


class Box:
    """A class whose methods are tools. Each attempt has an object of it."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name
        self.has_del = hasattr(kind, "__del__")
        # Objects that were made and are still there.
        self.made = []
        # Values of the class itself that its methods may change: each object gets copies of its own.
        self.shared = {}
        for base in reversed(own_bases(kind)):
            for attribute, value in vars(base).items():
                if isinstance(value, schema.MUTABLE) and not attribute.startswith("__"):
                    self.shared[attribute] = schema.copied(value)

    async def open(self, _session, given, row, run):
        """Makes the object of an attempt. Returns what its `reset` says, too."""
        made = await run(lambda: self.make(kwargs_of(given, "create_kwargs"), row), False)
        reset, said = method_of(made, "reset"), None
        if reset is not None:
            try:
                said = await run(lambda: reset(**self.fields(reset, {}, row, row)), is_coroutine(reset))
            except BaseException:
                await self.close(made, given, run)
                raise
        return made, answers.text_of(said) if isinstance(said, str) else None

    def make(self, named, row):
        fields = self.fields(self.kind, named, row, named)
        if type(self.kind).__call__ is not type.__call__:
            # A metaclass makes the objects.
            return self.first(self.kind(**fields))
        is_plain = self.kind.__new__ is object.__new__
        made = object.__new__(self.kind) if is_plain else self.kind.__new__(self.kind, **fields)
        self.first(made)
        for attribute, value in self.shared.items():
            # With slots it has no values of the class that its methods could change.
            with contextlib.suppress(AttributeError):
                object.__setattr__(made, attribute, schema.copied(value))
        if isinstance(made, self.kind):
            made.__init__(**fields)
        return made

    def first(self, made):
        """The object, which no other attempt has had: state would go from one to the other."""
        if any(known() is made for known in self.made):
            raise schema.Unusable(
                f"{self.name} gives the same object again: each attempt must have one of its own"
            )
        with contextlib.suppress(TypeError):
            self.made = [known for known in self.made if known() is not None] + [weakref.ref(made)]
        return made

    def fields(self, function, named, row, others):
        """Arguments for a function: those that are named for it, or else fields of the row by name; `others` are
        for one that takes any."""
        found = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                found.update({key: value for key, value in others.items() if key not in found})
            elif parameter.kind is parameter.VAR_POSITIONAL:
                continue
            elif name in named or name in row:
                found[name] = named[name] if name in named else row[name]
            elif name == "row":
                found[name] = row
            elif isinstance(parameter.default, schema.MUTABLE):
                found[name] = schema.copied(parameter.default)
            elif parameter.default is parameter.empty:
                what = self.name if inspect.isclass(function) else f"{self.name}.{function.__name__}"
                there = ", ".join(map(str, row)) or "none"
                raise schema.Unusable(
                    f"{what} needs {name!r}, and the row of the task has no such field; its fields: {there}"
                )
        return found

    async def evaluate(self, instance, _given, run):
        found = method_of(instance, "calc_reward")
        return await run(found, is_coroutine(found)) if found is not None else None

    async def state(self, instance, run):
        """What `final_state` of an object gives, as JSON; None where the class has no such method."""
        found = method_of(instance, "final_state")
        if found is None:
            return None
        value = await run(found, is_coroutine(found))
        try:
            return json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise schema.Unusable(f"{self.name}.final_state gave what cannot be written as JSON: {error}") from error

    async def expected(self, actions, methods, given, row, run):
        """The state of a fresh object after these calls, each a table with `name` and `arguments`."""
        if not isinstance(actions, list):
            raise schema.Unusable(f"`{ACTIONS}` of the row is {actions!r}, but must be a list of calls")
        made, _ = await self.open(None, given, row, run)
        try:
            for at, action in enumerate(actions):
                name = action.get("name") if isinstance(action, dict) else None
                if name not in methods:
                    there = ", ".join(methods)
                    raise schema.Unusable(f"call {at} of `{ACTIONS}` is of {name!r}; {self.name} has {there}")
                method, arguments = methods[name], action.get("arguments") or {}
                try:
                    await run(lambda m=method, a=arguments: m.call(made, a, None, None), method.is_async)
                except Exception as error:
                    what = f"{type(error).__name__}: {error}"
                    raise schema.Unusable(f"call {at} of `{ACTIONS}`, of {name}, failed: {what}") from error
            return await self.state(made, run)
        finally:
            await self.close(made, given, run)

    async def close(self, instance, _given, run):
        found = method_of(instance, "close")
        if found is not None:
            await run(found, is_coroutine(found))


class Method:
    """A method of the object that an attempt has."""

    stateful = True
    gives_reward = False

    def __init__(self, box, name, function):
        self.holder, self.name, self.method = box, name, name
        skip = () if inspect.ismethod(function) else tuple(inspect.signature(function).parameters)[:1]
        if isinstance(inspect.getattr_static(box.kind, name), staticmethod):
            skip = ()
        self.parameters, self.description = schema.parameters_of(function, skip)
        self.is_async = is_later(inspect.unwrap(function))

    def call(self, instance, arguments, _given, _told):
        function = getattr(instance, self.method)
        positional, named = schema.bind(function, arguments)
        return drawn(function(*positional, **named))


def method_of(instance, name):
    """A method that the class has: `__getattr__` of an object may give anything for any name, or raise."""
    return getattr(instance, name) if callable(getattr(type(instance), name, None)) else None


def is_coroutine(function):
    return function is not None and inspect.iscoroutinefunction(inspect.unwrap(function))


def own_bases(kind):
    """A class and those above it that are not of the standard library."""
    known = getattr(sys, "stdlib_module_names", ("abc", "builtins", "collections", "enum", "threading", "typing"))
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in known]


def methods_of(kind, marks=()):
    """Methods of a class that are tools: those that are marked, or else the public ones that have a docstring
    or annotations."""
    found = {}
    for base in reversed(own_bases(kind)):
        for name, value in vars(base).items():
            inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if name.startswith("_") or name in LIFECYCLE or not is_function(inner):
                found.pop(name, None)
                continue
            found[name] = inner
    marked = {name: value for name, value in found.items() if name in marks}
    told = {
        name: value
        for name, value in found.items()
        if inspect.getdoc(value) or getattr(inspect.unwrap(value), "__annotations__", None)
    }
    return {name: getattr(kind, name) for name in (marked or told)}


def is_toolbox(kind):
    """Whether the methods of a class can be tools: it is none of errors, values or other tools."""
    return (
        inspect.isclass(kind)
        and not is_class(kind)
        and not issubclass(kind, (BaseException, enum.Enum, tuple, dict))
        and not schema.is_pydantic(kind)
        and not getattr(kind, "_is_protocol", False)
        and not inspect.isabstract(kind)
        and bool(methods_of(kind))
    )


def of_toolbox(name, kind, marks=()):
    """The tools of a class."""
    methods = methods_of(kind, marks)
    if not methods:
        raise schema.Unusable(
            "no method of it is a tool: give public methods docstrings or annotations, or give it `execute`"
        )
    if inspect.isabstract(kind):
        raise schema.Unusable(f"it is abstract: it lacks {', '.join(sorted(kind.__abstractmethods__))}")
    box = Box(kind, name)
    return [Method(box, method, function) for method, function in methods.items()]


def positional(function):
    """Parameters that can be given by place, without self."""
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in places and p.default is p.empty
    ]
    return [p for p in found if p.name not in ("self", "cls", "agent_data")]


def kwargs_of(given, key):
    named = given.get(key) if isinstance(given, dict) else None
    return dict(named) if isinstance(named, dict) else {}


def told_of(execute, told):
    """Facts of the attempt for `execute`: verl's `agent_data`, where it takes that name or any."""
    parameters = inspect.signature(execute).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {"agent_data": told} if takes_any or "agent_data" in parameters else {}


def creating(create, named):
    """Arguments of `create`: each by its own name, and all of them as `create_kwargs`, as verl's loop gives
    them; of the two what the function takes."""
    parameters = inspect.signature(create).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes_all = takes_any or "create_kwargs" in parameters
    each = {name: value for name, value in named.items() if takes_any or not takes_all or name in parameters}
    return {"create_kwargs": dict(named), **each} if takes_all else each


def of_class(kind, config, given, name):
    """A tool of a class, made as verl makes it or, where it takes nothing, without anything."""
    if not callable(getattr(kind, "execute", None)):
        raise schema.Unusable("it has no method `execute`")
    described = validated(tidy(given)) if given else None
    takes = [p for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD]
    as_verl = takes and (
        takes[0].name in ("config", "tool_config") or takes[0].kind is takes[0].VAR_POSITIONAL
    )
    tool = kind(dict(config), described) if as_verl else kind()
    own = given or schema_of(tool)
    if own is None:
        why = "it has no schema: give it a method get_openai_tool_schema(), or a tool_schema in a `config`"
        raise schema.Unusable(why)
    return Stateful(tool, tidy(own), name)


def schema_of(tool):
    """The description that an object gives of itself as a tool."""
    for at in ("get_openai_tool_schema", "tool_schema", "tool_description"):
        found = getattr(tool, at, None)
        found = found() if callable(found) and not isinstance(found, dict) else found
        if found:
            return found
    parameters = getattr(tool, "parameters", None)
    if isinstance(parameters, dict):
        return {
            "name": getattr(tool, "name", ""),
            "description": getattr(tool, "description", ""),
            "parameters": parameters,
        }
    return None


def tidy(given):
    """A description as plain dictionaries."""
    if hasattr(given, "model_dump"):
        given = given.model_dump(exclude_none=True)
    if not isinstance(given, dict):
        raise schema.Unusable(f"its tool_schema is {given!r}, but must be a table")
    if "function" in given:
        function = dict(given["function"])
        if isinstance(function.get("parameters"), dict):
            function["parameters"] = mended(function["parameters"])
        return {**given, "function": function}
    return dict(given)


def validated(given):
    """A description as verl's own class of descriptions."""
    from verl.tools.schemas import OpenAIFunctionToolSchema

    whole = given if "function" in given else {"type": "function", "function": given}
    return OpenAIFunctionToolSchema.model_validate(whole)


def mended(given):
    """A JSON schema with slips in its keywords put right, such as `item` for `items`."""
    if not isinstance(given, dict):
        return given
    found = {}
    for key, value in given.items():
        if key not in KEYWORDS and not str(key).startswith("$"):
            near = difflib.get_close_matches(
                str(key), [known for known in KEYWORDS if known not in given], 1, 0.8
            )
            key = near[0] if near else key
        if key in ("properties", "$defs") and isinstance(value, dict):
            value = {name: mended(item) for name, item in value.items()}
        elif key in ("items", "additionalProperties", "not"):
            value = mended(value)
        elif key in ("anyOf", "oneOf", "allOf") and isinstance(value, list):
            value = [mended(item) for item in value]
        found[key] = value
    for key in ("required", "enum"):
        if not isinstance(found.get(key, []), list):
            del found[key]
    if isinstance(found.get("type"), str):
        found["type"] = TYPES.get(found["type"], found["type"])
    return found
