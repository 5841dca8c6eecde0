"""The user's file, or the configuration of verl's tools: which tools there are."""

import ast
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback

from levade_worker import answers, schema, shims, tools

MARKS = ("tool", "function_tool")


class Fault(Exception):
    """Something that the user must put right, in words."""


def prepare(place):
    """Lets the user's code import from its folder, which is returned, and the stand-ins."""
    folder = os.path.dirname(os.path.abspath(place))
    sys.path[0:1] = [folder] + [path for path in [os.getcwd()] if path != folder]
    shims.install()
    return folder


def load(file, config, functions):
    """All tools, in their order, by name."""
    folder = prepare(file or config)
    found = []
    if file:
        found += of_file(file, functions)
    if config:
        found += of_config(config, folder)
    by_name = {}
    for tool in found:
        if tool.name in by_name:
            raise Fault(
                f"two of its tools are called {tool.name!r}: a model could not tell them apart. Name in `functions` "
                "the functions and classes that are tools"
            )
        by_name[tool.name] = tool
    if not by_name:
        raise Fault(
            f"{os.path.basename(file or config)} has no tools: "
            "no public function is defined in it, nor a class with public methods that have docstrings"
        )
    return by_name


def run(file):
    """The module that a file is, after it has run."""
    if not os.path.isfile(file):
        raise Fault(f"there is no file {file}")
    stem = os.path.splitext(os.path.basename(file))[0]
    name = stem if is_own(stem, file) else "tools_of_" + "".join(c if c.isalnum() else "_" for c in stem)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise Fault(f"{file} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    for mark in MARKS:
        # So that functions can be marked without an import.
        setattr(module, mark, shims.mark)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise Fault(why_not_loaded(error, os.path.dirname(file))) from error
    return module


def is_own(name, file):
    """Whether a module of this name would be this file, and no other one that Python knows."""
    if not name.isidentifier() or name in sys.modules:
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return True
    return spec is None or (spec.origin is not None and os.path.abspath(spec.origin) == os.path.abspath(file))


def why_not_loaded(error, folder):
    """Why a file did not run to its end, in Python's own words, with the file and the line."""
    if isinstance(error, SystemExit):
        error = RuntimeError(f"it calls exit({error.code!r}) while it is loaded").with_traceback(
            error.__traceback__
        )
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(type(error), error)).strip()
    return answers.described(error, folder)


def of_file(file, functions):
    file = os.path.abspath(file)
    module = run(file)
    members = {
        name: value for name, value in vars(module).items() if not (name in MARKS and value is shims.mark)
    }
    marks = marked(file)
    if functions:
        names = functions
        for name in names:
            if name not in members:
                known = sorted(
                    name
                    for name, value in members.items()
                    if is_tool(value, module, name) or (inspect.isclass(value) and tools.is_toolbox(value))
                )
                raise Fault(
                    f"`functions` names {name!r}, which is not defined in {os.path.basename(file)}; "
                    f"there is {', '.join(known) or 'no function'}"
                )
    else:
        names = list(marks) or [name for name, value in members.items() if is_tool(value, module, name)]
        names = names or toolboxes(members, module)
    found = []
    for name in names:
        found += tools_of(name, members.get(name), module, marks.get(name, ()))
    return found


def toolboxes(members, module):
    """Names of the classes of a file whose methods are tools: those alone that no other one derives from."""
    found = {
        name: value
        for name, value in members.items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and tools.is_toolbox(value)
    }
    last = [
        name
        for name, value in found.items()
        if not any(other is not value and issubclass(other, value) for other in found.values())
    ]
    if len(last) > 1:
        raise Fault(
            f"{os.path.basename(module.__file__)} has several classes whose methods could be tools: "
            f"{', '.join(last)}; name in `functions` those that are, or mark them with @tool"
        )
    return last


