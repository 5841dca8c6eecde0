//! Tokens of a completion with the text that they complete.

use super::*;

/// Sampled tokens of a completion, in parts. Each part has the tokens and the deltas that they
/// complete. Either all deltas of a part are text of the message, or none.
#[derive(Default)]
pub(super) struct TokenParts {
    parts: Vec<(Vec<CompletionDelta>, Vec<Token>)>,
    /// Tokens that have not completed a delta yet.
    pending: Vec<Token>,
}

/// Returns whether `deltas` contain text of the message, not only reasoning and tool calls.
fn has_text(deltas: &[CompletionDelta]) -> bool {
    deltas.iter().any(|delta| matches!(delta, CompletionDelta::Speech(_)))
}

impl TokenParts {
    /// Parses tokens, and appends them to the parts and to `completion`.
    pub(super) fn add(
        &mut self,
        parser: &mut CompletionParser,
        completion: &mut Completion,
        (ids, logprobs, top, version): (Vec<u32>, Vec<f32>, Vec<TopLogprobs>, u64),
    ) {
        for (index, (&id, &logprob)) in ids.iter().zip(&logprobs).enumerate() {
            let deltas = parser.push(id);
            let top = top.get(index).cloned().unwrap_or_default();
            self.pending.push(Token { id, logprob, top, version });
            if deltas.is_empty() {
                continue;
            }
            match self.parts.last_mut().filter(|(last, _)| has_text(last) == has_text(&deltas)) {
                Some((last, tokens)) => {
                    last.extend(deltas);
                    tokens.append(&mut self.pending);
                }
                None => self.parts.push((deltas, std::mem::take(&mut self.pending))),
            }
        }
        completion.extend(&ids, &logprobs, version);
        completion.top.extend(top);
    }

    /// Returns the parts. Tokens that have not completed a delta form the last part, which has no
    /// deltas.
    pub(super) fn into_parts(mut self) -> Vec<(Vec<CompletionDelta>, Vec<Token>)> {
        if !self.pending.is_empty() {
            self.parts.push((Vec::new(), self.pending));
        }
        self.parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transcript::MessageTokens;

    const CALL: &str = "So.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1.50, \"b\": 2}}\n</tool_call>";

    #[test]
    fn message_tokens_exclude_reasoning_and_tool_calls() {
        let chat = Arc::new(levade_text::testing::tiny_chat().unwrap());
        let parsing = ChatParseOptions {
            chat,
            in_reasoning: false,
            tools: Vec::new().into(),
            calls_are_text: false,
        };
        let mut parser = CompletionParser::for_chat(&parsing, &[], "");
        let recorded_completion = format!("<think>Hm.</think>One{CALL}Two");
        let ids: Vec<u32> = recorded_completion.bytes().map(u32::from).collect();
        let mut parts = TokenParts::default();
        let logprobs = vec![-0.5; ids.len()];
        parts.add(&mut parser, &mut Completion::default(), (ids, logprobs, Vec::new(), 0));
        let mut tokens = MessageTokens::default();
        for (deltas, of) in parts.into_parts() {
            tokens.add(&deltas, &of);
        }
        let texts = tokens.take().into_iter().map(|part| {
            let bytes = part.iter().map(|token| u8::try_from(token.id).unwrap());
            String::from_utf8(bytes.collect()).unwrap()
        });
        assert_eq!(texts.collect::<Vec<_>>(), ["OneSo.", "Two"]);
    }
}
