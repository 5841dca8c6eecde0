"""A LangGraph agent that answers questions about a database, after Agent Lightning's example for Spider.

    write → execute → check → end
               ↑        │
               └ rewrite ┘

`write`, `check` and `rewrite` call the model, each as its own agent, which the header `x-levade-agent` names. `check`
reads the result of a query and accepts or rejects the query, which is then rewritten, at most twice. The process stays
alive, because LangGraph takes seconds to load. It reads a line of JSON for each attempt.

The last line of an attempt has the rewards of each agent's own part: of `write` whether its query is right (0 or 1), of
`rewrite` by how much it changed that (-1 to 1). Their sum is 1 if the last query is right, and 0 otherwise. `check` has
only a figure, the fraction of right verdicts.

Needs `pip install langgraph langchain-openai`.
"""

import itertools
import json
import operator
import re
import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Annotated, TypedDict

import httpx
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

DATABASES = Path("data/databases")
MAX_REWRITES = 2
# Maximum number of steps of SQLite's virtual machine in a query, in thousands. A timeout would depend on the machine's
# load, and so would the rewards.
MAX_STEPS = 20_000
# Maximum numbers of rows and columns of a result that is compared, and of its characters that the model reads.
MAX_ROWS, MAX_COLUMNS, MAX_SHOWN = 10_000, 5, 120

WRITE = "Write one SQLite query that answers the question. Reply with the query alone."
REWRITE = "The SQLite query does not answer the question. Reply with the corrected query alone."
CHECK = "Reply OK if the result has rows, or Error."
# Query, result and verdict.
EXAMPLES = [
    ("SELECT COUNT(*) FROM cat", "12", "OK"),
    ("SELECT age FROM cats", "Error: no such table: cats", "Error"),
    ("SELECT name FROM cat WHERE age > 9", "Tom | Kim", "OK"),
    ("SELECT name FROM cat WHERE age > 99", "no rows", "Error"),
    ("SELECT weigth FROM cat WHERE name = 'Kim'", "Error: no such column: weigth", "Error"),
]
VERDICTS = ["OK", "Error"]

# Clients of many attempts share the connections of one.
HTTP = httpx.Client(limits=httpx.Limits(max_connections=None), timeout=600)


class State(TypedDict):
    task: dict
    query: str
    result: str
    rewrites: int
    right: Annotated[list, operator.add]  # for each executed query, whether it is right
    accepted: Annotated[list, operator.add]  # for each verdict, whether it accepts the query


def call(config, agent, messages, **parameters):
    """Returns the completion of an agent for (role, content) messages."""
    model = config["configurable"]["model"]
    reply = model.invoke(messages, extra_headers={"x-levade-agent": agent}, **parameters)
    return str(reply.content)


def extract_query(text):
    """Returns the query in a completion, on one line."""
    fenced = re.search(r"```(?:sql)?\s*(.*?)```", text, re.DOTALL)
    return " ".join((fenced.group(1) if fenced else text).split())


def question(state):
    return f"{state['task']['row']['schema']}\nQuestion: {state['task']['question']}"


def write(state, config):
    reply = call(config, "write", [("system", WRITE), ("user", question(state))])
    return {"query": extract_query(reply), "rewrites": 0}


def database(name):
    """Returns the file of a database."""
    if not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"{name!r} is not a name of a database: letters, digits, `_` and `-`")
    return DATABASES / name / f"{name}.sqlite"


