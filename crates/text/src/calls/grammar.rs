//! Grammars of calls that must be made, in the Lark dialect of llguidance: the parts that formats build them
//! from.
//!
//! Guarantees: what keeps to a grammar reads as calls of its tools, whose arguments keep to the schemas of
//! these, except for keywords that are left out and named (`grammar_schema.rs`). White space between parts of
//! JSON is as templates print it: a model in doubt would write it for ever.

use std::cell::RefCell;
use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::grammar_schema::GrammarSchema;
use crate::schema::Schema;
use crate::{LeftOut, ToolSpec};

/// Tools to be called, and the tokenizer that the grammar is for.
pub(crate) struct Forms<'a> {
    pub tools: &'a [ToolSpec],
    /// Whether there may be several calls.
    pub several: bool,
    /// The id of a text that is one special token.
    pub special: &'a dyn Fn(&str) -> Option<u32>,
    /// The tags of the format.
    pub tags: &'a [&'a str],
    /// Keywords of the tools' schemas that the grammar leaves out.
    pub left_out: &'a RefCell<Vec<LeftOut>>,
}

/// Terms of a rule, and further rules that they need.
#[derive(Debug, Default)]
pub(crate) struct Rule {
    pub terms: String,
    pub rules: String,
}

impl Rule {
    /// Adds terms.
    pub(crate) fn then(mut self, terms: impl AsRef<str>) -> Self {
        self.terms.push_str(terms.as_ref());
        self.terms.push(' ');
        self
    }

    /// Adds a rule of this name, and its name to the terms.
    pub(crate) fn by(self, name: &str, body: impl AsRef<str>) -> Self {
        let mut rule = self.then(name);
        let _ = writeln!(rule.rules, "{name}: {}", body.as_ref());
        rule
    }
}

/// JSON of a schema.
fn json_of(mut schema: Value) -> String {
    let spaces = json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
    match schema.as_object_mut() {
        Some(fields) => drop(fields.insert("x-guidance".into(), spaces)),
        None => schema = json!({ "anyOf": [schema], "x-guidance": spaces }),
    }
    format!("%json {schema}")
}

/// A text as a literal.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A text as it stands in a regular expression.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            // Of other marks, such as `<`, the backslash would be the sense.
            c if r"\.+*?()|[]{}^$#&-~/".contains(c) => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out
}

