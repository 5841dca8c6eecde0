//! Values that transformers takes where a `config.json` does not say.

use crate::Family;

/// Defaults of a family; `None` where a file must say, or where it follows from other numbers.
pub(super) struct Defaults {
    pub(super) heads: Option<usize>,
    /// `None`: as many as query heads.
    pub(super) kv_heads: Option<usize>,
    /// `None`: the width shared out among the heads.
    pub(super) head_dim: Option<usize>,
    pub(super) vocabulary: Option<usize>,
    pub(super) context: usize,
    pub(super) theta: f32,
    pub(super) tied: bool,
    /// Size of sliding windows, where layers have them.
    pub(super) window: Option<usize>,
}

impl Defaults {
    pub(super) fn of(family: Family) -> Self {
        let plain = Defaults {
            heads: None,
            kv_heads: None,
            head_dim: None,
            vocabulary: None,
            context: 32_768,
            theta: 10_000.0,
            tied: false,
            window: None,
        };
        match family {
            Family::Llama => Defaults { context: 2048, ..plain },
            Family::Mistral => Defaults { kv_heads: Some(8), context: 131_072, window: Some(4096), ..plain },
            Family::Qwen2 => Defaults { window: Some(4096), ..plain },
            Family::Qwen3 => Defaults { head_dim: Some(128), window: Some(4096), ..plain },
            // The text part of a larger model says what differs from these alone.
            Family::Gemma3 => Defaults {
                heads: Some(8),
                kv_heads: Some(4),
                head_dim: Some(256),
                vocabulary: Some(262_208),
                context: 131_072,
                theta: 1_000_000.0,
                tied: true,
                window: Some(4096),
            },
            Family::SmolLm3 => Defaults { kv_heads: Some(4), theta: 2_000_000.0, tied: true, ..plain },
        }
    }
}
