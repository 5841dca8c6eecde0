"""Makes SQLite databases and questions about them, as Spider has them: questions to train on and questions to evaluate
on are about different databases.

    python3 prepare.py                                                  # made-up databases, into data/
    python3 prepare.py --spider spider/ --databases spider/database     # Spider's own train_spider.json and dev.json

A task has the question, its database (`db_id`) and the query that is expected. Two lists of replies demonstrate: one
writes that query at once, the other a query that fails first, and then the corrected one.
"""

import argparse
import json
import os
import random
import re
import sqlite3
from contextlib import closing
from pathlib import Path

# For each database: table, column of names, of a category (with its values), of two numbers, and a second table about
# the category with a number of its own.
TRAIN = {
    "concerts": ("singer", "name", "country", ["France", "Japan", "Brazil", "Kenya"], "age", "albums", "population"),
    "library": ("book", "title", "genre", ["crime", "poetry", "history", "travel"], "release_year", "pages", "shelf"),
    "company": (
        "employee",
        "full_name",
        "department",
        ["sales", "research", "law", "design"],
        "salary",
        "age",
        "budget",
    ),
    "garage": ("car", "model", "maker", ["Volta", "Norda", "Kiri", "Astra"], "price", "horsepower", "founded"),
    "cinema": ("film", "title", "director", ["Lind", "Okafor", "Ruiz", "Sato"], "year", "minutes", "awards"),
    "atlas": ("river", "river_name", "continent", ["Africa", "Asia", "Europe", "America"], "length", "depth", "area"),
    "school": ("student", "name", "major", ["physics", "law", "music", "biology"], "age", "score", "professors"),
    "market": (
        "shop",
        "shop_name",
        "district",
        ["north", "south", "harbour", "old town"],
        "products",
        "rating",
        "rent",
    ),
    "kennel": ("dog", "name", "breed", ["collie", "beagle", "poodle", "husky"], "age", "weight", "lifespan"),
    "league": ("player", "player_name", "team", ["Lions", "Hawks", "Bears", "Wolves"], "goals", "matches", "titles"),
}
DEV = {
    "airport": ("plane", "model", "airline", ["Alta", "Borea", "Cirrus", "Delfin"], "seats", "speed", "fleet_size"),
    "museums": (
        "museum",
        "name",
        "city",
        ["Lyon", "Porto", "Turin", "Ghent"],
        "visitors",
        "opening_year",
        "inhabitants",
    ),
    "garden": ("plant", "plant_name", "family", ["rose", "mint", "palm", "daisy"], "height", "cost", "species"),
    "fleet": ("ship", "name", "flag", ["Malta", "Panama", "Norway", "Greece"], "tons", "crew", "ports"),
}
SYLLABLES = "ba de fi go lu ma ne ri so ta ve zu ka lo mi pa".split()


def words(column):
    return column.replace("_", " ")


def database(path, shape, draws):
    """Writes a database; returns its rows."""
    table, name, category, values, first, second, about = shape
    rows, names = [], set()
    while len(names) < 24:
        names.add("".join(draws.choices(SYLLABLES, k=3)).capitalize())
    for each in sorted(names):
        rows.append((each, draws.choice(values), draws.randint(1, 99) * 10, draws.randint(1, 99)))
    kinds = [(value, draws.randint(1, 99) * 100) for value in values]
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as file:
        columns = f"{name} TEXT, {category} TEXT, {first} INTEGER, {second} INTEGER"
        file.execute(f"CREATE TABLE {table} ({columns})")
        file.execute(f"CREATE TABLE {category} ({category} TEXT, {about} INTEGER)")
        file.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", rows)
        file.executemany(f"INSERT INTO {category} VALUES (?, ?)", kinds)
    file.close()
    return rows


