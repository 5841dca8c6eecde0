"""Runs a program, and then one test of it, in a process of its own.

Input is two lines of JSON: `program`, `sign`, and either `asserts` (code) or `function`, `arguments`; then
`token`. The token is printed once the test has come to its end, with the value that the function gave, and only
then: a program that leaves early, whatever its exit code, has not passed. The second line is read once the program
has its own process, so that nothing it can look at holds the token; the values that a function may give are not
here at all. The sign says that the test came to its end; asserts share their process with the program, which can
find it there, or change what they call. With asserts may come `start`, code that defines the function `entry` up to
its documentation: the program is the rest of it, or has the whole function, and finds all that stands before it.
"""

import ast
import builtins
import ctypes
import importlib.util
import json
import os
import signal
import sys
import types

# Limits of LiveCodeBench's harness. CPython without the first has no such limit.
getattr(sys, "set_int_max_str_digits", int)(50000)
sys.setrecursionlimit(50000)

# Where functions are called, their authors have these names without an import, as LeetCode and the harnesses of
# APPS and LiveCodeBench give them.
GIVEN = """
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from typing import *
"""


# Says that the tests, and not the program, are at fault.
UNUSABLE = "unusable"

# Module by whose name tests import the program, as KodCode's do.
SOLUTION = "solution"

DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


def asserts(node):
    """Whether a node fails a program that is wrong."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, (ast.Constant, ast.Tuple))
    name = getattr(node, "func", None)
    name = getattr(name, "attr", getattr(name, "id", ""))
    return isinstance(node, ast.Raise) or name.lower().startswith(("assert", "fail"))


def acts(nodes):
    """Whether statements assert or call something themselves, and not only in what they define."""
    for node in nodes:
        is_main = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
        if not is_main and not isinstance(node, DEFINITIONS):
            is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            if is_call or asserts(node) or acts(ast.iter_child_nodes(node)):
                return True
    return False


def suite(tree):
    """The functions and classes that are tests and that nothing in the code calls, as pytest and unittest find them.

    Raises ValueError for code that would pass whatever the program does.
    """
    nodes = list(ast.walk(tree))
    if not any(map(asserts, nodes)):
        raise ValueError("the tests assert nothing")
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    found = []
    for node in tree.body:
        is_case = "TestCase" in "".join(map(ast.dump, getattr(node, "bases", [])))
        if not isinstance(node, DEFINITIONS) or not (is_case or node.name.lower().startswith(("test", "check"))):
            continue
        is_called = node.name in named
        takes_none = not isinstance(node, ast.FunctionDef) or not node.args.args
        is_plain = not any(isinstance(one, (ast.AsyncFunctionDef, ast.Yield, ast.YieldFrom)) for one in ast.walk(node))
        if not is_plain or not (is_called or takes_none):
            raise ValueError(f"the tests define `{node.name}`, which nothing calls")
        found += [] if is_called else [node.name]
    if not found and not acts(tree.body):
        raise ValueError("the tests define what nothing calls")
    for node in nodes:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        for module in modules if node in tree.body else []:
            module = module.split(".")[0]
            if module != SOLUTION and module not in sys.modules and importlib.util.find_spec(module) is None:
                raise ValueError(f"the tests import `{module}`, which the Python of the sandbox does not have")
    return found


def run_suite(names, suite):
    """Runs tests that code defines. Raises where one fails, or where a class has none."""
    for name in suite:
        item = names[name]
        if not isinstance(item, type):
            item()
        elif hasattr(item, "assertEqual"):
            import unittest

            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(item).run(result)
            assert result.testsRun and not result.skipped and result.wasSuccessful()
        else:
            tests = [test for test in dir(item) if test.startswith("test")]
            assert tests
            for test in tests:
                getattr(item(), test)()


def plain(value):
    """A value as JSON would have it: tuples are lists, and numbers of other types are Python's own."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    # Those of `decimal`, `fractions` and NumPy.
    if hasattr(type(value), "__float__") and not isinstance(value, (int, float)):
        whole = int(value)
        return whole if whole == value else float(value)
    return value


