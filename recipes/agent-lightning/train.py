"""A training script of Agent Lightning 0.3: an agent of OpenAI's SDK with a calculator. It knows nothing of Levade.

    AGL_MANAGED_STORE=0 AGL_CURRENT_ROLE=runner \\
        python train.py --external-store-address http://127.0.0.1:4747 --n-runners 10
"""

import argparse
import ast
import json
import operator
import re

import agentlightning as agl
from openai import OpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression: str) -> str:
    """Returns the value of an expression, or an error that the model can read."""

    def value(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float()):
                return node.value
            case ast.BinOp():
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
        raise ValueError("only numbers, + - * / and parentheses are supported")

    try:
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"Error: {error}"


def reward(answer: str, expected: str) -> float:
    """Returns 1 if the last number of the answer is the expected one."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(expected))


@agl.rollout
def agent(task: dict, llm: agl.LLM) -> float:
    client = OpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0, timeout=300)
    messages = [
        {"role": "system", "content": "Answer with the calculator's help."},
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(3):
        completion = client.chat.completions.create(model=llm.model, messages=messages, tools=[CALCULATOR])
        message = completion.choices[0].message
        if not message.tool_calls:
            return reward(message.content or "", task["answer"])
        messages.append(message)
        for call in message.tool_calls:
            try:
                expression = str(json.loads(call.function.arguments).get("expression", ""))
                result = calculate(expression)
            except (ValueError, AttributeError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--external-store-address", required=True, metavar="URL")
    p.add_argument("--n-runners", type=int, default=10)
    args = p.parse_args()
    store = agl.LightningStoreClient(args.external_store_address)
    agl.Trainer(n_runners=args.n_runners, store=store, strategy="cs").fit(agent, train_dataset=[])
