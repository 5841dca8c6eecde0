//! From TOML values to typed configuration, with errors that name the key by its whole path.
//!
//! serde's own way (`toml::from_str` with `deny_unknown_fields`) knows neither the path of a key nor which
//! key was meant. This reader hands serde the values one by one, so it knows both. It also gives enums with
//! contents one shape everywhere: a table whose `kind` names the variant (or just the name, where the
//! contents are all defaults).

use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, IntoDeserializer, Unexpected, Visitor};
use toml::{Table, Value};

/// Where agents by name are once they are apart; in a file they are in `[agent]`.
pub(super) const AGENTS: &str = "agents";

/// The key that names the variant of an enum.
pub(super) const KIND: &str = "kind";

/// Where several scorers are.
pub(super) const SCORERS: &str = "scorers";
/// The key of the only scorer, and of the options of one of several in the typed form.
pub(super) const SCORER: &str = "scorer";

/// A list whose items are one table in a file: keys that all have, and the options of a kind. Typed, these
/// are apart.
pub(super) struct Joined {
    /// Where the list is.
    list: &'static [&'static str],
    /// Keys that all items have.
    pub own: &'static [&'static str],
    /// Where the typed form has the options.
    pub options: &'static str,
}

/// `[[reward.scorers]]`
pub(super) const OF_SCORERS: Joined = Joined {
    list: &["reward", SCORERS],
    own: &["name", "weight", "weights", "when", "unscored"],
    options: SCORER,
};

/// `[[tool]]`
pub(super) const OF_TOOLS: Joined = Joined {
    list: &["tool"],
    own: &[
        "name",
        "seconds",
        "parallel",
        "max_tokens",
        "max_characters",
        "truncate",
        "calls_per_second",
        "at_once",
        "condense",
        "outage",
    ],
    options: "options",
};

/// The list to whose items the options belong that keys lead to.
fn options_of(path: &[&str]) -> Option<&'static Joined> {
    const ALL: [&Joined; 2] = [&OF_SCORERS, &OF_TOOLS];
    let leads = |joined: &&&Joined| {
        let rest = path.strip_prefix(joined.list);
        matches!(rest, Some([_, options]) if *options == joined.options)
    };
    ALL.iter().find(leads).copied()
}

/// Fault in a value, and where it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadError {
    /// Keys from the innermost outwards.
    path: Vec<String>,
    problem: Problem,
}

#[derive(Debug, Clone, PartialEq)]
enum Problem {
    UnknownKey { key: String, known: &'static [&'static str] },
    UnknownKind { found: String, known: &'static [&'static str] },
    Missing(String),
    Wrong { found: String, expected: String },
    Other(String),
}

impl ReadError {
    fn new(problem: Problem) -> Self {
        ReadError { path: Vec::new(), problem }
    }

    /// The same fault in a value that stands under this key.
    pub(super) fn within(mut self, key: impl ToString) -> Self {
        self.path.push(key.to_string());
        self
    }

    /// `a.0.b`, with `last` appended where given.
    fn key(&self, last: Option<&str>) -> String {
        // Agents by name are apart only once they have been read.
        let written = |key| if key == AGENTS { "agent" } else { key };
        let outer = self.outer();
        // The options of a kind are among the other keys in a file.
        let in_file = (0..outer.len()).filter(|&i| options_of(&outer[..=i]).is_none());
        in_file.map(|i| written(outer[i])).chain(last).collect::<Vec<_>>().join(".")
    }

