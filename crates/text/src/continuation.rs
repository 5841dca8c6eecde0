//! Tokens between a sampled turn and the next reply.
//!
//! Guarantees: [`Chat::continuation`] never depends on what the model wrote, in this turn or in an earlier
//! one: the template is shown a neutral reply in the place of each. So it fails for no reply, and two replies
//! are followed by the same tokens.
//!
//! Not here: which of the past a template is shown, and where it would print it otherwise than it was
//! recorded.

use crate::chat::excerpt;
use crate::{Chat, Message, Role, TextError, ToolSpec};

/// The text that stands for a reply while the template is asked what follows it.
const NEUTRAL: &str = "Done.";

/// The messages, with what the model wrote taken out.
fn neutral(messages: &[Message]) -> impl Iterator<Item = Message> {
    messages.iter().map(|message| match message.role {
        Role::Assistant => Message {
            content: NEUTRAL.into(),
            reasoning_content: None,
            tool_calls: Vec::new(),
            ..message.clone()
        },
        Role::System | Role::Developer | Role::User | Role::Tool => message.clone(),
    })
}

impl Chat {
    /// The tokens between a sampled turn and the next reply: the rest of the turn's end, `new`, and the
    /// beginning of the assistant's turn. `history` holds the messages before the sampled turn, and `sampled`
    /// the ids of the turn, with or without (when it was cut) the token that ends it.
    ///
    /// # Errors
    /// Errors that the template raises, whatever the model wrote; tools in a format that is not understood; a
    /// system message that the template does not print here.
    pub fn continuation(
        &self,
        history: &[Message],
        sampled: &[u32],
        new: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<u32>, TextError> {
        let [guard, mark] = self.free_characters(&[history, new].concat(), tools)?;
        // The mark ends the reply, so it shows exactly where what follows begins, white space included.
        let reply = Message::assistant(format!("{NEUTRAL}{mark}"));
        let messages: Vec<Message> =
            neutral(history).chain(std::iter::once(reply)).chain(new.iter().cloned()).collect();
        let text = self.print(&messages, tools, true, guard)?;
        let (_, following) =
            text.rsplit_once(mark).ok_or_else(|| TextError::NoTurn { found: excerpt(&text) })?;
        if new.iter().any(|message| message.role.instructs()) && !self.prints_later(Role::System) {
            return Err(TextError::Template(
                "it does not print a system message after an assistant's turn; put it at the beginning"
                    .into(),
            ));
        }
        let ended = sampled.last().is_some_and(|&last| last == self.end_of_turn());
        let given = if ended { self.without_end(following) } else { following };
        Ok(self.tokenizer().encode_guarded(given, Some(guard)))
    }

    /// The text after a reply without the token that ends its turn, which was sampled.
    fn without_end<'a>(&self, following: &'a str) -> &'a str {
        let rest = following.trim_start();
        match self.tokenizer().leading_special(rest) {
            Some((id, len)) if id == self.end_of_turn() => &rest[len..],
            _ => following,
        }
    }

    /// The tag that closes the thought which the prompt for these messages leaves open, as templates of
    /// models do that always think. What the model wrote before does not matter.
    ///
    /// # Errors
    /// Errors that the template raises, or tools in a format that is not understood.
    pub fn opened_thought(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Option<&str>, TextError> {
        let messages: Vec<Message> = neutral(messages).collect();
        let [guard] = self.free_characters(&messages, tools)?;
        let with = self.print(&messages, tools, true, guard)?;
        // Most templates end here: there is no such tag in what they print.
        if self.thoughts().left_open(&with).is_none() {
            return Ok(None);
        }
        // Only what begins the reply counts: a question may speak of tags, too.
        let without = self.print(&messages, tools, false, guard).unwrap_or_default();
        let shared = with.char_indices().zip(without.chars()).find(|((_, a), b)| a != b);
        let shared = shared.map_or(with.len().min(without.len()), |((at, _), _)| at);
        let opened = match &with[shared..] {
            // A template that begins a reply unasked.
            "" => self.thoughts().pairs().iter().find(|tags| with.trim_end().ends_with(&tags.open)),
            begun => self.thoughts().left_open(begun),
        };
        Ok(opened.map(|tags| tags.close.as_str()))
    }
}
