"""Checks that the terms of `levade inspect --terms` add up to the loss that each step recorded, bit for bit.

Trains toy recipes (terms_recipes.py) of every algorithm, loss and KL estimator from a tiny model that calls the
calculator, with stale tokens, several mini-batches and epochs, a critic, adapters, two policies, summaries, programs
and demonstrations. For some steps of each phase, it runs `inspect RUN --attempt ID --step STEP --terms --json` to get
the trained tokens of every attempt that the step trained. Then it checks three properties:

- All terms of the step are present. Added in the learner's order, they equal the loss in `metrics.jsonl`, bit for bit.
- `part` equals `weight` × (`loss` − `bonus`), bit for bit.
- The printed formula with the token's own numbers gives `loss`, within 1e-9 of the formula's largest part.

Prints a line for each recipe, with counts of what it exercised.

Not checked: a critic's loss, which has no terms, and learners other than the embedded engine.
"""

import argparse
import json
import math
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path

from bits import call, prepare, served
from terms_recipes import RECIPES

NUMBER = r"[-+]?[\d.]+(?:e[-+]?\d+)?"
UPDATES = "actor/updates"


def order(term: dict) -> tuple:
    """Returns the position at which the learner adds a term."""
    return tuple(term[key] for key in ("micro_batch", "unit", "row", "term"))


def total(terms: list[dict]) -> float:
    """Adds the terms of a policy's step in the learner's order, row by row, unit by unit, batch by batch."""
    loss = 0.0
    terms = sorted(terms, key=order)
    for _, batch in groupby(terms, key=lambda term: term["micro_batch"]):
        batch_loss = 0.0
        for _, unit in groupby(batch, key=lambda term: term["unit"]):
            unit_loss = 0.0
            for _, row in groupby(unit, key=lambda term: term["row"]):
                row_loss, row_bonus = 0.0, 0.0
                for term in row:
                    row_bonus = term["row_bonus"]
                    if term["weight"] != 0.0:
                        row_loss += term["weight"] * term["loss"]
                unit_loss += row_loss - row_bonus
            batch_loss += unit_loss
        loss += batch_loss
    # A step's metrics contain the mean over its updates.
    return loss / max(updates(terms), 1)


def updates(terms: list[dict]) -> int:
    """Returns the number of optimizer updates that have terms."""
    return len({term["update"] for term in terms})


def gap(terms: list[dict]) -> str | None:
    """Describes the first missing or duplicate term, if any. Units can be without terms."""
    expected = None
    for term in sorted(terms, key=order):
        batch, unit, row, index = order(term)
        if expected is None:
            allowed = [(0, unit, 0, 0)]
        else:
            b, u, r, t = expected
            later = [(b, unit, 0, 0)] if unit > u else []
            allowed = [(b, u, r, t + 1), (b, u, r + 1, 0), (b + 1, unit, 0, 0), *later]
        if (batch, unit, row, index) not in allowed:
            return f"micro-batch {batch}, unit {unit}, row {row}, term {index} comes after {expected}"
        expected = (batch, unit, row, index)
    return None


