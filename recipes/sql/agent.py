"""An agent that answers questions about a database: it writes a query, runs it, and where that fails has it rewritten.

It stays alive, and reads a line of JSON for each attempt. Rewriting names another agent in the header of its call, so
that it can have a policy of its own. Needs nothing but Python 3.11.
"""

import json
import re
import sqlite3
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

DATABASES = Path("data/databases")
WRITE = "Write one SQLite query that answers the question. Reply with the query alone."
REWRITE = "A SQLite query did not work. Reply with the corrected query alone."
REWRITER = {"x-levade-agent": "rewrite"}
REPAIRS = 2


def database(name):
    """The file of a database, as Spider has it or alone."""
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"{name!r} is no name of a database")
    nested = DATABASES / name / f"{name}.sqlite"
    return nested if nested.is_file() else DATABASES / f"{name}.sqlite"


def read(path, query, rows=50):
    """The first rows that a query gives. It cannot write, and ends after two seconds."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        # `mode=ro` is about this file alone: ATTACH and VACUUM INTO would open and write others.
        file.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        stop = threading.Timer(2, file.interrupt)
        stop.start()
        try:
            return file.execute(query).fetchmany(rows)
        finally:
            stop.cancel()


def wrong(path, query):
    """What is wrong with a query, in words; None where it gives rows."""
    try:
        return None if read(path, query) else "it gives no rows"
    except (sqlite3.Error, sqlite3.Warning) as error:
        return str(error)


def ask(order, system, words, **headers):
    """The model's reply, as a query on one line."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": words}]
    request = urllib.request.Request(
        f"{order['base_url']}/chat/completions",
        json.dumps({"model": order["model"], "messages": messages}).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {order['api_key']}",
            **headers,
        },
    )
    with urllib.request.urlopen(request) as reply:
        said = json.load(reply)["choices"][0]["message"]["content"] or ""
    fenced = re.search(r"```(?:sql)?\s*(.*?)```", said, re.DOTALL)
    return " ".join((fenced.group(1) if fenced else said).split())


def answer(order):
    """The last query, right or not."""
    task = order["task"]
    path = database(task["row"]["db_id"])
    schema = "\n".join(sql for (sql,) in read(path, "SELECT sql FROM sqlite_master WHERE type = 'table' AND sql <> ''"))
    asked = f"{schema}\nQuestion: {task['question']}"
    query = ask(order, WRITE, asked)
    for _ in range(REPAIRS):
        why = wrong(path, query)
        if why is None:
            break
        query = ask(order, REWRITE, f"{asked}\nQuery: {query}\nError: {why}", **REWRITER)
    return query


PRINTING = threading.Lock()


def attempt(order):
    try:
        said = {"attempt": order["attempt"], "answer": answer(order)}
    except Exception as error:  # one attempt that fails is not to end the others
        said = {"attempt": order["attempt"], "error": f"{type(error).__name__}: {error}"[:500]}
    with PRINTING:
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    with ThreadPoolExecutor(64) as threads:
        for line in sys.stdin:
            order = json.loads(line)
            if not order.get("stop"):
                threads.submit(attempt, order)
