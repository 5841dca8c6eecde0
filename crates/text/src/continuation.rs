//! Computes the context tokens between a sampled turn and the next completion.
//!
//! # Guarantees
//! **Independence of the completions**: [`Chat::continuation`] never depends on the model's text,
//! in this turn or in an earlier one. The template receives a neutral message in place of each
//! assistant message: fixed text, or calls of the tools that returned results. The function
//! therefore fails for no completion, and the same tokens follow every completion.
//!
//! Out of scope: selecting the history that a template receives, and detecting that the template
//! would render it differently than it was recorded.

use crate::excerpt::excerpt;
use crate::{Arguments, Chat, Message, Role, TextError, ToolCall, ToolSpec};

/// Text that stands for a completion while the chat template renders the text after the completion.
const NEUTRAL: &str = "Done.";

/// Name of the call argument that contains the mark.
const MARKED: &str = "text";

/// Tool name in the call for a tool result without a name.
const SOME_TOOL: &str = "tool";

impl Chat {
    /// Returns the messages with the model's text replaced by a neutral text. If the template
    /// prints calls itself, an assistant message before tool results calls the tools that returned
    /// them, because many templates print no result otherwise.
    fn neutralize_messages(&self, messages: &[Message]) -> Vec<Message> {
        let mut shown: Vec<Message> = messages.to_vec();
        for at in 0..shown.len() {
            if shown[at].role == Role::Assistant {
                let tool_calls =
                    self.make_neutral_calls(&messages[at + 1..], &messages[at].tool_calls);
                shown[at] = Message {
                    content: if tool_calls.is_empty() { NEUTRAL.into() } else { "".into() },
                    reasoning_content: None,
                    tool_calls,
                    ..shown[at].clone()
                };
            }
        }
        shown
    }

    /// Creates the calls that the tool results at the start of `messages` belong to. A result
    /// without a name belongs to the call with the same id in `made`.
    fn make_neutral_calls(&self, messages: &[Message], made: &[ToolCall]) -> Vec<ToolCall> {
        if self.call_message_format().is_none() {
            return Vec::new();
        }
        let results = messages.iter().take_while(|message| message.role == Role::Tool);
        results
            .enumerate()
            .map(|(index, result)| {
                let id = result.tool_call_id.clone().unwrap_or_else(|| format!("call_{index}"));
                let of_id = || made.iter().find(|call| call.id == id).map(|call| call.name.clone());
                let name = result.name.clone().or_else(of_id).unwrap_or_else(|| SOME_TOOL.into());
                ToolCall { id, name, arguments: Arguments::default() }
            })
            .collect()
    }

