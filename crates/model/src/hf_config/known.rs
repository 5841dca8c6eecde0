//! Keys of a `config.json` that are understood without being read: those that change no number here, and
//! those that must have the one value under which they change none.

use serde_json::{Value, json};

/// Keys that change no number of a model that is sampled from and trained here, by the reason why.
const WITHOUT_EFFECT: [&[&str]; 8] = [
    // Where the file comes from, and how other programs find its class.
    &[
        "architectures",
        "finetuning_task",
        "is_llama_config",
        "name_or_path",
        "task_specific_params",
        "tokenizer_class",
        "transformers.js_config",
    ],
    // Numbers are computed in the precision that the recipe asks for.
    &["dtype", "torch_dtype", "use_bfloat16"],
    // How other programs compute the same: caches, kernels, splitting of products.
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
    // What they return, not what they compute.
    &[
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "return_dict",
        "return_dict_in_generate",
        "use_return_dict",
    ],
    // Where training began, and noise that is added in it (Levade adds none).
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
    // How to sample: recipes and options say it.
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
    // Lengths that somebody trained with; `max_position_embeddings` counts.
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
    // Tokens and labels of tasks that are none here.
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

/// Beginnings of such keys: private entries of transformers, and remarks of trainers.
const PREFIXES: [&str; 6] = ["_", "axolotl_", "summary_", "trl_", "unsloth_", "wandb_"];

/// Whether a key changes no number here.
pub(super) fn is_without_effect(key: &str) -> bool {
    WITHOUT_EFFECT.iter().any(|keys| keys.contains(&key))
        || PREFIXES.iter().any(|prefix| key.starts_with(prefix))
        || key.ends_with("_version")
}

/// Noise that training elsewhere may add.
pub(super) const DROPOUTS: [&str; 2] = ["attention_dropout", "hidden_dropout"];

/// Keys that leave the computation as it is with one value alone, which is not always that of a switch that
/// is off.
pub(super) fn neutral() -> [(&'static str, Value); 12] {
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

/// Most layers that a model has.
pub(super) const MOST_LAYERS: usize = 1 << 12;

/// Whether a key of a model of text and images is about the images.
pub(super) fn is_of_images(key: &str) -> bool {
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
