"""Makes a corpus and questions for Search-R1: about a made-up country, or from files of Natural Questions, HotpotQA
and 2WikiMultiHopQA.

    python3 prepare.py                                                     # made-up, into data/
    python3 prepare.py --nq nq-train.jsonl --passages nq-passages.jsonl    # open Natural Questions
    python3 prepare.py --hops hotpot_train_v1.1.json                       # HotpotQA's or 2Wiki's own file

Files of yours become data/own.jsonl and data/own-passages.jsonl. Demonstrations search for what a question is about,
one search a hop, and answer with what is expected.
"""

import argparse
import json
import random
from pathlib import Path

BEGINNINGS = "Var Kel Mor Tir Os Bra Lun Fen Gal Hol Ister Jor Quin Rav Sol Thal Ulm Wen Yar Zel".split()
ENDINGS = "holt mere dale wick burg stead ford garth haven moor".split()
FIRST = (
    "Ada Bruno Clara Dario Elin Falk Greta Hugo Ines Joris Karla Leif Mira Nils Olga Pavel Rosa Sven Tilda Uwe".split()
)
LAST = "Krell Brandt Osei Lindqvist Moreau Tanaka Varga Holm Ruiz Petrov Aydin Keller Nowak Silva Byrne Costa".split()
TRADES = ["glass", "copper", "wool", "salt", "paper", "amber", "tiles", "honey", "clocks", "boats"]
RIVERS = ["Arn", "Belo", "Cirth", "Dovra", "Esk", "Fara", "Gilda", "Harn"]


def search(*queries):
    """A turn that searches: once, for each of these."""
    return [
        {"content": "", "tool_calls": [{"function": {"name": "search", "arguments": {"query": query}}}]}
        for query in queries
    ]


def made_up(seed, count):
    """Questions of one hop and two about towns and people, and the passages."""
    draws = random.Random(seed)
    towns = draws.sample([a + b for a in BEGINNINGS for b in ENDINGS], count)
    people = draws.sample([f"{a} {b}" for a in FIRST for b in LAST], count)
    passages, tasks = [], []
    for at, (town, mayor) in enumerate(zip(towns, people, strict=True)):
        # Towns and mayors are from elsewhere, so the second hop is another passage.
        born, river, trade = towns[(at + 7) % count], draws.choice(RIVERS), draws.choice(TRADES)
        founded, living = draws.randint(900, 1800), draws.randint(11, 99) * 100
        passages += [
            {
                "id": f"town-{at}",
                "title": town,
                "text": f"{town} is a town on the river {river}. It was founded in {founded} and has {living} inhabitants. "
                f"It is known for its {trade}. The mayor of {town} is {mayor}.",
            },
            {"id": f"person-{at}", "title": mayor, "text": f"{mayor} is a politician who was born in {born}."},
        ]
        tasks += [
            (f"Who is the mayor of {town}?", mayor, search(town)),
            (f"In which year was {town} founded?", str(founded), search(town)),
            (f"On which river is {town}?", river, search(town)),
            (f"What is {town} known for?", trade, search(town)),
            (f"In which town was {mayor} born?", born, search(mayor)),
            (f"In which town was the mayor of {town} born?", born, search(town, mayor)),
        ]
    draws.shuffle(tasks)
    rows = []
    for question, answer, searches in tasks:
        hops = len(searches)
        row = {"question": question, "golden_answers": [answer], "hops": hops}
        rows.append(row | {"demonstration": [*searches, f"<answer>{answer}</answer>"]})
    return rows, passages


def lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def natural(questions, passages):
    """Open Natural Questions: `question`, `golden_answers`. One search, for the question itself."""
    rows = []
    for row in lines(questions):
        turns = [*search(row["question"]), f"<answer>{row['golden_answers'][0]}</answer>"]
        rows.append(row | {"demonstration": turns})
    return rows, lines(passages)


def several_hops(path):
    """HotpotQA's and 2WikiMultiHopQA's own JSON: `context` is a list of titles with their sentences, and
    `supporting_facts` says which of them are needed, in order."""
    asked, rows, passages, known = json.loads(Path(path).read_text(encoding="utf-8")), [], [], set()
    for row in asked:
        for title, sentences in row["context"]:
            text = (
                "".join(sentences).strip() if any(s.startswith(" ") for s in sentences) else " ".join(sentences).strip()
            )
            if text and (title, text) not in known:
                known.add((title, text))
                passages.append({"id": str(len(passages)), "title": title, "text": text})
    for row in asked:
        titles = list(dict.fromkeys(title for title, _ in row["supporting_facts"]))
        turns = [*search(*titles), f"<answer>{row['answer']}</answer>"]
        kind = {"question": row["question"], "golden_answers": [row["answer"]], "data_source": row.get("type", "hops")}
        rows.append(kind | {"hops": len(titles), "demonstration": turns})
    return rows, passages


def write(folder, name, questions, passages):
    if not questions:
        raise SystemExit(f"there are no questions for {name}")
    folder.mkdir(parents=True, exist_ok=True)
    for file, rows in [(name, questions), (f"{name}-passages", passages)]:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{file}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder / file}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nq", metavar="FILE", help="questions with golden_answers, as JSON lines")
    parser.add_argument("--passages", metavar="FILE", help="their passages: id, title, text")
    parser.add_argument("--hops", metavar="FILE", help="HotpotQA's or 2WikiMultiHopQA's JSON")
    parser.add_argument("--towns", type=int, default=150, help="made-up towns, at most 200; six questions on each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    args = parser.parse_args()
    if bool(args.nq) != bool(args.passages):
        parser.error("--nq and --passages go together")
    if args.nq:
        write(args.out, "own", *natural(args.nq, args.passages))
    elif args.hops:
        write(args.out, "own", *several_hops(args.hops))
    else:
        write(args.out, "made-up", *made_up(args.seed, min(args.towns, 200)))
