"""Compares the scorer `maths` with math-verify, verdict by verdict, on pairs of an expected answer and an answer.

The first list contains pairs from a seeded generator (answers as in MATH, each in several forms, correct and
incorrect) and answers from the given JSON-lines files. The generator knows the correct verdict, so a disagreement
shows which side errs. Disagreements are counted by kind of pair. Speed is measured on one core with the same pairs,
without the start of either program.

The second list contains our own labeled pairs: handwritten ones by class
(`crates/reward/tests/data/maths_pairs.jsonl`), and families of words that change a value, times, units, names, sets,
matrices, bases and stated answers, correct and incorrect. Prints both accuracies and every false reward of ours; a
single one fails the check.

Not checked: non-default options.

    uv venv venv && uv pip install --python venv/bin/python 'math-verify[antlr4_13_2]==0.9.0'
    cargo build --release -p levade-reward --example grade
    venv/bin/python conformance/maths.py [FILE.jsonl …]
"""

import argparse
import json
import logging
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

from math_verify import parse, verify

ROOT = Path(__file__).resolve().parent.parent
logging.disable(logging.CRITICAL)

# Kinds of pairs on which the two differ for a known reason. They do not count for the agreement.
EXPLAINED = {
    "repeating": "math-verify reads 0.\\overline{3} as 0",
    "odd root": "math-verify takes the complex root of a negative number",
    "one-sided": "math-verify turns an inequality into a set only where the expected answer is one",
    "equation for a value": "math-verify takes the right side of any equation, 3x = 9 for 9 as well",
}


