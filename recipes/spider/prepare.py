"""Makes the tasks of the recipe from a folder in Spider's layout: `train_spider.json`, `dev.json`, `tables.json` and
`database/NAME/NAME.sqlite`.

    python3 prepare.py                      # made-up databases in this layout, in data/made-up
    python3 prepare.py --spider spider/     # Spider's own

The questions of dev.json are about other databases than those of train_spider.json. A task has the question, its
database (`db_id`), the database's schema as text, the expected query and its demonstration. Questions whose expected
query fails are left out and counted. The shapes of the made-up databases are those of recipes/sql.
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

HERE = Path(__file__).resolve().parent


def load(path):
    """Returns a module of another recipe, whatever its name."""
    if not path.is_file():
        raise SystemExit(f"{path} does not exist, but its databases are needed: copy the recipe sql next to this one")
    spec = importlib.util.spec_from_file_location(f"levade_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def harder(shape, draws):
    """Yields questions with their queries without end: subqueries, groups that are ordered or averaged, set operations."""
    t, n, c, values, first, second, about = shape
    while True:
        x, v = draws.choice([first, second]), draws.choice(values)
        k, z = draws.randint(30, 80) * (10 if x == first else 1), draws.randint(20, 80) * 100
        label = {column: column.replace("_", " ") for column in (n, c, x, about)}
        yield draws.choice(
            [
                (
                    f"What are the smallest and the largest {label[x]} of the {t}s?",
                    f"SELECT MIN({x}), MAX({x}) FROM {t}",
                ),
                (f"How many different {label[c]}s do the {t}s have?", f"SELECT COUNT(DISTINCT {c}) FROM {t}"),
                (
                    f"List the {label[n]} of every {t} with {label[x]} above the average.",
                    f"SELECT {n} FROM {t} WHERE {x} > (SELECT AVG({x}) FROM {t})",
                ),
                (
                    f"List the {label[n]} of every {t} with the {label[c]} {v} and {label[x]} below {k}.",
                    f"SELECT {n} FROM {t} WHERE {c} = '{v}' AND {x} < {k}",
                ),
                (
                    f"Which {label[c]} has the most {t}s?",
                    f"SELECT {c} FROM {t} GROUP BY {c} ORDER BY COUNT(*) DESC LIMIT 1",
                ),
                (
                    f"What is the average {label[x]} of the {t}s for each {label[c]}?",
                    f"SELECT {c}, AVG({x}) FROM {t} GROUP BY {c}",
                ),
                (
                    f"Which {label[c]}s have {label[about]} above {z} but no {t} with {label[x]} above {k}?",
                    f"SELECT {c} FROM {c} WHERE {about} > {z} EXCEPT SELECT {c} FROM {t} WHERE {x} > {k}",
                ),
            ]
        )


def make_up(sql, folder, counts, draws):
    """Writes made-up databases and questions in Spider's layout. Both kinds of questions occur equally often."""
    shutil.rmtree(folder, ignore_errors=True)
    tables = []
    for name, shapes, count in zip(("train_spider.json", "dev.json"), (sql.TRAIN, sql.DEV), counts, strict=True):
        sources, seen, rows = [], set(), []
        for db_id, shape in shapes.items():
            path = folder / "database" / db_id / f"{db_id}.sqlite"
            path.parent.mkdir(parents=True)
            content = sql.database(path, shape, draws)
            sources += [(db_id, path, sql.questions(shape, content, draws)), (db_id, path, harder(shape, draws))]
            tables.append(description(db_id, shape))
        while len(rows) < count:
            db_id, path, questions = sources[len(rows) % len(sources)]
            question, query = next(questions)
            found = sql.run(path, query)[0]
            if (db_id, question) in seen or not found or found in ([(None,)], [(0,)]):
                continue
            seen.add((db_id, question))
            rows.append({"db_id": db_id, "question": question, "query": query})
        (folder / name).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (folder / "tables.json").write_text(json.dumps(tables, indent=1), encoding="utf-8")


def description(db_id, shape):
    """Returns the entry of tables.json for a made-up database. Column 0 stands for all columns, as in Spider."""
    table, name, category, _, first, second, about = shape
    columns = [[-1, "*"], *([0, column] for column in (name, category, first, second)), [1, category], [1, about]]
    return {
        "db_id": db_id,
        "table_names_original": [table, category],
        "column_names_original": columns,
        "foreign_keys": [[2, 5]],
    }


def schema(entry):
    """Returns the tables of a database with their columns, and the foreign keys, as text."""
    names, columns = entry["table_names_original"], entry["column_names_original"]
    lines = [
        f"{table}({', '.join(column for owner, column in columns if owner == index)})"
        for index, table in enumerate(names)
    ]
    full = [f"{names[owner]}.{column}" for owner, column in columns]
    lines += [f"{full[column]} = {full[other]}" for column, other in entry["foreign_keys"]]
    return "\n".join(lines)


def read(folder, name):
    """Returns a file of Spider."""
    path = folder / name
    if not path.is_file():
        raise SystemExit(
            f"{path} does not exist: {folder} must contain train_spider.json, dev.json, tables.json, database/"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def fails(path, query):
    """Returns whether a query fails on a database."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as file:
            file.execute(query).fetchone()
    except (sqlite3.Error, sqlite3.Warning):
        return True
    return False


def tasks(folder, name, schemas):
    """Yields the tasks of a file of Spider whose expected queries run."""
    for row in read(folder, name):
        db_id = row["db_id"]
        path = folder / "database" / db_id / f"{db_id}.sqlite"
        if db_id not in schemas:
            raise SystemExit(f"{folder / 'tables.json'} has no database {db_id!r}, which {name} names")
        if not path.is_file():
            raise SystemExit(f"{path} does not exist, but {name} has questions about it")
        query = " ".join(row["query"].split())
        if not fails(path.resolve(), query):
            task = {"question": row["question"], "db_id": db_id, "schema": schemas[db_id], "query": query}
            # For `write`, and for both calls of `rewrite`, if `check` rejects even a right query.
            yield task | {"demonstration": [query] * 3}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spider", type=Path, metavar="FOLDER", help="Spider's folder, instead of made-up databases")
    parser.add_argument("--count", type=int, default=600, help="number of made-up questions to train on")
    parser.add_argument("--held-out", type=int, default=200, help="number of made-up questions to evaluate on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    args = parser.parse_args()
    folder = (args.spider or args.out / "made-up").resolve()
    if not args.spider:
        sql = load(HERE.parent / "sql" / "prepare.py")
        make_up(sql, folder, (args.count, args.held_out), random.Random(args.seed))
    schemas = {entry["db_id"]: schema(entry) for entry in read(folder, "tables.json")}
    args.out.mkdir(parents=True, exist_ok=True)
    for name, output in (("train_spider.json", "train.jsonl"), ("dev.json", "dev.jsonl")):
        rows = list(tasks(folder, name, schemas))
        (args.out / output).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        left = len(read(folder, name)) - len(rows)
        print(f"{args.out / output}: {len(rows)} tasks; {left} left out, because their expected query fails")
    # The recipe reads databases in its own folder.
    link = args.out / "databases"
    if link.is_symlink():
        link.unlink()
    if link.exists():
        raise SystemExit(f"{link} exists and is no link: remove it, or name another --out")
    os.symlink(folder / "database", link)