def read(path, query):
    """Returns the rows of a query, which cannot write."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        # `mode=ro` concerns this file only: ATTACH and VACUUM INTO would open and write other files.
        file.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        file.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)
        steps = itertools.count()
        file.set_progress_handler(lambda: next(steps) >= MAX_STEPS, 1000)
        return file.execute(query).fetchmany(MAX_ROWS)


def execute(state):
    row = state["task"]["row"]
    path = database(row["db_id"])
    try:
        rows, result = read(path, state["query"]), "no rows"
        if rows:
            result = ", ".join(" | ".join(str(value) for value in row) for row in rows[:4])
    except (sqlite3.Error, sqlite3.Warning) as error:
        rows, result = None, f"Error: {error}"
    expected = read(path, row["query"])
    right = rows is not None and is_same(rows, expected, "order by" in row["query"].lower())
    return {"result": result[:MAX_SHOWN], "right": [right]}


def is_same(rows, expected, ordered):
    """Returns whether two results are equal with some order of the columns, and if not `ordered` with any of rows."""
    if len(rows) != len(expected) or len(rows[0] if rows else ()) != len(expected[0] if expected else ()):
        return False
    if not rows:
        return True
    rounded = [[round(value, 6) if isinstance(value, float) else value for value in row] for row in rows]
    wanted = [[round(value, 6) if isinstance(value, float) else value for value in row] for row in expected]
    arrange = list if ordered else (lambda items: sorted(items, key=repr))
    width = len(rows[0])
    orders = itertools.permutations(range(width)) if width <= MAX_COLUMNS else [range(width)]
    target = arrange(wanted)
    return any(arrange([[row[index] for index in order] for row in rounded]) == target for order in orders)


def check(state, config):
    messages = [("system", CHECK)]
    for query, result, verdict in EXAMPLES:
        messages += [("user", f"Query: {query}\nResult: {result}"), ("assistant", verdict)]
    messages.append(("user", f"Query: {state['query']}\nResult: {state['result']}"))
    reply = call(config, "check", messages, extra_body={"guided_choice": VERDICTS})
    return {"accepted": [reply.strip() == VERDICTS[0]]}


def next_step(state):
    return END if state["accepted"][-1] or state["rewrites"] == MAX_REWRITES else "rewrite"


def rewrite(state, config):
    failed = f"{question(state)}\nQuery: {state['query']}\nResult: {state['result']}"
    query = extract_query(call(config, "rewrite", [("system", REWRITE), ("user", failed)]))
    return {"query": query, "rewrites": state["rewrites"] + 1}


def build():
    graph = StateGraph(State)
    for node in (write, execute, check, rewrite):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "write")
    graph.add_edge("write", "execute")
    graph.add_edge("execute", "check")
    graph.add_conditional_edges("check", next_step, ["rewrite", END])
    graph.add_edge("rewrite", "execute")
    return graph.compile()


GRAPH = build()


def rewards(state):
    """Returns the rewards of each agent's own part of an attempt, and the figure of `check`."""
    right = [float(value) for value in state["right"]]
    agreed = [accepted == bool(value) for accepted, value in zip(state["accepted"], right, strict=True)]
    found = [
        {"name": "write", "value": right[0], "agent": "write"},
        {"name": "check", "value": sum(agreed) / len(agreed)},
    ]
    if state["rewrites"]:
        found.append({"name": "rewrite", "value": right[-1] - right[0], "agent": "rewrite"})
    return found


def connect(order):
    """Returns the configuration of a graph whose agents call the endpoint of an attempt."""
    address = {"base_url": order["base_url"], "api_key": order["api_key"], "http_client": HTTP}
    return {"configurable": {"model": ChatOpenAI(model=order["model"], max_retries=0, **address)}}


def run(order):
    """Makes an attempt and returns its last state."""
    return GRAPH.invoke({"task": order["task"], "right": [], "accepted": []}, connect(order))


PRINTING = threading.Lock()


def attempt(order):
    try:
        state = run(order)
        line = {"attempt": order["attempt"], "answer": state["query"], "rewards": rewards(state)}
    except Exception as error:  # one attempt that fails must not end the others
        line = {"attempt": order["attempt"], "error": f"{type(error).__name__}: {error}"[:500]}
    with PRINTING:
        print(json.dumps(line), flush=True)


def serve():
    """Makes the attempts that standard input requests, several at once."""
    with ThreadPoolExecutor(64) as threads:
        for line in sys.stdin:
            order = json.loads(line)
            if not order.get("stop"):
                threads.submit(attempt, order)


if __name__ == "__main__":
    serve()
