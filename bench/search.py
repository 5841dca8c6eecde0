"""Compares recall and speed of retrieval with bm25s, rank_bm25 and sentence-transformers, in one run.

Every side indexes the same passages and answers the same questions. recall@k is the fraction of questions whose
passage is among the first k. Levade's recall is measured over HTTP, its speed by `examples/scan`. You provide the
data: passages with `id`, `title`, `text`, and questions with `question`, `gold_document`.

Not covered: other corpora, GPUs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

ROOT = Path(__file__).resolve().parent.parent
KS = (1, 3, 10)


def rows(path: Path) -> list[dict]:
    with path.open() as file:
        return [json.loads(line) for line in file if line.strip()]


def recall(found: list[list[str]], gold: list[str]) -> str:
    fractions = [sum(want in ids[:k] for ids, want in zip(found, gold, strict=True)) / len(gold) for k in KS]
    return " / ".join(f"{value:.3f}" for value in fractions)


def print_result(name: str, found: list[list[str]], gold: list[str], index_s: float, per_second: float) -> None:
    print(
        f"{name:34} recall@1/3/10 {recall(found, gold)}  index {index_s:.2f} s  {per_second:,.0f} queries/s", flush=True
    )


class Server:
    """Runs `levade search serve` in one mode."""

    def __init__(self, levade: Path, index: Path, mode: str):
        command = [levade, "search", "serve", index, "--mode", mode, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if " at http://" in line:
                self.url = line.split(" at ")[1].strip()
                return
        sys.exit(f"{command} did not start")

    def ask(self, queries: list[str]) -> list[list[str]]:
        found = []
        for at in range(0, len(queries), 256):
            body = json.dumps({"queries": queries[at : at + 256], "topk": max(KS), "return_scores": True}).encode()
            request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=600) as answer:
                found += [[hit["document"]["id"] for hit in hits] for hits in json.load(answer)["result"]]
        return found

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


def ours(args: argparse.Namespace, queries: list[str], gold: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        index = Path(directory) / "index"
        for dense in ([], ["--dense", str(args.model)]):
            command = [args.levade, "search", "index", args.passages, "--out", index, *dense]
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            index_s = time.perf_counter() - started
            for mode in ("dense", "hybrid") if dense else ("bm25",):
                server = Server(args.levade, index, mode)
                try:
                    server.ask(queries[:32])
                    started = time.perf_counter()
                    found = server.ask(queries)
                    seconds = time.perf_counter() - started
                finally:
                    server.stop()
                print_result(f"levade {mode}, over HTTP", found, gold, index_s, len(queries) / seconds)
            if not dense:
                done = subprocess.run(
                    [args.scan, "bm25", index, args.questions, "2"], check=True, capture_output=True, text=True
                )
                rates = json.loads(done.stdout)["per_second"]
                print(
                    f"levade bm25, in process: {rates[0]:,.0f} to {rates[-1]:,.0f} queries/s, median {rates[len(rates) // 2]:,.0f}"
                )
                subprocess.run(["rm", "-r", index], check=True)


def bm25s_side(texts: list[str], ids: list[str], queries: list[str], gold: list[str]) -> None:
    import bm25s
    import Stemmer

    stemmer = Stemmer.Stemmer("english")
    started = time.perf_counter()
    corpus = bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False)
    retriever = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    retriever.index(corpus, show_progress=False)
    index_s = time.perf_counter() - started
    started = time.perf_counter()
    tokens = bm25s.tokenize(queries, stopwords="en", stemmer=stemmer, show_progress=False)
    found, _ = retriever.retrieve(tokens, k=max(KS), n_threads=2, show_progress=False)
    seconds = time.perf_counter() - started
    print_result("bm25s, stemmed", [[ids[at] for at in row] for row in found], gold, index_s, len(queries) / seconds)


def rank_bm25_side(texts: list[str], ids: list[str], queries: list[str], gold: list[str]) -> None:
    from rank_bm25 import BM25Okapi

    started = time.perf_counter()
    ranker = BM25Okapi([text.lower().split() for text in texts])
    index_s = time.perf_counter() - started
    some = range(0, len(queries), max(1, len(queries) // 200))
    started = time.perf_counter()
    found = [ranker.get_scores(queries[at].lower().split()).argsort()[::-1][: max(KS)] for at in some]
    seconds = time.perf_counter() - started
    found = [[ids[at] for at in row] for row in found]
    print_result(f"rank_bm25, {len(some)} questions", found, [gold[at] for at in some], index_s, len(some) / seconds)


def sentence_transformers_side(
    model: Path, texts: list[str], ids: list[str], queries: list[str], gold: list[str]
) -> None:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(2)
    encoder = SentenceTransformer(str(model), device="cpu")
    started = time.perf_counter()
    passages = encoder.encode(texts, convert_to_tensor=True, normalize_embeddings=True)
    index_s = time.perf_counter() - started
    started = time.perf_counter()
    asked = encoder.encode(queries, convert_to_tensor=True, normalize_embeddings=True)
    best = (asked @ passages.T).topk(max(KS), dim=1).indices.tolist()
    seconds = time.perf_counter() - started
    print_result(
        "sentence-transformers", [[ids[at] for at in row] for row in best], gold, index_s, len(queries) / seconds
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--passages", type=Path, required=True)
    p.add_argument("--questions", type=Path, required=True)
    p.add_argument(
        "--model", type=Path, required=True, help="directory of an encoder in the layout of sentence-transformers"
    )
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/levade")
    p.add_argument("--scan", type=Path, default=ROOT / "target/release/examples/scan")
    p.add_argument(
        "--vectors", type=int, default=1_000_000, help="number of random vectors in the scan; 0 skips the scan"
    )
    args = p.parse_args()
    passages, questions = rows(args.passages), rows(args.questions)
    ids = [passage["id"] for passage in passages]
    texts = [
        f'"{passage["title"]}"\n{passage["text"]}' if passage.get("title") else passage["text"] for passage in passages
    ]
    queries, gold = [row["question"] for row in questions], [str(row["gold_document"]) for row in questions]
    print(f"{len(texts)} passages, {len(queries)} questions")
    ours(args, queries, gold)
    bm25s_side(texts, ids, queries, gold)
    rank_bm25_side(texts, ids, queries, gold)
    sentence_transformers_side(args.model, texts, ids, queries, gold)
    if args.vectors:
        done = subprocess.run(
            [args.scan, "vectors", str(args.vectors), "384", "2"], check=True, capture_output=True, text=True
        )
        print("made-up vectors:", done.stdout.strip())


if __name__ == "__main__":
    main()