    /// Keys from the outermost inwards.
    fn outer(&self) -> Vec<&str> {
        self.path.iter().rev().map(String::as_str).collect()
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |known: &[&str]| known.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ");
        match &self.problem {
            Problem::UnknownKey { key, known } => {
                let more = options_of(&self.outer()).map_or(&[][..], |joined| joined.own);
                let known = &[more, *known].concat();
                write!(f, "unknown key `{}`; ", self.key(Some(key)))?;
                match nearest(key, known) {
                    Some(near) => write!(f, "did you mean `{near}`?"),
                    None if known.is_empty() => write!(f, "nothing can be set there"),
                    None => write!(f, "the keys there are {}", list(known)),
                }
            }
            Problem::UnknownKind { found, known } => {
                write!(f, "`{}` is \"{found}\", but must be one of {}", self.key(None), list(known))?;
                match nearest(found, known) {
                    Some(near) => write!(f, "; did you mean `{near}`?"),
                    None => Ok(()),
                }
            }
            Problem::Missing(key) => write!(f, "`{}` is missing", self.key(Some(key))),
            Problem::Wrong { found, expected } => {
                write!(f, "`{}` is {found}, but must be {expected}", self.key(None))
            }
            Problem::Other(message) if self.path.is_empty() => f.write_str(message),
            Problem::Other(message) => write!(f, "`{}`: {message}", self.key(None)),
        }
    }
}

impl std::error::Error for ReadError {}

/// The known name that `name` is most likely a slip of.
pub(super) fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    known
        .iter()
        .map(|&candidate| (strsim::normalized_damerau_levenshtein(name, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= 0.6)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// Name of a type that serde expects, in the words of a person who writes a recipe.
fn plainly(expected: &dyn de::Expected) -> String {
    let text = expected.to_string();
    match text.as_str() {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, at least 0".into(),
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number".into(),
        "f32" | "f64" => "a number".into(),
        "a string" | "string" | "path string" => "a text in quotes".into(),
        "a boolean" => "true or false".into(),
        "a sequence" => "a list".into(),
        "a map" => "a table".into(),
        _ if text.starts_with("struct ") => "a table".into(),
        _ => text,
    }
}

fn shown(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => value.to_string(),
        Unexpected::Unsigned(value) => value.to_string(),
        Unexpected::Signed(value) => value.to_string(),
        Unexpected::Float(value) => format!("{value:?}"),
        Unexpected::Str(value) => format!("the text \"{value}\""),
        Unexpected::Seq => "a list".into(),
        Unexpected::Map => "a table".into(),
        other => other.to_string(),
    }
}

impl de::Error for ReadError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(Problem::Other(message.to_string()))
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(Problem::Wrong { found: shown(found), expected: plainly(expected) })
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn unknown_variant(found: &str, known: &'static [&'static str]) -> Self {
        Self::new(Problem::UnknownKind { found: found.into(), known })
    }

    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        Self::new(Problem::UnknownKey { key: key.into(), known })
    }

    fn missing_field(key: &'static str) -> Self {
        Self::new(Problem::Missing(key.into()))
    }
}

/// Reads a typed configuration.
pub(super) fn read<T: de::DeserializeOwned>(table: Table) -> Result<T, ReadError> {
    T::deserialize(Reader(Value::Table(table)))
}

struct Reader(Value);

