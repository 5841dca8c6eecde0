//! Compares questions of tasks, and decides which questions are held out. The decision depends on
//! the question, never on the position of its row.

use levade_text::{Message, Role};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use unicode_normalization::UnicodeNormalization;

use super::Task;
use super::spelling::{
    PromptPart, collect_multiline_questions, is_invisible, normalize_spelling, split_parts,
    split_sentences,
};

/// A hash of a question. Questions that differ only in irrelevant details have equal hashes.
///
/// [`Task::key`] ignores differences in Unicode form (NFC), case, white space and invisible
/// characters. In a conversation, all turns except the instructions count. A single user turn is
/// the same question as its text. The keys of `Task::question_set` and `Task::shown_keys` ignore
/// differences in spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QuestionKey([u8; 16]);

/// Names of fields that contain the subject of a question. The same question with another value of
/// such a field is a different task.
const CONTEXTS: [&str; 72] = [
    "context",
    "contexts",
    "ctx",
    "document",
    "documents",
    "doc",
    "docs",
    "passage",
    "passages",
    "paragraph",
    "paragraphs",
    "article",
    "story",
    "text",
    "body",
    "db_id",
    "db",
    "database",
    "schema",
    "table",
    "tables",
    "choices",
    "options",
    "endings",
    "image",
    "images",
    "input",
    "inputs",
    "evidence",
    "facts",
    "background",
    "premise",
    "hypothesis",
    "sentence",
    "review",
    "code",
    "repo",
    "files",
    "dialogue",
    "dialog",
    "history",
    "transcript",
    "abstract",
    "content",
    "create_table",
    "environment",
    "image_path",
    "video",
    "videos",
    "audio",
    "audios",
    "url",
    "html",
    "puzzle",
    "grid",
    "board",
    "maze",
    "map",
    "scene",
    "screenshot",
    "knowledge",
    "claim",
    "source_code",
    "snippet",
    "initial_state",
    "state",
    "game",
    "env",
    "observation",
    "sql_schema",
    "table_id",
    "table_name",
];

/// Names of fields that contain the subject of a question if their value is sentences or messages.
/// Otherwise they only describe the row, such as a label or the name of a data set.
const CONTEXTS_OF_SENTENCES: [&str; 5] =
    ["source", "reference", "references", "notes", "conversation"];

/// Minimum number of words in a field of [`CONTEXTS_OF_SENTENCES`] that counts as the subject of a
/// question.
const MIN_CONTEXT: usize = 4;

/// Names of fields that contain the options of a question. The order of options is irrelevant
/// except for the letters of answers.
const OPTIONS: [&str; 3] = ["choices", "options", "endings"];

/// Names of further fields that only identify a row. pandas gives its index column one of the last
/// three names.
const NAMES: [&str; 4] = ["qid", "", "__index_level_0__", "unnamed: 0"];

/// Names of fields that only identify a row if their values are strings or numbers.
/// [`Task::loose_row_key`] ignores these fields whatever their values.
const LOOSE_NAMES: [&str; 17] = [
    "id",
    "_id",
    "index",
    "idx",
    "uid",
    "uuid",
    "guid",
    "tid",
    "row",
    "row_id",
    "question_id",
    "task_id",
    "problem_id",
    "sample_id",
    "example_id",
    "instance_id",
    "unique_id",
];

/// Minimum length of a part of a text that is compared with held-out questions, in characters of
/// its normalized spelling.
const MIN_PART: usize = 8;

impl QuestionKey {
    pub(super) fn new(normalised: &str) -> Self {
        let mut key = [0; 16];
        key.copy_from_slice(&Sha256::digest(normalised)[..16]);
        QuestionKey(key)
    }

    /// Returns the sort key of the question in the split with the seed `split_seed`. The questions
    /// of a source with the smallest ranks are held out.
    pub fn rank(self, split_seed: u64) -> u64 {
        let hash =
            Sha256::new().chain_update(split_seed.to_le_bytes()).chain_update(self.0).finalize();
        hash[..8].iter().fold(0, |rank, byte| rank << 8 | u64::from(*byte))
    }

    /// Returns the key of a text in normalized spelling, so that differences in spelling are
    /// ignored.
    fn from_spelling(text: &str) -> Self {
        match normalize_spelling(text) {
            // The normalized spelling is empty.
            empty if empty.is_empty() => QuestionKey::new(&normalize(text)),
            spelled => QuestionKey::new(&format!("spelled {spelled}")),
        }
    }

    /// Returns the key of this question about the context `context`.
    pub(crate) fn with_context(self, context: QuestionKey) -> Self {
        let hash = Sha256::new().chain_update(self.0).chain_update(context.0).finalize();
        let mut key = [0; 16];
        key.copy_from_slice(&hash[..16]);
        QuestionKey(key)
    }
}

