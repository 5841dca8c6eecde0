"""Compares scores of lm-evaluation-harness through `levade serve` with transformers on the same weights.

The two small tasks are generated from a seed: sums with four choices, scored by the log-likelihood of each choice, and
sums that the model writes greedily. The harness measures both with `hf` (transformers, f32) and through `levade
serve`: `local-completions` (token ids, echo, log-probabilities; once with transformers' tokenizer, once with the
server's) and `local-chat-completions`.

Checks that scores are equal, that every log-likelihood agrees to 1e-3, that the same choices are greedy, and that
generated texts are equal except for a few in which two tokens are equally likely. transformers reads its weights from
`--model` (`gguf_types.py` checks that Levade reads the same weights).

Not checked: the harness's own tasks, which need the network, and sampling above temperature 0.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import ROOT, Report, begin, parser, scratch, source

CHOICE = """
task: levade_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
WRITTEN = """
task: levade_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}} Answer with the number alone."
doc_to_target: answer
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 24, do_sample: false, temperature: 0.0}}
filter_list:
  - name: number
    filter: [{{function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}}, {{function: take_first}}]
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(directory: Path, items: int) -> None:
    """Writes the tasks and their items."""
    directory.mkdir(parents=True)
    rng = random.Random(33)
    choices, written = [], []
    for _ in range(items):
        a, b = rng.randrange(2, 60), rng.randrange(2, 60)
        wrong = rng.sample([n for n in range(a + b - 12, a + b + 13) if n not in (a + b, 0)], 3)
        label = rng.randrange(4)
        answers = [*wrong[:label], a + b, *wrong[label:]]
        choices.append({"question": f"What is {a} plus {b}?", "choices": [str(n) for n in answers], "label": label})
        a, b = rng.randrange(1, 20), rng.randrange(1, 20)
        written.append({"question": f"What is {a} plus {b}?", "answer": str(a + b)})
    for name, rows, text in [("choice", choices, CHOICE), ("written", written, WRITTEN)]:
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (directory / f"{name}.yaml").write_text(text.format(data=data))


def write_model(model: Path, out: Path) -> None:
    """Writes the model as transformers unpacks it, in f32, with its tokenizer."""
    read = AutoModelForCausalLM.from_pretrained(**source(model), dtype=torch.float32)
    config = type(read.config).from_dict(read.config.to_dict() | {"quantization_config": None})
    # transformers cannot save a model from a GGUF file, so its weights are copied into a new model.
    plain = type(read)(config).to(torch.float32)
    plain.load_state_dict(read.state_dict())
    del plain.config.quantization_config
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(**source(model)).save_pretrained(out)


@contextmanager
def serve(binary: Path, model: Path, threads: int, log: Path):
    """Runs `levade serve` on a free port. Yields its base URL without `/v1`."""
    with log.open("w") as err:
        command = [binary, "serve", f"small={model}", "--port", "0", "--threads", str(threads), "--running", "8"]
        server = subprocess.Popen(command, stderr=err)
    try:
        deadline = time.monotonic() + 180
        while not (found := re.search(r"serving.* at (http://\S+)/v1", log.read_text())):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"levade serve does not come up:\n{log.read_text()}")
            time.sleep(0.2)
        yield found.group(1)
    finally:
        server.terminate()
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()


def run_harness(out: Path, tasks: Path, task: str, model: str, arguments: dict, *more: str) -> tuple[dict, list[dict]]:
    """Returns the scores and samples of the harness. Samples are in the order of the items."""
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", given, "--tasks", task]
    command += ["--include_path", str(tasks), "--log_samples", "--output_path", str(out), "--device", "cpu", *more]
    # Runs in another directory, so that the harness does not import this file, which has the harness's own name.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "any", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=tasks, env=environment, capture_output=True, text=True, timeout=3000)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed with code {done.returncode}:\n{done.stdout}\n{done.stderr[-6000:]}")
    (results,) = out.rglob("results_*.json")
    scores = json.loads(results.read_text())["results"][task]
    (samples,) = out.rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    numbers = {key: value for key, value in scores.items() if isinstance(value, float) and "stderr" not in key}
    return numbers, sorted(rows, key=lambda row: row["doc_id"])


def compare_choices(report: Report, name: str, ours: tuple, theirs: tuple) -> None:
    """Compares scores, and log-likelihoods of every choice of every item."""
    report.expect(f"{name}: scores", ours[0] == theirs[0] and bool(theirs[0]), f"{ours[0]} against {theirs[0]}")
    worst, greedy, count = 0.0, 0, 0
    for a, b in zip(ours[1], theirs[1], strict=True):
        for (ours_p, ours_greedy), (theirs_p, theirs_greedy) in zip(
            a["filtered_resps"], b["filtered_resps"], strict=True
        ):
            worst = max(worst, abs(float(ours_p) - float(theirs_p)))
            greedy += str(ours_greedy) != str(theirs_greedy)
            count += 1
    report.check(f"{name}: log-likelihoods of {count} choices", worst if count else float("inf"), 1e-3)
    report.expect(f"{name}: the same choices are greedy", greedy == 0, f"{greedy} of {count} differ")


def compare_texts(report: Report, name: str, ours: tuple, theirs: tuple) -> None:
    """Compares scores, and counts equal texts."""
    report.expect(f"{name}: scores", ours[0] == theirs[0] and bool(theirs[0]), f"{ours[0]} against {theirs[0]}")

    def text(row: dict) -> str:
        return row["resps"][0][0].strip()

    pairs = list(zip(ours[1], theirs[1], strict=True))
    same = sum(text(a) == text(b) for a, b in pairs)
    for a, b in pairs:
        if text(a) != text(b):
            print(f"      item {a['doc_id']}: {text(a)!r} against {text(b)!r}")
    report.expect(f"{name}: the same texts, but for 2 of 100", same * 100 >= len(pairs) * 98, f"{same} of {len(pairs)}")


def main() -> None:
    p = parser(__doc__)
    p.set_defaults(levade=ROOT / "target/release/levade")
    p.add_argument("--items", type=int, default=100, help="items per task")
    args = p.parse_args()
    if not args.model:
        sys.exit("Name SmolLM2-135M-Instruct with --model or LEVADE_CONFORMANCE_MODEL: random weights write no sums.")
    _, report = begin(args)
    with scratch() as name:
        directory = Path(name)
        tasks, weights = directory / "tasks", directory / "model"
        write_tasks(tasks, args.items)
        write_model(args.model, weights)
        hf = {"pretrained": weights, "dtype": "float32"}
        choices = run_harness(directory / "hf-choice", tasks, "levade_choice", "hf", hf, "--batch_size", "8")
        chat = ["--apply_chat_template"]
        texts = run_harness(directory / "hf-written", tasks, "levade_written", "hf", hf, "--batch_size", "1", *chat)
        with serve(args.levade, args.model, args.threads, directory / "serve.log") as base:
            api = {"model": "small", "num_concurrent": 4, "base_url": f"{base}/v1/completions"}
            for tokenizer in ["huggingface", "remote"]:
                given = api | {"tokenizer_backend": tokenizer}
                if tokenizer == "huggingface":
                    given |= {"tokenizer": weights, "tokenized_requests": True}
                more = ["--batch_size", "4" if tokenizer == "huggingface" else "1"]
                out = directory / f"ours-{tokenizer}"
                ours = run_harness(out, tasks, "levade_choice", "local-completions", given, *more)
                compare_choices(report, f"local-completions, tokenizer {tokenizer}", ours, choices)
            given = api | {"base_url": f"{base}/v1/chat/completions"}
            ours = run_harness(directory / "ours-chat", tasks, "levade_written", "local-chat-completions", given, *chat)
            compare_texts(report, "local-chat-completions", ours, texts)
    report.finish()


if __name__ == "__main__":
    main()
