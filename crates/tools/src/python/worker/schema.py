"""Types of parameters: their JSON schemas, and values of JSON as values of these types."""

import collections
import collections.abc
import copy
import dataclasses
import datetime
import decimal
import enum
import functools
import inspect
import json
import pathlib
import re
import typing
import uuid

from levade_worker import docstrings



def instant(text):
    """A point in time. Before Python 3.11 `fromisoformat` knows no Z for UTC."""
    return datetime.datetime.fromisoformat(text[:-1] + "+00:00" if text[-1:] in ("Z", "z") else text)


PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
TEXTS = {
    datetime.datetime: ("date-time", instant),
    datetime.date: ("date", datetime.date.fromisoformat),
    datetime.time: ("time", datetime.time.fromisoformat),
    decimal.Decimal: (None, lambda value: decimal.Decimal(str(value))),
    pathlib.Path: (None, pathlib.Path),
    pathlib.PurePath: (None, pathlib.PurePath),
    uuid.UUID: ("uuid", uuid.UUID),
    bytes: (None, lambda text: text.encode()),
}
LISTS = (
    list,
    tuple,
    set,
    frozenset,
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
    collections.abc.Set,
    collections.abc.MutableSequence,
)
# Types of parameters that frameworks fill themselves when they call a tool, and where these are from.
CONTEXTS = (
    "RunContextWrapper",
    "ToolContext",
    "RunContext",
    "Context",
    "RunnableConfig",
    "ToolRuntime",
    "CancellationToken",
)
FRAMEWORKS = (
    "agents",
    "autogen_core",
    "fastmcp",
    "google",
    "langchain",
    "langchain_core",
    "langgraph",
    "llama_index",
    "mcp",
    "pydantic_ai",
    "workflows",
)
HALVES = re.compile("[\ud800-\udfff]")
# Bounds of a value by the attributes that pydantic's `Field` and annotated_types give them.
BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
    "pattern": "pattern",
    "regex": "pattern",
}
LENGTHS = {"min_length": ("minLength", "minItems"), "max_length": ("maxLength", "maxItems")}
# Types of values that change in place, or hold some that do.
MUTABLE = (list, dict, set, bytearray, collections.deque, tuple)
UNIONS = tuple(filter(None, [typing.Union, getattr(__import__("types"), "UnionType", None)]))


class Written(float):
    """A number of JSON with the digits that it was written with."""

    def __new__(cls, text):
        self = super().__new__(cls, text)
        self.text = text
        return self


def order(text):
    """Parses a request. Only its arguments keep the digits of numbers."""
    found = json.loads(text, parse_float=Written)
    return {name: value if name == "arguments" else plain(value) for name, value in found.items()}


