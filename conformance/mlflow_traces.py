"""Compares the traces of a run with its record: on a real MLflow server, and at a collector of OpenTelemetry.

Trains a recipe that uses tools, with `metrics.traces.otlp = "mlflow"`. Afterwards the server must have one trace for
each attempt of the record, found by its tags: with a model call for each turn, the tool calls between them, the score,
and times within the attempt's. The run is then sent again, which must add no trace, and sent to a collector that
decodes requests with OpenTelemetry's own protobuf classes and must see the same spans.
"""

import argparse
import gzip
import http.server
import json
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from mlflow_server import ROOT, Server


class Collector:
    """A collector that keeps the spans that it receives."""

    def __init__(self) -> None:
        self.spans = []
        spans = self.spans

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers["content-encoding"] == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def levade(arguments: argparse.Namespace, *command: str | Path) -> str:
    done = subprocess.run([arguments.levade, *command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"levade {command[0]} ended with {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def recorded(run: Path) -> dict[str, dict]:
    """Reads the attempts that count from the record, by the name of their slot."""
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as db:
        db.row_factory = sqlite3.Row
        where = "status IN ('completed', 'failed') AND purpose != 'demonstration'"
        rows = db.execute(f"SELECT * FROM attempts WHERE {where} ORDER BY number").fetchall()
    found = {}
    for row in rows:
        name = "/".join(str(row[key]) for key in ("purpose", "phase", "step", "grp", "sample"))
        found[name] = {"score": row["score"], "outcome": json.loads(row["outcome"])}
    return found


def check_trace(name: str, attempt: dict, trace: object) -> list[str]:
    """Compares a trace on the server with the attempt of the record. Returns the differences."""
    outcome, wrong = attempt["outcome"], []
    spans = trace.data.spans
    root = next(span for span in spans if span.parent_id is None)
    kinds = Counter(str(span.span_type) for span in spans)
    if kinds["CHAT_MODEL"] != outcome["turns"]:
        wrong.append(f"{kinds['CHAT_MODEL']} model calls, but {outcome['turns']} turns")
    tools = sum(outcome["calls"][kind] for kind in outcome["calls"] if kind != "bare")
    if kinds["TOOL"] < tools:
        wrong.append(f"{kinds['TOOL']} tool calls, but {tools} in the record")
    if any(span.parent_id != root.span_id for span in spans if span is not root):
        wrong.append("a span is not a child of the root")
    score = root.attributes.get("levade.score")
    if score != attempt["score"]:
        wrong.append(f"score {score}, but {attempt['score']} in the record")
    for span in spans:
        # A call that cannot be parsed is not executed, so its time is not measured.
        is_executed = span.name.partition("unreadable call")[1] == ""
        if is_executed and span.attributes["levade.time"] != "measured":
            wrong.append(f"the time of {span.name} was not measured")
        if not root.start_time_ns <= span.start_time_ns <= span.end_time_ns <= root.end_time_ns:
            wrong.append(f"{span.name} lies outside of the attempt")
        if (
            is_executed
            and str(span.span_type) == "TOOL"
            and not {"gen_ai.tool.call.arguments", "gen_ai.tool.name"} <= set(span.attributes)
        ):
            wrong.append(f"{span.name} lacks its arguments")
    answer = json.dumps(outcome["final_text"] or "", ensure_ascii=False)[1:-1]
    if answer not in json.dumps(root.outputs, ensure_ascii=False):
        wrong.append(f"the final answer {answer!r} is missing in {root.outputs!r}")
    tokens = sum(span.attributes.get("gen_ai.usage.output_tokens", 0) for span in spans)
    if tokens != outcome["sampled_tokens"]:
        wrong.append(f"{tokens} sampled tokens, but {outcome['sampled_tokens']} in the record")
    return [f"{name}: {why}" for why in wrong]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recipe", help="recipe with tools; use --set to make it short")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="recipe keys, as for `levade train`")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    arguments = p.parse_args()
    import mlflow

    with tempfile.TemporaryDirectory(prefix="levade-traces-") as name:
        directory = Path(name)
        server, run = Server(f"sqlite:///{directory}/store.db", directory), directory / "run"
        server.start()
        try:
            changes = [*arguments.set, f"metrics.mlflow={server.url}", "metrics.traces.otlp=mlflow"]
            sets = [part for change in changes for part in ("--set", change)]
            levade(arguments, "train", arguments.recipe, *sets, "--run", run)
            mlflow.set_tracking_uri(server.url)
            experiments = [e for e in mlflow.MlflowClient().search_experiments() if e.name != "Default"]
            location = [experiments[0].experiment_id]

            def traces(query: str = "") -> list:
                found = mlflow.search_traces(
                    locations=location, filter_string=query or None, return_type="list", max_results=5000
                )
                return list(found)

            attempts = recorded(run)
            found = {trace.info.tags["levade.attempt"]: trace for trace in traces()}
            if found.keys() != attempts.keys():
                sys.exit(f"{len(found)} traces, but {len(attempts)} attempts")
            wrong = [line for name, a in attempts.items() for line in check_trace(name, a, found[name])]
            with_tools = sum(sum(a["outcome"]["calls"].values()) > 0 for a in attempts.values())
            if wrong or not with_tools:
                sys.exit(f"{len(wrong)} differences, {with_tools} attempts with tools:\n" + "\n".join(wrong[:10]))
            spans = sum(len(trace.data.spans) for trace in found.values())
            print(f"ok    MLflow: {len(found)} traces, {spans} spans, {with_tools} attempts with tools", flush=True)

            # A user looks for the attempts of a step, for a sample, and for one attempt.
            name = next(name for name in attempts if name.startswith("train/"))
            _, phase, step, _group, sample = name.split("/")
            query = (
                f"tags.`levade.purpose` = 'train' AND tags.`levade.phase` = '{phase}' AND tags.`levade.step` = '{step}'"
            )
            in_step = [n for n in attempts if n.startswith(f"train/{phase}/{step}/")]
            in_sample = [n for n in in_step if n.endswith(f"/{sample}")]
            for part, expected in (
                (query, in_step),
                (f"{query} AND tags.`levade.sample` = '{sample}'", in_sample),
                (f"tags.`levade.attempt` = '{name}'", [name]),
            ):
                names = sorted(trace.info.tags["levade.attempt"] for trace in traces(part))
                if names != sorted(expected):
                    sys.exit(f"{part}: found {names}, expected {sorted(expected)}")
            print(
                f"ok    filters: {len(in_step)} attempts of a step, {len(in_sample)} of a sample, 1 by name", flush=True
            )

            levade(arguments, "traces", run, "--mlflow", server.url)
            if len(traces()) != len(attempts):
                sys.exit(f"{len(traces())} traces after the run was sent again, but {len(attempts)} attempts")
            print("ok    sent again: no further trace", flush=True)
        finally:
            server.stop()

        collector = Collector()
        levade(arguments, "traces", run, "--to", collector.url)
        names = Counter(span.name for span in collector.spans)
        expected = Counter(span.name for trace in found.values() for span in trace.data.spans)
        # MLflow tells equal names of a trace apart by a number.
        plain = Counter()
        for text, count in expected.items():
            head, _, tail = text.rpartition("_")
            plain[head if tail.isdigit() and head else text] += count
        if names != plain and names != expected:
            sys.exit(f"the collector has other spans than MLflow: {(names - plain) + (plain - names)}")
        ids = {span.span_id for span in collector.spans}
        if len(ids) != len(collector.spans) or any(len(span.trace_id) != 16 for span in collector.spans):
            sys.exit("span ids repeat, or trace ids have a wrong length")
        print(f"ok    OpenTelemetry collector: {len(collector.spans)} spans", flush=True)


if __name__ == "__main__":
    main()
