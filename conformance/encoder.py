"""Compares the encoder's vectors with sentence-transformers.

Checks, for a sentence-transformers directory (all-MiniLM-L6-v2, e5, bge), that vectors of texts of all lengths, in
several alphabets, as queries and as passages, agree to 1e-5 per component. Always checks encoders with random weights:
mean and [CLS] pooling, and a text that fills the context.

Not checked: retrieval (bench/search.py).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from transformers import BertConfig, BertModel, BertTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
BOUND = 1e-5
TEXTS = [
    "",
    "a",
    "Café Über NAÏVE résumé",
    "when is the next deadpool movie being released",
    "中文 テスト русский العربية हिन्दी",
    "emoji 🙂 and\ttabs\nand lines, plus 'quotes' — dashes…",
    "Antidisestablishmentarianism " * 20,
    "The first Nobel Prize in Physics was awarded in 1901 to Wilhelm Conrad Röntgen, of Germany. " * 40,
    "x" * 300,
    "[CLS] special [SEP] tokens [MASK] in [PAD] text",
    "ﬁ ligature \u200b zero width \u00ad soft hyphen \x00 control",
]


def random_encoder(directory: Path, pooling: str) -> None:
    """Writes an encoder with random weights in the layout of sentence-transformers."""
    torch.manual_seed(7)
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *map(chr, range(33, 127)),
        *(f"##{chr(c)}" for c in range(97, 123)),
    ]
    vocabulary = directory / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=100,
        max_position_embeddings=64,
    )
    inner = directory / "inner"
    BertModel(config).save_pretrained(inner)
    BertTokenizerFast(str(vocabulary), do_lower_case=True).save_pretrained(inner)
    transformer = modules.Transformer(str(inner), max_seq_length=64)
    parts = [transformer, modules.Pooling(48, pooling_mode=pooling), modules.Normalize()]
    SentenceTransformer(modules=parts).save(str(directory / "model"))


def prefixes(directory: Path, name: str) -> tuple[str, str]:
    """Returns the prefixes of queries and passages from the model's documentation."""
    if "e5" in name:
        return "query: ", "passage: "
    if "bge" in name:
        return "Represent this sentence for searching relevant passages: ", ""
    return "", ""


def check(helper: Path, directory: Path, name: str) -> bool:
    """Compares all texts in both roles. Prints the largest difference."""
    rows = [{"text": text, "role": role} for role in ("query", "passage") for text in TEXTS]
    asked = "\n".join(json.dumps(row) for row in rows) + "\n"
    done = subprocess.run([helper, directory, name], input=asked, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{helper} failed with code {done.returncode}:\n{done.stderr}")
    ours = torch.tensor([json.loads(line) for line in done.stdout.splitlines()])
    query, passage = prefixes(directory, name)
    texts = [(query if row["role"] == "query" else passage) + row["text"] for row in rows]
    model = SentenceTransformer(str(directory), device="cpu")
    # Encodes texts one by one: padding changes the last bits.
    theirs = torch.stack([model.encode(text, convert_to_tensor=True, normalize_embeddings=True) for text in texts])
    worst = (ours - theirs).abs().max().item()
    good = worst <= BOUND and ours.shape == theirs.shape
    print(
        f"{'ok  ' if good else 'FAIL'} {name}: {len(texts)} texts, {ours.shape[1]} numbers, differ by {worst:.1e} (bound {BOUND})"
    )
    return good


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, action="append", default=[], help="directory of an encoder; repeatable")
    p.add_argument("--levade", type=Path, default=ROOT / "target/release/examples/encode", help="helper binary")
    args = p.parse_args()
    if not args.levade.is_file():
        sys.exit(f"{args.levade} does not exist: cargo build --release -p levade-engine --example encode")
    good = True
    for pooling in ("mean", "cls"):
        with tempfile.TemporaryDirectory() as directory:
            random_encoder(Path(directory), pooling)
            good &= check(args.levade, Path(directory) / "model", f"random-{pooling}")
    for model in args.model:
        good &= check(args.levade, model, model.name)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