def plain(value):
    """A value with plain numbers."""
    if isinstance(value, Written):
        return float(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


class Unfit(Exception):
    """A value that is none of its type."""


class Unusable(Exception):
    """Something that cannot be a tool, in words."""


def is_pydantic(kind):
    return inspect.isclass(kind) and hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate")


def is_typed_dict(kind):
    return inspect.isclass(kind) and issubclass(kind, dict) and hasattr(kind, "__total__")


def is_named_tuple(kind):
    return inspect.isclass(kind) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def hints_of(thing):
    """Annotations by name. Those that cannot be found out are left out."""
    if isinstance(thing, functools.partial):
        return hints_of(thing.func)
    try:
        return typing.get_type_hints(thing, include_extras=True)
    except Exception:
        found = {}
        space = getattr(inspect.unwrap(thing) if callable(thing) else thing, "__globals__", {})
        for name, hint in getattr(thing, "__annotations__", {}).items():
            try:
                # The user's own annotation, read as Python itself reads it; one in quotes is a text twice where
                # all of a file are texts.
                for _ in range(2):
                    hint = eval(hint, dict(space)) if isinstance(hint, str) else hint
            except Exception:
                continue
            found[name] = hint
        return found


def required_keys(kind):
    """The keys that a TypedDict must have."""
    required = set(kind.__required_keys__)
    for name, hint in hints_of(kind).items():
        origin = str(typing.get_origin(hint))
        if origin.endswith("NotRequired"):
            required.discard(name)
        elif origin.endswith("Required"):
            required.add(name)
    return required


class Schemas:
    """Makes JSON schemas. Those of types that hold themselves are collected in `definitions`."""

    def __init__(self):
        self.definitions = {}
        self.within = []

    def of(self, hint):
        if hint is inspect.Parameter.empty or hint is typing.Any or hint is object:
            return {}
        if hint is None:
            return {"type": "null"}
        if inspect.isclass(hint) and hint in PLAIN:
            return {"type": PLAIN[hint]}
        if hint is decimal.Decimal:
            return {"type": ["string", "number"]}
        if inspect.isclass(hint) and hint in TEXTS:
            form = TEXTS[hint][0]
            return {"type": "string", **({"format": form} if form else {})}
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if origin is not None and str(origin).endswith(("Required", "ReadOnly")):
            return self.of(parts[0])
        if hasattr(hint, "__metadata__"):
            return self.annotated(hint)
        if origin in UNIONS:
            return self.union([self.of(part) for part in parts])
        if origin is typing.Literal:
            return choice(list(parts))
        if hasattr(hint, "__supertype__"):
            return self.of(hint.__supertype__)
        if hasattr(hint, "__value__"):
            return self.of(hint.__value__)
        if isinstance(hint, typing.TypeVar):
            return self.of(hint.__bound__) if hint.__bound__ is not None else {}
        base = origin or hint
        if is_pydantic(base):
            return self.pydantic(hint)
        if inspect.isclass(base) and issubclass(base, enum.Enum):
            return choice([value_of(member) for member in base])
        if dataclasses.is_dataclass(base) or is_typed_dict(base) or is_named_tuple(base):
            return self.fields(base)
        if base in LISTS:
            return self.list(base, parts)
        if inspect.isclass(base) and issubclass(base, collections.abc.Mapping):
            values = self.of(parts[1]) if len(parts) == 2 else {}
            return {"type": "object", **({"additionalProperties": values} if values else {})}
        return {}

    def annotated(self, hint):
        schema = self.of(hint.__origin__)
        for extra in hint.__metadata__:
            text = extra if isinstance(extra, str) else getattr(extra, "description", None)
            if isinstance(text, str) and text:
                schema = {**schema, "description": text}
            schema = {**schema, **bounds_of(extra, schema)}
        return schema

    def union(self, members):
        unique = []
        for member in members:
            if member not in unique:
                unique.append(member)
        if len(unique) == 1:
            return unique[0]
        if {} in unique:
            return {}
        if all(set(member) == {"type"} and isinstance(member["type"], str) for member in unique):
            return {"type": [member["type"] for member in unique]}
        return {"anyOf": unique}

    def list(self, base, parts):
        unique = {"uniqueItems": True} if base in (set, frozenset, collections.abc.Set) else {}
        if base is tuple and parts and parts[-1] is not Ellipsis:
            items = self.union([self.of(part) for part in parts])
            return {"type": "array", "items": items, "minItems": len(parts), "maxItems": len(parts)}
        items = self.of(parts[0]) if parts else {}
        return {"type": "array", **({"items": items} if items else {}), **unique}

    def pydantic(self, kind):
        schema = dict(kind.model_json_schema(ref_template="#/$defs/{model}"))
        self.definitions.update(schema.pop("$defs", {}))
        return schema

    def fields(self, kind):
        """The schema of an object with named fields."""
        if kind in self.within:
            self.definitions.setdefault(kind.__name__, None)
            return {"$ref": "#/$defs/" + kind.__name__}
        self.within.append(kind)
        hints = hints_of(kind)
        # The docstring that a dataclass makes of its fields describes nothing.
        own = (
            kind.__doc__
            if (kind.__doc__ or "") and not (kind.__doc__ or "").startswith(kind.__name__ + "(")
            else ""
        )
        description, texts = docstrings.read(own if not is_named_tuple(kind) else "")
        if dataclasses.is_dataclass(kind):
            fields = [field for field in dataclasses.fields(kind) if field.init]
            names = [field.name for field in fields]
            missing = dataclasses.MISSING
            required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
        elif is_typed_dict(kind):
            names = list(hints)
            required = [name for name in names if name in required_keys(kind)]
        else:
            names = list(kind._fields)
            required = [name for name in names if name not in kind._field_defaults]
        properties = {}
        for name in names:
            properties[name] = self.of(hints.get(name, typing.Any))
            if name in texts:
                properties[name] = {"description": texts[name], **properties[name]}
        schema = {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
        if description:
            schema = {"description": description, **schema}
        self.within.pop()
        if kind.__name__ in self.definitions and self.definitions[kind.__name__] is None:
            self.definitions[kind.__name__] = schema
        return schema


def choice(values):
    """A value among some."""
    values = [value_of(value) if isinstance(value, enum.Enum) else value for value in values]
    kinds = sorted({PLAIN.get(type(value), "string") for value in values})
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def value_of(member):
    """The value of a member of an enumeration, or its name where that is nothing that JSON has."""
    return member.value if type(member.value) in PLAIN and is_json(member.value) else member.name


def sound(text):
    """A text with U+FFFD for halves of surrogate pairs, which no encoding has."""
    return HALVES.sub("\ufffd", str(text))


def is_json(value):
    """Whether a value can be written as JSON that every reader takes: finite numbers, integers of 64 bits, and
    texts without halves of surrogate pairs."""
    if isinstance(value, (list, tuple)):
        return all(is_json(item) for item in value)
    if isinstance(value, dict):
        return all(is_json(key) and is_json(item) for key, item in value.items())
    if type(value) is int:
        return -(2**63) <= value < 2**64
    try:
        json.dumps(value, allow_nan=False).encode()
        return not isinstance(value, str) or bool(value.encode()) or value == ""
    except (TypeError, ValueError, RecursionError):
        return False


def writable(schema):
    """A schema without the keywords whose values cannot be written as JSON: a default that is infinite, say.
    The parameter can be left out all the same, and the function then uses its own."""
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in ("properties", "$defs") and isinstance(value, dict):
            value = {name: writable(item) for name, item in value.items()}
        elif key in ("items", "additionalProperties"):
            value = writable(value)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            value = [writable(item) for item in value]
        elif key in ("description", "title") and isinstance(value, str):
            value = sound(value)
        if is_json(value):
            found[key] = value
    return found


def bounds_of(mark, schema):
    """The bounds that a mark of a parameter sets, as keywords of its schema."""
    found = {}
    for at in (mark, *(getattr(mark, "metadata", None) or ())):
        for name, keyword in BOUNDS.items():
            value = getattr(at, name, None)
            if isinstance(value, (int, float, str)) and not isinstance(value, bool) and is_json(value):
                found[keyword] = value
        for name, (of_text, of_list) in LENGTHS.items():
            value = getattr(at, name, None)
            if isinstance(value, int):
                found[of_list if schema.get("type") == "array" else of_text] = value
    return found


def parameters_of(function, skip=()):
    """The JSON schema of a function's parameters, and its description.

    Raises Unusable for parameters that cannot be given by name."""
    if isinstance(function, functools.partial):
        # What is given already is no business of the model's.
        skip = (*skip, *function.keywords)
        documented = function.func
    else:
        documented = function
    description, texts = docstrings.read(inspect.getdoc(documented))
    hints, schemas = hints_of(function), Schemas()
    properties, required, others = {}, [], False
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, parameter.annotation)
        if name in skip or is_context(hint):
            continue
        default, about = default_of(parameter.default)
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            raise Unusable(
                f"its parameter *{name} has no name for each value: a tool's arguments are named. Where it is "
                "none, begin its name with _, or name in `functions` those that are"
            )
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            others = schemas.of(typing.Any if isinstance(hint, str) else hint) or True
            continue
        schema = schemas.of(typing.Any if isinstance(hint, str) else hint)
        if name in texts:
            schema = {**schema, "description": texts[name]}
        if about:
            schema = {**schema, "description": about}
        if default is not parameter.default:
            schema = {**schema, **bounds_of(parameter.default, schema)}
        if default is inspect.Parameter.empty:
            required.append(name)
        elif type(default) in (str, int, float, bool):
            schema = {**schema, "default": default}
        properties[name] = schema
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": others,
    }
    if schemas.definitions:
        schema["$defs"] = schemas.definitions
    return writable(schema), sound(description)


