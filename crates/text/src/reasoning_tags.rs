//! Finds the tags around a model's reasoning. The parser that uses them is in
//! `completion_parser.rs`.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::{ChatTemplate, TemplateInput, Tokenizer};

/// A pair of tags around a model's reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReasoningTags {
    pub open: String,
    pub close: String,
}

/// Reasoning tags that a prompt may request although neither the template nor the tokenizer
/// contains them.
const USUAL: [(&str, &str); 2] = [("<think>", "</think>"), ("<thinking>", "</thinking>")];

/// Reasoning tags that consist of several tokens, for models that have the token in the first
/// column.
const COMPOUND: [(&str, &str, &str); 2] = [
    ("<|channel|>", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>", "<|channel>thought", "<channel|>"),
];

/// Closing tags of tool calls, whose content templates may drop like reasoning.
const CALLS: [&str; 2] = ["</tool_call>", "</minimax:tool_call>"];

/// Message fields from which published templates read reasoning.
pub(crate) const REASONING: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

const PROBE_REASONING: &str = "LevadeProbeThought";
const SPEECH: &str = "LevadeProbeSpeech";

/// The pairs of reasoning tags that a model uses.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReasoningTagSet(Vec<ReasoningTags>);

impl ReasoningTagSet {
    /// Finds the pairs of reasoning tags that a model uses: the usual pairs, and certain pairs in
    /// the template or the vocabulary.
    ///
    /// A pair is included if it is named after thinking, if the template prints it around
    /// reasoning, or if the template drops its contents from past turns.
    pub(crate) fn find_pairs(
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        variables: &Map<String, Value>,
    ) -> Self {
        let probe = ReasoningProbe { template, variables };
        let added = tokenizer.added_tokens();
        let tokens: BTreeSet<String> =
            added.iter().flat_map(|token| find_bracketed_tags(token)).collect();
        let written: BTreeSet<String> = find_bracketed_tags(template.source()).collect();
        let mut found = ReasoningTagSet::default();
        for (open, close) in USUAL {
            found.add_pair(open, close);
        }
        for (first, open, close) in COMPOUND {
            if template.source().contains(first) || added.iter().any(|token| token == first) {
                found.add_pair(open, close);
            }
        }
        for close in written.iter().chain(&tokens) {
            if CALLS.contains(&close.as_str()) {
                continue;
            }
            let slashed = without_slash(close);
            let replacements =
                [("end", "begin"), ("end", "start"), ("END", "BEGIN"), ("END", "START")];
            let other = replacements
                .iter()
                .map(|(end, start)| close.replacen(end, start, 1))
                .find(|open| open != close && (written.contains(open) || tokens.contains(open)));
            let Some(open) = slashed.or(other) else { continue };
            let is_named = ["think", "thought", "reason"]
                .iter()
                .any(|part| open.to_lowercase().contains(part));
            if is_named || (written.contains(close) && probe.drops_text(&open, close)) {
                found.add_pair(&open, close);
            }
        }
        if let Some((open, close)) = probe.find_field_tags() {
            found.add_pair(&open, &close);
        }
        found
    }

    /// Creates the tag set of a tool-call format that defines how reasoning is written.
    pub(crate) fn from_pair([open, close]: [&str; 2]) -> Self {
        ReasoningTagSet(vec![ReasoningTags { open: open.into(), close: close.into() }])
    }

    fn add_pair(&mut self, open: &str, close: &str) {
        let tags = ReasoningTags { open: open.into(), close: close.into() };
        if !self.0.contains(&tags) {
            self.0.push(tags);
        }
    }

    /// Removes each pair that contains a tag that ends a completion, because nothing could follow
    /// the reasoning.
    pub(crate) fn remove_pairs_with(&mut self, ends: &[String]) {
        self.0.retain(|tags| !ends.contains(&tags.open) && !ends.contains(&tags.close));
    }

    /// Returns the tags for writing reasoning that comes from a separate field. Prefers a pair in
    /// the template, then a pair of the tokenizer, then the usual pair.
    pub(crate) fn preferred_pair(
        &self,
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
    ) -> Option<&ReasoningTags> {
        let added = tokenizer.added_tokens();
        self.0
            .iter()
            .find(|tags| template.source().contains(&tags.close))
            .or_else(|| self.0.iter().find(|tags| added.contains(&tags.close)))
            .or(self.0.first())
    }

    /// Returns the last closing tag of reasoning in `text`, or `None` if there is none.
    pub(crate) fn find_last_close(&self, text: &str) -> Option<&str> {
        let found =
            self.0.iter().filter_map(|tags| Some((text.rfind(&tags.close)?, tags.close.as_str())));
        found.max_by_key(|(at, _)| *at).map(|(_, close)| close)
    }

    /// Removes the opening tag that belongs to the closing tag `close` from the start of `text`.
    pub(crate) fn strip_open_tag<'a>(&self, text: &'a str, close: &str) -> &'a str {
        let tags = self.0.iter().find(|tags| tags.close == close);
        let rest = tags.and_then(|tags| text.trim_start().strip_prefix(tags.open.as_str()));
        rest.map_or(text, |rest| rest.trim_start_matches('\n'))
    }

    /// Returns all pairs of reasoning tags, the usual pairs first.
    pub(crate) fn pairs(&self) -> &[ReasoningTags] {
        &self.0
    }

    /// Returns the tags of the reasoning that is still open at the end of `text`, or `None` if no
    /// reasoning is open. Assumes that no reasoning was open at the start of `text`.
    pub(crate) fn find_open(&self, text: &str) -> Option<&ReasoningTags> {
        let last_close = self.0.iter().filter_map(|tags| text.rfind(&tags.close)).max();
        let last_open = self.0.iter().filter_map(|tags| Some((text.rfind(&tags.open)?, tags)));
        let (at, tags) = last_open.max_by_key(|(at, tags)| (*at, tags.open.len()))?;
        last_close.is_none_or(|close| close < at).then_some(tags)
    }
}

