"""Runs mutation tests with one build: checks whether a test fails if an operator, a condition or a body is changed.

`cargo mutants --list` lists the mutants of a crate. A seed samples those of functions changed since a commit. A copy
of the source tree contains all mutants at once, each behind a switch (`if crate::mutant(17) { changed } else {
original }`), which an environment variable enables. Every test runs once separately, to find the mutants that it
reaches. Then each mutant runs with the tests that reach it, until one fails. A failure counts if it repeats. A mutant
that no test reaches survives.

Not included: mutants that do not compile as a switch (most of these do not compile at all: another type, `||` next to
`let`); the next sample takes their place. Tests of other crates run only if `--tests-of` lists them. A mutant is
disabled in processes with a cleared environment.

    pip install tree-sitter tree-sitter-rust; cargo install cargo-mutants
    python conformance/mutants.py --since 6c8e5c6 --sample reward http --copy /tmp/mutants          # lists survivors
    python conformance/mutants.py --since 6c8e5c6 --sample reward http --copy /tmp/mutants --again  # only these, with new tests
    python conformance/mutants.py --since 6c8e5c6 --all call --tests-of call=gateway --copy /tmp/mutants
"""

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile

import tree_sitter_rust
from tree_sitter import Language, Parser

ROOT = Path(__file__).resolve().parent.parent
PARSER = Parser(Language(tree_sitter_rust.language()))
# Appended to a crate's root module. `{last}` is the highest mutant number. An earlier crate may keep its switches in
# the build, so variables contain the crate's name.
SWITCH = """
/// Returns whether a mutant is on, and writes the number of a mutant that is reached for the first time.
#[doc(hidden)]
pub fn mutant(number: usize) -> bool {{
    use std::{{env::var, fs::File, io::Write, sync::LazyLock, sync::atomic::{{AtomicBool, Ordering}}}};
    static ON: LazyLock<Option<usize>> = LazyLock::new(|| var("LEVADE_MUTANT_{crate}").ok()?.parse().ok());
    static REACHED: LazyLock<Option<File>> = LazyLock::new(|| {{
        File::options().append(true).create(true).open(var("LEVADE_REACHED_{crate}").ok()?).ok()
    }});
    static SEEN: [AtomicBool; {last} + 1] = [const {{ AtomicBool::new(false) }}; {last} + 1];
    if let Some(mut file) = REACHED.as_ref()
        && !SEEN[number].swap(true, Ordering::Relaxed)
    {{
        let _ = file.write_all(format!("{{number}}\\n").as_bytes());
    }}
    *ON == Some(number)
}}
"""
# The syntax node that is duplicated, by kind of mutant.
TWICE = {
    "BinaryOperator": {"binary_expression", "compound_assignment_expr"},
    "UnaryOperator": {"unary_expression"},
    "StructField": {"struct_expression"},
}
# The error of a `match` whose arms have a switch. It is reported at the matched value.
NON_EXHAUSTIVE = "E0004"
# The timeout of a mutant's tests: a multiple of the unmutated time, plus additional seconds.
SLOWER, MORE_SECONDS = 5, 20
SURVIVED = ("survived", "unreached")


@dataclass
class Mutant:
    """A source change: the bytes from `start` to `end`, at `span` in lines and columns, become `replacement`."""

    crate: str
    name: str
    file: str
    span: dict
    replacement: str
    kind: str
    start: int = 0
    end: int = 0
    number: int = 0
    outcome: str = ""
    # Bytes of the duplicated expression. If `start == end`, the position at which `replacement` is inserted.
    outer: tuple[int, int] = field(default=(0, 0))


