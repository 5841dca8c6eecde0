"""What the Python clients share: a calculator, two questions, and what a program says at its end."""

import ast
import json
import operator
import os
import zlib

MODEL = os.environ.get("OPENAI_MODEL", "default")
# Replies to one question, at most.
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
    """The value of an expression, or why it has none, in words for the model."""
    global used
    used += 1
    try:
        return str(value(ast.parse(str(expression).strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        return f"Error: {error}"


def of_call(arguments):
    """The result of a call with these arguments, as JSON."""
    return calculate(json.loads(arguments).get("expression", ""))


def questions():
    """What the user says, turn after turn."""
    return [json.loads(os.environ["LEVADE_TASK"])["question"], "What is 12 + 30?"]


def done(answer):
    """Prints the last line of a program, with a reward that differs from attempt to attempt, so that each is learnt from."""
    reward = zlib.crc32(os.environ["LEVADE_ATTEMPT"].encode()) % 1000 / 1000
    print(json.dumps({"answer": answer or "", "reward": reward, "tools": used}))