class Generator:
    """Generates pairs (kind, expected, answer, whether they are equal) from a seed."""

    def __init__(self, seed: int):
        self.r = random.Random(seed)

    def number(self, low=-30, high=30, no=()):
        return self.r.choice([n for n in range(low, high + 1) if n not in no])

    def fraction(self) -> Fraction:
        while True:
            found = Fraction(self.number(no=(0,)), self.r.randint(2, 12))
            if found.denominator > 1:
                return found

    def written(self, q: Fraction) -> str:
        """Returns a fraction in one of its common notations."""
        sign, a, b = "-" if q < 0 else "", abs(q.numerator), q.denominator
        if b == 1:
            return f"{sign}{a}"
        forms = [
            f"{sign}\\frac{{{a}}}{{{b}}}",
            f"{sign}\\dfrac{{{a}}}{{{b}}}",
            f"{sign}{a}/{b}",
            f"\\frac{{{sign}{a}}}{{{b}}}",
        ]
        if a < 10 and b < 10:
            forms.append(f"{sign}\\frac{a}{b}" if len(f"{a}{b}") == 2 else forms[0])
        if a > b and not sign:
            forms.append(f"{a // b}\\frac{{{a % b}}}{{{b}}}")
        return self.r.choice(forms)

    def polynomial(self, c: list[int]) -> str:
        terms = []
        for power, k in reversed(list(enumerate(c))):
            if k:
                x = (
                    ""
                    if power == 0
                    else "x"
                    if power == 1
                    else f"x^{power}"
                    if self.r.random() < 0.5
                    else f"x^{{{power}}}"
                )
                terms.append(("-" if k < 0 else "+") + (x if abs(k) == 1 and x else f"{abs(k)}{x}"))
        self.r.shuffle(terms)
        return "".join(terms).removeprefix("+") or "0"

    def pairs(self):
        """Yields one correct and one incorrect pair of each kind."""
        r = self.r
        n, m = self.number(no=(0,)), self.number(no=(0,))
        other = self.number(no=(n,))
        q = self.fraction()
        p = q + Fraction(self.r.choice([-1, 1]), q.denominator)
        yield "integer", str(n), r.choice([f"{n}", f"{n}.0", f"x = {n}", f"{n}."]), True
        yield "integer", str(n), str(other), False
        big = r.randint(1000, 9_999_999)
        yield "thousands", str(big), r.choice([f"{big:,}", f"{big:,}".replace(",", "{,}"), f"\\${big:,}"]), True
        yield "thousands", f"{big:,}", str(big + r.choice([-1, 1, 1000])), False
        yield "fraction", self.written(q), self.written(q), True
        yield "fraction", self.written(q), self.written(p), False
        half = Fraction(self.number(no=(0,)), r.choice([2, 4, 5, 8, 20]))
        yield "decimal", self.written(half), f"{float(half):g}", True
        yield "decimal", self.written(half), f"{float(half) + 0.5:g}", False
        yield "rounded", self.written(q), f"{float(q):.7f}", True
        yield "rounded", self.written(q), f"{float(q):.2f}", abs(round(float(q), 2) - float(q)) < 5e-7
        units = r.choice(
            [
                "cm",
                "\\text{ cm}",
                "\\text{ square units}",
                "\\text{ m}^2",
                "^\\circ",
                "\\text{ apples}",
                "\\text{ meters}",
            ]
        )
        yield "unit", str(abs(n)), f"{abs(n)}{units}", True
        yield "unit", f"{abs(n)}{units}", str(abs(n) + 1), False
        percent = r.randint(1, 99)
        yield "percent", f"{percent}\\%", r.choice([f"{percent}", f"{percent}\\%", f"{percent / 100}"]), True
        yield "percent", f"{percent}\\%", f"{percent + 1}\\%", False
        s, t = r.choice([2, 3, 5, 6, 7, 10, 11]), r.randint(2, 9)
        yield (
            "radical",
            f"{t}\\sqrt{{{s}}}",
            r.choice([f"\\sqrt{{{s * t * t}}}", f"{t}\\sqrt{{{s}}}", f"\\sqrt{{{s}}}\\cdot{t}"]),
            True,
        )
        yield "radical", f"{t}\\sqrt{{{s}}}", f"{t + 1}\\sqrt{{{s}}}", False
        yield "rationalised", f"\\frac{{\\sqrt{{{s}}}}}{{{s}}}", f"\\frac{{1}}{{\\sqrt{{{s}}}}}", True
        yield "rationalised", f"\\frac{{\\sqrt{{{s}}}}}{{{s}}}", f"\\frac{{2}}{{\\sqrt{{{s}}}}}", False
        yield "surd", f"{n}+\\sqrt{{{s}}}", f"\\sqrt{{{s}}}+{n}" if n > 0 else f"\\sqrt{{{s}}}{n}", True
        yield "surd", f"{n}+\\sqrt{{{s}}}", f"{n}-\\sqrt{{{s}}}", False
        yield "pi", f"\\frac{{{t}\\pi}}{{{s}}}", r.choice([f"\\frac{{{t}}}{{{s}}}\\pi", f"{t}\\pi/{s}"]), True
        yield "pi", f"{t}\\pi", f"{t * 3.14:g}", False
        yield "power", f"2^{{{t}}}", str(2**t), True
        yield "power", f"2^{{{t}}}", str(2**t + 1), False
        yield "scientific", f"{t}.5 \\times 10^{{{s}}}", str((10 * t + 5) * 10 ** (s - 1)), True
        yield "scientific", f"{t}.5 \\times 10^{{{s}}}", str((10 * t + 5) * 10**s), False
        a, b, k = self.number(-9, 9, (0,)), self.number(-9, 9, (0,)), r.randint(1, 5)
        c = [k * a * b, k * (a + b), k]
        yield "polynomial", self.polynomial(c), self.polynomial(c), True
        yield "polynomial", self.polynomial(c), self.polynomial([c[0] + 1, *c[1:]]), False
        yield "factored", self.polynomial(c), f"{k if k > 1 else ''}(x{a:+})(x{b:+})", True
        yield "factored", self.polynomial(c), f"{k if k > 1 else ''}(x{a:+})(x{-b:+})", False
        yield "cancelled", f"x{a:+}", f"\\frac{{x^2{a + b:+}x{a * b:+}}}{{x{b:+}}}", True
        yield "cancelled", f"x{a:+}", f"\\frac{{x^2{a + b:+}x{a * b:+}}}{{x{a:+}}}", a == b
        yield "several variables", f"{t}xy+{s}z", f"{s}z+{t}yx", True
        yield "several variables", f"{t}xy+{s}z", f"{t}xz+{s}y", False
        yield "assignment", f"x = {n}", r.choice([f"{n}", f"x={n}"]), True
        yield "assignment", f"x = {n}", f"x = {other}", False
        yield "assignment of an expression", f"y = {t}x{a:+}", f"{t}x{a:+}", True
        yield "assignment of an expression", f"y = {t}x{a:+}", f"{t}x{a + 1:+}", False
        yield "scaled equation", f"y = {t}x{a:+}", f"{k + 1}y = {t * (k + 1)}x{a * (k + 1):+}", True
        yield "scaled equation", f"x^2+y^2={s}", f"x^2+y^2={s + 1}", False
        low, high = sorted([n, n + r.randint(1, 9)])
        inside, wide = f"({low},{high})", f"[{low},{high})"
        yield "interval", wide, f"\\left[{low}, {high}\\right)", True
        yield "interval", wide, f"({low},{high}]", False
        yield "interval", f"({low},\\infty)", f"( {low} , +\\infty )", True
        yield "interval", f"({low},\\infty)", f"[{low},\\infty)", False
        union = f"(-\\infty,{low})\\cup({high},\\infty)"
        yield "union", union, f"({high},\\infty) \\cup (-\\infty,{low})", True
        yield "union", union, f"(-\\infty,{low}]\\cup({high},\\infty)", False
        yield "inequality", f"x > {n}", r.choice([f"x>{n}", f"{n}<x"]), True
        yield "inequality", f"x > {n}", r.choice([f"x<{n}", f"x\\ge {n}"]), False
        yield "inequality as interval", f"{low} < x < {high}", inside, True
        yield "inequality as interval", f"{low} < x < {high}", wide, False
        yield "one-sided", inside, f"{low} < x < {high}", True
        items = r.sample(range(-9, 10), r.randint(2, 4))
        mixed = r.sample(items, len(items))
        yield "set", "\\{" + ",".join(map(str, items)) + "\\}", "\\{" + ", ".join(map(str, mixed)) + "\\}", True
        yield "set", "\\{" + ",".join(map(str, items)) + "\\}", "\\{" + ", ".join(map(str, items[1:])) + "\\}", False
        yield "list", ",".join(map(str, items)), ", ".join(map(str, mixed)), True
        yield "list", ",".join(map(str, items)), ", ".join(map(str, [items[0] + 20, *items[1:]])), False
        point = [self.written(self.fraction()) for _ in range(2)]
        yield "point", f"({point[0]},{n})", f"\\left({point[0]}, {n}\\right)", True
        yield "point", f"({point[0]},{n})", f"({point[0]}, {other})", False
        triple = (n, m, other)
        yield "triple", f"({n},{m},{other})", f"({n}, {m}, {other})", True
        yield "triple", f"({n},{m},{other})", f"({m}, {n}, {other})", (m, n, other) == triple
        cells = [self.number(-9, 9) for _ in range(4)]
        matrix = lambda e, c: f"\\begin{{{e}}} {c[0]} & {c[1]} \\\\ {c[2]} & {c[3]} \\end{{{e}}}"  # noqa: E731
        yield "matrix", matrix("pmatrix", cells), matrix(r.choice(["bmatrix", "pmatrix"]), cells), True
        yield "matrix", matrix("pmatrix", cells), matrix("pmatrix", [cells[0] + 1, *cells[1:]]), False
        letter = r.choice("ABCDE")
        yield "choice", f"\\text{{({letter})}}", r.choice([letter, f"({letter})", f"\\text{{{letter}}}"]), True
        yield "choice", letter, r.choice([x for x in "ABCDE" if x != letter]), False
        word = r.choice(["even", "odd", "Monday", "ellipse", "hyperbola", "Navin", "yes"])
        yield "words", f"\\text{{{word}}}", f"\\text{{{word.lower()}}}", True
        yield "words", f"\\text{{{word}}}", "\\text{circle}", False
        yield "both signs", f"{n} \\pm \\sqrt{{{s}}}", f"{n}+\\sqrt{{{s}}},{n}-\\sqrt{{{s}}}", True
        yield "both signs", f"{n} \\pm \\sqrt{{{s}}}", f"{n}+\\sqrt{{{s}}}", False
        yield "complex", f"{n}{m:+}i", f"{m}i{n:+}", True
        yield "complex", f"{n}{m:+}i", f"{n}{-m:+}i", False
        yield "function", f"\\binom{{{t + 2}}}{{2}}", str((t + 2) * (t + 1) // 2), True
        yield "function", f"\\log_2 {2**t}", str(t), True
        yield "function", f"\\sin({t})", f"\\cos({t})", False
        yield "base", f"{r.randint(100, 777)}_8", f"{r.randint(778, 999)}_8", False
        yield "repeating", f"\\frac{{{r.choice([1, 2, 4, 5, 7, 8])}}}{{9}}", "0.\\overline{3}", False
        third = r.choice([1, 2])
        yield "repeating", f"\\frac{{{third}}}{{3}}", f"0.\\overline{{{third * 3}}}", True
        yield "odd root", f"-{t}", f"\\sqrt[3]{{-{t**3}}}", True
        yield "equation for a value", str(3 * t), f"3x = {3 * t}", False


class Families:
    """Generates pairs (class, expected, completion, whether it is correct) of values and value-changing words from a
    seed.
    """

    def __init__(self, seed: int):
        self.r = random.Random(seed)

    def sentence(self, value: str) -> str:
        return self.r.choice(
            [
                "\\boxed{@}",
                "So the result is $\\boxed{@}$.",
                "\\[\\boxed{ @ }\\]",
                "\\boxed{\\color{red}{@}}",
                "The answer is $@$.",
                "The final answer is $@$, since 3 is odd.",
                "**Answer:** $@$",
            ]
        ).replace("@", value)

    def pairs(self):
        for kind, gold, right, wrong in self.values():
            yield from ((kind, gold, self.sentence(value), True) for value in right)
            yield from ((kind, gold, self.sentence(value), False) for value in wrong)

    def values(self):
        r = self.r
        n, m = r.randint(2, 499), r.randint(500, 999)
        word, zeros = r.choice([("thousand", 3), ("million", 6), ("billion", 9), ("crore", 7)])
        yield (
            "magnitude",
            f"{n}{'0' * zeros}",
            [f"{n}\\text{{ {word}}}", f"{n} {word} people"],
            [f"{n}", f"{n + 1}\\text{{ {word}}}", f"{n}\\text{{ trillion}}"],
        )
        before = r.choice(["at least ", "at most ", "less than ", "more than ", "not ", "twice ", "minus ", "up to "])
        yield "changed", f"{n}", [f"\\text{{about }}{n}"], [f"\\text{{{before}}}{n}", f"{n}\\text{{ or more}}"]
        yield "sign", f"-{n}", [f"\\text{{minus }}{n}", f"\\text{{negative }}{n}"], [f"{n}", f"\\text{{plus }}{n}"]
        h, minute = r.randint(1, 11), r.randint(0, 59)
        yield (
            "time",
            f"{h}:{minute:02}\\text{{ p.m.}}",
            [f"{h}:{minute:02}\\text{{ PM}}", f"{h + 12}:{minute:02}"],
            [f"{h}:{minute:02}\\text{{ a.m.}}", f"{h}:{minute:02}", f"{h}:{(minute + 7) % 60:02} PM"],
        )
        unit, same, other = r.choice(
            [
                ("cm", "centimeters", "m"),
                ("hours", "hr", "minutes"),
                ("dollars", "USD", "cents"),
                ("kg", "kilograms", "g"),
            ]
        )
        yield (
            "unit",
            f"{n}\\text{{ {unit}}}",
            [f"{n}", f"{n}\\text{{ {same}}}"],
            [f"{n}\\text{{ {other}}}", f"{n + 1}\\text{{ {unit}}}"],
        )
        x, y = r.choice([("boys", "girls"), ("cats", "dogs"), ("red balls", "blue balls")])
        yield (
            "names",
            f"{n}\\text{{ {x}}}, {m}\\text{{ {y}}}",
            [f"{m}\\text{{ {y}}}, {n}\\text{{ {x}}}"],
            [f"{m}\\text{{ {x}}}, {n}\\text{{ {y}}}", f"{n}\\text{{ {x}}}, {m + 1}\\text{{ {y}}}"],
        )
        yield "named tuple", f"(a,b)=({n},{m})", [f"({n},{m})", f"(b,a)=({m},{n})"], [f"(b,a)=({n},{m})", f"({m},{n})"]
        yield (
            "sets of reals",
            f"[{n},{m})",
            [f"\\{{x : {n} \\le x < {m}\\}}", f"[{n},{m}] \\setminus \\{{{m}\\}}"],
            [f"\\{{x : {n} < x < {m}\\}}", f"[{n},{m}]", f"[{n},{m}) \\setminus \\{{{n}\\}}"],
        )
        yield "absolute value", f"(-{n},{n})", [f"|x| < {n}"], [f"|x| > {n}", f"|x| < {n + 1}", f"|x| \\le {n}"]
        a, b, c, d = (r.randint(-9, 9) for _ in range(4))
        matrix = f"\\begin{{pmatrix}}{a}&{b}\\\\{c}&{d}\\end{{pmatrix}}"
        array = f"\\left(\\begin{{array}}{{cc}}{a}&{b}\\\\{c}&{d}\\end{{array}}\\right)"
        double = f"\\frac12\\begin{{pmatrix}}{2 * a}&{2 * b}\\\\{2 * c}&{2 * d}\\end{{pmatrix}}"
        yield "matrix", matrix, [array, double], [f"2{array}", matrix.replace(f"{d}\\end", f"{d + 1}\\end")]
        yield (
            "old commands",
            f"\\frac{{{n}}}{{{m}}}",
            [f"{{{n} \\over {m}}}"],
            [f"{{{m} \\over {n}}}", f"{{{n}\\choose {m}}}"],
        )
        yield "base", f"{n:b}_2", [f"{n}_{{10}}", f"{n:o}_8"], [f"{n:b}_3", f"{n:b}", f"{n + 1:b}_2"]
        yield "two guesses", f"{n}", [f"m+n={n}"], [f"{n} \\approx {n + 1}", f"{n}\\text{{ or }}{m}", f"{n}, {m}"]
        long = "".join(r.choice("123456789") for _ in range(40))
        yield "40 digits", long, [f"{int(long):,}"], [str(int(long) + 1), f"{long}0", f"-{long}"]


def own_pairs(seed: int, rounds: int):
    rows = (ROOT / "crates/reward/tests/data/maths_pairs.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        yield row["class"], row["answer"], row["text"], bool(row["right"])
    families = Families(seed)
    for _ in range(rounds):
        yield from families.pairs()


def grade(levade: Path, pairs: list[tuple[str, str]]) -> list[dict]:
    """Returns our scores of (expected, completion) pairs."""
    lines = "".join(json.dumps({"text": reply, "expected": gold}) + "\n" for gold, reply in pairs)
    ran = subprocess.run([levade], input=lines, capture_output=True, text=True, check=True)
    scores = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(scores) == len(pairs)
    return scores


def verified(gold: str, reply: str) -> bool:
    try:
        return bool(verify(parse(f"${gold}$"), parse(reply)))
    except Exception:  # whatever it cannot read
        return False


def compare_own(levade: Path, seed: int, rounds: int) -> bool:
    """Scores our own pairs with both. Returns whether we give no false reward and accept at least 98 % of correct
    answers.
    """
    pairs = list(own_pairs(seed, rounds))
    ours = [score["value"] == 1 for score in grade(levade, [pair[1:3] for pair in pairs])]
    theirs = [verified(gold, reply) for _, gold, reply, _ in pairs]
    right = sum(truth for *_, truth in pairs)
    for name, verdicts in [("levade", ours), ("math-verify", theirs)]:
        hits = sum(verdict == pair[3] for verdict, pair in zip(verdicts, pairs, strict=True))
        false = sum(verdict and not pair[3] for verdict, pair in zip(verdicts, pairs, strict=True))
        lost = sum(pair[3] and not verdict for verdict, pair in zip(verdicts, pairs, strict=True))
        print(
            f"own pairs: {name} {hits}/{len(pairs)} = {hits / len(pairs):.2%}; false rewards {false}, lost {lost} of {right}"
        )
    for (kind, gold, reply, truth), mine in zip(pairs, ours, strict=True):
        if mine != truth:
            print(f"{'FALSE' if mine else 'lost'}  {kind}: {gold}   {reply}")
    lost = sum(pair[3] and not mine for mine, pair in zip(ours, pairs, strict=True))
    return not any(mine and not pair[3] for mine, pair in zip(ours, pairs, strict=True)) and lost <= 0.02 * right


def answers_of_files(paths: list[Path], max_answers: int, r: random.Random):
    """Yields answers of datasets: unchanged, paired with another answer, and in other forms."""
    for path in paths:
        golds = []
        for line in path.read_text().splitlines():
            row = json.loads(line)
            answer = str(row.get("answer", "")).split("####")[-1].strip()
            if answer and re.fullmatch(r"[-+0-9.,/\\a-z{}()$%^ ]+", answer, re.IGNORECASE):
                golds.append(answer)
        for gold in r.sample(golds, min(max_answers, len(golds))):
            kind = path.stem
            yield kind, gold, gold, True
            value = gold.replace(",", "")
            if re.fullmatch(r"-?\d+(\.0)?", value):
                n = int(float(value))
                yield (
                    kind,
                    gold,
                    r.choice([f"{n}", f"{n:,}", f"{n}.00", f"\\${n}", f"{n} \\text{{ units}}", f"{2 * n}/2"]),
                    True,
                )
                yield kind, gold, r.choice([f"{n + 1}", f"{10 * n + 1}", f"-{n + 1}", f"{n}.5"]), False


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="*", type=Path, help="files with JSON lines that have a field `answer`")
    p.add_argument(
        "--levade", type=Path, default=ROOT / "target/release/examples/grade", help="binary of the example `grade`"
    )
    p.add_argument("--rounds", type=int, default=30, help="pairs per kind")
    p.add_argument("--own-rounds", type=int, default=15, help="values per family of our own pairs")
    p.add_argument("--most", type=int, default=150, help="maximum number of answers per file")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--show", type=int, default=3, help="number of printed disagreements per kind")
    args = p.parse_args()
    generator = Generator(args.seed)
    pairs = [pair for _ in range(args.rounds) for pair in generator.pairs()]
    pairs += list(answers_of_files(args.files, args.most, random.Random(args.seed)))

    ours = grade(args.levade, [(f"${a}$", f"\\boxed{{{b}}}") for _, a, b, _ in pairs])
    started = time.process_time()
    theirs = [verified(a, f"\\boxed{{{b}}}") for _, a, b, _ in pairs]
    seconds = time.process_time() - started

    wrong, agree, explained, apart = Counter(), 0, Counter(), defaultdict(list)
    for (kind, a, b, truth), our, their in zip(pairs, ours, theirs, strict=True):
        mine = our["value"] == 1
        wrong["ours"] += mine != truth
        wrong["theirs"] += their != truth
        if mine == their:
            agree += 1
        elif kind in EXPLAINED:
            explained[kind] += 1
        else:
            apart[kind].append((a, b, mine, their, truth))
    total = len(pairs)
    for kind, found in sorted(apart.items()):
        print(f"apart  {kind}: {len(found)}")
        for a, b, mine, their, truth in found[: args.show]:
            print(f"         {a}   {b}   levade {mine}, math-verify {their}, truth {truth}")
    for kind, count in sorted(explained.items()):
        print(f"known  {kind}: {count}  ({EXPLAINED[kind]})")
    counted = total - sum(explained.values())
    share, speed = agree / counted, seconds * 1e6 / sum(our["micros"] for our in ours)
    print(f"{total} pairs; errors against the truth: levade {wrong['ours']}, math-verify {wrong['theirs']}")
    print(
        f"agreement {agree}/{counted} = {share:.2%} (bound 98%); with the kinds that are explained {agree / total:.2%}"
    )
    print(
        f"a pair takes levade {sum(our['micros'] for our in ours) / total:.1f} us, math-verify {seconds * 1e6 / total:.0f} us: {speed:.0f} x"
    )
    own = compare_own(args.levade, args.seed, args.own_rounds)
    ok = share >= 0.98 and speed >= 50 and own
    print("ok" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
