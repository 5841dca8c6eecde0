//! Whether two tasks ask the same, and which of them are held out: by what is asked, never by the position of
//! its row.

use levade_text::{Message, Role};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use unicode_normalization::UnicodeNormalization;

use super::Task;
use super::spelling::{Part, blocks, cut_behind_sentences, is_unseen, parts, spelled};

/// A question up to what does not change it.
///
/// [`Task::key`] compares up to Unicode form (NFC), case, white space, and characters that are never seen:
/// of a conversation all turns but the instructions count, and a single turn of the user is the same question
/// as its text alone. The keys of `Task::asks` and `Task::shows` compare up to spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QuestionKey([u8; 16]);

/// Fields that hold what a question is about: the same question about another value of one is another task.
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

/// Fields that hold a context if they hold sentences or messages, and otherwise only describe a row: the name
/// of a data set, a mark.
const CONTEXTS_OF_SENTENCES: [&str; 5] = ["source", "reference", "references", "notes", "conversation"];

/// Minimum number of words of such a text.
const MIN_CONTEXT: usize = 4;

/// Fields with the options of a question: their order says nothing, but for the letters of answers.
const OPTIONS: [&str; 3] = ["choices", "options", "endings"];

/// Further fields that only name a row. pandas calls its index the last three.
const NAMES: [&str; 4] = ["qid", "", "__index_level_0__", "unnamed: 0"];

/// Fields that only name a row, as texts or numbers; by [`Task::row_key_by_words`], whatever they hold.
const NAMES_BY_WORDS: [&str; 17] = [
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

/// Minimum length of a part of a text that is compared with held-out questions, in characters of its
/// spelling.
const MIN_PART: usize = 8;

impl QuestionKey {
    pub(super) fn new(normalised: &str) -> Self {
        let mut key = [0; 16];
        key.copy_from_slice(&Sha256::digest(normalised)[..16]);
        QuestionKey(key)
    }

    /// Position among the questions of a source under a split: the first ones are held out.
    pub fn rank(self, split_seed: u64) -> u64 {
        let hash = Sha256::new().chain_update(split_seed.to_le_bytes()).chain_update(self.0).finalize();
        hash[..8].iter().fold(0, |rank, byte| rank << 8 | u64::from(*byte))
    }

    /// The key of a text up to its spelling.
    fn spelled(text: &str) -> Self {
        match spelled(text) {
            // Nothing is left of it.
            empty if empty.is_empty() => QuestionKey::new(&normalised(text)),
            spelled => QuestionKey::new(&format!("spelled {spelled}")),
        }
    }

    /// The key of this question about a context.
    pub(crate) fn about(self, context: QuestionKey) -> Self {
        let hash = Sha256::new().chain_update(self.0).chain_update(context.0).finalize();
        let mut key = [0; 16];
        key.copy_from_slice(&hash[..16]);
        QuestionKey(key)
    }
}

/// The questions of a task, by their spelling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    /// The whole conversation but for its instructions; the question itself if it is a single turn.
    pub conversation: QuestionKey,
    /// The question: the last turn of the user.
    pub question: QuestionKey,
    /// The last labelled question in the text of that turn, if it shows others before it.
    pub last: Option<QuestionKey>,
}

impl Task {
    /// Returns the question, for the split and for comparison with equal questions.
    pub fn key(&self) -> QuestionKey {
        match self.turns()[..] {
            [] => QuestionKey::new(&normalised(&self.question)),
            [only] => QuestionKey::new(&normalised(&only.content)),
            ref turns => {
                let turns =
                    turns.iter().map(|turn| format!("{} {}", turn.role.as_str(), normalised(&turn.content)));
                QuestionKey::new(&turns.collect::<Vec<_>>().join("\n"))
            }
        }
    }

    /// Returns the questions that the task asks.
    pub(crate) fn asks(&self) -> Asked {
        let question = self.question_key();
        Asked {
            conversation: self.conversation_key(question),
            question,
            last: last_labelled(self.asked_text()),
        }
    }

    /// Returns the key of the last turn of the user.
    pub(crate) fn question_key(&self) -> QuestionKey {
        QuestionKey::spelled(self.asked_text())
    }

    /// Returns the key of the whole conversation but for its instructions, whose question has the key
    /// `question`.
    fn conversation_key(&self, question: QuestionKey) -> QuestionKey {
        match self.turns()[..] {
            [] | [_] => question,
            ref turns => {
                let turns =
                    turns.iter().map(|turn| format!("{} {}", turn.role.as_str(), spelled(&turn.content)));
                QuestionKey::new(&turns.collect::<Vec<_>>().join("\n"))
            }
        }
    }

