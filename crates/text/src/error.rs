//! Errors between text and tokens.

/// Errors of tokenizers, chat templates and tool protocols.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The tokenizer cannot be used; the message names what is wrong with it and the way out.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The model comes without a chat template, and none was named.
    #[error(
        "the model has no chat template; name one: the text of a Jinja template, or \"chatml\" for a model that was \
         trained on <|im_start|> and <|im_end|>"
    )]
    NoTemplate,
    /// The chat template does not parse, or fails on these messages.
    #[error("chat template: {0}")]
    Template(String),
    /// After an assistant turn the template prints no special token, so a reply would never end.
    #[error(
        "the chat template prints {found:?} after an assistant turn, where a special token of the tokenizer should end \
         it; does the template belong to this model?"
    )]
    NoEndOfTurn {
        /// Text that stands there.
        found: String,
    },
    /// A message holds something else than text.
    #[error(
        "a {role} message has a part of type {kind:?}, which this model cannot take; it takes parts of type \"text\""
    )]
    Part {
        /// Role that speaks.
        role: &'static str,
        /// Type of the part.
        kind: String,
    },
    /// The template prints tools, but asks for calls in a format that is not understood here.
    #[error(
        "the chat template asks for calls in a format of its own that is none of those that Levade reads; set the \
         tool protocol to \"hermes\" to describe tools in the system prompt instead, or, where one of the others \
         fits, to \"qwen_xml\", \"llama\", \"mistral\", \"deepseek\", \"glm\", \"kimi\", \"minimax\" or \"harmony\""
    )]
    ForeignTools,
    /// The template prints nothing of what an assistant says.
    #[error(
        "the chat template does not print what an assistant says (it prints {found:?}); does it belong to a \
         model that chats?"
    )]
    NoTurn {
        /// Text that it prints.
        found: String,
    },
    /// A special token of the tokenizer keeps tool calls from being written or read.
    #[error(
        "tools cannot be called with this tokenizer: its special token {token:?} {why}; mark it as not \
         special in tokenizer.json, or take the tools out"
    )]
    CallToken {
        /// The token.
        token: String,
        /// The way it treats calls.
        why: String,
    },
    /// A text is too long for a context, which its bytes show.
    #[error(
        "the prompt has {bytes} bytes, which are at least {min_tokens} tokens (no token of this model stands for more \
         than {longest} {what}), but {max_tokens} are left of its context; make it shorter"
    )]
    TooLong {
        /// Bytes of the text.
        bytes: usize,
        /// Number of tokens that it has at least.
        min_tokens: usize,
        /// Number of tokens that it can have.
        max_tokens: usize,
        /// Number of bytes of the kind below that one token stands for at most.
        longest: usize,
        /// Kind of bytes that are counted.
        what: &'static str,
    },
}