/// Keys of the questions that a task asks. Differences in spelling are ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QuestionSet {
    /// Key of the complete conversation except its instructions. Equal to `question` if the
    /// conversation is a single turn.
    pub conversation: QuestionKey,
    /// Key of the question: the last user turn.
    pub question: QuestionKey,
    /// Key of the last labeled question in the last user turn. `None` if no worked examples precede
    /// the question.
    pub last: Option<QuestionKey>,
}

impl Task {
    /// Returns the key of the task's question, which determines its split and identifies equal
    /// questions.
    pub fn key(&self) -> QuestionKey {
        match self.non_instruction_turns()[..] {
            [] => QuestionKey::new(&normalize(&self.question)),
            [only] => QuestionKey::new(&normalize(&only.content)),
            ref turns => {
                let turns = turns
                    .iter()
                    .map(|turn| format!("{} {}", turn.role.as_str(), normalize(&turn.content)));
                QuestionKey::new(&turns.collect::<Vec<_>>().join("\n"))
            }
        }
    }

    /// Returns the keys of the questions that the task asks. Differences in spelling are ignored.
    pub(crate) fn question_set(&self) -> QuestionSet {
        let question = self.question_key();
        QuestionSet {
            conversation: self.conversation_key(question),
            question,
            last: find_last_labeled_key(self.question_text()),
        }
    }

    /// Returns the key of the last user turn. Differences in spelling are ignored.
    pub(crate) fn question_key(&self) -> QuestionKey {
        QuestionKey::from_spelling(self.question_text())
    }

    /// Returns the key of the complete conversation except its instructions. `question` is the key
    /// of the last user turn.
    fn conversation_key(&self, question: QuestionKey) -> QuestionKey {
        match self.non_instruction_turns()[..] {
            [] | [_] => question,
            ref turns => {
                let turns = turns.iter().map(|turn| {
                    format!("{} {}", turn.role.as_str(), normalize_spelling(&turn.content))
                });
                QuestionKey::new(&turns.collect::<Vec<_>>().join("\n"))
            }
        }
    }

    /// Returns the keys of all texts in the task that could be a held-out question: its
    /// conversation, each turn, each line and labeled part of a turn, and all strings in tool call
    /// arguments.
    pub fn shown_keys(&self) -> Vec<QuestionKey> {
        let question = self.question_key();
        let mut shown = vec![question];
        if !self.messages.is_empty() {
            shown.push(self.conversation_key(question));
            shown
                .extend(self.messages.iter().map(|turn| QuestionKey::from_spelling(&turn.content)));
        }
        let turns = self.messages.iter().map(|turn| &*turn.content);
        for text in turns.chain(self.messages.is_empty().then_some(&*self.question)) {
            shown.extend(part_keys(text));
        }
        for call in self.messages.iter().flat_map(|turn| &turn.tool_calls) {
            let mut texts = Vec::new();
            call.arguments.values().for_each(|value| collect_texts(value, &mut texts));
            for text in texts {
                shown.extend(part_key(text));
                shown.extend(part_keys(text));
            }
        }
        shown.sort_unstable();
        shown.dedup();
        shown
    }

    /// Returns the text of the last user turn.
    pub(crate) fn question_text(&self) -> &str {
        let last = self.messages.iter().rev().find(|turn| turn.role == Role::User);
        last.map_or(&*self.question, |turn| &*turn.content)
    }

    /// Returns the key of the context of the question: the instructions, the turns before the
    /// question, and the fields that contain a context.
    pub fn context(&self) -> QuestionKey {
        let mut context: Vec<String> = self.instructions().map(normalize_spelling).collect();
        let turns = self.non_instruction_turns();
        let question_index = turns.iter().rposition(|turn| turn.role == Role::User).unwrap_or(0);
        context
            .extend(turns[..question_index].iter().map(|turn| normalize_spelling(&turn.content)));
        let question = normalize_spelling(self.question_text());
        let is_sentence = |value: &Value| match value {
            Value::String(text) => text.split_whitespace().count() >= MIN_CONTEXT,
            // Messages that the task itself was read from add no context.
            value => value.is_array() && self.messages.is_empty(),
        };
        let names = CONTEXTS.into_iter().map(|name| (name, false));
        for (name, of_sentences) in names.chain(CONTEXTS_OF_SENTENCES.map(|name| (name, true))) {
            let found = self.field(name).filter(|value| !of_sentences || is_sentence(value));
            // A field that contains the question itself is not a context.
            let is_question = |value: &&Value| {
                value.as_str().is_some_and(|text| normalize_spelling(text) == question)
            };
            if let Some(value) = found.filter(|value| !value.is_null() && !is_question(value)) {
                let value = if OPTIONS.contains(&name) {
                    to_unordered_text(value)
                } else {
                    to_normalized_text(value)
                };
                context.push(format!("{name} {value}"));
            }
        }
        QuestionKey::new(&context.join("\n"))
    }

