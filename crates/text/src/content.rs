//! Message content: a text or a list of parts, as in OpenAI's API.

use std::fmt;
use std::ops::Deref;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

/// One part of a message's content: text or another type, such as an image.
#[derive(Debug, Clone, PartialEq)]
pub enum ContentPart {
    /// A text part, whose text may be empty.
    Text(String),
    /// A part of another type (an image, audio, a file), stored unchanged. It always has a `type`.
    Other(Map<String, Value>),
}

impl ContentPart {
    /// Returns the name of the part's type in OpenAI's format, such as `text`.
    pub fn kind(&self) -> &str {
        match self {
            ContentPart::Text(_) => "text",
            ContentPart::Other(fields) => {
                fields.get("type").and_then(Value::as_str).unwrap_or_default()
            }
        }
    }
}

impl Serialize for ContentPart {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            ContentPart::Text(text) => {
                json!({ "type": "text", "text": text }).serialize(serializer)
            }
            ContentPart::Other(fields) => fields.serialize(serializer),
        }
    }
}

impl TryFrom<Value> for ContentPart {
    type Error = String;

    /// Parses a content part in OpenAI's format. Text parts of the Responses API, refusals and bare
    /// strings become text. Additional fields of a text part are ignored.
    fn try_from(value: Value) -> Result<Self, String> {
        let mut fields = match value {
            Value::String(text) => return Ok(ContentPart::Text(text)),
            Value::Object(fields) => fields,
            other => {
                return Err(format!("a part of the content is {other}, but must be an object"));
            }
        };
        let Some(kind) = fields.get("type").and_then(Value::as_str) else {
            return Err("a part of the content has no \"type\"".into());
        };
        let key = match kind {
            "text" | "input_text" | "output_text" => "text",
            "refusal" => "refusal",
            _ => return Ok(ContentPart::Other(fields)),
        };
        match fields.remove(key) {
            Some(Value::String(text)) => Ok(ContentPart::Text(text)),
            _ => Err(format!(
                "a part of type {:?} has no {key:?}",
                fields["type"].as_str().unwrap_or(key)
            )),
        }
    }
}

/// Content of a message: a text or a list of parts.
///
/// It dereferences to its text, which is the concatenation of all text parts without separators.
/// The text therefore does not depend on how it is split into parts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Content {
    text: String,
    /// The content's parts, or `None` if the content was sent as a plain string.
    parts: Option<Vec<ContentPart>>,
}

impl Content {
    /// Returns the content's text, without parts of other types.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the content's parts, or `None` if the content was not sent as a list of parts.
    pub fn parts(&self) -> Option<&[ContentPart]> {
        self.parts.as_deref()
    }

    /// Returns the content's parts that are not text.
    pub fn non_text_parts(&self) -> impl Iterator<Item = &ContentPart> {
        self.parts.iter().flatten().filter(|part| matches!(part, ContentPart::Other(_)))
    }

    /// Returns whether the content has neither text nor a part of another type.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.non_text_parts().next().is_none()
    }
}

impl Deref for Content {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl<T: Into<String>> From<T> for Content {
    fn from(text: T) -> Self {
        Content { text: text.into(), parts: None }
    }
}

impl FromIterator<ContentPart> for Content {
    fn from_iter<I: IntoIterator<Item = ContentPart>>(parts: I) -> Self {
        let parts: Vec<ContentPart> = parts.into_iter().collect();
        let texts = parts.iter().filter_map(|part| match part {
            ContentPart::Text(text) => Some(text.as_str()),
            ContentPart::Other(_) => None,
        });
        Content { text: texts.collect(), parts: Some(parts) }
    }
}

impl PartialEq<str> for Content {
    fn eq(&self, text: &str) -> bool {
        self.parts.is_none() && self.text == text
    }
}

impl PartialEq<&str> for Content {
    fn eq(&self, text: &&str) -> bool {
        *self == **text
    }
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.parts {
            Some(parts) => parts.serialize(serializer),
            None => self.text.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let error = serde::de::Error::custom;
        match Value::deserialize(deserializer)? {
            Value::Null => Ok(Content::default()),
            Value::String(text) => Ok(text.into()),
            Value::Array(parts) => {
                parts.into_iter().map(|part| ContentPart::try_from(part).map_err(error)).collect()
            }
            other => Err(error(format!(
                "the content is {other}, but must be a string or a list of parts"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_round_trips_openai_formats() {
        let image = r#"{"type":"image_url","image_url":{"url":"data:,"},"text":"alt"}"#;
        for (sent, text, written) in [
            (r#""Hi""#, "Hi", r#""Hi""#),
            ("null", "", r#""""#),
            ("[]", "", "[]"),
            (
                r#"[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "b"]"#,
                "ab",
                r#"[{"type":"text","text":"a"},{"type":"text","text":"b"}]"#,
            ),
            (
                r#"[{"type": "refusal", "refusal": "No."}]"#,
                "No.",
                r#"[{"type":"text","text":"No."}]"#,
            ),
            (r#"[{"type": "output_text", "text": "a"}]"#, "a", r#"[{"type":"text","text":"a"}]"#),
        ] {
            let content: Content = serde_json::from_str(sent).unwrap();
            assert_eq!(
                (content.as_str(), &serde_json::to_string(&content).unwrap()[..]),
                (text, written)
            );
            assert_eq!(content.is_empty(), text.is_empty());
        }
        let mixed: Content = serde_json::from_str(&format!(r#"["a",{image}]"#)).unwrap();
        assert_eq!(
            mixed.non_text_parts().map(ContentPart::kind).collect::<Vec<_>>(),
            ["image_url"]
        );
        assert_eq!((mixed.as_str(), mixed.is_empty()), ("a", false));
        let again: Content = serde_json::from_str(&serde_json::to_string(&mixed).unwrap()).unwrap();
        assert_eq!(again, mixed);
        assert_eq!(Content::from("a"), "a");
        assert_ne!(mixed, "a");
        for (sent, why) in [
            ("7", "the content is 7, but must be a string or a list"),
            (r#"{"type": "text", "text": "a"}"#, "must be a string or a list"),
            ("[7]", "is 7, but must be an object"),
            (r#"[{"text": "a"}]"#, "has no \"type\""),
            (r#"[{"type": "text", "text": null}]"#, "has no \"text\""),
            (r#"[{"type": "refusal"}]"#, "has no \"refusal\""),
        ] {
            let error = serde_json::from_str::<Content>(sent).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
