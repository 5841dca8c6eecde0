"""Runs a program and one test of it in a child process.

Standard input is two lines of JSON. The first is an object with `program`, `sign`, and either `asserts` (code) or
`function` and `arguments`. The second is an object with `token`.

The token is printed, with the return value of the function, only after the test has completed. A program that exits
early therefore does not pass, whatever its exit code. The second line is read after the child process has been
forked, so the program cannot find the token in its memory. Expected return values are never sent to this process.

The child sends the sign to its parent to report that the test completed. Asserts share a process with the program,
which can find the sign there, or replace the functions that the asserts call.

Two keys are optional, both with `asserts`. `start` is code that defines the function `entry` up to its docstring. The
program either continues this code or contains the complete function, and can use all names defined before it.
With `control`, the asserts run without the program, to check whether they test anything.
"""

import ast
import builtins
import ctypes
import importlib.util
import inspect
import json
import os
import signal
import sys
import types

# Limits of LiveCodeBench's harness. Versions of CPython that lack the first function have no limit on digits.
getattr(sys, "set_int_max_str_digits", int)(50000)
sys.setrecursionlimit(50000)

# Programs whose functions are called, and programs tested by code that uses a class `Solution`, can use these names
# without an import, as on LeetCode and in the harnesses of APPS and LiveCodeBench. For other tests that are code the
# names are not defined: they could stand in for a function that the program lacks.
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


# Reports that the tests, and not the program, are at fault.
UNUSABLE = "unusable"

# Module name under which tests import the program, as in KodCode.
SOLUTION = "solution"

DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef


# Exceptions whose handlers catch a failed assertion.
CATCHING = "AssertionError", "Exception", "BaseException"


def called(node):
    """Returns the last name of the expression that a call node calls, or an empty string."""
    name = getattr(node, "func", None)
    return getattr(name, "attr", getattr(name, "id", ""))


def asserts(node):
    """Returns whether a node can make the test of a wrong program fail."""
    if isinstance(node, ast.Assert):
        # `assert False` after a call that must raise also counts.
        is_true = isinstance(node.test, ast.Constant) and bool(node.test.value)
        return not is_true and not isinstance(node.test, ast.Tuple)
    if called(node) in ("exit", "_exit", "quit"):
        return True
    return isinstance(node, ast.Raise) or called(node).lower().startswith(("assert", "fail"))


def is_caught(node):
    """Returns whether this node swallows a failed assertion in its body."""
    if isinstance(node, ast.Try):
        for handler in node.handlers:
            kinds = [getattr(kind, "attr", getattr(kind, "id", "")) for kind in ast.walk(handler.type or ast.Pass())]
            if handler.type is None or any(kind in CATCHING for kind in kinds):
                return not any(map(asserts, ast.walk(handler)))
        return False
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any(called(item.context_expr) == "suppress" for item in node.items)
    return False


def is_main(node):
    """Returns whether a node is an `if` on `__name__`, whose body runs only in a script."""
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def effective(node):
    """Yields all nodes within a node, except those that run only in a script or whose failure is swallowed."""
    for name, children in ast.iter_fields(node):
        if name == "body" and (is_caught(node) or is_main(node)):
            continue
        for child in children if isinstance(children, list) else [children]:
            if isinstance(child, ast.AST):
                yield child
                yield from effective(child)


def acts(nodes):
    """Returns whether statements assert or call something outside of the functions and classes that they define."""
    for node in nodes:
        if not is_main(node) and not isinstance(node, DEFINITIONS):
            is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            if is_call or asserts(node) or acts(ast.iter_child_nodes(node)):
                return True
    return False


def top(nodes):
    """Yields the nodes of a module, and those within its `if`, `try` and `with` statements."""
    for node in nodes:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)) and not is_main(node):
            yield from top(ast.iter_child_nodes(node))