def statements(code, entry):
    """The number of statements of the last function of this name, or 0."""
    try:
        compile(code, "program.py", "exec")
        found = [node for node in ast.parse(code).body if getattr(node, "name", None) == entry]
        return len(found[-1].body) if found else 0
    except (SyntaxError, ValueError):
        return 0


def defines(code, entry):
    """Whether code that may be incomplete binds this name."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return False
    names = [getattr(node, "name", None) for node in body]
    for node in body:
        if isinstance(node, ast.Assign):
            names += [getattr(target, "id", None) for target in node.targets]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [alias.asname or alias.name for alias in node.names]
    return entry in names


def sources(order):
    """The code to run, one after the other."""
    program, start, entry = order["program"], order.get("start"), order.get("entry")
    if start is None:
        return [program]
    if not defines(program, entry):
        import textwrap

        least = statements(start, entry)
        # As it is; without its indentation; with that of its first line stripped away.
        for body in program, textwrap.indent(textwrap.dedent(program), "    "), "    " + program.lstrip():
            whole = f"{start}\n{body}"
            if statements(whole, entry) > least:
                return [whole]
    lines = start.splitlines(keepends=True)
    last = max(at for at, line in enumerate(lines) if line.removeprefix("async ").split("(")[0].split() == ["def", entry])
    while last > 0 and lines[last - 1].startswith("@"):
        last -= 1
    return ["".join(lines[:last]), program]


def tested(order):
    """What the function gives, or None once the asserts hold."""
    # A module that others find by its name: dataclasses and type hints are looked up there.
    module = sys.modules["program"] = sys.modules[SOLUTION] = types.ModuleType("program")
    names = module.__dict__
    # Beneath the names of the program, so that these alone are its functions.
    given = {}
    exec(GIVEN, given)
    names["__builtins__"] = {**given, **vars(builtins)}
    for source in sources(order):
        exec(compile(source, "program.py", "exec"), names)
    if "asserts" in order:
        exec(order["asserts"], names)
        run_suite(names, order["suite"])
        return None
    function = names.get(order["function"])
    if function is None and "Solution" in names:
        function = getattr(names["Solution"](), order["function"], None)
    if function is None:
        raise NameError(f"the program defines no {order['function']}")
    return plain(function(*order["arguments"]))


def line():
    """The next line of the input. Nothing beyond it is read."""
    found = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        found += byte
    return json.loads(found)


def run(order, out):
    """Runs program and test, and writes what came of it."""
    sign, write, leave = order.pop("sign"), os.write, os._exit
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    found = json.dumps({"found": tested(order), "sign": sign}).encode()
    sys.stdout.flush()
    while found:
        found = found[write(out, found) :]
    leave(0)


def main():
    order = line()
    sign = order["sign"]
    if "asserts" in order:
        try:
            tree = ast.parse(order["asserts"], "test.py")
            order["suite"], order["asserts"] = suite(tree), compile(tree, "test.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            # No program has run yet, so this process alone knows the token.
            os.write(1, f"\n{line()['token']} {UNUSABLE} {error}\n".encode())
            os._exit(1)
    read, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        return run(order, out)
    os.close(out)
    # PR_SET_DUMPABLE: the program cannot read the memory of this process.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    expected = line()
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        # The limits of the program are those of both.
        os.kill(os.getpid(), os.WTERMSIG(status))
        signal.pause()
    told = json.loads(said) if os.waitstatus_to_exitcode(status) == 0 and said else {}
    passed = told.get("sign") == sign
    if passed:
        value = json.dumps(told["found"]) if "function" in order else ""
        left = f"\n{expected['token']} {value}\n".encode()
        while left:
            left = left[os.write(1, left) :]
    os._exit(0 if passed else 1)


main()