    /// Returns the expected answer as text, together with the options that it refers to, because
    /// the same letter with other options is another answer.
    pub(crate) fn answer_with_options(&self) -> String {
        let options = OPTIONS.iter().find_map(|name| self.field(name)).map(to_unordered_text);
        format!("{}\n{}", to_normalized_text(&self.answer), options.unwrap_or_default())
    }

    /// Returns the key of the complete task: question, conversation, expected answer, agent, and
    /// all fields of `row` except the fields in `skipped` and the fields that only identify the
    /// row. Texts are compared exactly, except for white space around questions.
    pub(crate) fn row_key(&self, row: &Map<String, Value>, skipped: &[&str]) -> QuestionKey {
        let mut hash = Sha256::new()
            .chain_update(self.question.trim())
            .chain_update(to_exact_text(&self.answer));
        for turn in &self.messages {
            let calls = turn.tool_calls.iter().map(|call| format!("{call:?}"));
            hash.update([0]);
            hash.update([turn.role.as_str(), turn.content.trim()].join("\u{1}"));
            calls.for_each(|call| hash.update(call));
        }
        hash.update([2]);
        hash.update(self.agent.as_deref().unwrap_or_default());
        hash_row_fields(hash, &FieldRule { is_name, shown: to_exact_text }, row, skipped)
    }

    /// Returns the key of the complete task by the rule of runs with
    /// [`MatchingRule::Rows`](super::MatchingRule). Case and white space of texts are ignored, and
    /// so are tool calls.
    pub(crate) fn loose_row_key(&self, row: &Map<String, Value>, skipped: &[&str]) -> QuestionKey {
        let mut hash =
            Sha256::new().chain_update(self.key().0).chain_update(to_words(&self.answer));
        for text in self.instructions().map(normalize).chain(self.agent.clone()) {
            hash.update([0]);
            hash.update(text);
        }
        let is_name = |name: &str, _: &Value| LOOSE_NAMES.contains(&name);
        hash_row_fields(hash, &FieldRule { is_name, shown: to_words }, row, skipped)
    }

    /// Returns a field of the task's row, or of verl's `extra_info` within the row. `None` if
    /// neither has the field.
    fn field(&self, name: &str) -> Option<&Value> {
        self.row.get(name).or_else(|| self.row.get("extra_info")?.get(name))
    }

    /// Returns the turns of the conversation except instructions.
    fn non_instruction_turns(&self) -> Vec<&Message> {
        self.messages.iter().filter(|turn| !turn.role.instructs()).collect()
    }

    fn instructions(&self) -> impl Iterator<Item = &str> {
        self.messages.iter().filter(|turn| turn.role.instructs()).map(|turn| &*turn.content)
    }
}

fn to_words(value: &Value) -> String {
    to_value_text(value, &|text| text.split_whitespace().collect::<Vec<_>>().join(" "), false)
}

/// Returns the keys of the parts of a text. If the text has only one part, returns only the keys of
/// its sentences.
fn part_keys(text: &str) -> Vec<QuestionKey> {
    let parts = split_parts(text);
    let mut texts: Vec<String> = Vec::new();
    // A text with a single part is compared as a whole by the caller.
    if parts.len() > 1 {
        texts.extend(collect_multiline_questions(&parts));
        texts.extend(parts.iter().map(|(_, part)| part.clone()));
    }
    for (_, part) in &parts {
        texts.extend(split_sentences(part).into_iter().map(str::to_owned));
    }
    // Everything except the text after the last sentence.
    if let [before @ .., (_, last)] = &parts[..]
        && let [start, ..] = split_sentences(last)[..]
        && !before.is_empty()
    {
        let lines = before.iter().map(|(_, part)| &**part).chain([start]);
        texts.push(lines.collect::<Vec<_>>().join("\n"));
    }
    texts.iter().filter_map(|text| part_key(text)).collect()
}

/// Returns the key of a part of a text, or `None` if the part is too short to identify a question.
fn part_key(text: &str) -> Option<QuestionKey> {
    let part = normalize_spelling(text);
    (part.chars().count() >= MIN_PART).then(|| QuestionKey::new(&format!("spelled {part}")))
}

/// Appends all strings within a JSON value to `texts`.
fn collect_texts<'v>(value: &'v Value, texts: &mut Vec<&'v str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(items) => items.iter().for_each(|item| collect_texts(item, texts)),
        Value::Object(fields) => fields.values().for_each(|item| collect_texts(item, texts)),
        _ => {}
    }
}

/// Rule by which the fields of rows are compared.
struct FieldRule {
    /// Returns whether a field only identifies its row. The name is in lower case.
    is_name: fn(&str, &Value) -> bool,
    /// Converts a field value to the text that is compared.
    shown: fn(&Value) -> String,
}

