//! Lists keys of a `config.json` that are accepted without being read: keys without effect on the
//! computation, and keys that must have a neutral value.

use serde_json::{Value, json};

/// Keys of `config.json` that have no effect on sampling or training in Levade, grouped by the
/// reason.
const WITHOUT_EFFECT: [&[&str]; 8] = [
    // The origin of the file, and the class that other programs use for it.
    &[
        "architectures",
        "finetuning_task",
        "is_llama_config",
        "name_or_path",
        "task_specific_params",
        "tokenizer_class",
        "transformers.js_config",
    ],
    // The number format. Levade computes in the precision that the recipe sets.
    &["dtype", "torch_dtype", "use_bfloat16"],
    // Ways in which other programs compute the same result: caches, kernels, split matmuls.
    &[
        "attn_implementation",
        "chunk_size_feed_forward",
        "gradient_checkpointing",
        "is_decoder",
        "pretraining_tp",
        "torchscript",
        "use_cache",
        "use_flash_attention",
        "use_flash_attention_2",
        "use_flash_attn",
        "use_sdpa",
    ],
    // Outputs that other programs return, which do not affect their computation.
    &[
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "use_return_dict",
    ],
    // Initialization, and noise in training (Levade adds none).
    &[
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_dropout",
        "attn_pdrop",
        "classifier_dropout",
        "dropout",
        "embd_pdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "initializer_factor",
        "initializer_range",
        "layerdrop",
        "neftune_noise_alpha",
        "resid_dropout",
        "resid_pdrop",
    ],
    // Sampling parameters. In Levade, recipes and options set them.
    &[
        "bad_words_ids",
        "begin_suppress_tokens",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "prefix",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ],
    // Sequence lengths used in training. Levade uses only `max_position_embeddings`.
    &[
        "max_seq_len",
        "max_seq_length",
        "max_sequence_length",
        "model_max_length",
        "n_ctx",
        "n_positions",
        "seq_length",
        "tokenizer_model_max_length",
        "tokenizer_padding_side",
    ],
    // Tokens and labels of tasks that Levade does not support.
    &[
        "cls_token_id",
        "id2label",
        "label2id",
        "mask_token_id",
        "num_labels",
        "problem_type",
        "sep_token_id",
        "unk_token_id",
    ],
];

/// Prefixes of `config.json` keys without effect: private entries of transformers, and remarks of
/// trainers.
const PREFIXES: [&str; 6] = ["_", "axolotl_", "summary_", "trl_", "unsloth_", "wandb_"];

/// Returns whether a key of `config.json` has no effect on the computation.
pub(super) fn is_without_effect(key: &str) -> bool {
    WITHOUT_EFFECT.iter().any(|keys| keys.contains(&key))
        || PREFIXES.iter().any(|prefix| key.starts_with(prefix))
        || key.ends_with("_version")
}

/// Keys of dropout rates, which other trainers apply. If a rate is not 0, the user gets a note.
pub(super) const DROPOUTS: [&str; 2] = ["attention_dropout", "hidden_dropout"];

/// Returns keys of `config.json` with their neutral value, the only value that does not change the
/// computation. The neutral value is not always "off".
pub(super) fn neutral_values() -> [(&'static str, Value); 12] {
    [
        ("attention_multiplier", Value::Null),
        ("causal", json!(true)),
        ("embedding_multiplier", json!(1)),
        ("is_causal", json!(true)),
        ("logit_scale", json!(1)),
        ("logits_scaling", json!(1)),
        ("mlp_multiplier", json!(1)),
        ("residual_multiplier", json!(1)),
        ("rope_percent", json!(1)),
        ("rotary_pct", json!(1)),
        ("use_rope", json!(true)),
        ("use_rotary_embeddings", json!(true)),
    ]
}

/// Maximum number of layers of a model.
pub(super) const MAX_LAYERS: usize = 1 << 12;

/// Returns whether a key in the `config.json` of a multimodal (text and image) model concerns
/// images.
pub(super) fn concerns_images(key: &str) -> bool {
    const IMAGES: [&str; 8] = [
        "boi_token_id",
        "boi_token_index",
        "eoi_token_id",
        "eoi_token_index",
        "image_token_id",
        "image_token_index",
        "mm_tokens_per_image",
        "vision_config",
    ];
    IMAGES.contains(&key)
}