/// Returns the opening tag `<x>` for a closing tag such as `</x>`, or `None` if the tag has no
/// slash.
fn without_slash(tag: &str) -> Option<String> {
    let at = tag.find('/').filter(|&at| tag[..at].chars().all(|c| "<[◁|".contains(c)))?;
    Some(format!("{}{}", &tag[..at], &tag[at + 1..]))
}

/// Returns the words in brackets without white space, such as `<think>` and `[THINK]`.
fn find_bracketed_tags(text: &str) -> impl Iterator<Item = String> {
    const MAX_TAG_LEN: usize = 40;
    text.char_indices().filter_map(move |(at, c)| {
        let end = match c {
            '<' => '>',
            '[' => ']',
            '◁' => '▷',
            _ => return None,
        };
        let inner = &text[at + c.len_utf8()..];
        let stop = inner.find(|c: char| {
            c == end || c == '\\' || c.is_whitespace() || "<>[]◁▷'\"".contains(c)
        })?;
        let is_tag = (1..MAX_TAG_LEN).contains(&stop) && inner[stop..].starts_with(end);
        is_tag.then(|| text[at..at + c.len_utf8() + stop + end.len_utf8()].to_string())
    })
}

/// Probes how a chat template renders reasoning.
struct ReasoningProbe<'a> {
    template: &'a ChatTemplate,
    variables: &'a Map<String, Value>,
}

impl ReasoningProbe<'_> {
    fn render(&self, messages: &[Value]) -> Option<String> {
        let variables = self.variables;
        let rendering =
            TemplateInput { messages, tools: None, add_generation_prompt: false, variables };
        self.template.render(rendering).ok()
    }

    /// Returns whether the chat template drops the text between two tags once the conversation
    /// continues.
    fn drops_text(&self, open: &str, close: &str) -> bool {
        let content = format!("{open}{PROBE_REASONING}{close}{SPEECH}");
        let user = json!({ "role": "user", "content": "Hi" });
        let messages = [user.clone(), json!({ "role": "assistant", "content": content }), user];
        self.render(&messages)
            .is_some_and(|text| text.contains(SPEECH) && !text.contains(PROBE_REASONING))
    }

    /// Returns the tags that the chat template prints around reasoning from a separate field,
    /// unless it also prints these tags elsewhere.
    fn find_field_tags(&self) -> Option<(String, String)> {
        let user = json!({ "role": "user", "content": "Hi" });
        let plain = json!({ "role": "assistant", "content": SPEECH });
        let past = self.render(&[user.clone(), plain.clone(), user.clone()])?;
        REASONING.iter().find_map(|field| {
            let mut assistant_message = plain.clone();
            assistant_message[*field] = PROBE_REASONING.into();
            let text = self.render(&[user.clone(), assistant_message])?;
            let (before, after) = text.split_once(PROBE_REASONING)?;
            let between = after.split_once(SPEECH)?.0;
            let open = find_bracketed_tags(before)
                .last()
                .filter(|tag| before.trim_end().ends_with(tag.as_str()))?;
            let close = find_bracketed_tags(between)
                .next()
                .filter(|tag| between.trim_start().starts_with(tag.as_str()))?;
            (!past.contains(&open) && !past.contains(&close)).then_some((open, close))
        })
    }
}

#[cfg(test)]
#[path = "reasoning_tags_tests.rs"]
pub(crate) mod tests;