def is_context(hint):
    """Whether a parameter is for the framework that a function was written for to fill, and not for the model."""
    marks = [mark if inspect.isclass(mark) else type(mark) for mark in getattr(hint, "__metadata__", ())]
    if any(kind.__name__.startswith("Injected") for mark in marks for kind in mark.__mro__):
        return True
    kind = typing.get_origin(hint) or hint
    return (
        inspect.isclass(kind)
        and kind.__name__ in CONTEXTS
        and kind.__module__.partition(".")[0] in FRAMEWORKS
    )


def default_of(default):
    """The default that a parameter has, and its description: those of pydantic's `Field(…)` are within."""
    if not (type(default).__name__ == "FieldInfo" and hasattr(default, "get_default")):
        return default, None
    if default.is_required():
        return inspect.Parameter.empty, default.description
    return default.get_default(call_default_factory=True), default.description


def convert(hint, value):
    """A value of JSON, which fits the schema of a type, as a value of that type.

    Raises Unfit where it is none after all."""
    if hint is inspect.Parameter.empty or hint is typing.Any or hint is None:
        return plain(value)
    if isinstance(value, Written):
        if hint is decimal.Decimal:
            return decimal.Decimal(value.text)
        if not is_around(hint):
            value = float(value)
    if hint is float and type(value) is int:
        return made(float, value)
    if hint is int and type(value) is float and value.is_integer():
        return int(value)
    if inspect.isclass(hint) and hint in PLAIN:
        if type(value) is not hint:
            raise Unfit(f"{value!r} is no {PLAIN[hint]}")
        return value
    if inspect.isclass(hint) and hint in TEXTS:
        return made(TEXTS[hint][1], value)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is not None and str(origin).endswith(("Required", "ReadOnly")):
        return convert(parts[0], value)
    if hasattr(hint, "__metadata__"):
        return convert(hint.__origin__, value)
    if origin in UNIONS:
        return one_of(parts, value)
    if origin is typing.Literal:
        for part in parts:
            known = value_of(part) if isinstance(part, enum.Enum) else part
            if value == known and type(value) is type(known):
                return part
        raise Unfit(f"{value!r} is none of {', '.join(map(repr, parts))}")
    if hasattr(hint, "__supertype__"):
        return convert(hint.__supertype__, value)
    if hasattr(hint, "__value__"):
        return convert(hint.__value__, value)
    base = origin or hint
    if is_pydantic(base):
        return made(base.model_validate, plain(value))
    if inspect.isclass(base) and issubclass(base, enum.Enum):
        for member in base:
            if value_of(member) == value:
                return member
        raise Unfit(f"{value!r} is none of {', '.join(repr(value_of(member)) for member in base)}")
    if dataclasses.is_dataclass(base) or is_named_tuple(base) or is_typed_dict(base):
        hints = hints_of(base)
        need(value, dict, "object")
        return made(
            base, **{name: convert(hints.get(name, typing.Any), item) for name, item in value.items()}
        )
    if base in LISTS:
        need(value, list, "array")
        if base is tuple and parts and parts[-1] is not Ellipsis:
            return tuple(convert(part, item) for part, item in zip(parts, value))
        items = [convert(parts[0] if parts else typing.Any, item) for item in value]
        return base(items) if base in (tuple, set, frozenset) else items
    if inspect.isclass(base) and issubclass(base, collections.abc.Mapping):
        need(value, dict, "object")
        key, item = parts if len(parts) == 2 else (typing.Any, typing.Any)
        converted = {convert_key(key, name): convert(item, found) for name, found in value.items()}
        if len(converted) < len(value):
            raise Unfit(f"two of the keys {', '.join(map(repr, value))} are the same")
        return converted
    return plain(value)


