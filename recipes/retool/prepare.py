"""Makes tasks for ReTool: problems that a few lines of Python solve, each with a demonstration.

    python3 prepare.py                                        # made-up problems, into data/
    python3 prepare.py --questions gsm8k-train.jsonl …        # and problems of yours, as data/own.jsonl

A demonstration is a list of replies. Only what the model is to write stands in it: Levade runs its code in
the sandbox, and imitates what ends with the right answer.
"""

import argparse
import json
import random
import re
from pathlib import Path

# Wordings of a kind of problem, the code that solves it, and how its numbers are chosen.
KINDS = [
    (
        ["What is the remainder when {a}^{b} is divided by {m}?", "Find {a}^{b} modulo {m}."],
        "print(pow({a}, {b}, {m}))",
        lambda r: {"a": r.randint(2, 99), "b": r.randint(11, 999), "m": r.randint(7, 999)},
    ),
    (
        ["Find the sum of all positive multiples of {k} below {n}.", "Add up all multiples of {k} less than {n}."],
        "print(sum(range({k}, {n}, {k})))",
        lambda r: {"k": r.randint(3, 19), "n": r.randint(100, 2999)},
    ),
    (
        ["How many positive divisors does {n} have?", "Find the number of positive divisors of {n}."],
        "print(sum({n} % d == 0 for d in range(1, {n} + 1)))",
        lambda r: {"n": r.randint(12, 9999)},
    ),
    (
        ["What is the sum of the digits of {a}^{b}?", "Find the digit sum of {a}^{b}."],
        "print(sum(map(int, str({a} ** {b}))))",
        lambda r: {"a": r.randint(2, 29), "b": r.randint(11, 99)},
    ),
    (
        ["In how many ways can {k} of {n} people be chosen?", "How many sets of {k} elements do {n} elements have?"],
        "import math\nprint(math.comb({n}, {k}))",
        lambda r: {"n": r.randint(9, 30), "k": r.randint(3, 8)},
    ),
    (
        ["What is the greatest common divisor of {a} and {b}?", "Find the largest number that divides {a} and {b}."],
        "import math\nprint(math.gcd({a}, {b}))",
        lambda r: (lambda g: {"a": g * r.randint(7, 99), "b": g * r.randint(7, 99)})(r.randint(6, 99)),
    ),
    (
        ["What is the least common multiple of {a} and {b}?", "Find the smallest number that {a} and {b} divide."],
        "import math\nprint(math.lcm({a}, {b}))",
        lambda r: {"a": r.randint(12, 199), "b": r.randint(12, 199)},
    ),
    (
        [
            "How many numbers from 1 to {n} are divisible by {a} or {b}?",
            "Count the numbers from 1 to {n} that {a} or {b} divides.",
        ],
        "print(sum(i % {a} == 0 or i % {b} == 0 for i in range(1, {n} + 1)))",
        lambda r: {"n": r.randint(100, 4999), "a": r.randint(3, 9), "b": r.randint(11, 29)},
    ),
]


def replies(code, answer):
    """The turns of a demonstration: a call of the sandbox, and the answer in a box."""
    call = {"function": {"name": "python", "arguments": {"code": code}}}
    return [{"content": "", "tool_calls": [call]}, f"The answer is \\boxed{{{answer}}}."]


def made_up(count, seed):
    """Problems that differ in their numbers, of all kinds alike."""
    draws, seen = random.Random(seed), set()
    while len(seen) < count:
        wordings, code, numbers = KINDS[len(seen) % len(KINDS)]
        numbers = numbers(draws)
        question, code = draws.choice(wordings).format(**numbers), code.format(**numbers)
        if question in seen:
            continue
        seen.add(question)
        answer = ran(code)
        yield {"question": question, "answer": str(answer), "demonstration": replies(code, answer)}


def ran(code):
    """The number that a program of this file prints; None where it prints none, or fails."""
    printed = []
    try:
        exec(code, {"print": printed.append})
        return printed[0]
    except (ArithmeticError, SyntaxError, IndexError, TypeError):
        return None


def annotated(solution, answer):
    """GSM8K's calculator annotations as a program that prints the answer; None where they do not come to it."""
    steps = re.findall(r"<<([0-9.+\-*/()% ]+)=([0-9.]+)>>", solution)
    if not 1 <= len(steps) <= 4 or any(re.search(r"\*\*|//|%\s*\d", expression) for expression, _ in steps):
        return None
    names, lines = {}, []
    for name, (expression, result) in zip("abcd", steps, strict=False):
        # A number that an earlier step found is that step's variable.
        known = re.sub(r"\d+(?:\.\d+)?", lambda number: names.get(number.group(), number.group()), expression)
        lines.append(f"{name} = {known.replace('%', '/100')}")
        names[result] = name
    code = "\n".join([*lines, f"print({name})"])
    value = ran(code)
    return code if value is not None and abs(value - float(answer)) < 1e-6 else None


def brought(paths):
    """Problems of files: `question` (or `problem`, `Problem`) and `answer` (or `Answer`), as JSON lines."""
    for path in paths:
        for at, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            question = row.get("question") or row.get("problem") or row.get("Problem")
            answer = row.get("answer", row.get("Answer"))
            if question is None or answer is None:
                raise SystemExit(f"{path}, line {at}: needs `question` and `answer`, but has {', '.join(row)}")
            solution, answer = str(answer), str(answer).rsplit("####", 1)[-1].strip().replace(",", "")
            task = {"question": question, "answer": answer.removesuffix(".0"), "data_source": Path(path).stem}
            if code := annotated(solution, task["answer"]):
                task["demonstration"] = replies(code, task["answer"])
            yield task


def write(path, rows):
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} tasks, {sum('demonstration' in row for row in rows)} with a demonstration")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", nargs="+", default=[], metavar="FILE", help="GSM8K, DAPO-Math, AIME, AMC, …")
    parser.add_argument("--count", type=int, default=1200, help="made-up problems")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    args = parser.parse_args()
    write(args.out / "made-up.jsonl", made_up(args.count, args.seed))
    if args.questions:
        write(args.out / "own.jsonl", brought(args.questions))