def changed_lines(since):
    """Returns the lines of each file that are new since a commit."""
    lines, file = defaultdict(set), None
    diff = subprocess.run(
        ["git", "diff", "-U0", since, "--", "crates"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    for line in diff.stdout.splitlines():
        if line.startswith("+++ "):
            file = line[6:]
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines[file].update(range(first, first + count))
    return lines


def list_mutants(crate, changed):
    """Returns the mutants of a crate: those of changed functions, and the remaining ones."""
    command = ["cargo", "mutants", "--list", "--json", "--no-shuffle", "-p", f"levade-{crate}"]
    found = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)
    inside, outside, seen = [], [], Counter()
    for m in found:
        # Edits move lines, so a mutant is identified by its change and by the count of equal changes before it.
        name = re.sub(r":\d+:\d+:", ":", m["name"])
        seen[name] += 1
        mutant = Mutant(crate, f"{name} #{seen[name]}", m["file"], m["span"], m["replacement"], m["genre"])
        lines = m["function"]["span"] if m["function"] else m["span"]
        touched = changed[m["file"]].intersection(range(lines["start"]["line"], lines["end"]["line"] + 1))
        (inside if touched else outside).append(mutant)
    return inside, outside


class Source:
    """A source file, its lines and its syntax tree."""

    def __init__(self, text):
        self.text = text
        self.lines = text.split(b"\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.tree = PARSER.parse(text)

    def offset(self, line, column):
        """Returns the byte offset of a line and a character column, both 1-based."""
        return self.starts[line - 1] + len(self.lines[line - 1].decode()[: column - 1].encode())

    def switchable(self, m):
        """Finds the expression around which a mutant's switch goes. Returns whether there is one."""
        m.start, m.end = (self.offset(**m.span[side]) for side in ("start", "end"))
        node = self.tree.root_node.descendant_for_byte_range(m.start, m.end)
        if m.kind == "FnValue":
            while node.type != "function_item":
                node = node.parent
            m.start = m.end = node.child_by_field_name("body").start_byte + 1
            m.replacement, m.outer = f" if crate::mutant(NUMBER) {{ return {m.replacement}; }} ", (m.start, m.start)
        elif m.kind == "MatchArm":
            while node.type != "match_arm":
                node = node.parent
            pattern = node.child_by_field_name("pattern")
            guard = pattern.child_by_field_name("condition")
            if guard is None:
                m.start = m.end = pattern.end_byte
                m.replacement, m.outer = " if !crate::mutant(NUMBER)", (m.end, m.end)
            else:
                m.start, m.end, m.replacement = guard.start_byte, guard.end_byte, "false"
                m.outer = (m.start, m.end)
        elif m.kind == "MatchArmGuard":
            m.outer = (m.start, m.end)
        else:
            while node is not None and node.type not in TWICE.get(m.kind, ()):
                node = node.parent
            if node is None:
                return False
            m.outer = (node.start_byte, node.end_byte)
        return True

    def switched(self, mutants, start=0, end=None):
        """Returns the text of a range with switches."""
        end = len(self.text) if end is None else end
        inside = [m for m in mutants if start <= m.outer[0] and m.outer[1] <= end]
        inside.sort(key=lambda m: (m.outer[0], -m.outer[1]))
        out, at = b"", start
        while inside:
            outer = inside[0].outer
            same = [m for m in inside if m.outer == outer]
            deeper = [m for m in inside if m.outer != outer and m.outer[1] <= outer[1]]
            inside = [m for m in inside if m.outer != outer and m.outer[1] > outer[1]]
            out += self.text[at : outer[0]]
            at = outer[1]
            for m in same:
                changed = m.replacement.replace("NUMBER", str(m.number)).encode()
                if outer[0] == outer[1]:
                    out += changed
                    continue
                changed = self.switched(deeper, outer[0], m.start) + changed + self.switched(deeper, m.end, outer[1])
                out += (
                    (b"(" if m is same[0] else b"")
                    + f"if crate::mutant({m.number}) {{ ".encode()
                    + changed
                    + b" } else "
                )
            if outer[0] != outer[1]:
                out += b"{ " + self.switched(deeper, *outer) + b" })"
        return out + self.text[at:end]


def write(path, data, times=None):
    """Writes a file if its content differs. An unchanged time stamp prevents a rebuild by cargo."""
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if times:
            os.utime(path, times)


def plant(copy, mutants):
    """Copies the source tree, with a switch for each mutant. Returns the changed files by path."""
    by_file, last, planted = defaultdict(list), defaultdict(int), {}
    for m in mutants:
        by_file[m.file].append(m)
        root = f"crates/{m.crate}/src/lib.rs"
        last[root] = max(last[root], m.number)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        path = ROOT / name
        if not path.is_file():
            continue
        data, stat = path.read_bytes(), path.stat()
        if name in by_file:
            data = planted[name] = Source(data).switched(by_file[name])
        if name in last:
            data = planted[name] = data + SWITCH.format(last=last[name], crate=name.split("/")[1]).encode()
        write(copy / name, data, None if name in planted else (stat.st_atime, stat.st_mtime))
    return planted


def build_tests(copy, arguments):
    """Builds the tests. Returns crate and path of the test binaries by crate, the library's first, and the compiler's
    errors.
    """
    # The crates `levade` and `remote` are included for their features, so that dependencies equal those of the
    # workspace build.
    testing = [testing for pair in arguments.tests_of for testing in pair.split("=")]
    crates = {"levade", "levade-remote", *(f"levade-{crate}" for crate in arguments.sample + arguments.all + testing)}
    packages = [word for crate in sorted(crates) for word in ("-p", crate)]
    targets = ["--lib", *(word for name in arguments.tests for word in ("--test", name))]
    command = [*shlex.split(arguments.cargo), "test", "--release", *packages, *targets, "--no-run", "--no-fail-fast"]
    done = subprocess.run([*command, "--message-format=json"], cwd=copy, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    messages = [line["message"] for line in lines if line["reason"] == "compiler-message"]
    errors = [message for message in messages if message["level"] == "error" and message["spans"]]
    if done.returncode != 0 and not errors:
        sys.exit(done.stderr[-4000:])
    programs = defaultdict(list)
    for line in lines:
        if line.get("executable") and line["profile"]["test"]:
            crate = Path(line["manifest_path"]).parent.name
            programs[crate].insert(
                0 if "lib" in line["target"]["kind"] else len(programs[crate]), (crate, line["executable"])
            )
    return programs, errors


def enclosing_node(text, span, kind):
    """Returns the text of the innermost node of a kind that contains a compiler span, or None."""
    node = Source(text).tree.root_node.descendant_for_byte_range(span["byte_start"], span["byte_end"])
    while node is not None and node.type != kind:
        node = node.parent
    return node.text if node else b""


def blamed_mutants(errors, planted):
    """Returns the crates and numbers of the mutants that cause the compiler's errors."""
    numbers = set()
    for error in errors:
        found = set()
        for span in sorted(error["spans"], key=lambda s: not s["is_primary"]):
            text = planted.get(span["file_name"])
            if text is None or found:
                continue
            lines = text.split(b"\n")
            first, last = span["line_start"] - 1, span["line_end"]
            calls = re.findall(rb"mutant\((\d+)\)", b"\n".join(lines[first:last]))
            if (error["code"] or {}).get("code") == NON_EXHAUSTIVE:
                calls = re.findall(rb"if !crate::mutant\((\d+)\)", enclosing_node(text, span, "match_expression"))
            # Otherwise the last mutant before the error in its function. Code without a mutant, such as tests, has its
            # own errors.
            function = enclosing_node(text, span, "function_item")
            before = function[: span["byte_end"] - text.find(function)]
            calls = calls or re.findall(rb"mutant\((\d+)\)", before)[-1:]
            found = {(span["file_name"].split("/")[1], int(number)) for number in calls}
        if not found:
            sys.exit(f"An error without a mutant:\n{error['rendered']}")
        numbers |= found
    return numbers


def run_tests(copy, program, tests, environment, limit):
    """Runs tests of a crate's program. Returns whether they passed, the output, and the seconds; None on a timeout."""
    crate, program = program
    directory = copy / "crates" / crate
    environment = (
        os.environ
        | {"CARGO_MANIFEST_DIR": str(directory), "CARGO_PKG_NAME": f"levade-{crate}"}
        | {"PROPTEST_DISABLE_FAILURE_PERSISTENCE": "1"}
        | environment
    )
    started = time.monotonic()
    command = [program, "--exact", *tests, "--test-threads", "1"]
    # A separate process group, so that child processes of tests end with them.
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=limit)
        return process.returncode == 0, out, time.monotonic() - started
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return None, "", limit


def reached_tests(copy, crate, programs, pool):
    """Runs each test separately. Returns for each mutant the tests that reach it, with their seconds, by program."""
    reached = defaultdict(lambda: defaultdict(list))

    def one(program, test):
        with NamedTemporaryFile() as file:
            ok, out, seconds = run_tests(copy, program, [test], {f"LEVADE_REACHED_{crate}": file.name}, 600)
            return program, test, ok, out, seconds, {int(n) for n in Path(file.name).read_text().split()}

    jobs = []
    for program in programs:
        names = subprocess.run(
            [program[1], "--list"], cwd=copy / "crates" / program[0], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        jobs += [pool.submit(one, program, name) for name in re.findall(r"^(\S+): test$", names, re.MULTILINE)]
    for program, test, ok, out, seconds, numbers in (job.result() for job in jobs):
        if not ok:
            print(f"{crate}: {test} fails without a mutant, and is left out:\n{out[-600:]}", flush=True)
            continue
        for number in numbers:
            reached[number][program].append((seconds, test))
    return reached


def run_mutant(copy, m, programs, reached):
    """Runs a mutant's tests, the fastest first, until one fails twice."""
    m.outcome = "survived" if reached else "unreached"
    for program in programs:
        tests = sorted(reached.get(program, []))
        for chunk in (tests[:6], tests[6:30], tests[30:]):
            limit = SLOWER * sum(seconds for seconds, _ in chunk) + MORE_SECONDS
            names, again = [test for _, test in chunk], False
            while names:
                ok, out, _ = run_tests(copy, program, names, {f"LEVADE_MUTANT_{m.crate}": str(m.number)}, limit)
                if ok:
                    break
                failed = re.findall(r"^test (\S+)(?: - should panic)? \.\.\. FAILED", out, re.MULTILINE)
                if ok is None or not failed or again:
                    m.outcome = "timed out" if ok is None else "caught"
                    return
                # Repeats all failed tests: a test of random cases may pass this time.
                names, again = failed, True


def sample_mutants(crate, arguments, changed, before):
    """Returns the mutants of a crate that the seed samples, or the previous survivors."""
    inside, outside = list_mutants(crate, changed)
    all_mutants = crate in arguments.all
    pick, mutants = random.Random(f"{arguments.seed} {crate}"), []
    for pool, wanted in (
        (inside, len(inside) if all_mutants else arguments.drawn),
        (outside, arguments.drawn if all_mutants else 0),
    ):
        pick.shuffle(pool)
        # Some mutants do not compile; the next samples replace them.
        mutants += pool[: wanted + wanted // 4]
    if arguments.again:
        mutants = [m for m in inside + outside if before.get(m.name) in SURVIVED]
    print(f"{crate}: {len(inside)} mutants in changed functions, {len(outside)} in the rest", flush=True)
    sources = {file: Source((ROOT / file).read_bytes()) for file in {m.file for m in mutants}}
    for number, mutant in enumerate(mutants):
        mutant.number = number
        mutant.outcome = "" if sources[mutant.file].switchable(mutant) else "unbuilt"
    return mutants


def build(mutants, copy, arguments):
    """Builds the tests of a tree with all mutants that compile, and marks the other mutants. Returns the test binaries
    by crate.
    """
    while True:
        alive = [m for m in mutants if not m.outcome]
        planted = plant(copy, alive)
        programs, errors = build_tests(copy, arguments)
        if not errors:
            return programs
        bad = blamed_mutants(errors, planted)
        print(f"{len(bad)} do not compile as switches", flush=True)
        for m in alive:
            m.outcome = "unbuilt" if (m.crate, m.number) in bad else ""


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sample", nargs="*", default=[], help="crates of which mutants in changed functions are sampled")
    p.add_argument(
        "--all",
        nargs="*",
        default=[],
        help="crates with all mutants in changed functions, and equally many sampled from the rest",
    )
    p.add_argument("--since", required=True, help="commit since which functions must have changed")
    p.add_argument("--drawn", type=int, default=60, help="number of sampled mutants per crate")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument(
        "--copy", type=Path, required=True, help="directory for the copy of the tree, its build and the results"
    )
    p.add_argument("--cargo", default="cargo", help="build command")
    p.add_argument("--tests", nargs="*", default=[], help="integration tests in addition to the library tests")
    p.add_argument(
        "--tests-of",
        nargs="*",
        default=[],
        metavar="CRATE=OTHER",
        help="also run the tests of OTHER for mutants of CRATE",
    )
    p.add_argument("--jobs", type=int, default=2, help="number of mutants tested in parallel")
    p.add_argument("--again", action="store_true", help="test only the previous survivors")
    arguments = p.parse_args()
    copy = arguments.copy.resolve()
    changed, drawn_of, records = changed_lines(arguments.since), {}, {}
    for crate in arguments.sample + arguments.all:
        path = copy / "target/mutants" / f"{crate}.json"
        records[crate] = path, json.loads(path.read_text()) if arguments.again else {}
        drawn_of[crate] = sample_mutants(crate, arguments, changed, records[crate][1])
    programs = build([m for mutants in drawn_of.values() for m in mutants], copy, arguments)
    survivors = 0
    for crate, mutants in drawn_of.items():
        with ThreadPoolExecutor(arguments.jobs) as pool:
            own = list(programs[crate])
            for pair in arguments.tests_of:
                of, other = pair.split("=")
                own += programs[other] if of == crate else []
            reached = reached_tests(copy, crate, own, pool)
            alive = [m for m in mutants if not m.outcome]
            list(pool.map(lambda m: run_mutant(copy, m, own, reached.get(m.number, {})), alive))  # noqa: B023
        path, before = records[crate]
        write(path, json.dumps(before | {m.name: m.outcome for m in mutants}, indent=1).encode())
        counts = Counter(m.outcome for m in mutants)
        print(f"{crate}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())), flush=True)
        for m in mutants:
            if m.outcome in SURVIVED:
                survivors += 1
                print(f"  {m.outcome}  {m.name}", flush=True)
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
