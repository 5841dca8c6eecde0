//! What can go wrong between text and tokens.

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
        /// What stands there.
        found: String,
    },
    /// The template prints tools, but asks for calls in a format that is not understood here.
    #[error(
        "the chat template describes tools in a format of its own that Dressage does not parse (it knows \
         <tool_call>{{…}}</tool_call>); set the tool protocol to \"hermes\" to describe them in the system prompt instead"
    )]
    ForeignTools,
    /// The template prints earlier turns differently once new messages follow, so the recorded tokens are not a prefix
    /// of the new prompt. The caller may start a new branch from [`Chat::prompt`](crate::Chat::prompt).
    #[error(
        "the chat template rewrites earlier turns once new messages follow (it now prints {now:?} where the recorded \
         turn has {before:?}); start a new branch from the whole history instead of continuing"
    )]
    Rewritten {
        /// What the recorded turns have, from where they differ.
        before: String,
        /// What the template prints there now.
        now: String,
    },
}
