//! Deserializes typed keys from TOML, with errors that contain the full path of the key.
//!
//! `serde_path_to_error` finds the path of an error. This module adds two layouts of recipes. An
//! enum with contents is a table whose `kind` names the variant, or just that name if its contents
//! are all defaults. A struct with a field [`OPTIONS`] has the contents of that enum among its own
//! keys. serde's attributes for these layouts, `tag` and `flatten`, read through a buffer, which
//! loses the path.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{
    self, Deserialize, Deserializer, IntoDeserializer, SeqAccess, Unexpected, Visitor,
};
use serde_path_to_error::Segment;
use toml::{Table, Value};

/// Name of the typed field that contains the named agents, which are in `[agent]` in a recipe file.
/// No key of a file starts with `$`.
pub(super) const AGENTS: &str = "$agents";

/// Name of the key that selects the variant of an enum.
pub(super) const KIND: &str = "kind";

/// Name of the typed field whose keys are, in a recipe file, in the table of the surrounding
/// struct.
pub(super) const OPTIONS: &str = "$options";

/// An error in a value of a recipe, with the path of its key.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadError {
    /// Path of the key, outermost part first. Until [`read`] returns, it contains only the parts
    /// that serde does not report.
    path: Vec<String>,
    problem: ReadProblem,
}

#[derive(Debug, Clone, PartialEq)]
enum ReadProblem {
    UnknownKey { known: Vec<&'static str> },
    UnknownKind { found: String, known: &'static [&'static str] },
    Missing { kinds: &'static [&'static str] },
    InvalidValue { found: String, expected: String },
    Other(String),
}

impl ReadError {
    /// Creates an error for the value at `path`.
    pub(super) fn at_path<const N: usize>(path: [&str; N], why: impl fmt::Display) -> Self {
        ReadError {
            path: path.map(str::to_owned).to_vec(),
            problem: ReadProblem::Other(why.to_string()),
        }
    }

    /// Adds the keys of an outer struct to the known keys, if this error is about an unknown key of
    /// the struct with `fields`. In a recipe file, both structs share one table.
    fn with_known_keys(mut self, fields: &[&str], outer: &[&'static str]) -> Self {
        if let ReadProblem::UnknownKey { known } = &mut self.problem
            && *known == fields
        {
            known.splice(0..0, outer.iter().copied());
        }
        self
    }
}

impl From<ReadProblem> for ReadError {
    fn from(problem: ReadProblem) -> Self {
        ReadError { path: Vec::new(), problem }
    }
}

fn type_error(found: &Value, expected: &str) -> ReadError {
    <ReadError as de::Error>::invalid_type(Unexpected::Other(&found.to_string()), &expected)
}

/// Formats names in quotes as a list. Omits names that start with `$`, because users do not see
/// them.
fn format_list(names: &[&str], quote: &str, separator: &str) -> String {
    let names = names.iter().filter(|name| !name.starts_with('$'));
    names.map(|name| format!("{quote}{name}{quote}")).collect::<Vec<_>>().join(separator)
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.path.join(".");
        match &self.problem {
            ReadProblem::UnknownKey { known } => {
                let last = self.path.last().map_or("", String::as_str);
                write!(f, "unknown key `{key}`; ")?;
                match nearest_name(last, known) {
                    Some(near) => write!(f, "did you mean `{near}`?"),
                    None if known.is_empty() => write!(f, "this table has no keys"),
                    None => write!(f, "the keys there are {}", format_list(known, "`", ", ")),
                }
            }
            ReadProblem::UnknownKind { found, known } => {
                write!(
                    f,
                    "`{key}` is \"{found}\", but must be one of {}",
                    format_list(known, "`", ", ")
                )?;
                match nearest_name(found, known) {
                    Some(near) => write!(f, "; did you mean `{near}`?"),
                    None => Ok(()),
                }
            }
            ReadProblem::Missing { kinds: [] } => write!(f, "`{key}` is missing"),
            ReadProblem::Missing { kinds } => {
                write!(f, "`{key}` (which may be {}) is missing", format_list(kinds, "\"", " or "))
            }
            ReadProblem::InvalidValue { found, expected } => {
                write!(f, "`{key}` is {found}, but must be {expected}")
            }
            ReadProblem::Other(message) if key.is_empty() => f.write_str(message),
            ReadProblem::Other(message) => write!(f, "`{key}`: {message}"),
        }
    }
}

