"""An agent like any other: asks a model for the answer to a question, and lets it use a calculator.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py "What is 12 * (3 + 4)?"
"""

import ast
import json
import operator
import os
import sys

from openai import OpenAI

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression with + - * / ^ and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression, such as (12 + 7) * 3."}},
            "required": ["expression"],
        },
    },
}


def calculate(expression):
    """The value of an expression, or why it has none, in words for the model."""

    def value(node):
        match node:
            case ast.Constant(value=int() | float()):
                return node.value
            case ast.BinOp():
                left, right = value(node.left), value(node.right)
                if isinstance(node.op, ast.Pow) and abs(right) > 64:
                    raise ValueError("the exponent is too large")
                return OPERATORS[type(node.op)](left, right)
            case ast.UnaryOp():
                return OPERATORS[type(node.op)](value(node.operand))
        raise ValueError("only numbers, + - * / ^ and parentheses are understood")

    try:
        result = value(ast.parse(expression.replace("^", "**").strip(), mode="eval").body)
        return str(int(result) if result == int(result) else result)
    except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        return f"Error: {error}"


def run(question, turns=3):
    """The model's answer to a question."""
    client, model = OpenAI(), os.environ.get("OPENAI_MODEL", "default")
    messages = [{"role": "user", "content": question}]
    for _ in range(turns):
        reply = client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR]).choices[0].message
        if not reply.tool_calls:
            return reply.content
        messages.append(reply)
        for call in reply.tool_calls:
            arguments = json.loads(call.function.arguments)
            answer = calculate(str(arguments.get("expression", "")))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    return None


if __name__ == "__main__":
    # One line, which is what the question's answer is looked for in.
    print(" ".join((run(sys.argv[1]) or "").split()))
