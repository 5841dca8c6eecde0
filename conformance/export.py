"""Checks that exports of a run open in the programs that they are for, with the values of the record.

Trains toy recipes (bits_recipes.py) from a tiny model that calls the calculator: a tool loop, and a program whose calls
fork the conversation. Exports each run in every format, in an environment with the published packages, and compares:

- `jsonl` and `parquet` in pandas and `datasets`: equal rows in both encodings; and against the SQLite file: every
  attempt, token id, log-probability (to the bit), weight version and score;
- `verl` and `verl-sft` in pandas: the columns that verl reads, one row per task;
- `trl-sft` and `trl-preference` in `datasets`: TRL detects the conversational formats, the format of each message is
  accepted by the chat template of the model, and chosen scores exceed rejected ones;
- `atif` with Harbor's own pydantic models, as one file and as a directory;
- an export that is killed and repeated: the same bytes as an undisturbed one.

Then damages a byte of the record and checks that `levade store check` finds it, and that the rescued file exports.

Not checked: training in verl or TRL.
"""

import argparse
import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ["pandas", "pyarrow", "datasets", "jinja2", "pydantic", "tokenizers", "safetensors", "regex"]
# Without PyTorch, which only training needs.
BARE_PACKAGES = ["trl", "accelerate", "transformers"]
NAMES = ["calculator", "forking-program"]
EXPORTS = {
    "rows.jsonl": ["--tokens"],
    "rows.parquet": ["--tokens"],
    "eval.jsonl": ["--purpose", "eval", "--status", "completed,unscored,failed"],
    "verl.parquet": ["--format", "verl"],
    "verl-sft.parquet": ["--format", "verl-sft"],
    "sft.jsonl": ["--format", "trl-sft"],
    "split.jsonl": ["--format", "trl-sft", "--split-prompt"],
    "pairs.jsonl": ["--format", "trl-preference"],
    "atif.jsonl": ["--format", "atif", "--tokens"],
    "atif/": ["--format", "atif"],
}


def environment(directory: Path) -> Path:
    """Creates an environment with the packages, unless it exists, and returns its Python."""
    python = directory / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", *BARE_PACKAGES], check=True)
        # Only the models of trajectories are used, which need pydantic alone, and work with any Python.
        subprocess.run(
            [
                *pip,
                "--no-deps",
                "--target",
                directory / "harbor",
                "--ignore-requires-python",
                "--only-binary=:all:",
                "harbor",
            ],
            check=True,
        )
    return python


