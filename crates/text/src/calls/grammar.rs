//! Parts from which call formats build grammars for mandatory tool calls, in the Lark dialect of
//! llguidance.
//!
//! # Guarantees
//! A text that follows a grammar parses as calls of its tools. The arguments conform to the tools'
//! schemas, except for omitted keywords, which are listed (`grammar_schema.rs`).
//!
//! White space between parts of JSON is fixed to what templates print, because an uncertain model
//! would otherwise write white space endlessly.

use std::cell::RefCell;
use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::grammar_schema::GrammarSchema;
use crate::schema::Schema;
use crate::{OmittedKeyword, ToolSpec};

/// The tools and tags for which a grammar of tool calls is built.
pub(crate) struct GrammarContext<'a> {
    pub tools: &'a [ToolSpec],
    /// Whether the grammar allows several calls in one completion.
    pub several: bool,
    /// Function that returns the token id of a text that is a special token.
    pub special: &'a dyn Fn(&str) -> Option<u32>,
    /// Tags of the tool-call format.
    pub tags: &'a [&'a str],
    /// Keywords of the tools' schemas that the grammar does not enforce.
    pub omitted: &'a RefCell<Vec<OmittedKeyword>>,
}

/// Body of a grammar rule, and additional rules that the body refers to.
#[derive(Debug, Default)]
pub(crate) struct Rule {
    pub terms: String,
    pub rules: String,
}

impl Rule {
    /// Appends terms to the body of the rule.
    pub(crate) fn append(mut self, terms: impl AsRef<str>) -> Self {
        self.terms.push_str(terms.as_ref());
        self.terms.push(' ');
        self
    }

    /// Appends a reference to the rule `name` to the body, and adds this rule.
    pub(crate) fn append_rule(self, name: &str, body: impl AsRef<str>) -> Self {
        let mut rule = self.append(name);
        let _ = writeln!(rule.rules, "{name}: {}", body.as_ref());
        rule
    }
}

/// Returns a `%json` term of the grammar for a JSON schema, with the white space that templates
/// print.
fn to_json_term(mut schema: Value) -> String {
    let spaces =
        json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
    match schema.as_object_mut() {
        Some(fields) => drop(fields.insert("x-guidance".into(), spaces)),
        None => schema = json!({ "anyOf": [schema], "x-guidance": spaces }),
    }
    format!("%json {schema}")
}

/// Returns a text as a quoted literal of a Lark grammar.
fn quote_literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Escapes a text for use in a regular expression of the grammar.
fn escape_regex(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            // Escaping other characters, such as `<`, would give them a special meaning.
            c if r"\.+*?()|[]{}^$#&-~/".contains(c) => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out
}

