"""Compares checkpoints that Levade saves with the original model, as transformers loads both.

Checks, for the given model and for every random-weight configuration:

- transformers finds every tensor that it looks for, and no other.
- Every weight is bit-identical to the original.
- The logits of Levade and of transformers agree to 1e-3.

For the given model also: AutoTokenizer returns the original token ids for plain texts and for chats (so the chat
template is unchanged), Levade returns the same ids, and the ids that end a text are preserved.

`--checkpoint DIR` checks a directory that `levade train` wrote instead: transformers loads it without missing or
unknown tensors, logits agree, and its tokenizer agrees with that of `--model`.

Not checked: the optimizer state in a checkpoint, and crashes while saving.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import Levade, Report, begin, parser, ragged, reference, scratch, source, tensors
from models import all_models

TEXTS = [
    "Hello, world!",
    "  leading and  double   spaces\n\n\tand tabs\r\n",
    "What is 12.50 * (3 - 47) / 1,234? It's 3000000 or 1e-5; don't ask.",
    "naïve café — „Größe“ 東京タワー 🙂🏳️‍🌈 Ελλάδα é (decomposed) \u00a0nbsp",
    "def f(x):\n    return x ** 2  # comment\n",
    '<tool_call>{"name": "calculator", "arguments": {"expression": "2+2"}}</tool_call>',
    "<|im_start|>user\nspecial tokens in a text<|im_end|>",
    "",
]
CHATS = [
    [{"role": "user", "content": "What is 17 + 25?"}],
    [
        {"role": "system", "content": "You have a calculator."},
        {"role": "user", "content": "  spaces around  "},
        {"role": "assistant", "content": '<tool_call>{"name": "calculator"}</tool_call>'},
        {"role": "user", "content": "<tool_response>\n42\n</tool_response>"},
    ],
]


def check_model(report: Report, levade: Levade, name: str, checkpoint: Path, out: Path) -> dict:
    """Loads a checkpoint in transformers and compares logits. Returns its weights."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: sorted(map(str, value)) for key, value in loading.items() if value}
    report.expect(f"{name}: transformers finds every tensor and no other", not wrong, str(wrong or ""))
    sequences = ragged(model.config.vocab_size, seed=4, longest=60)
    levade.run("logits", checkpoint, out, sequences=sequences)
    ours, worst = tensors(out), 0.0
    for i, sequence in enumerate(sequences):
        theirs = model.eval()(torch.tensor([sequence])).logits[0]
        worst = max(worst, (ours[f"logits.{i}"] - theirs).abs().nan_to_num(nan=float("inf")).max().item())
    report.check(f"{name}: logits on the checkpoint", worst, 1e-3)
    return dict(model.named_parameters())


def chat_ids(tokenizer, messages: list[dict], prompt: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def check_text(report: Report, levade: Levade, name: str, original: Path, checkpoint: Path, out: Path) -> None:
    """Compares token ids of transformers on both models, and of Levade on both."""
    before = AutoTokenizer.from_pretrained(**source(original))
    after = AutoTokenizer.from_pretrained(checkpoint)
    texts = [before(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    again = [after(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    prompts = [(messages, prompt) for messages in CHATS for prompt in (False, True)]
    chats = [chat_ids(before, *p) for p in prompts]
    chats_again = [chat_ids(after, *p) for p in prompts]
    report.expect(f"{name}: transformers' token ids of texts, before and after", texts == again)
    report.expect(f"{name}: transformers' token ids of chats, before and after", chats == chats_again)
    ends = [t.eos_token_id for t in (before, after)]
    report.expect(f"{name}: the token that ends a text", ends[0] == ends[1], str(ends))
    for which, path in (("original", original), ("checkpoint", checkpoint)):
        jobs = [{"messages": messages, "add_generation_prompt": prompt} for messages, prompt in prompts]
        ours = levade.run("tokens", path, out, texts=TEXTS, chats=jobs)
        for kind, expected in (("texts", texts), ("chats", chats)):
            wrong = [i for i, (a, b) in enumerate(zip(ours[kind], expected, strict=True)) if a != b]
            note = f"{kind} {wrong} differ" if wrong else ""
            report.expect(f"{name}: Levade's token ids of {kind}, {which}", not wrong, note)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--checkpoint", type=Path, help="check this directory, written by `levade train` from --model")
    arguments = p.parse_args()
    if arguments.checkpoint and not arguments.model:
        p.error("--checkpoint needs --model, the model that the training started from")
    levade, report = begin(arguments)
    with scratch() as directory, torch.inference_mode():
        out = Path(directory) / "out"
        if arguments.checkpoint:
            name = arguments.checkpoint.name
            check_model(report, levade, name, arguments.checkpoint, out)
            check_text(report, levade, name, arguments.model, arguments.checkpoint, out)
            report.finish()
            return
        for name, path in all_models(Path(directory), arguments.only, arguments.model):
            saved = Path(directory) / f"saved-{name}"
            levade.run("save", path, saved)
            checkpoint = saved / "checkpoint"
            weights = check_model(report, levade, name, checkpoint, out)
            original = dict(reference(path).named_parameters())
            same = original.keys() == weights.keys() and all(torch.equal(weights[n], original[n]) for n in original)
            report.expect(f"{name}: weights equal the original to the bit", same)
            if path == arguments.model:
                check_text(report, levade, name, path, checkpoint, out)
    report.finish()


if __name__ == "__main__":
    main()