/// Returns the key of a task. `hash` already contains the other parts of the task, and the fields
/// of `row` are added by the rule.
fn hash_row_fields(
    mut hash: Sha256,
    rule: &FieldRule,
    row: &Map<String, Value>,
    skipped: &[&str],
) -> QuestionKey {
    let mut fields = Vec::new();
    collect_fields(row, "", rule, skipped, &mut fields);
    fields.sort_unstable();
    for field in fields {
        hash.update([1]);
        hash.update(field);
    }
    let mut key = [0; 16];
    key.copy_from_slice(&hash.finalize()[..16]);
    QuestionKey(key)
}

/// Appends the fields of a row to `fields` as strings, each with its path.
fn collect_fields(
    row: &Map<String, Value>,
    before: &str,
    rule: &FieldRule,
    skipped: &[&str],
    fields: &mut Vec<String>,
) {
    for (name, value) in row {
        let path = format!("{before}{name}");
        let is_name = (rule.is_name)(&name.to_lowercase(), value);
        if is_name || skipped.contains(&path.as_str()) || value.is_null() {
            continue;
        }
        match value {
            Value::Object(inner) => {
                collect_fields(inner, &format!("{path}."), rule, skipped, fields)
            }
            value => fields.push(format!("{path} {}", (rule.shown)(value))),
        }
    }
}

fn is_name(name: &str, value: &Value) -> bool {
    let is_scalar = matches!(value, Value::String(_) | Value::Number(_));
    is_scalar && (LOOSE_NAMES.contains(&name) || NAMES.contains(&name))
}

/// Converts a JSON value to text exactly, including white space. A number becomes its digits,
/// because CSV files contain numbers as text.
fn to_exact_text(value: &Value) -> String {
    to_value_text(value, &|text| text.to_owned(), false)
}

/// Converts a JSON value to text with normalized strings, so that different spellings of a text are
/// equal.
fn to_normalized_text(value: &Value) -> String {
    to_value_text(value, &normalize_or_trim, false)
}

/// Converts a list of options to text, ignoring the order and the spelling of the options. An
/// object with lettered options counts as a list of their texts.
fn to_unordered_text(options: &Value) -> String {
    let texts = options.get("text").filter(|texts| texts.is_array()).unwrap_or(options);
    match texts {
        Value::Object(by_letter) => {
            to_value_text(&by_letter.values().cloned().collect(), &normalize_or_trim, true)
        }
        texts => to_value_text(texts, &normalize_or_trim, true),
    }
}

fn normalize_or_trim(text: &str) -> String {
    Some(normalize_spelling(text))
        .filter(|spelled| !spelled.is_empty())
        .unwrap_or_else(|| text.trim().to_owned())
}

/// Converts a JSON value to text with the function `text` for strings. The fields of objects are
/// sorted. The items of lists are sorted only if `sorted` is set.
fn to_value_text(value: &Value, text: &dyn Fn(&str) -> String, sorted: bool) -> String {
    match value {
        Value::String(value) => text(value),
        Value::Array(items) => {
            let mut items: Vec<String> =
                items.iter().map(|item| to_value_text(item, text, sorted)).collect();
            if sorted {
                items.sort_unstable();
            }
            format!("[{}]", items.join("\u{1}"))
        }
        Value::Object(fields) => {
            let fields = fields.iter();
            let mut all: Vec<String> = fields
                .map(|(name, value)| format!("{name}\u{2}{}", to_value_text(value, text, sorted)))
                .collect();
            all.sort_unstable();
            format!("{{{}}}", all.join("\u{1}"))
        }
        other => other.to_string(),
    }
}

/// Returns the key of the last labeled question of a text. The text must show labeled examples with
/// answers before the question, and only labels after it; otherwise returns `None`.
fn find_last_labeled_key(text: &str) -> Option<QuestionKey> {
    let parts = split_parts(text);
    let at =
        parts.iter().rposition(|(part, text)| *part == PromptPart::Question && !text.is_empty())?;
    let shows =
        parts[..at].iter().any(|(part, text)| *part == PromptPart::Answer && !text.is_empty());
    let is_last =
        parts[at + 1..].iter().all(|(part, text)| *part == PromptPart::Answer && text.is_empty());
    (shows && is_last).then(|| QuestionKey::from_spelling(&parts[at].1))
}

/// Normalizes case, Unicode form and spaces of a text, and removes invisible characters.
fn normalize(text: &str) -> String {
    // Upper case first: ß and SS, and also σ and ς, differ in lower case but not in upper case.
    let folded = text
        .chars()
        .filter(|c| !is_invisible(*c))
        .collect::<String>()
        .to_uppercase()
        .to_lowercase();
    let normalized: String = folded.nfc().collect();
    normalized
        .split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
#[path = "question_tests.rs"]
mod tests;