def suite(tree):
    """Returns the functions to run and the classes that may have tests, as pytest and unittest find them.

    Raises ValueError for code whose result does not depend on the program, or that cannot run here.
    """
    nodes = list(effective(tree))
    if not any(map(asserts, nodes)):
        raise ValueError("the tests assert nothing")
    for node in nodes:
        codes = [getattr(code, "value", None) for code in getattr(node, "args", [])] if isinstance(node, ast.Call) else []
        if called(node) in ("exit", "_exit", "quit") and not any(codes):
            raise ValueError(f"the tests call `{called(node)}`, which fails for every program")
        if "autouse" in [getattr(keyword, "arg", None) for keyword in getattr(node, "keywords", [])]:
            raise ValueError("the tests have autouse fixtures, which need pytest")
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    # Functions that the module calls itself have already run; an exception in them ended the tests.
    ran = {called(node.value) for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)}
    functions, classes = [], []
    for node in top(tree.body):
        if isinstance(node, ast.ClassDef):
            classes += [node.name]
        elif isinstance(node, DEFINITIONS) and node.name.lower().startswith(("test", "check")):
            taken = node.args.posonlyargs + node.args.args
            is_free = len(taken) == len(node.args.defaults) and None not in node.args.kw_defaults
            if not is_free and node.name not in named:
                raise ValueError(f"the tests define `{node.name}`, which is never called")
            functions += [node.name] if is_free and node.name not in ran else []
    if not functions and not classes and not acts(tree.body):
        raise ValueError("the tests only define code that is never called")
    for node in nodes:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        for module in modules if node in tree.body else []:
            module = module.split(".")[0]
            if module != SOLUTION and module not in sys.modules and importlib.util.find_spec(module) is None:
                raise ValueError(f"the tests import `{module}`, which the Python of the sandbox does not have")
    return {"functions": functions, "classes": classes, "acts": acts(tree.body), "names": sorted(named)}


class Unusable(Exception):
    """Raised if the tests, and not the program, are at fault."""


def given_hook(owner, name, item):
    """Calls the setup or teardown hook `name`, if `owner` has it. A hook with a parameter gets `item`."""
    hook = getattr(owner, name, None)
    if hook is not None:
        hook(*[item][: len(inspect.signature(hook).parameters)])


def run_test(owner, test, item, before, after):
    """Runs one test function between its setup and teardown hooks."""
    given_hook(owner, before, item)
    try:
        result = test()
        if inspect.iscoroutine(result):
            import asyncio

            asyncio.run(result)
        elif inspect.isgenerator(result):
            raise Unusable("the tests are generators, which are not supported")
    finally:
        given_hook(owner, after, item)


def run_suite(names, suite, is_control):
    """Runs the tests that code defines. Raises an exception if a test fails, and Unusable if no test runs."""
    unittest = sys.modules.get("unittest")
    classes = [names[name] for name in suite["classes"] if isinstance(names.get(name), type)]
    cases, plain_classes, skipped = [], [], False
    for item in classes:
        if unittest and issubclass(item, unittest.TestCase):
            for test in unittest.defaultTestLoader.loadTestsFromTestCase(item):
                method = getattr(item, test._testMethodName, None)
                is_skipped = any(getattr(of, "__unittest_skip__", False) for of in (item, method))
                skipped |= is_skipped
                cases += [] if is_skipped else [test]
        elif item.__name__.lower().startswith(("test", "check")):
            tests = [test for test in dir(item) if test.startswith("test") and callable(getattr(item, test))]
            plain_classes += [(item, tests)] if tests else []
    if not suite["functions"] and not cases and not plain_classes and (skipped or not suite["acts"]):
        raise Unusable("the tests skip themselves" if skipped else "the tests only define code that is never called")
    module = types.SimpleNamespace(**{name: names[name] for name in names if name.startswith(("setup", "teardown"))})
    given_hook(module, "setup_module", module)
    for name in suite["functions"]:
        run_test(module, names[name], names[name], "setup_function", "teardown_function")
    if cases:
        result = unittest.TestResult()
        unittest.TestSuite(cases).run(result)
        if is_control and result.skipped:
            raise Unusable("the tests skip themselves")
        assert result.testsRun and not result.skipped and result.wasSuccessful()
    for item, tests in plain_classes:
        try:
            made = [item() for _ in tests]
            for one, test in zip(made, tests):
                inspect.signature(getattr(one, test)).bind()
        except TypeError as error:
            if is_control:
                raise Unusable(f"the tests define `{item.__name__}`, which is never called") from error
            raise
        given_hook(item, "setup_class", item)
        for one, test in zip(made, tests):
            run_test(one, getattr(one, test), test, "setup_method", "teardown_method")
        given_hook(item, "teardown_class", item)


def leave_no_run_to_tests():
    """Disables `unittest.main`: `run_suite` runs the tests that it would find."""
    import unittest

    unittest.main = unittest.TestProgram = lambda *_, **__: types.SimpleNamespace(result=unittest.TestResult())