impl<'de> Deserializer<'de> for Reader {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match self.0 {
            Value::String(text) => visitor.visit_string(text),
            Value::Integer(number) => visitor.visit_i64(number),
            Value::Float(number) => visitor.visit_f64(number),
            Value::Boolean(value) => visitor.visit_bool(value),
            Value::Datetime(time) => Err(ReadError::new(Problem::Wrong {
                found: format!("the time {time}"),
                expected: "a text, a number, a list or a table".into(),
            })),
            Value::Array(items) => visitor.visit_seq(Items(items.into_iter().enumerate())),
            Value::Table(table) => visitor.visit_map(Entries { rest: table.into_iter(), next: None }),
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

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        match self.0 {
            Value::String(variant) => {
                visitor.visit_enum(Variant { variant, contents: Table::new(), keyed: false })
            }
            Value::Table(mut contents) => match contents.remove(KIND) {
                Some(Value::String(variant)) => {
                    visitor.visit_enum(Variant { variant, contents, keyed: true })
                }
                Some(other) => Err(<ReadError as de::Error>::invalid_type(
                    Unexpected::Other(&other.to_string()),
                    &"a text in quotes",
                )
                .within(KIND)),
                None => {
                    let known = variants.iter().map(|v| format!("\"{v}\"")).collect::<Vec<_>>().join(" or ");
                    Err(ReadError::new(Problem::Missing(format!("{KIND}` (which may be {known}), `{KIND}"))))
                }
            },
            other => Err(<ReadError as de::Error>::invalid_type(
                Unexpected::Other(&other.to_string()),
                &"a text in quotes or a table",
            )),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier ignored_any
    }
}

struct Items(std::iter::Enumerate<std::vec::IntoIter<Value>>);

impl<'de> de::SeqAccess<'de> for Items {
    type Error = ReadError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, ReadError> {
        let Some((index, value)) = self.0.next() else { return Ok(None) };
        seed.deserialize(Reader(value)).map(Some).map_err(|error| error.within(index))
    }
}

struct Entries {
    rest: toml::map::IntoIter<String, Value>,
    next: Option<(String, Value)>,
}

impl<'de> de::MapAccess<'de> for Entries {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        let Some((key, value)) = self.rest.next() else { return Ok(None) };
        self.next = Some((key.clone(), value));
        seed.deserialize(key.into_deserializer()).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ReadError> {
        let (key, value) = self.next.take().ok_or_else(|| de::Error::custom("a value without its key"))?;
        seed.deserialize(Reader(value)).map_err(|error| error.within(key))
    }
}

/// A variant by name, with what its table holds besides.
struct Variant {
    variant: String,
    contents: Table,
    /// Whether the name stood under `kind`.
    keyed: bool,
}

impl<'de> de::EnumAccess<'de> for Variant {
    type Error = ReadError;
    type Variant = Contents;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Contents), ReadError> {
        let keyed = self.keyed;
        let name: de::value::StringDeserializer<ReadError> = self.variant.into_deserializer();
        let variant =
            seed.deserialize(name).map_err(|error| if keyed { error.within(KIND) } else { error })?;
        Ok((variant, Contents(self.contents)))
    }
}

struct Contents(Table);

impl<'de> de::VariantAccess<'de> for Contents {
    type Error = ReadError;

    fn unit_variant(self) -> Result<(), ReadError> {
        match self.0.into_iter().next() {
            None => Ok(()),
            Some((key, _)) => Err(ReadError::new(Problem::UnknownKey { key, known: &[KIND] })),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, ReadError> {
        seed.deserialize(Reader(Value::Table(self.0)))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _len: usize, _visitor: V) -> Result<V::Value, ReadError> {
        Err(de::Error::custom("a list of unnamed values has no form in a recipe"))
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        Reader(Value::Table(self.0)).deserialize_any(visitor)
    }
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
            "name = 'x'\nrate = 1\nmode = 'slow'\npart = [{kind = 'small', learning_rate = 2.5, mode = 'slow'}, \
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
    fn errors_name_the_key_and_the_way_out() {
        let cases = [
            ("", "`name` is missing"),
            ("name = 3", "`name` is 3, but must be a text in quotes"),
            ("name = 'x'\nraet = 1", "unknown key `raet`; did you mean `rate`?"),
            ("name = 'x'\nzzz = 1", "the keys there are `name`, `rate`"),
            ("name = 'x'\nrate = 'high'", "`rate` is the text \"high\", but must be a number"),
            (
                "name = 'x'\npart = [{kind='small'}, {kind='small', lerning_rate=1}]",
                "unknown key `part.1.lerning_rate`; did you mean `learning_rate`?",
            ),
            (
                "name = 'x'\npart = [{kind='smal'}]",
                "`part.0.kind` is \"smal\", but must be one of `small`, `large`; did",
            ),
            ("name = 'x'\npart = [{size=1}]", "`part.0.kind` (which may be \"small\" or \"large\")"),
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
            ("name = 'x'\ntable = {a = 'b'}", "`table.a` is the text \"b\""),
            ("name = 2024-01-01", "`name` is the time 2024-01-01"),
        ];
        for (text, want) in cases {
            let error = parse(text).unwrap_err();
            assert!(error.contains(want), "{text}\n  gave: {error}\n  want: {want}");
        }
    }
}