impl Forms<'_> {
    /// Terms of a text: its tags as tokens where they are such, all else as it is written.
    pub(crate) fn said(&self, text: &str) -> String {
        let (mut terms, mut plain, mut rest) = (Vec::new(), String::new(), text);
        while let Some(c) = rest.chars().next() {
            let tag = self.tags.iter().filter(|tag| rest.starts_with(**tag));
            let found = tag.filter_map(|tag| Some((tag.len(), (self.special)(tag)?))).max();
            if let Some((length, id)) = found {
                if !plain.is_empty() {
                    terms.push(literal(&std::mem::take(&mut plain)));
                }
                terms.push(format!("<[{id}]>"));
                rest = &rest[length..];
            } else {
                plain.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
        if !plain.is_empty() {
            terms.push(literal(&plain));
        }
        terms.join(" ")
    }

    /// The grammar of calls, each as `call` has it for a tool and its number: the first after `open`, the
    /// last before `close`, `between` them.
    pub(crate) fn calls(
        &self,
        [open, between, close]: [&str; 3],
        call: impl Fn(usize, &ToolSpec) -> Rule,
    ) -> String {
        let more = if self.several { format!("({} call)*", self.said(between)) } else { String::new() };
        let mut text = format!("start: {} call {more} {}\n", self.said(open), self.said(close));
        let names: Vec<String> = (0..self.tools.len()).map(|at| format!("call_{at}")).collect();
        let _ = writeln!(text, "call: {}", names.join(" | "));
        for (at, tool) in self.tools.iter().enumerate() {
            let Rule { terms, rules } = call(at, tool);
            let _ = writeln!(text, "call_{at}: {terms}");
            text.push_str(&rules);
        }
        text
    }

    /// Returns the form of a schema that a grammar can follow, and notes what it leaves out.
    fn followed(&self, tool: &ToolSpec, schema: Schema<'_>, path: &str) -> GrammarSchema {
        let form = GrammarSchema::of(schema, path);
        self.note(tool, form.left_out.iter().cloned());
        form
    }

    fn note(&self, tool: &ToolSpec, left_out: impl Iterator<Item = LeftOut>) {
        let named = left_out.map(|found| LeftOut { tool: tool.name.clone(), ..found });
        self.left_out.borrow_mut().extend(named);
    }

    /// A call whose arguments are JSON between two texts.
    pub(crate) fn arguments(&self, at: usize, tool: &ToolSpec, before: &str, after: &str) -> Rule {
        let schema = self.followed(tool, Schema::of(&tool.parameters), "").of_object().closed().document();
        let rule = Rule::default().then(self.said(before));
        rule.by(&format!("arguments_{at}"), json_of(schema)).then(self.said(after))
    }

    /// A call that is JSON between two texts: its name, its arguments under this key, and after these, as it
    /// likes, more fields with their schemas.
    pub(crate) fn object(
        &self,
        (at, tool): (usize, &ToolSpec),
        key: &str,
        [before, after]: [&str; 2],
        more: &Value,
    ) -> Rule {
        let arguments = self.followed(tool, Schema::of(&tool.parameters), "").of_object().closed();
        let schema = arguments.within(|arguments| {
            let mut schema = json!({
                "type": "object",
                "properties": { "name": { "const": tool.name }, key: arguments },
                "required": ["name", key],
                "additionalProperties": false,
            });
            for (name, of) in more.as_object().into_iter().flatten() {
                schema["properties"][name] = of.clone();
            }
            schema
        });
        let rule = Rule::default().then(self.said(before));
        rule.by(&format!("object_{at}"), json_of(schema)).then(self.said(after))
    }

    /// A call whose arguments stand one by one, between `before` and `after`, each as `open` gives it its
    /// name and up to `close`: those of its schema, in their order, without the ones that are not required as
    /// it likes.
    pub(crate) fn parts(
        &self,
        (at, tool): (usize, &ToolSpec),
        before: &str,
        open: impl Fn(&str) -> String,
        close: &str,
        after: &str,
    ) -> Rule {
        let schema = Schema::of(&tool.parameters);
        let mut rule = Rule::default().then(self.said(before));
        let required = schema.required();
        for (number, (key, of)) in schema.properties().into_iter().enumerate() {
            let value = self.value(&format!("value_{at}_{number}"), tool, (key, of), close);
            let (opens, terms) = (self.said(&open(key)), value.terms);
            rule.rules.push_str(&value.rules);
            rule = rule.then(match required.contains(key) {
                true => format!("{opens} {terms}"),
                false => format!("({opens} {terms})?"),
            });
        }
        rule.then(self.said(after))
    }

    /// A value as bare text, up to `close`.
    fn value(&self, name: &str, tool: &ToolSpec, (key, schema): (&str, Schema<'_>), close: &str) -> Rule {
        if let Some(texts) = schema.texts() {
            let all: Vec<String> = texts.into_iter().map(literal).collect();
            return Rule::default().by(name, all.join(" | ")).then(self.said(close));
        }
        let (types, path) = (schema.types(), format!("/properties/{key}"));
        if !types.is_empty() && !types.contains("string") {
            let schema = self.followed(tool, schema, &path).document();
            return Rule::default().by(name, json_of(schema)).then(self.said(close));
        }
        // Any text is written; what the schema restricts of it is left out.
        let restricts = ["pattern", "minLength", "maxLength"].into_iter();
        let restricts = restricts.filter(|keyword| !schema.value[*keyword].is_null());
        let left_out =
            |keyword: &str| LeftOut { tool: String::new(), path: path.clone(), keyword: keyword.into() };
        self.note(tool, restricts.map(left_out));
        self.text(name, close)
    }

    /// Any text without tags of the format, which would be read as such, and `close` after it.
    pub(crate) fn text(&self, name: &str, close: &str) -> Rule {
        let tags: Vec<String> = self.tags.iter().map(|tag| escaped(tag)).collect();
        let without = format!("~/(.|\\n)*({})(.|\\n)*/", tags.join("|"));
        let tags = self.tags.iter().filter_map(|tag| close.find(*tag).map(|at| (at, *tag)));
        // Without a tag the text ends with its close.
        let (at, tag) = tags.min().unwrap_or((0, close));
        let (before, after) = (&close[..at], &close[at..]);
        if (self.special)(tag).is_some() {
            // No special token is text.
            let body = format!("/(.|\\n)*{}/ & {without}", escaped(before));
            return Rule::default().by(&name.to_uppercase(), body).then(self.said(after));
        }
        let suffix = literal(&close[..at + tag.len()]);
        let (mut rule, terminal) = (Rule::default().then(name), name.to_uppercase());
        let _ = writeln!(rule.rules, "{name}[suffix={suffix}]: {terminal}");
        let _ = writeln!(rule.rules, "{terminal}: /(.|\\n)*/ & {without}");
        rule.then(self.said(&close[at + tag.len()..]))
    }
}