impl GrammarContext<'_> {
    /// Returns the grammar terms that match a text: special tokens for the tags that are tokens,
    /// and literals for the remaining text.
    pub(crate) fn terms_for_text(&self, text: &str) -> String {
        let mut terms = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let tag = self.tags.iter().filter(|tag| rest.starts_with(**tag));
            let found = tag.filter_map(|tag| Some((tag.len(), (self.special)(tag)?))).max();
            if let Some((length, id)) = found {
                if !plain.is_empty() {
                    terms.push(quote_literal(&std::mem::take(&mut plain)));
                }
                terms.push(format!("<[{id}]>"));
                rest = &rest[length..];
            } else {
                plain.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
        if !plain.is_empty() {
            terms.push(quote_literal(&plain));
        }
        terms.join(" ")
    }

    /// Returns the grammar of a list of calls. `open` precedes the first call, `close` follows the
    /// last call, and `between` separates two calls. `call` builds the rule of a tool from its
    /// index.
    pub(crate) fn calls_grammar(
        &self,
        [open, between, close]: [&str; 3],
        call: impl Fn(usize, &ToolSpec) -> Rule,
    ) -> String {
        let more = if self.several {
            format!("({} call)*", self.terms_for_text(between))
        } else {
            String::new()
        };
        let mut text = format!(
            "start: {} call {more} {}\n",
            self.terms_for_text(open),
            self.terms_for_text(close)
        );
        let names: Vec<String> = (0..self.tools.len()).map(|at| format!("call_{at}")).collect();
        let _ = writeln!(text, "call: {}", names.join(" | "));
        for (at, tool) in self.tools.iter().enumerate() {
            let Rule { terms, rules } = call(at, tool);
            let _ = writeln!(text, "call_{at}: {terms}");
            text.push_str(&rules);
        }
        text
    }

    /// Returns the form of a schema that a grammar can enforce, and records the omitted keywords.
    fn enforce_schema(
        &self,
        tool: &ToolSpec,
        schema: Schema<'_>,
        schema_pointer: &str,
    ) -> GrammarSchema {
        let enforceable = GrammarSchema::from_schema(schema, schema_pointer);
        self.record_omitted_keywords(tool, enforceable.omitted.iter().cloned());
        enforceable
    }

    fn record_omitted_keywords(
        &self,
        tool: &ToolSpec,
        omitted: impl Iterator<Item = OmittedKeyword>,
    ) {
        let named = omitted.map(|found| OmittedKeyword { tool: tool.name.clone(), ..found });
        self.omitted.borrow_mut().extend(named);
    }

    /// Returns the grammar rule of a call of `tool`, the tool at index `at`: the text `before`, the
    /// arguments as JSON, and the text `after`.
    pub(crate) fn arguments_rule(
        &self,
        at: usize,
        tool: &ToolSpec,
        before: &str,
        after: &str,
    ) -> Rule {
        let schema = self
            .enforce_schema(tool, Schema::from_document(&tool.parameters), "")
            .restrict_to_object()
            .close_objects()
            .document();
        let rule = Rule::default().append(self.terms_for_text(before));
        rule.append_rule(&format!("arguments_{at}"), to_json_term(schema))
            .append(self.terms_for_text(after))
    }

    /// Returns the grammar rule of a call that is a JSON object between the texts `before` and
    /// `after`. The object contains the tool's name, the arguments under `key`, and optionally the
    /// fields in `more`, which maps names to schemas.
    pub(crate) fn object_rule(
        &self,
        (at, tool): (usize, &ToolSpec),
        key: &str,
        [before, after]: [&str; 2],
        more: &Value,
    ) -> Rule {
        let arguments = self
            .enforce_schema(tool, Schema::from_document(&tool.parameters), "")
            .restrict_to_object()
            .close_objects();
        let schema = arguments.embed_in(|arguments| {
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
        let rule = Rule::default().append(self.terms_for_text(before));
        rule.append_rule(&format!("object_{at}"), to_json_term(schema))
            .append(self.terms_for_text(after))
    }

    /// Returns the grammar rule of a call whose arguments are separate texts between `before` and
    /// `after`. `open` returns the text that starts an argument, and `close` ends an argument. The
    /// rule allows the arguments that the schema names, in its order; arguments that are not
    /// required are optional.
    pub(crate) fn parameters_rule(
        &self,
        (at, tool): (usize, &ToolSpec),
        before: &str,
        open: impl Fn(&str) -> String,
        close: &str,
        after: &str,
    ) -> Rule {
        let schema = Schema::from_document(&tool.parameters);
        let mut rule = Rule::default().append(self.terms_for_text(before));
        let required = schema.required();
        for (number, (key, of)) in schema.properties().into_iter().enumerate() {
            let value = self.value_rule(&format!("value_{at}_{number}"), tool, (key, of), close);
            let opening = self.terms_for_text(&open(key));
            let terms = value.terms;
            rule.rules.push_str(&value.rules);
            rule = rule.append(if required.contains(key) {
                format!("{opening} {terms}")
            } else {
                format!("({opening} {terms})?")
            });
        }
        rule.append(self.terms_for_text(after))
    }

    /// Returns the grammar rule of an argument's value as plain text, followed by `close`.
    fn value_rule(
        &self,
        name: &str,
        tool: &ToolSpec,
        (key, schema): (&str, Schema<'_>),
        close: &str,
    ) -> Rule {
        if let Some(texts) = schema.listed_strings() {
            let all: Vec<String> = texts.into_iter().map(quote_literal).collect();
            return Rule::default()
                .append_rule(name, all.join(" | "))
                .append(self.terms_for_text(close));
        }
        let types = schema.types();
        let schema_pointer = format!("/properties/{key}");
        if !types.is_empty() && !types.contains("string") {
            let schema = self.enforce_schema(tool, schema, &schema_pointer).document();
            return Rule::default()
                .append_rule(name, to_json_term(schema))
                .append(self.terms_for_text(close));
        }
        // Any text is allowed; restrictions of the text are omitted.
        let restricts = ["pattern", "minLength", "maxLength"].into_iter();
        let restricts = restricts.filter(|keyword| !schema.value[*keyword].is_null());
        self.record_omitted_keywords(
            tool,
            restricts.map(|keyword| OmittedKeyword {
                tool: String::new(),
                path: schema_pointer.clone(),
                keyword: keyword.into(),
            }),
        );
        self.text_rule(name, close)
    }

    /// Returns the grammar rule of any text without tags of the call format, followed by `close`. A
    /// tag in the text would end or start a call.
    pub(crate) fn text_rule(&self, name: &str, close: &str) -> Rule {
        let tags: Vec<String> = self.tags.iter().map(|tag| escape_regex(tag)).collect();
        let without = format!("~/(.|\\n)*({})(.|\\n)*/", tags.join("|"));
        let tags = self.tags.iter().filter_map(|tag| close.find(*tag).map(|at| (at, *tag)));
        // Without a tag, the text ends with `close`.
        let (at, tag) = tags.min().unwrap_or((0, close));
        let before = &close[..at];
        let after = &close[at..];
        if (self.special)(tag).is_some() {
            // A special token is never text.
            let body = format!("/(.|\\n)*{}/ & {without}", escape_regex(before));
            return Rule::default()
                .append_rule(&name.to_uppercase(), body)
                .append(self.terms_for_text(after));
        }
        let suffix = quote_literal(&close[..at + tag.len()]);
        let mut rule = Rule::default().append(name);
        let terminal = name.to_uppercase();
        let _ = writeln!(rule.rules, "{name}[suffix={suffix}]: {terminal}");
        let _ = writeln!(rule.rules, "{terminal}: /(.|\\n)*/ & {without}");
        rule.append(self.terms_for_text(&close[at + tag.len()..]))
    }
}
