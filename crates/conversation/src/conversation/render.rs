//! Rendering of a matched request as a prompt.

use super::*;

impl MatchedRequest {
    /// Renders the prompt of a matched request. This takes as long as the chat template does, so it
    /// must run outside async workers. It does not need the conversation.
    ///
    /// # Errors
    /// Returns an error if the template fails, or if the format of the tools is not supported. With
    /// [`Options::strict`], also returns an error if the template renders the recorded history
    /// differently.
    ///
    /// [`Options::strict`]: crate::Options::strict
    pub fn render(self) -> Result<PreparedPrompt, ConversationError> {
        self.render_within(usize::MAX)
    }

    /// Renders the prompt like [`render`](Self::render), but rejects it before tokenization if its
    /// length in bytes shows that it has more than `max_tokens` tokens.
    ///
    /// # Errors
    /// Returns [`TextError::TooLong`] for such a prompt, and the errors of
    /// [`render`](Self::render).
    pub fn render_within(self, max_tokens: usize) -> Result<PreparedPrompt, ConversationError> {
        let MatchedRequest { from, format, mut origin, repeated, continuation: after, new, turn } =
            self;
        let chat = format.chat();
        let shifted = chat.count_shifted_systems(&new, after.is_none());
        let Some(after) = after else {
            let prompt = chat.prompt_with_limit(&new, &from.tools, max_tokens)?;
            let in_reasoning = chat.opened_reasoning(&new, &from.tools)?.is_some();
            return Ok(PreparedPrompt {
                prompt,
                in_reasoning,
                origin,
                repeated,
                drift: None,
                shifted,
                from,
                format,
                continuation: None,
                recorded: Some(0),
                is_truncated: false,
                new,
                recorded_prompt: None,
                calls: None,
                fitted: None,
            });
        };
        let ContinuationPoint {
            node,
            segment,
            mut path,
            mut sampled,
            past,
            message: recorded,
            is_truncated: truncation,
            drifted,
            rest,
        } = after;
        let extended = (!rest.is_empty()).then(|| append_text(&recorded, &rest));
        if extended.is_some() && path.last().is_some_and(|last| chat.stop_ids().contains(last)) {
            // The client continues the turn, so its end-of-turn token is dropped.
            path.truncate(path.len() - 1);
            sampled -= 1;
        }
        let completion = path[path.len() - sampled..].to_vec();
        let text = &extended.as_ref().unwrap_or(&recorded).content;
        let past = &past;
        let tools = &from.tools;
        let round =
            CompletionRound { past, completion: &completion, text, rest: &rest, new: &new, tools };
        let following = format.following_tokens(round, max_tokens.saturating_sub(path.len()))?;
        let recorded = path.len();
        path.extend(&following.tokens);
        let options = format.options();
        let found = if truncation {
            // No template renders a truncated prompt, so there is no drift to find.
            None
        } else if options.history == History::Template || !format.can_abridge() {
            format.full_drift(&path, round)
        } else if let Some(levade_tree::Drift { recorded, printed, .. }) = drifted {
            // A sequence that has drifted counts as drifted at every later turn.
            Some(Drift { recorded, printed, prompt: None })
        } else {
            format.nearby_drift(round, &following.tokens)
        };
        let mut prompt = path;
        let mut recorded = Some(recorded);
        let mut drift = None;
        if let Some(found) = found {
            let printed = found.prompt.clone().filter(|_| options.history == History::Template);
            drift = Some(found.to_record(turn, printed.is_some()));
            match printed {
                Some(printed) => {
                    (prompt, recorded) = (printed, None);
                    origin = Origin::Forked(Fork { at: 0, reason: Reason::Reprinted });
                }
                None if options.strict => {
                    let Drift { recorded, printed, .. } = found;
                    return Err(ConversationError::Drift { turn, recorded, printed });
                }
                None => {}
            }
        }
        let in_reasoning = following.in_reasoning;
        let after = Some(SequenceEnd { node, segment, tokens: sampled as u32, extended });
        let recorded_prompt = None;
        Ok(PreparedPrompt {
            prompt,
            in_reasoning,
            origin,
            repeated,
            drift,
            shifted,
            from,
            format,
            continuation: after,
            recorded,
            is_truncated: truncation,
            new,
            recorded_prompt,
            calls: None,
            fitted: None,
        })
    }
}
