//! Converts conversations that were written elsewhere to trajectories for imitation.

use levade_text::{Chat, Message, Role, TextError, ToolSpec};
use levade_tree::{Segment, Trajectory, TreeError};

/// Reason why a conversation cannot become a demonstration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DemonstrationError {
    /// The conversation has no assistant turn after its opening messages.
    #[error("a demonstration must have an assistant turn, with another turn before it")]
    MissingCompletion,
    /// The conversation does not end with a turn of the assistant, but with a turn of this role.
    #[error(
        "a demonstration must end with an assistant turn, but ends with a turn of the role {0}"
    )]
    Trailing(&'static str),
    /// The conversation cannot be rendered in the model's format.
    #[error("{0}")]
    Text(#[from] TextError),
    /// The demonstration cannot be added to a conversation.
    #[error("{0}")]
    Conversation(#[from] levade_conversation::ConversationError),
    /// The demonstration has inconsistent segments.
    #[error("{0}")]
    Tree(#[from] TreeError),
}

/// Returns the tokens of a conversation as the agent loop would have recorded it, with the
/// assistant's turns demonstrated instead of sampled. The first `opening` messages open the task:
/// an assistant turn among them is context and not imitated.
///
/// # Errors
/// Returns an error if there is no turn to imitate, if the conversation does not end with an
/// assistant turn, or if it cannot be rendered in the model's format.
pub fn demonstrate(
    chat: &Chat,
    tools: &[ToolSpec],
    messages: &[Message],
    opening: usize,
) -> Result<Trajectory, DemonstrationError> {
    let first = (opening.max(1)..messages.len()).find(|&at| messages[at].role == Role::Assistant);
    let first = first.ok_or(DemonstrationError::MissingCompletion)?;
    if let Some(last) = messages.last().filter(|last| last.role != Role::Assistant) {
        return Err(DemonstrationError::Trailing(last.role.as_str()));
    }
    let mut trajectory = Trajectory::new();
    let mut leaf = Some(trajectory.push(Segment::context(
        None,
        chat.prompt(&messages[..first], tools)?,
        0,
    ))?);
    let mut at = first;
    let mut turn = 0;
    loop {
        let opened = chat.opened_reasoning(&messages[..at], tools)?;
        let completion_tokens = chat.assistant(&messages[at], opened)?;
        leaf =
            Some(trajectory.push(Segment::demonstrated(leaf, completion_tokens.clone(), turn))?);
        let Some(next) =
            messages[at + 1..].iter().position(|m| m.role == Role::Assistant).map(|n| at + 1 + n)
        else {
            return Ok(trajectory);
        };
        turn += 1;
        let between =
            chat.continuation(&messages[..at], &completion_tokens, &messages[at + 1..next], tools)?;
        leaf = Some(trajectory.push(Segment::context(leaf, between, turn))?);
        at = next;
    }
}
