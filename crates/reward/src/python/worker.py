"""Runs a scoring function of the user's, call after call. Started by Dressage, never by hand.

Arguments: the file, the name of the function. Lines of JSON come on standard input, each
with the function's keyword arguments; to each goes one line back, with `score` and numbers besides, or `error`.
Whatever the function prints goes to standard error.
"""

import asyncio
import decimal
import importlib.util
import inspect
import json
import math
import numbers
import os
import sys
import traceback


def number(value):
    """The number that a value is, or None: Python's, NumPy's, and tensors of one element."""
    if isinstance(value, (bool, numbers.Real, decimal.Decimal)):
        return float(value)
    if not isinstance(value, (str, bytes, dict, list, tuple)) and hasattr(value, "item"):
        try:
            return float(value.item())
        except Exception:
            return None
    return None


def shown(value):
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


def answer(result):
    """The reply that says what the function returned."""
    extra = {}
    if isinstance(result, dict):
        if "score" not in result:
            return {"error": f"returned {shown(result)}, which has no `score`"}
        extra = {str(k): number(v) for k, v in result.items() if k != "score"}
        extra = {k: v for k, v in extra.items() if v is not None and math.isfinite(v)}
        result = result["score"]
    score = number(result)
    if score is None:
        return {"error": f"returned {shown(result)}, which is neither a number nor a dict with a number as `score`"}
    if not math.isfinite(score):
        return {"error": f"returned {score}, which is no score"}
    return {"score": score, "extra": extra}


def raised(error, path):
    """The error as a message, with the line of the file that it came from."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    where = f" (line {lines[-1]})" if lines else ""
    if isinstance(error, SystemExit):
        return f"ended with exit({error.code!r}){where}"
    return f"raised {type(error).__name__}: {error}{where}"


def main():
    path, name = sys.argv[1], sys.argv[2]
    questions = os.fdopen(os.dup(0), encoding="utf-8", errors="surrogateescape")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def reply(value):
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    try:
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location("custom_reward", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["custom_reward"] = module
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        if not callable(function):
            return reply({"error": f"defines no function `{name}`"})
    except BaseException as error:
        return reply({"error": raised(error, path)})
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    reply({"ready": True})
    for line in questions:
        try:
            result = function(**json.loads(line))
            if inspect.isawaitable(result):
                result = loop.run_until_complete(result)
            said = answer(result)
        except BaseException as error:
            said = {"error": raised(error, path)}
        reply(said)


main()
