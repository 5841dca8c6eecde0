"""Compares GGUF files of every supported type with the `gguf` package as transformers uses it.

Checks, for small random Llama, Qwen2 and Qwen3 files with matrices in F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K and Q6_K:
the weights that Levade saves are bit-identical to those that transformers reads (each needs at most one rounding, so
there is one correct result), and logits agree to 1e-3. K types are random blocks with realistic scales, since the
package can read but not write them.

Not checked: real files with K types, other architectures, tokenizers (checkpoint.py).
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from common import begin, parser, ragged, reference, scratch, tensors

TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q6_K]
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 256, 512, 2, 4, 2
# transformers uses 128 for Qwen3, regardless of the file.
HEAD_DIM = {"llama": 64, "qwen2": 64, "qwen3": 128}


def half(rng: np.random.Generator, rows: int, blocks: int, scale: float) -> np.ndarray:
    """Returns the bytes of one random f16 per block, of either sign."""
    values = rng.uniform(0.5, 1.5, (rows, blocks, 1)) * rng.choice([-scale, scale], (rows, blocks, 1))
    return values.astype(np.float16).view(np.uint8)


def encode(rng: np.random.Generator, shape: tuple[int, int], kind: Type) -> np.ndarray:
    """Returns a random matrix in a GGUF type, as bytes (or numbers for F32 and F16)."""
    rows, blocks = shape[0], shape[1] // 256

    def raw(count: int) -> np.ndarray:
        return rng.integers(0, 256, (rows, blocks, count), dtype=np.uint8)

    if kind == Type.Q4_K:
        # d, dmin, twelve bytes of 6-bit scales and minima, 256 nibbles.
        parts = [half(rng, rows, blocks, 2e-4), half(rng, rows, blocks, 2e-3), raw(12), raw(128)]
    elif kind == Type.Q6_K:
        # Low nibbles, high pairs of bits, sixteen 8-bit scales, d.
        parts = [raw(128), raw(64), raw(16), half(rng, rows, blocks, 3e-5)]
    else:
        dense = rng.normal(0.0, 1.3 * shape[1] ** -0.5, shape).astype(np.float32)
        return {Type.F32: dense, Type.F16: dense.astype(np.float16)}.get(kind, gguf.quants.quantize(dense, kind))
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


def tokens() -> list[str]:
    """Returns a byte-level vocabulary with control tokens, the 256 bytes in their alphabet, and one merge."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return ["<pad>", "<s>", "</s>", *map(chr, printable), *(chr(256 + i) for i in range(len(others))), "ab"]


def write(path: Path, arch: str, kind: Type) -> None:
    """Writes a model with matrices of a type."""
    rng = np.random.default_rng(sum(map(ord, arch)) * 100 + kind)
    vocabulary, head_dim = tokens(), HEAD_DIM[arch]
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(LAYERS)
    w.add_context_length(512)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(INTERMEDIATE)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(50000.0)
    w.add_rope_dimension_count(head_dim)
    w.add_vocab_size(len(vocabulary))
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm" if arch == "llama" else "qwen2")
    w.add_token_list(vocabulary)
    w.add_token_types([3, 3, 3] + [1] * (len(vocabulary) - 3))
    w.add_token_merges(["a b"])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_pad_token_id(0)
    w.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    def matrix(name: str, rows: int, columns: int) -> None:
        w.add_tensor(name, encode(rng, (rows, columns), kind), raw_dtype=kind)

    def vector(name: str, size: int, middle: float) -> None:
        w.add_tensor(name, rng.normal(middle, 0.2, size).astype(np.float32))

    matrix("token_embd.weight", len(vocabulary), HIDDEN)
    vector("output_norm.weight", HIDDEN, 1.0)
    matrix("output.weight", len(vocabulary), HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        vector(block + "attn_norm.weight", HIDDEN, 1.0)
        vector(block + "ffn_norm.weight", HIDDEN, 1.0)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"{block}attn_{part}.weight", heads * head_dim, HIDDEN)
            if arch == "qwen2":
                vector(f"{block}attn_{part}.bias", heads * head_dim, 0.0)
            if arch == "qwen3" and part != "v":
                vector(f"{block}attn_{part}_norm.weight", head_dim, 1.0)
        matrix(block + "attn_output.weight", HIDDEN, HEADS * head_dim)
        matrix(block + "ffn_gate.weight", INTERMEDIATE, HIDDEN)
        matrix(block + "ffn_up.weight", INTERMEDIATE, HIDDEN)
        matrix(block + "ffn_down.weight", HIDDEN, INTERMEDIATE)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main() -> None:
    arguments = parser(__doc__).parse_args()
    levade, report = begin(arguments)
    with scratch() as directory, torch.inference_mode():
        for arch in ("llama", "qwen2", "qwen3"):
            for kind in TYPES:
                name = f"{arch}-{kind.name}.gguf"
                if arguments.only not in name:
                    continue
                path, out = Path(directory) / name, Path(directory) / f"out-{name}"
                write(path, arch, kind)
                model = reference(path)
                theirs = dict(model.named_parameters())
                levade.run("save", path, out)
                ours = load_file(out / "checkpoint" / "model.safetensors")
                report.expect(f"{name}: names", ours.keys() == theirs.keys(), str(ours.keys() ^ theirs.keys() or ""))
                wrong = [n for n in ours.keys() & theirs.keys() if not torch.equal(ours[n].float(), theirs[n])]
                report.expect(f"{name}: weights, to the bit", not wrong, str(sorted(wrong) or ""))
                sequence = ragged(len(tokens()), seed=5, longest=40)[0]
                levade.run("logits", path, out, sequences=[sequence])
                logits = model(torch.tensor([sequence])).logits[0]
                difference = (tensors(out)["logits.0"] - logits).abs().nan_to_num(nan=float("inf"))
                report.check(f"{name}: logits", difference.max().item(), 1e-3, f"std {logits.std():.1f}")
    report.finish()


if __name__ == "__main__":
    main()