def export(levade: Path, run: Path, out: Path, *options: str, code: int = 0) -> str:
    """Exports a run and returns what was printed to standard error."""
    target = f"{out}/" if out.suffix == "" else str(out)
    done = subprocess.run(
        [levade, "export", run, "--out", target, *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, f"{options} ended with {done.returncode}: {done.stderr}"
    return done.stderr


def make(levade: Path, model: Path, directory: Path) -> None:
    """Trains the recipes and exports the runs."""
    from bits import train

    for name in NAMES:
        train(levade, directory / name, model, name, "eval.tasks=2")
        run, out = directory / name / "run", directory / name / "out"
        out.mkdir()
        for file, options in EXPORTS.items():
            print(f"{name} {file}: {export(levade, run, out / file.rstrip('/'), *options).strip()}")


def numbers(kind: str, blob: bytes) -> list:
    """Returns the little-endian numbers of a blob."""
    return [item[0] for item in struct.iter_unpack(f"<{kind}", blob)]


def recorded(run: Path) -> dict:
    """Returns the completed attempts of training: score, and the tokens and log-probabilities of each segment."""
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as db:
        db.row_factory = sqlite3.Row
        attempts = {}
        for row in db.execute("SELECT * FROM attempts WHERE purpose = 'train' AND status = 'completed'").fetchall():
            query = "SELECT s.*, coalesce(s.tokens, p.tokens) AS ids FROM segments s LEFT JOIN prompts p ON p.id = s.prompt WHERE attempt = ? ORDER BY s.id"
            segments = [(numbers("I", s["ids"]), numbers("f", s["logprobs"])) for s in db.execute(query, [row["id"]])]
            attempts[row["name"].hex()] = (row["score"], segments)
        return attempts


def same(a: object, b: object) -> bool:
    """Compares values of two readers: lists and arrays, None and NaN are equal, and absent fields are None."""
    if hasattr(a, "tolist"):
        a = a.tolist()
    if hasattr(b, "tolist"):
        b = b.tolist()
    if isinstance(a, dict) and isinstance(b, dict):
        return all(same(a.get(key), b.get(key)) for key in a.keys() | b.keys())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    absent = [value is None or (isinstance(value, float) and math.isnan(value)) for value in (a, b)]
    return (
        all(absent)
        or (not any(absent) and a == b)
        or (isinstance(a, float) and isinstance(b, float) and struct.pack("f", a) == struct.pack("f", b))
    )


def check(directory: Path, harbor: Path) -> None:
    """Opens the exports of a run."""
    import datasets
    import pandas
    from trl.data_utils import is_conversational

    sys.path.insert(0, str(harbor))
    from harbor.models.trajectories import Trajectory

    out, attempts = directory / "out", recorded(directory / "run")
    lines = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    frame = pandas.read_parquet(out / "rows.parquet")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(out / "rows.parquet"), split="train", cache_dir=str(directory / "cache")
    )
    # By default, `datasets` 5 rewrites rows with messages of different fields, and rounds their numbers to ten decimals.
    options = {"data_files": str(out / "rows.jsonl"), "split": "train", "cache_dir": str(directory / "cache")}
    jsonl = datasets.load_dataset("json", **options, on_mixed_types=None)
    rounded = datasets.load_dataset("json", **options)
    for line, row in zip(lines, rounded, strict=True):
        assert line["token_ids"] == row["token_ids"], line["slot"]
        for a, b in [(line["score"], row["score"]), *zip(line["logprobs"], row["logprobs"], strict=True)]:
            assert a is b is None or abs(a - b) < 5.1e-11, f"{line['slot']}: {a} and {b}"
    assert len(lines) == len(frame) == len(loaded) == len(jsonl) > 0
    for line, pandas_row, row, json_row in zip(lines, frame.to_dict("records"), loaded, jsonl, strict=True):
        for column in line:
            for other in (pandas_row, row, json_row):
                assert same(line[column], other[column]), f"{line['slot']} {column}: {line[column]} and {other[column]}"
    assert {line["attempt"] for line in lines} == attempts.keys()
    tokens = 0
    for line in lines:
        score, segments = attempts[line["attempt"]]
        assert line["score"] == score
        # The model samples single bytes.
        assert all("malformed" in problem or "not UTF-8" in problem for problem in line["problems"] or []), line[
            "problems"
        ]
        assert line["messages"] and line["text"] is None, line["slot"]
        if line["sequences"] == 1:
            assert line["token_ids"] == [token for ids, _ in segments for token in ids]
            sampled = [p for p in line["logprobs"] if p is not None]
            assert [struct.pack("f", p) for p in sampled] == [
                struct.pack("f", p) for _, all_p in segments for p in all_p
            ]
            assert [mask for mask in line["loss_mask"] if mask] == [True] * line["target_tokens"]
        tokens += len(line["token_ids"])

    verl = pandas.read_parquet(out / "verl.parquet")
    tasks = {line["task_json"] for line in lines}
    assert len(verl) == len(tasks)
    for row in verl.to_dict("records"):
        assert {"data_source", "prompt", "reward_model", "extra_info"} <= row.keys()
        assert row["prompt"][-1]["role"] == "user" and row["reward_model"]["ground_truth"]
    verl_sft = pandas.read_parquet(out / "verl-sft.parquet")
    assert len(verl_sft) == len(lines) and all(len(messages) > 1 for messages in verl_sft["messages"])

    template = json.loads((directory / "model/tokenizer_config.json").read_text())["chat_template"]
    counts = {}
    for name in ("sft", "split", "pairs"):
        data = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        counts[name] = len(data)
        assert data and all(is_conversational(row) for row in data), f"TRL does not detect {name}"
        data = datasets.load_dataset(
            "json", data_files=str(out / f"{name}.jsonl"), split="train", cache_dir=str(directory / "cache")
        )
        assert all(is_conversational(row) for row in data)
        for row in data if name == "pairs" else []:
            assert row["score_chosen"] > row["score_rejected"] and row["chosen"] != row["rejected"]
    assert counts["sft"] == counts["split"] == len(lines)
    import jinja2

    rendered = jinja2.Environment().from_string(template)
    for line in lines:
        assert rendered.render(messages=line["messages"], add_generation_prompt=False)

    trajectories = [Trajectory.model_validate_json(line) for line in (out / "atif.jsonl").read_text().splitlines()]
    files = [Trajectory.model_validate_json(file.read_text()) for file in (out / "atif").iterdir()]
    assert len(trajectories) == len(files) == len(lines)
    assert {t.trajectory_id for t in trajectories} == {t.trajectory_id for t in files}
    calls = sum(len(step.tool_calls or []) for t in trajectories for step in t.steps)
    results = sum(len(step.observation.results) for t in trajectories for step in t.steps if step.observation)
    print(
        f"{directory.name}: {len(lines)} sequences of {len(attempts)} attempts, {tokens} tokens, {len(verl)} tasks, {counts['pairs']} pairs, "
        f"{calls} tool calls with {results} results in trajectories"
    )


def interrupt(levade: Path, directory: Path) -> None:
    """Kills exports at various times, and compares the repeated export with the undisturbed one."""
    run, out, kills = directory / "run", directory / "out", 0
    for name in ("rows.jsonl", "rows.parquet"):
        target = out / f"killed-{name}"
        for delay in (0.0, 0.005, 0.01, 0.02, 0.04, 0.08):
            process = subprocess.Popen([levade, "export", run, "--tokens", "--out", target], stderr=subprocess.DEVNULL)
            try:
                process.wait(delay)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                kills += 1
        if not target.exists():
            export(levade, run, target, "--tokens")
        assert target.read_bytes() == (out / name).read_bytes(), f"{name} differs after {kills} kills"
        left = [file.name for file in out.iterdir() if ".part" in file.name]
        assert not left, left
    print(f"{directory.name}: equal after {kills} killed exports")


def damage(levade: Path, directory: Path) -> None:
    """Changes one byte of a recorded value, and checks what is found and rescued."""
    run = directory / "run"
    whole = subprocess.run([levade, "store", "check", run], capture_output=True, text=True)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    checkpoint = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('PRAGMA wal_checkpoint(TRUNCATE)')"
    subprocess.run([sys.executable, "-c", checkpoint, run / "run.db"], check=True)
    with sqlite3.connect(run / "run.db") as db:
        blob = next(
            row[0]
            for row in db.execute(
                "SELECT logprobs FROM segments WHERE kind = 'sampled' AND length(logprobs) BETWEEN 40 AND 400"
            )
        )
    data = bytearray((run / "run.db").read_bytes())
    at = data.index(blob)
    data[at + 9] ^= 4
    (run / "run.db").write_bytes(data)
    rescued = directory / "rescued.db"
    found = subprocess.run([levade, "store", "check", run, "--out", rescued, "--json"], capture_output=True, text=True)
    report = json.loads(found.stdout)
    assert found.returncode == 1 and report["attempts"]["lost"] >= 1, found.stdout + found.stderr
    print(f"{directory.name}: {report['findings'][0]['message']}")
    for suffix in ("-wal", "-shm"):
        Path(f"{run / 'run.db'}{suffix}").unlink(missing_ok=True)
    os.replace(rescued, run / "run.db")
    assert subprocess.run([levade, "store", "check", run], capture_output=True).returncode in (0, 1)
    export(levade, run, directory / "out/rescued.jsonl")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--levade", type=Path, default=Path(__file__).resolve().parent.parent / "target/release/levade")
    p.add_argument("--model", type=Path, help="directory of a tiny model that calls the calculator")
    p.add_argument(
        "--environment", type=Path, default=Path(".export"), help="environment with the packages, created if missing"
    )
    p.add_argument("--check", type=Path, help=argparse.SUPPRESS)
    args = p.parse_args()
    harbor = args.environment.resolve() / "harbor"
    if args.check:
        for name in NAMES:
            check(args.check / name, harbor)
        return
    levade, python = args.levade.resolve(), environment(args.environment.resolve())
    with tempfile.TemporaryDirectory() as directory:
        make(levade, args.model.resolve(), Path(directory))
        command = [python, __file__, "--check", directory, "--environment", args.environment]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"})
        for name in NAMES:
            interrupt(levade, Path(directory) / name)
            damage(levade, Path(directory) / name)


if __name__ == "__main__":
    main()
