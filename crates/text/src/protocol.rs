//! Ways in which models are told of tools, and call them.

use serde::{Deserialize, Serialize};

/// How a model is told of tools and calls them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolProtocol {
    /// Decides by what the chat template prints for calls and tools; where it knows neither,
    /// [`Hermes`](Self::Hermes). With any of the others, the template still describes the tools where it can.
    #[default]
    Auto,
    /// A section of the system prompt, whatever the template knows, and calls as JSON between `<tool_call>`
    /// tags.
    Hermes,
    /// The tags of Qwen3-Coder: `<tool_call><function=…><parameter=…>`.
    QwenXml,
    /// A reply in JSON, as of Llama 3.
    Llama,
    /// `[TOOL_CALLS]` and JSON.
    Mistral,
    /// The special tokens of DeepSeek V3, R1 and V3.1.
    Deepseek,
    /// `<tool_call>` with `<arg_key>` and `<arg_value>`, as of GLM 4.5.
    Glm,
    /// The special tokens of Kimi K2.
    Kimi,
    /// `<minimax:tool_call>` with `<invoke>`, as of MiniMax M2.
    Minimax,
    /// Messages on channels, as of gpt-oss.
    Harmony,
}

/// Ways of a template with tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolSupport {
    /// Prints them and asks for calls in a format that is understood.
    Native,
    /// Prints them and asks for calls in another format.
    Foreign,
    /// Ignores them, or is to be kept from printing them.
    None,
}