    /// Returns everything in the task that could be a held-out question: its conversation, each turn, each
    /// line and labelled part of a turn, and the texts that calls of tools have.
    pub fn shows(&self) -> Vec<QuestionKey> {
        let question = self.question_key();
        let mut shown = vec![question];
        if !self.messages.is_empty() {
            shown.push(self.conversation_key(question));
            shown.extend(self.messages.iter().map(|turn| QuestionKey::spelled(&turn.content)));
        }
        let turns = self.messages.iter().map(|turn| &*turn.content);
        for text in turns.chain(self.messages.is_empty().then_some(&*self.question)) {
            shown.extend(keys_of_parts(text));
        }
        for call in self.messages.iter().flat_map(|turn| &turn.tool_calls) {
            let mut texts = Vec::new();
            call.arguments.values().for_each(|value| collect_texts(value, &mut texts));
            for text in texts {
                shown.extend(key_of_part(text));
                shown.extend(keys_of_parts(text));
            }
        }
        shown.sort_unstable();
        shown.dedup();
        shown
    }

    /// Returns the text of the last turn of the user.
    pub(crate) fn asked_text(&self) -> &str {
        let last = self.messages.iter().rev().find(|turn| turn.role == Role::User);
        last.map_or(&*self.question, |turn| &*turn.content)
    }

    /// Returns what the question is about: instructions, the turns before it, and fields that hold a context.
    pub fn context(&self) -> QuestionKey {
        let mut context: Vec<String> = self.instructions().map(spelled).collect();
        let turns = self.turns();
        let asked = turns.iter().rposition(|turn| turn.role == Role::User).unwrap_or(0);
        context.extend(turns[..asked].iter().map(|turn| spelled(&turn.content)));
        let question = spelled(self.asked_text());
        let is_sentence = |value: &Value| match value {
            Value::String(text) => text.split_whitespace().count() >= MIN_CONTEXT,
            // Messages that the task itself was read from say nothing more.
            value => value.is_array() && self.messages.is_empty(),
        };
        let names = CONTEXTS.into_iter().map(|name| (name, false));
        for (name, of_sentences) in names.chain(CONTEXTS_OF_SENTENCES.map(|name| (name, true))) {
            let found = self.field(name).filter(|value| !of_sentences || is_sentence(value));
            // A field that holds the question itself is none.
            let is_question = |value: &&Value| value.as_str().is_some_and(|text| spelled(text) == question);
            if let Some(value) = found.filter(|value| !value.is_null() && !is_question(value)) {
                let value = if OPTIONS.contains(&name) { unordered(value) } else { loose(value) };
                context.push(format!("{name} {value}"));
            }
        }
        QuestionKey::new(&context.join("\n"))
    }

    /// Returns the expected answer as text, with the options that it chooses among: the same letter is
    /// another answer among others.
    pub(crate) fn answer_among(&self) -> String {
        let options = OPTIONS.iter().find_map(|name| self.field(name)).map(unordered);
        format!("{}\n{}", loose(&self.answer), options.unwrap_or_default())
    }

    /// Returns the task as a whole: its question, conversation, expected answer, agent, and all fields of
    /// `row` but those that `skipped` holds and those that only name it. Of texts all counts but white space
    /// around questions.
    pub(crate) fn row_key(&self, row: &Map<String, Value>, skipped: &[&str]) -> QuestionKey {
        let mut hash = Sha256::new().chain_update(self.question.trim()).chain_update(exact(&self.answer));
        for turn in &self.messages {
            let calls = turn.tool_calls.iter().map(|call| format!("{call:?}"));
            hash.update([0]);
            hash.update([turn.role.as_str(), turn.content.trim()].join("\u{1}"));
            calls.for_each(|call| hash.update(call));
        }
        hash.update([2]);
        hash.update(self.agent.as_deref().unwrap_or_default());
        key_of(hash, &FieldRule { is_name, shown: exact }, row, skipped)
    }

    /// Returns the task as a whole by the rule of runs with [`Matching::Rows`](super::Matching): case and
    /// white space of texts do not count, nor do tool calls.
    pub(crate) fn row_key_by_words(&self, row: &Map<String, Value>, skipped: &[&str]) -> QuestionKey {
        let by_words = |value: &Value| {
            written(value, &|text| text.split_whitespace().collect::<Vec<_>>().join(" "), false)
        };
        let mut hash = Sha256::new().chain_update(self.key().0).chain_update(by_words(&self.answer));
        for text in self.instructions().map(normalised).chain(self.agent.clone()) {
            hash.update([0]);
            hash.update(text);
        }
        let is_name = |name: &str, _: &Value| NAMES_BY_WORDS.contains(&name);
        key_of(hash, &FieldRule { is_name, shown: by_words }, row, skipped)
    }

    /// A field of its row, or of verl's `extra_info`.
    fn field(&self, name: &str) -> Option<&Value> {
        self.row.get(name).or_else(|| self.row.get("extra_info")?.get(name))
    }

    /// Turns but for instructions.
    fn turns(&self) -> Vec<&Message> {
        self.messages.iter().filter(|turn| !turn.role.instructs()).collect()
    }

    fn instructions(&self) -> impl Iterator<Item = &str> {
        self.messages.iter().filter(|turn| turn.role.instructs()).map(|turn| &*turn.content)
    }
}

