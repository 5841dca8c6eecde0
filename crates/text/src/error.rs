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
    /// The chat template does not parse, or fails on these messages.
    #[error("chat template: {0}")]
    Template(String),
    /// The template prints no special token after an assistant turn, so a completion would never
    /// end.
    #[error(
        "the chat template prints {found:?} after an assistant turn, where a special token of the \
         tokenizer should end it; does the template belong to this model?"
    )]
    NoEndOfTurn {
        /// Text that the template prints instead.
        found: String,
    },
    /// A message contains a part that is not text.
    #[error(
        "a {role} message has a part of type {kind:?}, which this model does not support; use \
         parts of type \"text\""
    )]
    Part {
        /// Role of the message.
        role: &'static str,
        /// Type of the part.
        kind: String,
    },
    /// The template describes tools, but requests calls in an unsupported format.
    #[error(
        "the chat template requests tool calls in a format that Levade does not support; set the \
         tool protocol to \"hermes\" to describe tools in the system prompt instead, or, if \
         another format fits, to \"qwen_xml\", \"llama\", \"mistral\", \"deepseek\", \"glm\", \
         \"kimi\", \"minimax\" or \"harmony\""
    )]
    ForeignTools,
    /// The template does not print the content of an assistant message.
    #[error(
        "the chat template does not print the text of assistant messages (it prints {found:?}); \
         does it belong to a chat model?"
    )]
    NoTurn {
        /// Text that the template prints instead.
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
        /// Effect of the token on calls.
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
        /// Lower bound on the number of tokens of the text.
        min_tokens: usize,
        /// Maximum number of tokens that fit.
        max_tokens: usize,
        /// Maximum number of bytes of the kind `what` in one token.
        max_token_size: usize,
        /// Kind of bytes that are counted, such as "letters and digits".
        what: &'static str,
    },
}
