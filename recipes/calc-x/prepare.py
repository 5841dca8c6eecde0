"""Makes sums for Calc-X: made-up ones, or those of Calc-X's own files (MU-NLPC/Calc-gsm8k and others) and of GSM8K.

    python3 prepare.py                                  # made-up, into data/
    python3 prepare.py --questions calc-gsm8k.jsonl     # and problems of yours, as data/own.jsonl

A demonstration is a list of replies: the calls of the calculator, and the answer. The agent itself is run with them.
"""

import argparse
import json
import random
import re
from pathlib import Path

WORDS = {"+": "the sum of {a} and {b}", "-": "the difference between {a} and {b}", "*": "the product of {a} and {b}"}
BEGINNINGS = ["What is {}?", "Find {}.", "Calculate {}.", "Work out {}."]


def call(expression):
    """A turn that calls the tool of mcp-server-calculator."""
    return {"content": "", "tool_calls": [{"function": {"name": "calculate", "arguments": {"expression": expression}}}]}


def made_up(count, seed):
    """Sums of three numbers in words, with one operation within the other."""
    draws, seen = random.Random(seed), set()
    while len(seen) < count:
        a, b, c = (draws.randint(10, 9999) for _ in range(3))
        inner, outer = draws.choice("+-*"), draws.choice("+-*")
        words, expression = WORDS[inner].format(a=b, b=c), f"({b} {inner} {c})"
        sides = [(str(a), str(a)), (words, expression)]
        draws.shuffle(sides)
        (left, first), (right, second) = sides
        question = draws.choice(BEGINNINGS).format(WORDS[outer].format(a=left, b=right))
        if question in seen:
            continue
        seen.add(question)
        expression = f"{first} {outer} {second}"
        answer = eval(expression)  # numbers and operators of this function
        yield {
            "question": question,
            "answer": str(answer),
            "demonstration": [call(expression), f"The answer is {answer}."],
        }


def chain(row):
    """The calls of a solution: Calc-X's <gadget> elements, or GSM8K's annotations."""
    text = str(row.get("chain") or row.get("answer") or "")
    gadgets = re.findall(r"<gadget[^>]*>(.*?)</gadget>", text, re.DOTALL)
    return [found.strip() for found in gadgets or re.findall(r"<<([^=<>]+)=[^<>]*>>", text)]


def brought(paths):
    for path in paths:
        for at, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            question, answer = row.get("question"), row.get("result", row.get("answer"))
            if question is None or answer is None:
                raise SystemExit(
                    f"{path}, line {at}: needs `question` and `result` or `answer`, but has {', '.join(row)}"
                )
            answer = str(answer).rsplit("####", 1)[-1].strip().replace(",", "")
            task = {"question": question, "answer": answer, "data_source": Path(path).stem}
            if 1 <= len(calls := chain(row)) <= 4:
                task["demonstration"] = [*map(call, calls), f"The answer is {answer}."]
            yield task


def write(path, rows):
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} tasks, {sum('demonstration' in row for row in rows)} with a demonstration")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", nargs="+", default=[], metavar="FILE", help="as JSON lines")
    parser.add_argument("--count", type=int, default=1500, help="made-up sums")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    args = parser.parse_args()
    write(args.out / "made-up.jsonl", made_up(args.count, args.seed))
    if args.questions:
        write(args.out / "own.jsonl", brought(args.questions))
