//! Tokens between a sampled turn and the next reply.
//!
//! Guarantees: [`Chat::continuation`] never depends on what the model wrote, in this turn or in an earlier
//! one: the template is shown a neutral reply in the place of each, which at most calls the tools that
//! answered. So it fails for no reply, and two replies are followed by the same tokens.
//!
//! Not here: which of the past a template is shown, and where it would print it otherwise than it was
//! recorded.

use crate::excerpt::excerpt;
use crate::{Arguments, Chat, Message, Role, TextError, ToolCall, ToolSpec};

/// The text that stands for a reply while the template is asked what follows it.
const NEUTRAL: &str = "Done.";

/// Name of the argument that holds the mark.
const MARKED: &str = "text";

/// Name of a tool that answered without saying its name.
const SOME_TOOL: &str = "tool";

impl Chat {
    /// The messages, with what the model wrote taken out. Where the template prints calls itself, a reply
    /// that results follow calls the tools that answered: many templates print no result otherwise.
    fn neutral(&self, messages: &[Message]) -> Vec<Message> {
        let mut shown: Vec<Message> = messages.to_vec();
        for at in 0..shown.len() {
            if shown[at].role == Role::Assistant {
                let tool_calls = self.neutral_calls(&messages[at + 1..], &messages[at].tool_calls);
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

    /// Calls for the results that messages begin with. A result without a name is that of the call whose id
    /// it has.
    fn neutral_calls(&self, messages: &[Message], made: &[ToolCall]) -> Vec<ToolCall> {
        if self.takes_calls().is_none() {
            return Vec::new();
        }
        let results = messages.iter().take_while(|message| message.role == Role::Tool);
        let call = |(index, result): (usize, &Message)| {
            let id = result.tool_call_id.clone().unwrap_or_else(|| format!("call_{index}"));
            let of_id = || made.iter().find(|call| call.id == id).map(|call| call.name.clone());
            let name = result.name.clone().or_else(of_id).unwrap_or_else(|| SOME_TOOL.into());
            ToolCall { id, name, arguments: Arguments::default() }
        };
        results.enumerate().map(call).collect()
    }

    /// The tokens between a sampled turn and the next reply: the rest of the turn's end, `new`, and the
    /// beginning of the assistant's turn. `history` holds the messages before the sampled turn, and `sampled`
    /// the ids of the turn, with or without (when it was cut) the token that ends it.
    ///
    /// # Errors
    /// Errors that the template raises, whatever the model wrote; tools in a format that is not understood.
    pub fn continuation(
        &self,
        history: &[Message],
        sampled: &[u32],
        new: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<u32>, TextError> {
        self.continuation_within(history, (sampled, ""), new, tools, usize::MAX)
    }

    /// Like [`continuation`](Self::continuation), after a turn that its client has extended: `rest` is text
    /// that follows the sampled text within the turn, which `sampled` must not end then. Rejects text that
    /// has more than `max_tokens` tokens, by its bytes where these suffice.
    ///
    /// # Errors
    /// Returns [`TextError::TooLong`] if the bytes show that there are more than `max_tokens` tokens, and the
    /// errors of [`continuation`](Self::continuation).
    pub fn continuation_within(
        &self,
        history: &[Message],
        (sampled, rest): (&[u32], &str),
        new: &[Message],
        tools: &[ToolSpec],
        max_tokens: usize,
    ) -> Result<Vec<u32>, TextError> {
        let shown = [history, new, &[Message::assistant(rest)]].concat();
        let [guard, mark] = self.free_characters(&shown, tools)?;
        let calls = self.neutral_calls(new, &[]);
        let following = match self.following(history, calls, new, tools, [guard, mark])? {
            Some(following) => following,
            // A template that does not end a turn with calls: a turn without them shows what follows.
            None => self.following(history, Vec::new(), new, tools, [guard, mark])?.unwrap_or_default(),
        };
        let ended = sampled.last().is_some_and(|&last| self.ends_turn(last));
        let given = if ended { self.without_end(&following) } else { &following };
        let given = match rest {
            "" => given.to_owned(),
            rest => self.tokenizer().guard(rest, guard, true) + given,
        };
        self.tokenizer().check_length(&given, max_tokens)?;
        Ok(self.tokenizer().encode_guarded(&given, Some(guard)))
    }

    /// The text after a neutral reply with these calls; `None` where calls keep the template from ending it.
    fn following(
        &self,
        history: &[Message],
        calls: Vec<ToolCall>,
        new: &[Message],
        tools: &[ToolSpec],
        [guard, mark]: [char; 2],
    ) -> Result<Option<String>, TextError> {
        let mut reply = Message::calls("", calls);
        let is_call = match reply.tool_calls.last_mut() {
            Some(call) => {
                call.arguments.insert(MARKED.into(), mark.to_string().into());
                true
            }
            // The mark ends the reply, so it shows exactly where what follows begins, white space included.
            None => {
                reply = Message::assistant(format!("{NEUTRAL}{mark}"));
                false
            }
        };
        let mut messages = self.neutral(history);
        messages.push(reply);
        messages.extend(new.iter().cloned());
        let text = self.print(&messages, tools, true, guard)?;
        let (_, following) =
            text.rsplit_once(mark).ok_or_else(|| TextError::NoTurn { found: excerpt(&text) })?;
        // A call is closed in between.
        let following = if is_call { self.since_end(following) } else { Some(following) };
        Ok(following.map(str::to_owned))
    }

    /// The text after a reply without the token that ends its turn, which was sampled.
    fn without_end<'a>(&self, following: &'a str) -> &'a str {
        let rest = following.trim_start();
        match self.tokenizer().leading_special(rest) {
            Some((id, len)) if self.ends_turn(id) => &rest[len..],
            _ => following,
        }
    }

    /// Whether a token ends a turn as the template or the format of calls has it.
    fn ends_turn(&self, id: u32) -> bool {
        let is_stop = |stop: &&str| self.tokenizer().special(stop) == Some(id);
        id == self.end_of_turn() || self.tags().syntax.spelling().stops.iter().any(is_stop)
    }

    /// A text from the first token on that ends a turn.
    fn since_end<'a>(&self, text: &'a str) -> Option<&'a str> {
        let ends = |at: &usize| {
            let special = self.tokenizer().leading_special(&text[*at..]);
            special.is_some_and(|(id, _)| self.stop_ids().contains(&id) || self.ends_turn(id))
        };
        text.char_indices().map(|(at, _)| at).find(ends).map(|at| &text[at..])
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
        let messages: Vec<Message> = self.neutral(messages);
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