def marked(file):
    """Names of the functions and classes that a decorator marks as tools, in their order; of a class with the
    methods that are marked."""
    with open(file, "rb") as source:
        tree = ast.parse(source.read())
    found = {}
    for node in tree.body:
        methods = [inner.name for inner in node.body if is_marked(inner)] if isinstance(node, ast.ClassDef) else []
        if is_marked(node) or methods:
            found.setdefault(node.name, tuple(methods))
    return found


def is_marked(node):
    for decorator in getattr(node, "decorator_list", []):
        mark = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = mark.attr if isinstance(mark, ast.Attribute) else getattr(mark, "id", None)
        if name in MARKS:
            return True
    return False


def is_tool(value, module, name):
    """Whether a public member of a module is a tool that is defined there."""
    if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
        return False
    return tools.is_function(value) or tools.is_class(value)


def tools_of(name, value, module, marks):
    try:
        if inspect.isclass(value) and not tools.is_class(value):
            return tools.of_toolbox(name, value, marks)
        if inspect.isclass(value):
            return [tools.of_class(value, {}, None, name)]
        return [tools.of_function(name, value)]
    except Exception as error:
        folder = os.path.dirname(os.path.abspath(module.__file__))
        raise Fault(f"{name} cannot be a tool: {why(error, folder)}") from error


def why(error, folder):
    """An error as the user reads it: one of the code in this folder with its place there."""
    return str(error) if isinstance(error, schema.Unusable) else answers.described(error, folder)


def of_config(config, folder):
    """The tools of a configuration as verl has it."""
    if not os.path.isfile(config):
        raise Fault(f"there is no file {config}")
    contents = read(config)
    listed = contents.get("tools") if isinstance(contents, dict) else None
    if not isinstance(listed, list) or not listed:
        raise Fault(f"{os.path.basename(config)} has no list `tools`, as verl's configurations of tools have")
    found = []
    for at, entry in enumerate(listed):
        where = f"tools[{at}] of {os.path.basename(config)}"
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise Fault(f"{where} has no `class_name`")
        if entry["class_name"].endswith("MCPBaseTool") or (entry.get("config") or {}).get("type") == "mcp":
            raise Fault(f'{where} is an MCP server: give it a [[tool]] of its own with kind = "mcp"')
        kind = imported(entry["class_name"], where, folder)
        try:
            found.append(
                tools.of_class(kind, entry.get("config") or {}, entry.get("tool_schema"), kind.__name__)
            )
        except Exception as error:
            raise Fault(f"{where}, {entry['class_name']}: {why(error, folder)}") from error
    return found


def read(config):
    """A configuration file, read as verl reads it where its reader is there."""
    try:
        from omegaconf import OmegaConf
    except ImportError:
        pass
    else:
        return OmegaConf.to_container(OmegaConf.load(config), resolve=True)
    with open(config, encoding="utf-8") as source:
        text = source.read()
    try:
        return json.loads(text)
    except ValueError as no_json:
        try:
            import yaml
        except ImportError:
            raise Fault(
                f"{os.path.basename(config)} is YAML, and the environment of {sys.executable} has no PyYAML to "
                f"read it: install it there ({sys.executable} -m pip install pyyaml), or write it as JSON"
            ) from no_json
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise Fault(f"{os.path.basename(config)} is no valid YAML: {error}") from error


def imported(path, where, folder):
    """The class of this dotted name."""
    module, _, name = path.rpartition(".")
    if not module:
        raise Fault(
            f"{where}: `class_name` is {path!r}, but must be a module and a class, as my_tools.{path}"
        )
    try:
        found = importlib.import_module(module)
    except SyntaxError as error:
        raise Fault(why_not_loaded(error, folder)) from error
    except BaseException as error:
        raise Fault(f"{where}: {module} cannot be imported: {answers.described(error, folder)}") from error
    if not inspect.isclass(getattr(found, name, None)):
        raise Fault(f"{where}: {module} has no class {name}")
    return getattr(found, name)