def policy_loss(formula: str, term: dict) -> float:
    """Evaluates the policy's part of a formula. Symbols are those of `Loss::formula`."""
    a, logp, rho = term["advantage"], term["logp"], term["ratio"]
    sequence = term["sequence_log_ratio"]
    # A divergence beyond its bound is a clip that removes the loss.
    zero = {"outside of the trust region": "dropped", "if marked": "dropped", "if p is too far .*": "clipped"}
    for condition, flag in zero.items():
        if match := re.fullmatch(f"(.*), 0 {condition}", formula):
            if term[flag]:
                return 0.0
            formula = match[1]
    if formula.endswith(", ρ of the sequence"):
        formula, rho = formula.removesuffix(", ρ of the sequence"), math.exp(min(sequence, 10.0))

    def found(pattern: str) -> list[float] | None:
        pattern = re.escape(pattern).replace("NUMBER", f"({NUMBER})")
        match = re.fullmatch(pattern, formula)
        return match and [float(number) for number in match.groups()]

    simple = {"−ln p": -logp, "−A ln p": -a * logp, "−A ρ": -a * rho, "−sg(ρ) A ln p": -rho * a * logp}
    if formula in simple:
        return simple[formula]
    clip, *more = formula.split("), ")
    if match := re.fullmatch(rf"max\(−A ρ, −A clip\(ρ, ({NUMBER}), ({NUMBER})\)\)?", clip):
        low, high = map(float, match.groups())
        loss = max(-a * rho, -a * min(max(rho, low), high))
        rest = ", ".join(more)
        if dual := re.search(rf"at most −({NUMBER}) A if A < 0", rest):
            loss = min(loss, -float(dual[1]) * a) if a < 0 else loss
        kept = rf"−A · ({NUMBER})( / ρ)?\)? if A ([<>]) 0 and ρ [<>] ({NUMBER})"
        for part, divided, sign, bound in re.findall(kept, formula):
            beyond = (a < 0 and rho < float(bound)) if sign == "<" else (a > 0 and rho > float(bound))
            if beyond:
                loss = max(-a * rho, -a * float(part) / rho) if divided else -a * float(part)
        return loss
    if bounds := found("−sg(clip(ρ, NUMBER, NUMBER)) A ln p"):
        return -min(max(rho, bounds[0]), bounds[1]) * a * logp
    if found("−A times the geometric mean of the sequence's ρ, each x clipped at −NUMBER or NUMBER"):
        return -a * math.exp(sequence)
    if taus := found("−(4/τ) A sigmoid(τ (ρ − 1)), τ = NUMBER if A > 0, else NUMBER"):
        tau = taus[0] if a > 0 else taus[1]
        return -4 / tau * a / (1 + math.exp(-tau * (rho - 1)))
    if beta := found("−(A ln p − ½ · NUMBER · x²)"):
        return -(a * logp - 0.5 * beta[0] * math.log(rho) ** 2)
    if cap := found("−A sg(min(ρ, NUMBER)) ln p"):
        return -a * min(rho, cap[0]) * logp
    if coefficient := found("−A ρ, + NUMBER |x| if marked"):
        return -a * rho + coefficient[0] * abs(math.log(rho)) * term["marked"]
    raise ValueError(f"no rule for the formula {formula!r}")


def evaluated(term: dict) -> tuple[float, float]:
    """Returns the loss by the printed formula, without the entropy bonus, and the magnitude of its largest part."""
    formula, kl, bonus = term["formula"], 0.0, 0.0
    if match := re.fullmatch(rf"(.*) − ({NUMBER}) · H", formula):
        formula, bonus = match[1], float(match[2]) * term["entropy"]
    if match := re.fullmatch(rf"(.*) \+ ({NUMBER}) · D", formula):
        formula, kl = match[1], float(match[2]) * term["kl"]
    if not math.isclose(bonus, term["bonus"], rel_tol=1e-12, abs_tol=0.0):
        raise ValueError(f"a bonus of {term['bonus']}, but the formula gives {bonus}: {term}")
    correction = 1.0
    if match := re.fullmatch(r"c · \((.*)\)", formula):
        formula, correction = match[1], 1.0 if term["correction"] is None else term["correction"]
    parts = [correction * policy_loss(formula, term), kl]
    return sum(parts), max(1.0, *map(abs, parts))


def steps_of(run: Path, max_steps: int) -> Iterator[tuple[int, int, list[str]]]:
    """Yields phase, step and attempts of up to `max_steps` steps of each phase: the first, the last, and some between."""
    with closing(sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)) as db:
        planned: dict[tuple[int, int], list[str]] = {
            (phase, step): [] for phase, step in db.execute("SELECT phase, step FROM steps ORDER BY phase, step")
        }
        query = "SELECT DISTINCT phase, step, attempt FROM planned_paths ORDER BY phase, step, place"
        for phase, step, attempt in db.execute(query):
            if attempt.hex() not in planned[phase, step]:
                planned[phase, step].append(attempt.hex())
    for phase, of_phase in groupby(planned, key=lambda at: at[0]):
        steps = list(of_phase)
        chosen = {round(at * (len(steps) - 1) / max(max_steps - 1, 1)) for at in range(max_steps)}
        for at in sorted(chosen):
            if planned[steps[at]]:
                yield phase, steps[at][1], planned[steps[at]]


def recorded(run: Path) -> dict[tuple[int, int], dict]:
    """Returns the metrics of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Metrics count steps from 1.
    return {(line["phase"], line["step"] - 1): line for line in lines if "eval" not in line}


def loss_in(metrics: dict, policy: str) -> float:
    """Returns the loss of a policy in a step's metrics. With several policies, metrics have prefixes."""
    names = [prefix + name for prefix in ("", f"{policy}/") for name in ("actor/pg_loss", "actor/loss", "train/loss")]
    (found,) = (metrics[name] for name in names if name in metrics)
    return found


