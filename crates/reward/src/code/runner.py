"""Runs a program, and then one test of it, in a process of its own.

Input is two lines of JSON: `program`, `sign`, and either `asserts` (code) or `function`, `arguments`; then
`token`. The token is printed once the test has come to its end, with the value that the function gave, and only
then: a program that leaves early, whatever its exit code, has not passed. The second line is read once the program
has its own process, so that nothing it can look at holds the token; the values that a function may give are not
here at all. The sign says that the test came to its end; asserts share their process with the program, which can
find it there, or change what they call. With asserts may come `start`, code that defines the function `entry` up to
its documentation: the program is the rest of it, or has the whole function, and finds all that stands before it.
"""

import builtins
import ctypes
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


def plain(value):
    """A value as JSON would have it: tuples are lists."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def statements(code, entry):
    """The number of statements of the last function of this name, or 0."""
    import ast

    try:
        compile(code, "program.py", "exec")
        found = [node for node in ast.parse(code).body if getattr(node, "name", None) == entry]
        return len(found[-1].body) if found else 0
    except (SyntaxError, ValueError):
        return 0


def defines(code, entry):
    """Whether code that may be incomplete binds this name."""
    import ast

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
    module = sys.modules["program"] = types.ModuleType("program")
    names = module.__dict__
    # Beneath the names of the program, so that these alone are its functions.
    given = {}
    exec(GIVEN, given)
    names["__builtins__"] = {**given, **vars(builtins)}
    for source in sources(order):
        exec(compile(source, "program.py", "exec"), names)
    if "asserts" in order:
        exec(compile(order["asserts"], "test.py", "exec"), names)
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