def is_around(hint):
    """Whether a type is one or several others under another name."""
    origin = typing.get_origin(hint)
    names = ("__metadata__", "__supertype__", "__value__")
    is_marked = origin is not None and str(origin).endswith(("Required", "ReadOnly"))
    return is_marked or origin in UNIONS or any(hasattr(hint, name) for name in names)


def convert_key(hint, name):
    """The name of a field as a key of this type: JSON has keys that are texts alone."""
    try:
        return convert(hint, name)
    except Unfit:
        try:
            return convert(hint, json.loads(name))
        except ValueError:
            raise Unfit(f"the key {name!r} is none of its type") from None


def copied(value):
    """A copy of a value with all that it holds, or the value where it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def need(value, kind, name):
    if not isinstance(value, kind):
        raise Unfit(f"{value!r} is no {name}")


def one_of(parts, value):
    """The value as one of several types, of which that which is exactly its own comes first."""
    own = float if isinstance(value, Written) else type(value)
    for part in sorted(parts, key=lambda part: own is not part):
        try:
            return convert(part, value)
        except Unfit as unfit:
            why = unfit
    raise why


def made(kind, *values, **fields):
    """What a type makes of values. Its own refusals say what is wrong with them."""
    try:
        return kind(*values, **fields)
    except Exception as error:
        raise Unfit(f"{type(error).__name__}: {error}") from error


def bind(function, arguments, skip=()):
    """Arguments by name, as positional and named ones of a function."""
    hints, positional, named, others = hints_of(function), [], {}, dict(arguments)
    for name, parameter in inspect.signature(function).parameters.items():
        if name in skip or parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update({other: converted(hints, name, other, value) for other, value in others.items()})
            others = {}
            continue
        default, _ = default_of(parameter.default)
        is_empty, is_positional = default is parameter.empty, parameter.kind is parameter.POSITIONAL_ONLY
        if name in others and not is_context(hints.get(name)):
            value = converted(hints, name, name, others.pop(name))
        elif is_context(hints.get(name)) and is_empty:
            # There is no framework that would fill it.
            value = None
        elif isinstance(default, MUTABLE):
            # What a function changes in its default is no business of other attempts.
            value = copied(default)
        elif not is_empty and (is_positional or default is not parameter.default):
            # A positional one that is left out has its place all the same: the next must not move to it.
            value = default
        else:
            continue
        if is_positional:
            positional.append(value)
        else:
            named[name] = value
    return positional, {**named, **others}


def converted(hints, parameter, name, value):
    """The value of an argument, called `name`, as the type of a parameter."""
    try:
        return convert(hints.get(parameter, typing.Any), value)
    except Unfit as unfit:
        raise Unfit(f"{name}: {unfit}") from unfit
