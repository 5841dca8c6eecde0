"""Shared code of the Python clients: a calculator, two questions, and a program's last line."""

import ast
import json
import operator
import os
import zlib

MODEL = os.environ.get("OPENAI_MODEL", "default")
# Maximum number of model calls per question.
ROUNDS = 3
SYSTEM = "Answer briefly."
NAME, DESCRIPTION = "calculator", "Evaluates an arithmetic expression with + - * / ^ and parentheses."
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "The expression, such as (12 + 7) * 3."}},
    "required": ["expression"],
}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def value(node):
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.BinOp():
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        case ast.UnaryOp():
            return OPERATORS[type(node.op)](value(node.operand))
    raise ValueError("only numbers, + - * / and parentheses are understood")


used = 0


def calculate(expression):
    """Returns the value of an expression, or an error message for the model."""
    global used
    used += 1
    try:
        return str(value(ast.parse(str(expression).strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        return f"Error: {error}"


def of_call(arguments):
    """Returns the result of a call with these arguments, as JSON."""
    return calculate(json.loads(arguments).get("expression", ""))


def questions():
    """Returns the user's messages, turn by turn."""
    return [json.loads(os.environ["LEVADE_TASK"])["question"], "What is 12 + 30?"]


def done(answer):
    """Prints a program's last line, with a reward that differs between attempts, so that the step trains on each."""
    reward = zlib.crc32(os.environ["LEVADE_ATTEMPT"].encode()) % 1000 / 1000
    print(json.dumps({"answer": answer or "", "reward": reward, "tools": used}))