def terms_of(binary: Path, directory: Path, attempt: str, step: int) -> list[dict]:
    """Returns the terms of an attempt in a step. There are none while only a critic trains."""
    command = ["inspect", "run", "--attempt", attempt, "--step", str(step), "--terms", "--json"]
    try:
        return [json.loads(line) for line in call(binary, directory, *command).splitlines()]
    except RuntimeError as error:
        if "trained on no token of" in str(error):
            return []
        raise


def check(binary: Path, directory: Path, max_steps: int) -> tuple[str | None, str]:
    """Checks the steps of a run. Returns the first difference, and counts of what was exercised."""
    run = directory / "run"
    metrics, counts = recorded(run), Counter()
    for phase, step, attempts in steps_of(run, max_steps):
        location, terms = f"phase {phase}, step {step}", []
        for attempt in attempts:
            terms += terms_of(binary, directory, attempt, step)
        if not terms and any(metrics[phase, step][name] for name in metrics[phase, step] if name.endswith(UPDATES)):
            return f"{location}: no terms, though the step had updates", ""
        for policy, of_policy in groupby(sorted(terms, key=lambda t: t["policy"]), key=lambda t: t["policy"]):
            of_policy = list(of_policy)
            if missing := gap(of_policy):
                return f"{location}, {policy}: {missing}", ""
            want, got = loss_in(metrics[phase, step], policy), total(of_policy)
            if want != got:
                return f"{location}, {policy}: terms add up to {got!r}, recorded is {want!r}", ""
            counts["sums"] += 1
            counts["off in another order"] += sum(term["part"] for term in of_policy) != want * updates(of_policy)
            counts["updates"] += updates(of_policy)
            counts["batches"] += len({term["micro_batch"] for term in of_policy})
            counts["units"] += len({order(term)[:2] for term in of_policy})
        for term in terms:
            part = term["weight"] * (term["loss"] - term["bonus"]) if term["weight"] else 0.0
            if part != term["part"]:
                return f"{location}: a part of {term['part']!r}, but weight × (loss − bonus) is {part!r}: {term}", ""
            loss, size = evaluated(term)
            if not abs(loss - term["loss"]) <= 1e-9 * size:
                return f"{location}: the formula gives {loss!r}: {term}", ""
            counts["terms"] += 1
            counts["of several in a row"] += term["term"] > 0
            for name in ("clipped", "dual_clipped", "dropped", "marked"):
                counts[name.replace("_", " ")] += term[name]
            counts["off policy"] += term["ratio"] != 1.0
            counts["stale"] += term["age"] > 0
            counts["without weight"] += term["weight"] == 0.0
            counts["corrected"] += term["correction"] not in (None, 1.0)
            counts["with KL"] += term["kl"] != 0.0
            counts["with bonus"] += term["bonus"] != 0.0
    if not counts["sums"]:
        return "no step trained a token", ""
    return None, ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=Path("target/release/levade"), help="levade binary")
    p.add_argument("--model", type=Path, required=True, help="directory of a tiny model that calls the calculator")
    p.add_argument("--only", default="", metavar="NAME", help="recipes whose names contain this")
    p.add_argument("--steps", type=int, default=3, help="checked steps per phase")
    p.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs in this directory, which must not exist")
    options = p.parse_args()
    binary, model = options.levade.resolve(strict=True), options.model.resolve(strict=True)
    chosen = {name: recipe for name, recipe in RECIPES.items() if options.only in name}
    if not chosen:
        sys.exit(f"no recipe is called {options.only}: {', '.join(RECIPES)}")
    failures = []
    with tempfile.TemporaryDirectory() as temporary:
        root = (options.keep or Path(temporary)).resolve()
        for name, recipe in chosen.items():
            start, directory = time.monotonic(), root / name
            directory.mkdir(parents=True)
            try:
                prepare(directory, model)
                with served(binary, directory, recipe) as text:
                    (directory / "recipe.toml").write_text(text)
                    if "./school" in text:
                        call(binary, directory, "train", "school.toml")
                    call(binary, directory, "train", "recipe.toml", "--set", "eval.tasks=0")
                    found, what = check(binary, directory, options.steps)
            except (RuntimeError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
                found, what = f"{type(error).__name__}: {error}", ""
            if found:
                failures.append(name)
            line = f"{'FAIL' if found else 'ok  '}  {name}: {found or what}"
            print(f"{line} ({time.monotonic() - start:.1f} s)", flush=True)
            if not options.keep:
                shutil.rmtree(directory)
    if failures:
        sys.exit(f"{len(failures)} of {len(chosen)} recipes failed: {', '.join(failures)}")
    print(f"all {len(chosen)} recipes passed")


if __name__ == "__main__":
    main()
