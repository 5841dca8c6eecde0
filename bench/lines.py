"""Counts lines of code by crate and Python package, without blank lines, comments, tests and examples.

    python bench/lines.py                    # this tree
    python bench/lines.py --before COMMIT    # compared with that of a commit

Tests are files named `*_tests.rs` and `tests.rs`, directories named `tests`, `testing` and `examples`, and modules
under `#[cfg(test)]`, which are at the end of their files here. A line with code and a comment counts. Macros and
multi-line strings count with all their lines.
"""

import argparse
import re
import subprocess
from collections import Counter
from pathlib import PurePosixPath

TEST_DIRECTORIES = {"tests", "testing", "examples", "benches"}
TEST_FILES = re.compile(r"(_tests|^tests|^testing|_for_tests|^conftest|^test_.*)\.(rs|py)$")
DOCSTRING = re.compile(r'^\s*(r|f)?"""')


def read(path: str, commit: str | None) -> str:
    """Returns the text of a file, in the working tree or at a commit."""
    if commit is None:
        return open(path, encoding="utf-8").read()
    return subprocess.run(["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=True).stdout


def files(commit: str | None) -> list[str]:
    """Returns the paths of all tracked source files of crates and Python packages, without tests."""
    command = ["git", "ls-files"] if commit is None else ["git", "ls-tree", "-r", "--name-only", commit]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    sources = (PurePosixPath(path) for path in listed if path.startswith(("crates/", "python/")))
    return [
        str(path)
        for path in sources
        if path.suffix in {".rs", ".py"}
        and not TEST_DIRECTORIES.intersection(path.parts)
        and not TEST_FILES.search(path.name)
    ]


def rust_lines(text: str) -> int:
    """Returns the number of lines of Rust code before the tests of a file."""
    count, in_comment = 0, False
    for line in text.split("#[cfg(test)]\nmod tests {")[0].splitlines():
        line = line.strip()
        if in_comment or line.startswith("/*"):
            in_comment = "*/" not in line
        elif line and not line.startswith("//"):
            count += 1
    return count


def python_lines(text: str) -> int:
    """Returns the number of lines of Python code, without docstrings."""
    count, in_docstring = 0, False
    for line in text.splitlines():
        if in_docstring:
            in_docstring = '"""' not in line
        elif DOCSTRING.match(line):
            in_docstring = line.count('"""') == 1
        elif line.strip() and not line.strip().startswith("#"):
            count += 1
    return count


def count(commit: str | None) -> Counter:
    """Returns the lines by crate or package."""
    lines = Counter()
    for path in files(commit):
        text = read(path, commit)
        lines["/".join(path.split("/")[:2])] += rust_lines(text) if path.endswith(".rs") else python_lines(text)
    return lines


def main() -> None:
    """Prints a table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--before", metavar="COMMIT", help="also print the lines at this commit")
    args = p.parse_args()
    now = count(None)
    before = count(args.before) if args.before else now
    for name in sorted(now | before):
        print(f"{name:24} {before[name]:7} {now[name]:7} {now[name] - before[name]:+7}")
    print(f"{'all':24} {before.total():7} {now.total():7} {now.total() - before.total():+7}")


if __name__ == "__main__":
    main()
