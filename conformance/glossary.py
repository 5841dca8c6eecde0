"""Lists the identifiers of the Rust code that use a replaced word, such as `folder` or `reply`.

A name whose word has a meaning that stays (the path of a file, a turn of a conversation) is explained by KEPT and not
listed. Stored names and aliases are strings, which are not read.

    python3 conformance/glossary.py              # the names, and how many there are
    python3 conformance/glossary.py --explained  # also the number of uses that each explanation covers
"""

import argparse
import collections
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = """
folder folders place places answer answers answered reply replies replied ask asks asked asking say says said others
turn turns share shares begin begins begun began most longest least fewest shortest whole given words draw draws drawn
drew held cut cuts uncut refuse refused refuses refusal path fault faults member members thought thoughts tell tells
told form piece pieces product left right gone dead died alive alone summarise recognise optimiser normaliser nobody
whoever evidence adopt adopts adopted keeper apart shared earn earner earned beside slope slopes strip around away
trouble rehearse survey settle recall charge learnt idle sight
"""
REPLACED = set(WORDS.split())
# Word, the meaning that stays, and the names that have it: a regular expression of the name, or of any name if it is
# empty. A fourth entry, if any, is a regular expression of the file: elsewhere the word does not have this meaning.
KEPT = [
    ("path", "the path of a file, an HTTP path, or a path within JSON or a template", ""),
    ("turn", "a model call in a conversation and what follows it", ""),
    ("turns", "model calls in a conversation", ""),
    ("words", "words of a text, or machine words of a vector register", ""),
    ("answer", "the answer to a task", ""),
    ("answers", "answers to a task", ""),
    ("answered", "an attempt or a task has a final answer", ""),
    ("held", "tasks that are held out from training", r"(?i)held_?out"),
    ("left", "a side: of text that is truncated, of an equation, of a bracket; or what remains", ""),
    ("right", "a side: of text that is truncated, of an equation, of a bracket", ""),
    ("idle", "a device, a process, a connection or a service without work", ""),
    ("product", "a product of numbers or sets", ""),
    ("members", "members of a set, of an archive or of a JSON object", ""),
    ("member", "a member of a set, of an archive or of a JSON object", ""),
    ("refusal", "the key of OpenAI's API", ""),
    ("share", "sharing: two things share a third", "share_|shares_"),
    ("shares", "sharing: one thing shares a part of another", "shares_"),
    ("least", "a minimum in an established term", "least_(loaded|recently|one)|LeastLoaded|at_least|least_as_new"),
    ("most", "a maximum in an established term", "at_most"),
    ("place", "an operation in place", "in_place"),
    ("held", "text or memory that is held back or held", "^held_|^HeldText$"),
    ("held", "a lease that a trainer holds", "^is_held$", "^crates/store_mongo/"),
    ("nobody", "the user `nobody` of Unix", "^NOBODY$"),
    ("nobody", "the result of a vote by which no player dies", "^Nobody$", "^crates/game/"),
    ("dead", "the lint `dead_code`", "^dead_code$"),
    ("gone", "the HTTP status 410", "^GONE$"),
    ("begin", "LaTeX's `\\begin`", "^[Bb]egin$", "^crates/reward/src/maths/"),
    ("draw", "indicatif's types", "^ProgressDrawTarget$|^with_draw_target$"),
    ("piece", "the tokenizer WordPiece", "^WordPiece$"),
    ("dead", "players of a game who have died", "^dead$", "^crates/game/"),
    (
        "draw",
        "a recipe key that is named so",
        "^draw$|^PastDraw$",
        "^crates/(recipe/src/(policy|lib)|trainer/(src|tests/trainer)/past)",
    ),
    ("draw", "drawing a picture", "^draw(_|$)", "^crates/cli/src/inspect"),
    ("draw", "a match without a winner", "^draw$", "^crates/game/src/tic_tac_toe.rs"),
    ("drawn", "a match without a winner", "^drawn$", "^crates/(game/src/tic_tac_toe|cli/src/play/elo).rs"),
    ("most", "the most votes", "^most_votes$", "^crates/game/"),
    (
        "say",
        "the public statement of a player, whose key is `say`",
        "^say$",
        "^crates/(game|agent/src/game|cli/src/play)",
    ),
    ("around", "values on both sides of a bound", "values_around"),
    ("longest", "the longest of several", ""),
    ("shortest", "the shortest of several", ""),
    ("fewest", "the fewest of several", ""),
    ("strip", "removal of a prefix, a suffix or tags from a text", r"strip_|^strip$|Strip"),
    ("pieces", "pieces of a tokenizer's vocabulary", "", "^crates/text/src/(sentencepiece|tokenizer)"),
    ("shared", "data that threads, calls or sequences share", ""),
    ("alive", "whether a process runs, a connection is kept open, or a player of a game lives", ""),
    ("whole", "an integer of a template language or of mathematics", r"^whole$"),
    ("most", "the most likely token", r"most_(likely|common|recent)"),
    ("longest", "the longest prefix of a set", r"longest_\w*(prefix|record)"),
    ("shortest", "the shortest decimal number", "shortest_decimal"),
    ("fault", "a fault that a test injects", "(?i)fault"),
    ("faults", "faults that a test injects", "(?i)fault"),
    ("folder", "a recipe key that is named so", "^folder$|^Folder$"),
    ("form", "a form of a sentence, a number or a message, or the canonical form of any of these", ""),
    ("given", "an argument that was passed", ""),
]
# What is no identifier: strings, raw or of several lines, and comments. A character that is a quote starts no string.
TEXT = re.compile(r"""b?r(?P<hashes>#*)"(?:.|\n)*?"(?P=hashes)|"(?:[^"\\]|\\.)*"|'"'|//[^\n]*""", re.S)


def names() -> list[tuple[str, str]]:
    """Returns all identifiers in the code with their locations. Some belong to other crates."""
    files = subprocess.run(["git", "ls-files", "crates/*.rs"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = []
    for file in files.stdout.split():
        code = TEXT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), (ROOT / file).read_text())
        for number, line in enumerate(code.split("\n"), 1):
            found += [(name, f"{file}:{number}") for name in re.findall(r"[A-Za-z_]\w*", line)]
    return found


def explanation(word: str, name: str, file: str) -> str | None:
    """Returns the meaning in which a name in a file may use a replaced word, or None."""
    for kept, meaning, names, *files in KEPT:
        if kept == word and re.search(names, name) and all(re.search(pattern, file) for pattern in files):
            return meaning
    return None


def main() -> None:
    """Prints the names without an explanation, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--explained", action="store_true", help="print the number of uses of each explanation")
    args = parser.parse_args()
    explained, rest = collections.Counter(), collections.defaultdict(list)
    for name, location in names():
        parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}
        for word in sorted(parts & REPLACED):
            meaning = explanation(word, name, location)
            if meaning is None:
                rest[name].append(location)
            else:
                explained[f"{word}: {meaning}"] += 1
    for name, locations in sorted(rest.items()):
        print(f"{name:32} {', '.join(locations[:3])}{' …' if len(locations) > 3 else ''}")
    if args.explained:
        for meaning, count in explained.most_common():
            print(f"{count:6} {meaning}")
    print(f"{len(rest)} names with a replaced word are not explained; {sum(explained.values())} uses are")


if __name__ == "__main__":
    main()
