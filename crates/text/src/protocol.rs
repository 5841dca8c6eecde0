//! Protocols in which tools are described to a model and called by it.

use serde::{Deserialize, Serialize};

/// Protocol by which tools are described to a model and called by it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolProtocol {
    /// Selects the format in which the chat template prints calls and tools. If it prints neither,
    /// selects [`Hermes`](Self::Hermes). With any other protocol except Hermes, the template still
    /// describes the tools if it can.
    #[default]
    Auto,
    /// Tools are described in a section of the system prompt, whatever the template supports. Calls
    /// are JSON between `<tool_call>` tags.
    Hermes,
    /// Calls are written with the tags of Qwen3-Coder: `<tool_call><function=…><parameter=…>`.
    QwenXml,
    /// A call is a completion that consists of JSON, as in Llama 3.
    Llama,
    /// Calls are `[TOOL_CALLS]` and JSON, as in Mistral's models.
    Mistral,
    /// Calls are written with the special tokens of DeepSeek V3, R1 and V3.1.
    Deepseek,
    /// Calls are `<tool_call>` with `<arg_key>` and `<arg_value>`, as in GLM 4.5.
    Glm,
    /// Calls are written with the special tokens of Kimi K2.
    Kimi,
    /// Calls are `<minimax:tool_call>` with `<invoke>`, as in MiniMax M2.
    Minimax,
    /// Calls are messages on channels, as in gpt-oss.
    Harmony,
}

/// Tool support of a chat template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolSupport {
    /// The template prints tools and requests calls in a supported format.
    Native,
    /// The template prints tools and requests calls in an unsupported format.
    Foreign,
    /// The template ignores tools, or must not print them.
    None,
}
