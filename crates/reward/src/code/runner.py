"""Runs a program, and then one test of it, in one process.

Input is one line of JSON: `program`, `token`, and either `asserts` (code) or `function`, `arguments`,
`value`. The token is printed once the test has passed, and only then: a program that leaves early, whatever
its exit code, has not. It is handed over this way so that no file holds it.
"""

import json
import os
import sys


def plain(value):
    """A value as JSON would have it: tuples are lists."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def equal(found, want):
    if isinstance(want, float) or isinstance(found, float):
        number = (int, float)
        return isinstance(found, number) and isinstance(want, number) and abs(found - want) <= 1e-6 * max(1, abs(want))
    if isinstance(want, list):
        return isinstance(found, list) and len(found) == len(want) and all(map(equal, found, want))
    if isinstance(want, dict):
        return isinstance(found, dict) and found.keys() == want.keys() and all(equal(found[key], want[key]) for key in want)
    return type(found) is type(want) and found == want


def test(order):
    names = {"__name__": "program", "__builtins__": __builtins__}
    exec(compile(order["program"], "program.py", "exec"), names)
    if "asserts" in order:
        exec(compile(order["asserts"], "test.py", "exec"), names)
        return True
    function = names.get(order["function"])
    if function is None and "Solution" in names:
        function = getattr(names["Solution"](), order["function"], None)
    if function is None:
        raise NameError(f"the program defines no {order['function']}")
    return equal(plain(function(*order["arguments"])), order["value"])


def main():
    order = json.loads(sys.stdin.readline())
    token, write, leave = order.pop("token"), os.write, os._exit
    passed = test(order)
    sys.stdout.flush()
    if passed:
        write(1, f"\n{token}\n".encode())
    leave(0 if passed else 1)


main()