impl std::error::Error for ReadError {}

/// Returns the known name that is most similar to `name`, or `None` if none is similar enough.
pub(super) fn nearest_name<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .filter(|candidate| !candidate.starts_with('$'))
        .map(|&candidate| (strsim::normalized_damerau_levenshtein(name, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= 0.6)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// Converts serde's name of an expected type to the wording of recipes, such as `a whole number`.
fn describe_expected(expected: &dyn de::Expected) -> String {
    let text = expected.to_string();
    match text.as_str() {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, at least 0".into(),
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number".into(),
        "f32" | "f64" => "a number".into(),
        "a string" | "string" | "path string" => "a string in quotes".into(),
        "a boolean" => "true or false".into(),
        "a sequence" => "a list".into(),
        "a map" => "a table".into(),
        _ if text.starts_with("struct ") => "a table".into(),
        _ => text,
    }
}

fn describe_found(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Float(value) => format!("{value:?}"),
        Unexpected::Str(value) => format!("the string \"{value}\""),
        Unexpected::Seq => "a list".into(),
        Unexpected::Map => "a table".into(),
        other => other.to_string(),
    }
}

impl de::Error for ReadError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        ReadProblem::Other(message.to_string()).into()
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        ReadProblem::InvalidValue {
            found: describe_found(found),
            expected: describe_expected(expected),
        }
        .into()
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn unknown_variant(found: &str, known: &'static [&'static str]) -> Self {
        ReadProblem::UnknownKind { found: found.into(), known }.into()
    }

    // The path of serde's error already leads to the key.
    fn unknown_field(_key: &str, known: &'static [&'static str]) -> Self {
        ReadProblem::UnknownKey { known: known.to_vec() }.into()
    }

    fn missing_field(key: &'static str) -> Self {
        ReadError { path: vec![key.into()], problem: ReadProblem::Missing { kinds: &[] } }
    }
}

/// Deserializes a typed configuration from a TOML table.
pub(super) fn read<T: de::DeserializeOwned>(table: Table) -> Result<T, ReadError> {
    let value = Value::Table(table);
    serde_path_to_error::deserialize(Reader::Value(&value)).map_err(|error| {
        let outer: Vec<String> = error
            .path()
            .iter()
            .filter_map(|segment| match segment {
                Segment::Seq { index } => Some(index.to_string()),
                Segment::Map { key } if key == AGENTS => Some("agent".into()),
                Segment::Map { key } if key != OPTIONS => Some(key.clone()),
                _ => None,
            })
            .collect();
        let ReadError { path, problem } = error.into_inner();
        ReadError { path: [outer, path].concat(), problem }
    })
}

/// Keys and values of a table, in file order.
type Entries<'a> = Vec<(&'a str, Reader<'a>)>;