def questions(shape, rows, draws):
    """Questions with their queries, without end."""
    t, n, c, values, first, second, about = shape
    while True:
        x, v, one = draws.choice([first, second]), draws.choice(values), draws.choice(rows)[0]
        k, most = draws.randint(20, 80) * (10 if x == first else 1), draws.choice(["largest", "smallest"])
        order, pick = ("DESC", "MAX") if most == "largest" else ("ASC", "MIN")
        few, z = draws.randint(2, 7), draws.randint(20, 80) * 100
        yield draws.choice(
            [
                (f"How many {t}s are there?", f"SELECT COUNT(*) FROM {t}"),
                (f"How many {t}s have the {words(c)} {v}?", f"SELECT COUNT(*) FROM {t} WHERE {c} = '{v}'"),
                (f"What is the average {words(x)} of all {t}s?", f"SELECT AVG({x}) FROM {t}"),
                (
                    f"What is the {most} {words(x)} of the {t}s with the {words(c)} {v}?",
                    f"SELECT {pick}({x}) FROM {t} WHERE {c} = '{v}'",
                ),
                (
                    f"Give the {words(n)} of the {t} with the {most} {words(x)}.",
                    f"SELECT {n} FROM {t} ORDER BY {x} {order} LIMIT 1",
                ),
                (
                    f"List the {words(n)} of every {t} whose {words(x)} is greater than {k}.",
                    f"SELECT {n} FROM {t} WHERE {x} > {k}",
                ),
                (f"How many {t}s are there for each {words(c)}?", f"SELECT {c}, COUNT(*) FROM {t} GROUP BY {c}"),
                (
                    f"Which {words(c)} has more than {few} {t}s?",
                    f"SELECT {c} FROM {t} GROUP BY {c} HAVING COUNT(*) > {few}",
                ),
                (f"What is the {words(x)} of the {t} {one}?", f"SELECT {x} FROM {t} WHERE {n} = '{one}'"),
                (
                    f"List the {words(n)} of every {t} whose {words(c)} has {words(about)} above {z}.",
                    f"SELECT {n} FROM {t} JOIN {c} ON {t}.{c} = {c}.{c} WHERE {about} > {z}",
                ),
            ]
        )


def run(path, query):
    """The rows of a query, or what is wrong with it."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
            return file.execute(query).fetchall(), None
    except sqlite3.Error as error:
        return [], str(error)


def broken(query, path, draws):
    """A slip in a query such as people make it, that the database refuses; None where none is found."""
    names = dict.fromkeys(re.findall(r"[a-z_]+", query.split("'")[0]))
    slips = [
        re.sub(rf"\b{name}\b", wrong, query) for name in names for wrong in (f"{name}s", f"{name}_id", f"the_{name}")
    ]
    slips += [query.replace("'", "", 1), query.replace(" FROM", "", 1), query.replace("(", "", 1)]
    draws.shuffle(slips)
    return next((slip for slip in slips if slip != query and run(path, slip)[1]), None)


def tasks(shapes, folder, count, draws):
    """So many questions about these databases, all different, whose answers are not empty."""
    open_to = []
    for name, shape in shapes.items():
        path = folder / f"{name}.sqlite"
        open_to.append((name, path, questions(shape, database(path, shape, draws), draws)))
    seen = set()
    while len(seen) < count:
        name, path, source = open_to[len(seen) % len(open_to)]
        question, query = next(source)
        found = run(path, query)[0]
        if (name, question) in seen or not found or found == [(None,)] or found == [(0,)]:
            continue
        seen.add((name, question))
        task = {"question": question, "db_id": name, "query": query, "demonstration": [query]}
        if slip := broken(query, path, draws):
            task["repair"] = [slip, query]
        yield task


def spider(file, databases, draws):
    """The tasks of one of Spider's own files."""
    for row in json.loads(file.read_text(encoding="utf-8")):
        query = " ".join(row["query"].split())
        task = {"question": row["question"], "db_id": row["db_id"], "query": query, "demonstration": [query]}
        path = databases / row["db_id"] / f"{row['db_id']}.sqlite"
        if path.is_file() and (slip := broken(query, path, draws)):
            task["repair"] = [slip, query]
        yield task


def write(path, rows):
    rows = list(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} tasks, {sum('repair' in row for row in rows)} with a repair")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spider", type=Path, metavar="FOLDER", help="with train_spider.json and dev.json")
    parser.add_argument("--databases", type=Path, metavar="FOLDER", help="Spider's databases, NAME/NAME.sqlite")
    parser.add_argument("--count", type=int, default=600, help="made-up questions to train on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    args = parser.parse_args()
    if bool(args.spider) != bool(args.databases):
        parser.error("--spider and --databases go together")
    draws, folder = random.Random(args.seed), args.out / "databases"
    args.out.mkdir(parents=True, exist_ok=True)
    # Of an earlier run with --spider: what is written through it would be among Spider's own files.
    if folder.is_symlink():
        folder.unlink()
    if args.spider:
        # The recipe reads databases in its own folder.
        if folder.exists():
            raise SystemExit(f"{folder} is there already: remove it, or give another --out")
        os.symlink(args.databases.resolve(), folder)
        write(args.out / "train.jsonl", spider(args.spider / "train_spider.json", args.databases, draws))
        write(args.out / "dev.jsonl", spider(args.spider / "dev.json", args.databases, draws))
    else:
        folder.mkdir(exist_ok=True)
        write(args.out / "train.jsonl", tasks(TRAIN, folder, args.count, draws))
        write(args.out / "dev.jsonl", tasks(DEV, folder, 160, draws))