def plain(value):
    """Converts a value for JSON: tuples become lists, and numbers of other types become int or float."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    # Numbers of `decimal`, `fractions` and NumPy.
    if hasattr(type(value), "__float__") and not isinstance(value, (int, float)):
        whole = int(value)
        return whole if whole == value else float(value)
    return value


def statements(code, entry):
    """Returns the number of statements of the last definition of `entry`, or 0 if there is none."""
    try:
        compile(code, "program.py", "exec")
        found = [node for node in ast.parse(code).body if getattr(node, "name", None) == entry]
        return len(found[-1].body) if found else 0
    except (SyntaxError, ValueError):
        return 0


def defines(code, entry):
    """Returns whether code binds the name `entry` in its top level. Code that does not parse binds no name."""
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
    """Returns the sources to run, in order."""
    program, start, entry = order["program"], order.get("start"), order.get("entry")
    if start is None:
        return [program]
    if not defines(program, entry):
        import textwrap

        least = statements(start, entry)
        # The body may be complete, lack its indentation, or lack only the indentation of its first line.
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
    """Runs the test. Returns the value of the function, or None after asserts that hold."""
    # Registered under its name, because dataclasses and type hints look up names in `sys.modules`.
    module = sys.modules["program"] = sys.modules[SOLUTION] = types.ModuleType("program")
    names = module.__dict__
    if "function" in order or "Solution" in order["suite"]["names"]:
        # Defined as builtins, so that the program's namespace contains only its own functions.
        given = {}
        exec(GIVEN, given)
        for name, value in given.items():
            if not hasattr(builtins, name):
                setattr(builtins, name, value)
    for source in sources(order):
        exec(compile(source, "program.py", "exec"), names)
    if "asserts" in order:
        if "unittest" in order["asserts"].co_names:
            leave_no_run_to_tests()
        exec(order["asserts"], names)
        run_suite(names, order["suite"], order.get("control", False))
        return None
    function = names.get(order["function"])
    if function is None and "Solution" in names:
        function = getattr(names["Solution"](), order["function"], None)
    if function is None:
        raise NameError(f"the program defines no {order['function']}")
    return plain(function(*order["arguments"]))


def line():
    """Reads one line of standard input, without buffering beyond it, and parses it as JSON."""
    found = bytearray()
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        found += byte
    return json.loads(found)


def run(order, out):
    """Runs program and test, writes the result as JSON to the file descriptor `out`, and exits."""
    sign, write, leave = order.pop("sign"), os.write, os._exit
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        found = {"found": tested(order), "sign": sign}
    except Unusable as why:
        # Only in a control run are the tests certainly at fault; otherwise, the program could be.
        found = {"unusable": str(why), "sign": sign} if order.get("control") else {}
    found = json.dumps(found).encode()
    sys.stdout.flush()
    while found:
        found = found[write(out, found) :]
    leave(0)


def forked(order):
    """Forks a child process for program and test. Returns its process id and the pipe with its result."""
    read, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        run(order, out)
    os.close(out)
    return child, read


def said(child, read):
    """Returns the result of a child process, empty if it failed, and its wait status."""
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    return (json.loads(found) if os.waitstatus_to_exitcode(status) == 0 and found else {}), status


def stand_in(tree):
    """Returns a program that defines each name in the tests as a function that returns a bare object."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == SOLUTION:
            names |= {alias.name for alias in node.names}
    lines = [f"def {name}(*_, **__): return object()" for name in sorted(names) if name.isidentifier()]
    return "\n".join(line for line in lines if not hasattr(builtins, line[4:].split("(")[0]))


def controlled(order, tree):
    """Returns why tests are unusable, or None if they fail without a program or with a stand-in.

    Tests that pass both without a program and with functions that do nothing are unusable.
    """
    for program in "", stand_in(tree):
        told, _ = said(*forked({**order, "program": program}))
        if "sign" not in told or "unusable" in told:
            return told.get("unusable")
    return "the tests pass without a program"


def main():
    order = line()
    sign = order["sign"]
    why = tree = None
    if "asserts" in order:
        try:
            tree = ast.parse(order["asserts"], "test.py")
            order["suite"], order["asserts"] = suite(tree), compile(tree, "test.py", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = str(error)
    if why is None and order.get("control"):
        why = controlled(order, tree)
    if why is not None or order.get("control"):
        # The program under test has not started, so only this process can know the token.
        token = line()["token"]
        if why is not None:
            os.write(1, f"\n{token} {UNUSABLE} {why}\n".encode())
        os._exit(1)
    child, read = forked(order)
    # PR_SET_DUMPABLE: the program cannot read the memory of this process.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    expected = line()
    told, status = said(child, read)
    if os.WIFSIGNALED(status):
        # The child shares this process's limits; ending by the same signal reports a limit that was exceeded.
        os.kill(os.getpid(), os.WTERMSIG(status))
        signal.pause()
    passed = told.get("sign") == sign
    if passed:
        value = json.dumps(told["found"]) if "function" in order else ""
        left = f"\n{expected['token']} {value}\n".encode()
        while left:
            left = left[os.write(1, left) :]
    os._exit(0 if passed else 1)


main()
