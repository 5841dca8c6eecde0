//! Conversations that somebody else wrote, as trajectories to imitate.

use levade_text::{Chat, Message, Role, TextError, ToolSpec};
use levade_tree::{Segment, Trajectory, TreeError};

/// Faults of a demonstration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DemonstrationError {
    /// Starts with the model's turn, or has none.
    #[error("a demonstration needs an assistant's turn, with another turn before it")]
    NoTurn,
    /// Goes on after the last thing there is to imitate.
    #[error("a demonstration must end with an assistant's turn, but this one ends with a turn of the {0}")]
    Trailing(&'static str),
    /// Cannot be written in the model's format.
    #[error("{0}")]
    Text(#[from] TextError),
    /// Cannot be put into a conversation.
    #[error("{0}")]
    Conversation(#[from] levade_conversation::ConversationError),
    /// Has segments that do not fit together.
    #[error("{0}")]
    Tree(#[from] TreeError),
}

/// The tokens of a conversation as the agent loop would have recorded it, the assistant's turns demonstrated
/// instead of sampled. The first `opening` messages are what the task opens with: an assistant's turn among
/// them is given, not imitated.
///
/// # Errors
/// When there is nothing to imitate, or the conversation cannot be written in the model's format.
pub fn demonstrate(
    chat: &Chat,
    tools: &[ToolSpec],
    messages: &[Message],
    opening: usize,
) -> Result<Trajectory, DemonstrationError> {
    let first = (opening.max(1)..messages.len()).find(|&at| messages[at].role == Role::Assistant);
    let first = first.ok_or(DemonstrationError::NoTurn)?;
    if let Some(last) = messages.last().filter(|last| last.role != Role::Assistant) {
        return Err(DemonstrationError::Trailing(last.role.as_str()));
    }
    let mut trajectory = Trajectory::new();
    let mut leaf = Some(trajectory.push(Segment::given(None, chat.prompt(&messages[..first], tools)?, 0))?);
    let (mut at, mut turn) = (first, 0);
    loop {
        let opened = chat.opened_thought(&messages[..at], tools)?;
        let said = chat.assistant(&messages[at], opened)?;
        leaf = Some(trajectory.push(Segment::demonstrated(leaf, said.clone(), turn))?);
        let Some(next) =
            messages[at + 1..].iter().position(|m| m.role == Role::Assistant).map(|n| at + 1 + n)
        else {
            return Ok(trajectory);
        };
        turn += 1;
        let between = chat.continuation(&messages[..at], &said, &messages[at + 1..next], tools)?;
        leaf = Some(trajectory.push(Segment::given(leaf, between, turn))?);
        at = next;
    }
}