enum Reader<'a> {
    /// A value in the recipe file.
    Value(&'a Value),
    /// A part of a table, and the fields of the outer struct to which the other part of the table
    /// belongs.
    Part(Entries<'a>, &'static [&'static str]),
}

impl<'a> Reader<'a> {
    /// Returns the entries of a table, and the fields of the outer struct to which other entries of
    /// the table belong. Returns the value itself as an error if it is not a table.
    fn entries(self) -> Result<(Entries<'a>, &'static [&'static str]), &'a Value> {
        match self {
            Reader::Value(Value::Table(table)) => Ok((
                table.iter().map(|(key, value)| (key.as_str(), Reader::Value(value))).collect(),
                &[],
            )),
            Reader::Value(value) => Err(value),
            Reader::Part(entries, fields) => Ok((entries, fields)),
        }
    }

    /// Returns the name of an enum variant, and the contents of the variant.
    fn read_variant(self, variants: &'static [&'static str]) -> Result<(&'a str, Self), ReadError> {
        let (mut entries, outer) = match self.entries() {
            Ok(table) => table,
            Err(Value::String(variant)) => return Ok((variant, Reader::Part(Vec::new(), &[]))),
            Err(other) => {
                let expected = "a string in quotes or a table";
                return Err(type_error(other, expected));
            }
        };
        let at_kind = |error| ReadError { path: vec![KIND.into()], ..error };
        match entries.iter().position(|(key, _)| *key == KIND).map(|at| entries.remove(at).1) {
            None => Err(at_kind(ReadProblem::Missing { kinds: variants }.into())),
            Some(Reader::Value(Value::String(variant))) if variants.contains(&variant.as_str()) => {
                Ok((variant, Reader::Part(entries, outer)))
            }
            Some(Reader::Value(Value::String(found))) => {
                Err(at_kind(de::Error::unknown_variant(found, variants)))
            }
            Some(Reader::Value(other)) => Err(at_kind(type_error(other, "a string in quotes"))),
            Some(Reader::Part(..)) => {
                Err(at_kind(de::Error::custom("the value must be a string, but is a table")))
            }
        }
    }
}

impl<'de> IntoDeserializer<'de, ReadError> for Reader<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Reader<'de> {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self.entries() {
            Ok((entries, _)) => visitor.visit_map(MapDeserializer::new(entries.into_iter())),
            Err(Value::Array(items)) => {
                visitor.visit_seq(SeqDeserializer::new(items.iter().map(Reader::Value)))
            }
            Err(Value::String(text)) => visitor.visit_borrowed_str(text),
            Err(Value::Integer(number)) => visitor.visit_i64(*number),
            Err(Value::Float(number)) => visitor.visit_f64(*number),
            Err(Value::Boolean(value)) => visitor.visit_bool(*value),
            Err(other) => Err(ReadProblem::InvalidValue {
                found: format!("the time {other}"),
                expected: "a string, a number, a list or a table".into(),
            }
            .into()),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        if !fields.contains(&OPTIONS) {
            let outer = if let Reader::Part(_, outer) = self { outer } else { &[] };
            return self
                .deserialize_any(visitor)
                .map_err(|error| error.with_known_keys(fields, outer));
        }
        let (mut own, options) = match self {
            Reader::Value(Value::Table(table)) => {
                let all = table.iter().map(|(key, value)| (key.as_str(), Reader::Value(value)));
                let (own, options) =
                    all.partition(|(key, _)| *key != OPTIONS && fields.contains(key));
                (own, Reader::Part(options, fields))
            }
            // Only a kind, whose options are all defaults.
            kind @ Reader::Value(Value::String(_)) => (Vec::new(), kind),
            other => return other.deserialize_any(visitor),
        };
        own.push((OPTIONS, options));
        visitor.visit_map(MapDeserializer::new(own.into_iter()))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        let variant = std::iter::once(self.read_variant(variants)?);
        visitor.visit_enum(MapAccessDeserializer::new(MapDeserializer::new(variant)))
    }

    /// Deserializes the contents of an enum variant without fields.
    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let Reader::Part(entries, outer) = self else { return self.deserialize_any(visitor) };
        let Some((key, _)) = entries.first() else { return visitor.visit_unit() };
        let known = [outer, &[KIND]].concat();
        Err(ReadError { path: vec![(*key).to_owned()], problem: ReadProblem::UnknownKey { known } })
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

/// Deserializes a list with at least one item. A single string is accepted as a list with one item.
pub(super) fn deserialize_one_or_several<'de, T, D>(
    deserializer: D,
    expected: &'static str,
) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de> + From<String>,
    D: Deserializer<'de>,
{
    struct Items<T>(&'static str, PhantomData<T>);
    impl<'de, T: Deserialize<'de> + From<String>> Visitor<'de> for Items<T> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<E>(self, text: &str) -> Result<Vec<T>, E> {
            Ok(vec![text.to_owned().into()])
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
            let mut all = Vec::new();
            while let Some(item) = items.next_element()? {
                all.push(item);
            }
            if all.is_empty() {
                Err(de::Error::invalid_value(Unexpected::Seq, &self))
            } else {
                Ok(all)
            }
        }
    }
    deserializer.deserialize_any(Items(expected, PhantomData))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        name: String,
        #[serde(default)]
        rate: f32,
        #[serde(default)]
        part: Vec<Part>,
        #[serde(default)]
        mode: Option<Mode>,
        #[serde(default)]
        table: BTreeMap<String, u32>,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Part {
        Small(Small),
        Large { size: u8 },
    }

    #[derive(Debug, PartialEq, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Small {
        learning_rate: f64,
        mode: Mode,
    }

    #[derive(Debug, PartialEq, Default, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Mode {
        #[default]
        Fast,
        Slow,
    }

    fn parse(text: &str) -> Result<Outer, String> {
        read(text.parse().unwrap()).map_err(|e: ReadError| e.to_string())
    }

    #[test]
    fn reads_every_shape() {
        let outer = parse(
            "name = 'x'\nrate = 1\nmode = 'slow'\n\
             part = [{kind = 'small', learning_rate = 2.5, mode = 'slow'}, \
             {kind = 'large', size = 3}, 'small']\ntable = {a = 1}",
        )
        .unwrap();
        assert_eq!(
            outer,
            Outer {
                name: "x".into(),
                rate: 1.0,
                part: vec![
                    Part::Small(Small { learning_rate: 2.5, mode: Mode::Slow }),
                    Part::Large { size: 3 },
                    Part::Small(Small::default()),
                ],
                mode: Some(Mode::Slow),
                table: BTreeMap::from([("a".into(), 1)]),
            }
        );
    }

    #[test]
    fn read_errors_name_key_and_remedy() {
        let cases = [
            ("", "`name` is missing"),
            ("name = 3", "`name` is 3, but must be a string in quotes"),
            ("name = 'x'\nraet = 1", "unknown key `raet`; did you mean `rate`?"),
            ("name = 'x'\nzzz = 1", "the keys there are `name`, `rate`"),
            ("name = 'x'\nrate = 'high'", "`rate` is the string \"high\", but must be a number"),
            (
                "name = 'x'\npart = [{kind='small'}, {kind='small', lerning_rate=1}]",
                "unknown key `part.1.lerning_rate`; did you mean `learning_rate`?",
            ),
            (
                "name = 'x'\npart = [{kind='smal'}]",
                "`part.0.kind` is \"smal\", but must be one of `small`, `large`; did",
            ),
            (
                "name = 'x'\npart = [{size=1}]",
                "`part.0.kind` (which may be \"small\" or \"large\")",
            ),
            ("name = 'x'\npart = [{kind='large'}]", "`part.0.size` is missing"),
            (
                "name = 'x'\npart = [{kind='large', size=-1}]",
                "`part.0.size` is -1, but must be a whole number, at least 0",
            ),
            ("name = 'x'\npart = [{kind='large', size=300}]", "`part.0.size` is 300"),
            (
                "name = 'x'\npart = [{kind='small', mode='slw'}]",
                "`part.0.mode` is \"slw\", but must be one of `fast`",
            ),
            ("name = 'x'\npart = 3", "`part` is 3, but must be a list"),
            ("name = 'x'\nmode = {kind='fast', speed=2}", "unknown key `mode.speed`"),
            ("name = 'x'\ntable = {a = 'b'}", "`table.a` is the string \"b\""),
            ("name = 2024-01-01", "`name` is the time 2024-01-01"),
        ];
        for (text, want) in cases {
            let error = parse(text).unwrap_err();
            assert!(error.contains(want), "{text}\n  gave: {error}\n  want: {want}");
        }
    }
}
