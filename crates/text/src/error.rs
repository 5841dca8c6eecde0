//! Error type for conversions between text and tokens.

/// An error of a tokenizer, a chat template or a tool protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The tokenizer cannot be used. The message states the problem and a remedy.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The model has no chat template, and the configuration names none.
    #[error(
        "the model has no chat template; set one: the text of a Jinja template, or \"chatml\" for \
         a model that was trained with <|im_start|> and <|im_end|>"
    )]
    NoTemplate,
    /// The chat template does not parse, or raises an error for these messages.
    #[error("chat template: {0}")]
    Template(String),
    /// The chat template prints no special token after an assistant turn, so a completion would
    /// never end.
    #[error(
        "the chat template prints {found:?} after an assistant turn, where a special token of the \
         tokenizer should end it; does the template belong to this model?"
    )]
    NoEndOfTurn {
        /// Text that the chat template prints after an assistant turn.
        found: String,
    },
    /// A message contains a part that is not text.
    #[error(
        "a {role} message has a part of type {kind:?}, which this model does not support; use \
         parts of type \"text\""
    )]
    Part {
        /// Role of the message that contains the part.
        role: &'static str,
        /// Type of the part, such as `image_url`.
        kind: String,
    },
    /// The chat template describes tools, but requests tool calls in an unsupported format.
    #[error(
        "the chat template requests tool calls in a format that Levade does not support; set the \
         tool protocol to \"hermes\" to describe tools in the system prompt instead, or, if \
         another format fits, to \"qwen_xml\", \"llama\", \"mistral\", \"deepseek\", \"glm\", \
         \"kimi\", \"minimax\" or \"harmony\""
    )]
    ForeignTools,
    /// The chat template does not print the content of an assistant message.
    #[error(
        "the chat template does not print the text of assistant messages (it prints {found:?}); \
         does it belong to a chat model?"
    )]
    NoTurn {
        /// Text that the chat template prints instead of the content.
        found: String,
    },
    /// A special token of the tokenizer prevents tool calls from being written or parsed.
    #[error(
        "tools cannot be called with this tokenizer: its special token {token:?} {why}; mark it as \
         not special in tokenizer.json, or remove the tools"
    )]
    CallToken {
        /// Text of the special token.
        token: String,
        /// Effect of the special token on tool calls.
        why: String,
    },
    /// A text is too long for the context, as its length in bytes proves.
    #[error(
        "the prompt has {bytes} bytes, which are at least {min_tokens} tokens (no token of this \
         model has more than {max_token_size} {what}), but {max_tokens} tokens are left in the \
         context; shorten the prompt"
    )]
    TooLong {
        /// Length of the text, in bytes.
        bytes: usize,
        /// Lower bound on the number of tokens of the text, from its length in bytes.
        min_tokens: usize,
        /// Maximum number of tokens that fit into the context.
        max_tokens: usize,
        /// Maximum number of bytes in one token, counting only bytes of the kind `what`.
        max_token_size: usize,
        /// Kind of the counted bytes, such as "letters and digits".
        what: &'static str,
    },
}
