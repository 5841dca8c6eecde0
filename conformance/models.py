"""Creates small models with random weights in transformers, which together use every part of the model families.

Sizes are odd (no size divides a vector register), biases and norms differ from their initial 0 and 1, and weights are
large enough to spread logits over several units, so that errors become visible.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
# One base for each kind of layer in Gemma 3, and a scaling for the full-attention layers.
TWO_KINDS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
PLAIN_KINDS = {
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass
class Case:
    """A model to create. `shape` overrides fields of the family's configuration."""

    name: str
    family: str
    shape: dict = field(default_factory=dict)
    shard: str = "5GB"
    dtype: torch.dtype = torch.float32
    old_spelling: bool = False


CASES = [
    Case("llama-tied", "llama", {"tie_word_embeddings": True}),
    Case("llama-llama3-rope", "llama", {"rope_parameters": LLAMA3}),
    Case("llama-linear-rope-sharded", "llama", {"rope_parameters": LINEAR}, shard="300KB"),
    Case("llama-all-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-multi-head-bf16", "llama", {"num_key_value_heads": 5}, dtype=torch.bfloat16),
    Case("llama-llama3-rope-old-spelling", "llama", {"rope_parameters": LLAMA3}, old_spelling=True),
    Case("qwen2-tied", "qwen2", {"tie_word_embeddings": True}),
    Case("qwen2-untied-sharded", "qwen2", shard="300KB"),
    Case("qwen2-yarn", "qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    Case("qwen2-yarn-old-spelling", "qwen2", {"rope_parameters": YARN}, old_spelling=True),
    Case("qwen2-multi-query-f16", "qwen2", {"num_key_value_heads": 1}, dtype=torch.float16),
    Case("qwen3-tied", "qwen3", {"tie_word_embeddings": True}),
    Case("qwen3-untied-head-dim-128-sharded", "qwen3", {"head_dim": 128}, shard="300KB"),
    Case("qwen3-attention-bias", "qwen3", {"attention_bias": True}),
    Case("qwen3-yarn", "qwen3", {"rope_parameters": YARN | {"attention_factor": 1.25, "beta_fast": 16.0}}),
    Case("mistral-window", "mistral", {"sliding_window": 45}),
    Case("mistral-whole-paths-sharded", "mistral", {"sliding_window": None}, shard="300KB"),
    Case("qwen2-windows", "qwen2", {"use_sliding_window": True, "sliding_window": 31, "max_window_layers": 1}),
    Case("qwen3-windows", "qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    Case("gemma3-tied", "gemma3", {"layer_types": [SLIDING, FULL, SLIDING]}),
    Case(
        "gemma3-untied-scaled-sharded",
        "gemma3",
        {"rope_parameters": TWO_KINDS, "tie_word_embeddings": False},
        shard="300KB",
    ),
    Case(
        "gemma3-old-spelling",
        "gemma3",
        {"rope_parameters": TWO_KINDS, "layer_types": [FULL, SLIDING, FULL]},
        old_spelling=True,
    ),
    Case(
        "gemma3-bias-wide-scalar-bf16",
        "gemma3",
        {"attention_bias": True, "query_pre_attn_scalar": 168},
        dtype=torch.bfloat16,
    ),
    Case("gemma3-multi-query-narrow-window", "gemma3", {"num_key_value_heads": 1, "sliding_window": 3}),
    Case("smollm3-tied", "smollm3", {"no_rope_layer_interval": 2}),
    Case(
        "smollm3-untied-biases",
        "smollm3",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "no_rope_layers": [0, 1, 0]},
    ),
    Case("smollm3-windows", "smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 40}),
    Case(
        "smollm3-windows-of-layer-types-yarn",
        "smollm3",
        {
            "rope_parameters": YARN,
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
]

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    # Qwen3 configures its head width, which may differ from hidden / heads.
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 48}),
    "mistral": (MistralConfig, MistralForCausalLM, {}),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 44,
            "query_pre_attn_scalar": 44,
            "sliding_window": 50,
            "rope_parameters": PLAIN_KINDS,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {"tie_word_embeddings": True}),
}

BASE = {
    "vocab_size": 1003,
    "hidden_size": 160,
    "intermediate_size": 333,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Default grouped queries: two query heads for each of three key heads.
GROUPED = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 168}


def make(case: Case, directory: Path) -> Path:
    """Writes the model to `directory / name`."""
    config_class, model_class, extra = FAMILIES[case.family]
    grouped = {} if "num_key_value_heads" in case.shape else GROUPED
    config = config_class(**(BASE | grouped | extra | case.shape))
    torch.manual_seed(sum(map(ord, case.name)))
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                # Gemma 3 scales by 1 + weight.
                parameter.uniform_(0.5, 1.5).sub_(1.0 if case.family == "gemma3" else 0.0)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "embed_tokens" in name:
                parameter.normal_(0.0, 0.2)
            else:
                parameter.normal_(0.0, 1.3 * parameter.shape[-1] ** -0.5)
    out = directory / case.name
    model.to(case.dtype).save_pretrained(out, max_shard_size=case.shard)
    if case.shard != "5GB" and not (out / "model.safetensors.index.json").exists():
        raise RuntimeError(f"{case.name} was meant to be sharded, but fits into one file")
    if case.old_spelling:
        respell(out / "config.json")
    return out


def respell(path: Path) -> None:
    """Rewrites a configuration in the format of transformers 4: `rope_theta`, `rope_scaling` (for YaRN with `type`, as
    in Qwen2.5's documentation) and `torch_dtype`.
    """
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if SLIDING in rope:
        config["rope_local_base_freq"] = rope[SLIDING]["rope_theta"]
        rope = rope[FULL]
    config["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] == "yarn":
        rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2))


def all_models(directory: Path, only: str, given: Path | None) -> Iterator[tuple[str, Path]]:
    """Yields names and paths: the user's model, if given, and the cases whose names contain `only`."""
    if given is not None and only in Path(given).name:
        yield Path(given).name, Path(given)
    for case in CASES:
        if only in case.name:
            yield case.name, make(case, directory)