    /// Returns the tokens between a sampled turn and the next completion: the missing end of the
    /// turn, the messages in `new`, and the generation prompt.
    ///
    /// `history` contains the messages before the sampled turn. `sampled` contains the ids of the
    /// turn. A truncated turn lacks the end-of-turn token, which is then part of the returned
    /// tokens.
    ///
    /// # Errors
    /// Returns an error if the template raises one, which does not depend on the model's text, or
    /// if the template describes tools in an unsupported call format.
    pub fn continuation(
        &self,
        history: &[Message],
        sampled: &[u32],
        new: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<u32>, TextError> {
        self.continuation_within(history, (sampled, ""), new, tools, usize::MAX)
    }

    /// Returns the tokens between a sampled turn that the client has extended and the next
    /// completion, as [`continuation`](Self::continuation) does for other turns.
    ///
    /// `rest` is the text that follows the sampled text within the turn; if it is not empty,
    /// `sampled` must not end the turn. A text with more than `max_tokens` tokens is rejected if
    /// its bytes suffice to show that.
    ///
    /// # Errors
    /// Returns [`TextError::TooLong`] if the bytes show that there are more than `max_tokens`
    /// tokens, and the errors of [`continuation`](Self::continuation).
    pub fn continuation_within(
        &self,
        history: &[Message],
        (sampled, rest): (&[u32], &str),
        new: &[Message],
        tools: &[ToolSpec],
        max_tokens: usize,
    ) -> Result<Vec<u32>, TextError> {
        let shown = [history, new, &[Message::assistant(rest)]].concat();
        let [guard, mark] = self.find_unused_characters(&shown, tools)?;
        let calls = self.make_neutral_calls(new, &[]);
        let following = match self.render_following(history, calls, new, tools, [guard, mark])? {
            Some(following) => following,
            // The template does not end a turn with calls. A turn without calls shows what follows.
            None => self
                .render_following(history, Vec::new(), new, tools, [guard, mark])?
                .unwrap_or_default(),
        };
        let ended = sampled.last().is_some_and(|&last| self.ends_turn(last));
        let context_text = if ended { self.strip_turn_end(&following) } else { &following };
        let context_text = match rest {
            "" => context_text.to_owned(),
            rest => self.tokenizer().guard(rest, guard, true) + context_text,
        };
        self.tokenizer().check_length(&context_text, max_tokens)?;
        Ok(self.tokenizer().encode_guarded(&context_text, Some(guard)))
    }

    /// Returns the text that the template prints after an assistant message with these calls.
    /// Returns `None` if the template does not end a turn with calls.
    fn render_following(
        &self,
        history: &[Message],
        calls: Vec<ToolCall>,
        new: &[Message],
        tools: &[ToolSpec],
        [guard, mark]: [char; 2],
    ) -> Result<Option<String>, TextError> {
        let mut assistant_message = Message::calls("", calls);
        let is_call = match assistant_message.tool_calls.last_mut() {
            Some(call) => {
                call.arguments.insert(MARKED.into(), mark.to_string().into());
                true
            }
            // The mark ends the message, so it shows exactly where the following text starts,
            // including white space.
            None => {
                assistant_message = Message::assistant(format!("{NEUTRAL}{mark}"));
                false
            }
        };
        let mut messages = self.neutralize_messages(history);
        messages.push(assistant_message);
        messages.extend(new.iter().cloned());
        let text = self.render_text(&messages, tools, true, guard)?;
        let (_, following) =
            text.rsplit_once(mark).ok_or_else(|| TextError::NoTurn { found: excerpt(&text) })?;
        // The text between the mark and the end-of-turn token closes the call.
        let following = if is_call { self.text_from_turn_end(following) } else { Some(following) };
        Ok(following.map(str::to_owned))
    }

    /// Removes the end-of-turn token from the text after an assistant message, because the model
    /// has sampled this token.
    fn strip_turn_end<'a>(&self, following: &'a str) -> &'a str {
        let rest = following.trim_start();
        match self.tokenizer().leading_special(rest) {
            Some((id, len)) if self.ends_turn(id) => &rest[len..],
            _ => following,
        }
    }

    /// Returns whether a token ends a turn according to the template or the call format.
    fn ends_turn(&self, id: u32) -> bool {
        let is_stop = |stop: &&str| self.tokenizer().special(stop) == Some(id);
        id == self.end_of_turn() || self.tags().syntax.syntax_tags().stops.iter().any(is_stop)
    }

    /// Returns the part of a text from its first end-of-turn token on, or `None` if the text has no
    /// such token.
    fn text_from_turn_end<'a>(&self, text: &'a str) -> Option<&'a str> {
        text.char_indices()
            .map(|(at, _)| at)
            .find(|at| {
                let special = self.tokenizer().leading_special(&text[*at..]);
                special.is_some_and(|(id, _)| self.stop_ids().contains(&id) || self.ends_turn(id))
            })
            .map(|at| &text[at..])
    }

    /// Returns the tag that closes the reasoning that the prompt for these messages leaves open, or
    /// `None` if no reasoning is open. Templates of models that always reason open the reasoning.
    /// The model's earlier text has no influence.
    ///
    /// # Errors
    /// Returns an error if the template raises one, or if it describes tools in an unsupported call
    /// format.
    pub fn opened_reasoning(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Option<&str>, TextError> {
        let messages: Vec<Message> = self.neutralize_messages(messages);
        let [guard] = self.find_unused_characters(&messages, tools)?;
        let with = self.render_text(&messages, tools, true, guard)?;
        // Most templates end here: their text contains no such tag.
        if self.reasoning_tags().find_open(&with).is_none() {
            return Ok(None);
        }
        // Only the generation prompt counts, because a question may also contain tags.
        let without = self.render_text(&messages, tools, false, guard).unwrap_or_default();
        let common_len = with.char_indices().zip(without.chars()).find(|((_, a), b)| a != b);
        let common_len = common_len.map_or(with.len().min(without.len()), |((at, _), _)| at);
        let opened = match &with[common_len..] {
            // The template prints the generation prompt even without a request.
            "" => self
                .reasoning_tags()
                .pairs()
                .iter()
                .find(|tags| with.trim_end().ends_with(&tags.open)),
            opened_tag => self.reasoning_tags().find_open(opened_tag),
        };
        Ok(opened.map(|tags| tags.close.as_str()))
    }
}
