"""Lists the identifiers of the Rust code that use a replaced word, such as `folder` or `reply`.

CONTRIBUTING.md has the words that the project uses. A name whose word has a meaning that stays (the path of a file, a
turn of a conversation) is explained by KEPT and not listed. Stored names and aliases are strings, which are not read.

    python3 conformance/glossary.py              # the names, and how many there are
    python3 conformance/glossary.py --explained  # also the number of names that each explanation covers
"""

import argparse
import collections
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPLACED = set(
    """folder folders place places answer answers answered reply replies replied ask asks asked asking say says said others
    turn turns share shares begin begins begun began most longest least fewest shortest whole given words draw draws drawn
    drew held cut cuts uncut refuse refused refuses refusal path fault faults member members thought thoughts tell tells
    told form piece pieces product left right gone dead died alive alone summarise recognise optimiser normaliser nobody
    whoever evidence adopt adopts adopted keeper apart shared earn earner earned beside slope slopes strip around away
    trouble rehearse survey settle recall charge learnt idle sight""".split()
)
# Word, the meaning that stays, and the names that have it (a regular expression; of any name if it is empty).
KEPT = [
    ("path", "the path of a file, an HTTP path, or a path within JSON or a template", ""),
    ("turn", "a model call in a conversation and what follows it", ""),
    ("turns", "model calls in a conversation", ""),
    ("words", "words of a text, or machine words of a vector register", ""),
    ("answer", "the answer to a task", ""),
    ("answers", "answers to a task", ""),
    ("answered", "an attempt or a task has a final answer", ""),
    ("held", "tasks that are held out from training", r"held_?out|HeldOut"),
    ("left", "a side: of text that is truncated, of an equation, of a bracket; or what remains", ""),
    ("right", "a side: of text that is truncated, of an equation, of a bracket", ""),
    ("idle", "a device, a connection or a worker without work", ""),
    ("product", "a product of numbers or sets", ""),
    ("members", "members of a set, of an archive or of a JSON object", ""),
    ("member", "a member of a set, of an archive or of a JSON object", ""),
    ("refusal", "the key of OpenAI's API", ""),
    ("share", "sharing: two things share a third", "share_|shares_"),
    ("shares", "sharing: one thing shares a part of another", "shares_"),
    ("least", "a minimum in an established term", "least_(loaded|recently|one)|at_least|least_as_new"),
    ("most", "a maximum in an established term", "at_most"),
    ("place", "an operation in place", "in_place"),
    ("held", "text or memory that is held back or held", "^held_"),
    ("around", "values on both sides of a bound", "values_around"),
    ("longest", "the longest of several", ""),
    ("shortest", "the shortest of several", ""),
    ("fewest", "the fewest of several", ""),
    ("strip", "removal of a prefix, a suffix or tags from a text", r"strip_|^strip$|Strip"),
    ("pieces", "pieces of SentencePiece's vocabulary", ""),
    ("piece", "a piece of SentencePiece's vocabulary", ""),
    ("shared", "data that threads, calls or sequences share", ""),
    ("alive", "whether a process runs", ""),
    ("whole", "an integer of a template language or of mathematics", r"^whole$"),
    ("most", "the most likely token", r"most_(likely|common|recent)"),
    ("longest", "the longest prefix of a set", r"longest_\w*(prefix|record)"),
    ("shortest", "the shortest decimal number", "shortest_decimal"),
    ("fault", "a fault that a test injects", "(?i)fault"),
    ("faults", "faults that a test injects", "(?i)fault"),
    ("folder", "a recipe key that is named so", "^folder$|^Folder$"),
    ("form", "a form of a sentence or of a number", ""),
    ("given", "an argument that was passed", ""),
    ("record", "writing to the store", ""),
]
DEFINITION = re.compile(
    r"\b(?:fn|struct|enum|trait|type|const|static|mod|let(?:\s+mut)?|for)\s+(\w+)|^\s*(?:pub(?:\([a-z]+\))?\s+)?(\w+):\s[^:]",
    re.M,
)


def names() -> list[tuple[str, str]]:
    """Returns the defined names with the places of their definitions."""
    files = subprocess.run(["git", "ls-files", "crates/*.rs"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = []
    for name in files.stdout.split():
        text = re.sub(r"//.*", "", (ROOT / name).read_text())
        for match in DEFINITION.finditer(text):
            found.append((match[1] or match[2], f"{name}:{text.count(chr(10), 0, match.start()) + 1}"))
    return found


def explanation(word: str, name: str) -> str | None:
    """Returns the meaning in which a name may use a replaced word, or None."""
    meanings = (meaning for kept, meaning, names in KEPT if kept == word and (not names or re.search(names, name)))
    return next(meanings, None)


def main() -> None:
    """Prints the names without an explanation, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--explained", action="store_true", help="print the number of names of each explanation")
    args = parser.parse_args()
    explained, rest = collections.Counter(), collections.defaultdict(list)
    for name, location in names():
        parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}
        for word in sorted(parts & REPLACED):
            meaning = explanation(word, name)
            if meaning is None:
                rest[name].append(location)
            else:
                explained[f"{word}: {meaning}"] += 1
    for name, locations in sorted(rest.items()):
        print(f"{name:32} {', '.join(locations[:3])}{' …' if len(locations) > 3 else ''}")
    if args.explained:
        for meaning, count in explained.most_common():
            print(f"{count:6} {meaning}")
    print(f"{len(rest)} names with a replaced word are not explained; {sum(explained.values())} definitions are")


if __name__ == "__main__":
    main()