/// Returns the keys of the parts of a text, if it has several.
fn keys_of_parts(text: &str) -> Vec<QuestionKey> {
    let parts = parts(text);
    let mut texts: Vec<String> = Vec::new();
    // A text of one part is compared as a whole.
    if parts.len() > 1 {
        texts.extend(blocks(&parts));
        texts.extend(parts.iter().map(|(_, part)| part.clone()));
    }
    for (_, part) in &parts {
        texts.extend(cut_behind_sentences(part).into_iter().map(str::to_owned));
    }
    // All but what follows the last sentence.
    if let [before @ .., (_, last)] = &parts[..]
        && let [start, ..] = cut_behind_sentences(last)[..]
        && !before.is_empty()
    {
        let lines = before.iter().map(|(_, part)| &**part).chain([start]);
        texts.push(lines.collect::<Vec<_>>().join("\n"));
    }
    texts.iter().filter_map(|text| key_of_part(text)).collect()
}

/// Returns the key of a part of a text, unless the part is too short to tell a question.
fn key_of_part(text: &str) -> Option<QuestionKey> {
    let part = spelled(text);
    (part.chars().count() >= MIN_PART).then(|| QuestionKey::new(&format!("spelled {part}")))
}

/// Collects the texts within a value.
fn collect_texts<'v>(value: &'v Value, texts: &mut Vec<&'v str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(items) => items.iter().for_each(|item| collect_texts(item, texts)),
        Value::Object(fields) => fields.values().for_each(|item| collect_texts(item, texts)),
        _ => {}
    }
}

/// How fields of rows are compared.
struct FieldRule {
    /// Whether a field of this name, in lower case, only names its row.
    is_name: fn(&str, &Value) -> bool,
    /// A value as text.
    shown: fn(&Value) -> String,
}

/// Returns the key of a task whose other parts `hash` has, with the fields of its row.
fn key_of(mut hash: Sha256, rule: &FieldRule, row: &Map<String, Value>, skipped: &[&str]) -> QuestionKey {
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

/// Collects the fields of a row as texts, each with its path.
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
            Value::Object(inner) => collect_fields(inner, &format!("{path}."), rule, skipped, fields),
            value => fields.push(format!("{path} {}", (rule.shown)(value))),
        }
    }
}

fn is_name(name: &str, value: &Value) -> bool {
    let is_scalar = matches!(value, Value::String(_) | Value::Number(_));
    is_scalar && (NAMES_BY_WORDS.contains(&name) || NAMES.contains(&name))
}

/// Writes a value as text, with its white space. A number becomes its digits, since CSV has numbers as text.
fn exact(value: &Value) -> String {
    written(value, &|text| text.to_owned(), false)
}

/// Writes a value as text whose strings are normalised, so that spellings of one text are equal.
fn loose(value: &Value) -> String {
    written(value, &spelled_or_plain, false)
}

/// A list of options as text up to their order and spelling. A table with the letters of options is a list
/// of their texts.
fn unordered(options: &Value) -> String {
    let texts = options.get("text").filter(|texts| texts.is_array()).unwrap_or(options);
    match texts {
        Value::Object(by_letter) => written(&by_letter.values().cloned().collect(), &spelled_or_plain, true),
        texts => written(texts, &spelled_or_plain, true),
    }
}

fn spelled_or_plain(text: &str) -> String {
    Some(spelled(text)).filter(|spelled| !spelled.is_empty()).unwrap_or_else(|| text.trim().to_owned())
}

/// A value as text, with fields in one order, and with the items of lists in one if they are `sorted`.
fn written(value: &Value, text: &dyn Fn(&str) -> String, sorted: bool) -> String {
    match value {
        Value::String(value) => text(value),
        Value::Array(items) => {
            let mut items: Vec<String> = items.iter().map(|item| written(item, text, sorted)).collect();
            if sorted {
                items.sort_unstable();
            }
            format!("[{}]", items.join("\u{1}"))
        }
        Value::Object(fields) => {
            let fields = fields.iter();
            let mut all: Vec<String> =
                fields.map(|(name, value)| format!("{name}\u{2}{}", written(value, text, sorted))).collect();
            all.sort_unstable();
            format!("{{{}}}", all.join("\u{1}"))
        }
        other => other.to_string(),
    }
}

/// The last labelled question of a text that shows others with their answers before it, with nothing but
/// labels behind it.
fn last_labelled(text: &str) -> Option<QuestionKey> {
    let parts = parts(text);
    let at = parts.iter().rposition(|(part, text)| *part == Part::Question && !text.is_empty())?;
    let shows = parts[..at].iter().any(|(part, text)| *part == Part::Answer && !text.is_empty());
    let is_last = parts[at + 1..].iter().all(|(part, text)| *part == Part::Answer && text.is_empty());
    (shows && is_last).then(|| QuestionKey::spelled(&parts[at].1))
}

/// A text in one case and Unicode form, with single spaces, without what is never seen.
fn normalised(text: &str) -> String {
    // Upper case first: ß and SS, σ and ς have lower forms of their own, but one upper form.
    let folded = text.chars().filter(|c| !is_unseen(*c)).collect::<String>().to_uppercase().to_lowercase();
    let form: String = folded.nfc().collect();
    let blank = |c: char| c.is_whitespace() || c.is_control();
    form.split(blank).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[path = "question_tests.rs"]
mod tests;
