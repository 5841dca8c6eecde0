"""Runs a scoring function of the user, one call at a time.

The first input line contains the file, the name of the function, the names of the recipe's own arguments, and the type
of completions. The worker then reports the columns that the function requires. Each request contains the data of an
attempt; its response contains `score` and further numbers, or `error`.

The names of the function's parameters determine for which library it was written, and thus how it is called:

- verl, one attempt at a time: `data_source`, `solution_str`, `ground_truth`, `extra_info`.
- verl's BatchRewardManager: `data_sources`, `solution_strs`, `ground_truths`, `extra_infos`, lists of one element.
- TRL: `prompts`, `completions` and the columns of the data set, lists of one element.
"""

import asyncio
import decimal
import importlib.util
import inspect
import math
import numbers
import os
import re
import sys

from levade_worker import protocol
from levade_worker.protocol import shown


def number(value):
    """Returns a value as a float, or None. Accepts numbers of Python and NumPy, and tensors of one element."""
    if isinstance(value, (bool, numbers.Real, decimal.Decimal)):
        return float(value)
    if not isinstance(value, (str, bytes, dict, list, tuple)) and hasattr(value, "item"):
        try:
            return float(value.item())
        except Exception:
            return None
    return None


def answer(result):
    """Returns the response for a result of the function: `score` and `extra`, or `error`."""
    extra = {}
    if isinstance(result, dict):
        if "score" not in result:
            return {"error": f"returned {shown(result)}, which has no key `score`"}
        extra = {str(k): number(v) for k, v in result.items() if k != "score"}
        extra = {k: v for k, v in extra.items() if v is not None and math.isfinite(v)}
        result = result["score"]
    score = number(result)
    if score is None:
        return {"error": f"returned {shown(result)}, which is neither a number nor a dict with a number as `score`"}
    if not math.isfinite(score):
        return {"error": f"returned {score}, which is not a finite number"}
    return {"score": score, "extra": extra}


SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL = ("prompts", "completions", "completion_ids", "trainer_state")


class Unscored(Exception):
    """The function's result contains no score for the attempt."""


class Call:
    """Calling convention of a function: the arguments that it receives, and the columns that it requires."""

    def __init__(self, function, own, reads_messages):
        self.reads_messages = reads_messages
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            parameters = None
        kinds = inspect.Parameter
        named = [p for p in parameters or () if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        fixed = [p.name for p in parameters or () if p.kind is kinds.POSITIONAL_ONLY and p.default is kinds.empty]
        self.names = {p.name for p in named}
        self.takes_all = parameters is None or any(p.kind is kinds.VAR_KEYWORD for p in parameters)
        required = {p.name for p in named if p.default is kinds.empty} - set(own)
        if "completions" in self.names:
            self.style, usual = "trl", set(TRL)
        elif self.names & set(BATCH):
            self.style, usual = "batch", set(BATCH)
        else:
            self.style, usual = "single", set(SINGLE)
        # Columns of the data set can be checked only when a task is known.
        self.columns = sorted(required - usual) if self.style == "trl" else []
        self.refusal = None
        other = sorted(required - usual) if self.style != "trl" else []
        unknown = sorted(set(own) - self.names) if not self.takes_all else []
        if fixed:
            self.refusal = f"takes {', '.join(fixed)} by position only: let the function also accept them by name"
        elif not self.takes_all and not self.names & (usual - {"trainer_state"}):
            self.refusal = (
                f"takes ({', '.join(sorted(self.names))}), none of which comes from the attempt: let the function take "
                "verl's (data_source, solution_str, ground_truth, extra_info), verl's in batches (data_sources, "
                "solution_strs, ground_truths, extra_infos) or TRL's (prompts, completions, **columns)"
            )
        elif other:
            self.refusal = (
                f"requires `{other[0]}`, which an attempt does not have: give the parameter a default, or set it in "
                "`arguments`"
            )
        elif unknown:
            self.refusal = (
                f"does not take `{unknown[0]}` of `arguments`: remove this argument, or let the function take it"
            )
        elif "completion_ids" in required:
            self.refusal = "requires `completion_ids`, which an attempt does not have: give the parameter a default"

    def arguments(self, attempt):
        """Returns the keyword arguments of a call."""
        own = attempt["arguments"]
        if self.style == "single":
            usual = {name: attempt[name] for name in SINGLE}
        elif self.style == "batch":
            usual = {name: [attempt[name[:-1]]] for name in BATCH}
        else:
            text, question = attempt["solution_str"], attempt["question"]
            if self.reads_messages:
                text = [{"role": "assistant", "content": text}]
                question = question if isinstance(question, list) else [{"role": "user", "content": question}]
            usual = {name: [value] for name, value in attempt["columns"].items()}
            usual.update(prompts=[question], completions=[text])
            if "trainer_state" in self.names:
                usual["trainer_state"] = None
        return {**{name: value for name, value in usual.items() if self.takes_all or name in self.names}, **own}

    def score(self, result):
        """Returns the result for the single attempt of a call.

        Raises Unscored if the function returned no list with exactly one score.
        """
        if self.style == "single":
            return result
        if not isinstance(result, (list, tuple)) and hasattr(result, "tolist"):
            result = result.tolist()
        if not isinstance(result, (list, tuple)):
            raise Unscored(f"returned {shown(result)}, which is not a list with a score for the attempt")
        if len(result) != 1:
            raise Unscored(f"returned {len(result)} scores for 1 attempt")
        if result[0] is None:
            raise Unscored("returned [None]: the function does not score this attempt")
        return result[0]


def raised(error, path):
    """Returns the message of an exception, with the line of the user's file that raised it."""
    place = protocol.where(error, lambda file: file == path)
    where = f" (line {place[1]})" if place else ""
    if isinstance(error, SystemExit):
        return f"called exit({error.code!r}){where}"
    return f"raised {type(error).__name__}: {error}{where}"


def main(first, line):
    path, name, own, form = first["file"], first["function"], first["arguments"], first["completions"]
    try:
        sys.path.insert(0, os.path.dirname(path))
        spec = importlib.util.spec_from_file_location("custom_reward", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["custom_reward"] = module
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        if not callable(function):
            others = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == "custom_reward"]
            others = [k for k in others if not k.startswith("_")]
            way_out = f"; set `function` to one of its functions: {', '.join(others)}" if others else ""
            return line.failed(f"defines no function `{name}`{way_out}")
        if inspect.isclass(function):
            return line.failed(f"defines `{name}` as a class, not as a function")
        # In TRL, the data set determines whether completions are messages. Here, the file does, by reading "content".
        with open(path, encoding="utf-8", errors="replace") as file:
            reads_content = re.search(r"""["']content["']""", file.read()) is not None
        call = Call(function, own, reads_content if form == "auto" else form == "messages")
        if call.refusal:
            return line.failed(f"defines `{name}`, which {call.refusal}")
    except BaseException as error:
        return line.failed(raised(error, path))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    line.ready({"columns": call.columns})
    for request in line:
        if request.get("stop"):
            continue
        try:
            result = function(**call.arguments(request))
            if inspect.isawaitable(result):
                result = loop.run_until_complete(result)
            said = answer(call.score(result))
        except Unscored as error:
            said = {"error": str(error)}
        except BaseException as error:
            said = {"error": raised(error, path)}
        line.answer(request, said)
