//! The form of errors between a client and a server of stores.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Code, Status, StoreError};

/// Names of fields and actions that errors can contain. [`StoreError`] requires static texts.
const NAMES: [&str; 14] = [
    "task",
    "outcome",
    "score",
    "reward",
    "trajectory",
    "segment",
    "plan",
    "result",
    "withdrawal",
    "read",
    "record",
    "open",
    "migrate",
    "remove",
];

/// A [`StoreError`] in its serialized form. The receiver replaces the location by its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireError {
    /// Location of the store, as the sender names it.
    pub location: String,
    kind: WireErrorKind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WireErrorKind {
    Empty,
    NotEmpty,
    ReadOnly { key: String },
    OtherRun { found: String, expected: String },
    Leased { holder: String, seconds: u64 },
    Fenced { key: String, holder: String },
    Unknown { key: String },
    Conflict { key: String, field: String },
    Ended { key: String, status: Status },
    Corrupt { key: String, what: String },
    Unstorable { key: String, what: String },
    Open { code: Code, text: String },
    Failed { action: String, key: String, code: Code, text: String },
}

impl From<&StoreError> for WireError {
    fn from(error: &StoreError) -> Self {
        let code = error.code();
        let (location, kind) = match error {
            StoreError::Empty { location } => (location, WireErrorKind::Empty),
            StoreError::NotEmpty { location } => (location, WireErrorKind::NotEmpty),
            StoreError::ReadOnly { location, key } => {
                (location, WireErrorKind::ReadOnly { key: key.clone() })
            }
            StoreError::OtherRun { location, found, expected } => (
                location,
                WireErrorKind::OtherRun { found: found.clone(), expected: expected.clone() },
            ),
            StoreError::Leased { location, holder, seconds } => {
                (location, WireErrorKind::Leased { holder: holder.clone(), seconds: *seconds })
            }
            StoreError::Fenced { location, key, holder } => {
                (location, WireErrorKind::Fenced { key: key.clone(), holder: holder.clone() })
            }
            StoreError::Unknown { location, key } => {
                (location, WireErrorKind::Unknown { key: key.clone() })
            }
            StoreError::Conflict { location, key, field } => {
                (location, WireErrorKind::Conflict { key: key.clone(), field: (*field).to_owned() })
            }
            StoreError::Ended { location, key, status } => {
                (location, WireErrorKind::Ended { key: key.clone(), status: *status })
            }
            StoreError::Corrupt { location, key, what } => {
                (location, WireErrorKind::Corrupt { key: key.clone(), what: what.clone() })
            }
            StoreError::Unstorable { location, key, what } => {
                (location, WireErrorKind::Unstorable { key: key.clone(), what: what.clone() })
            }
            StoreError::Failed { location, action, key, source, .. } => {
                let text = source.to_string();
                (
                    location,
                    WireErrorKind::Failed {
                        action: (*action).to_owned(),
                        key: key.clone(),
                        code,
                        text,
                    },
                )
            }
            StoreError::Deadline { location, action, key, waited } => {
                let text = format!("waited {waited:?} for the disk");
                (
                    location,
                    WireErrorKind::Failed {
                        action: (*action).to_owned(),
                        key: key.clone(),
                        code,
                        text,
                    },
                )
            }
            StoreError::Stopped { location, action, key } => {
                let text = "the thread of the store has exited".to_owned();
                (
                    location,
                    WireErrorKind::Failed {
                        action: (*action).to_owned(),
                        key: key.clone(),
                        code,
                        text,
                    },
                )
            }
            StoreError::Open { location, source, .. } => {
                (location, WireErrorKind::Open { code, text: source.to_string() })
            }
            StoreError::Unwritable { location, .. }
            | StoreError::Foreign { location, .. }
            | StoreError::Version { location, .. } => {
                (location, WireErrorKind::Open { code, text: error.to_string() })
            }
            StoreError::NotDurable { run_dir } => {
                let kind = WireErrorKind::Open { code, text: error.to_string() };
                return WireError { location: run_dir.display().to_string(), kind };
            }
        };
        WireError { location: location.clone(), kind }
    }
}

impl From<WireError> for StoreError {
    fn from(WireError { location, kind }: WireError) -> Self {
        match kind {
            WireErrorKind::Empty => StoreError::Empty { location },
            WireErrorKind::NotEmpty => StoreError::NotEmpty { location },
            WireErrorKind::ReadOnly { key } => StoreError::ReadOnly { location, key },
            WireErrorKind::OtherRun { found, expected } => {
                StoreError::OtherRun { location, found, expected }
            }
            WireErrorKind::Leased { holder, seconds } => {
                StoreError::Leased { location, holder, seconds }
            }
            WireErrorKind::Fenced { key, holder } => StoreError::Fenced { location, key, holder },
            WireErrorKind::Unknown { key } => StoreError::Unknown { location, key },
            WireErrorKind::Conflict { key, field } => {
                StoreError::Conflict { location, key, field: to_static(&field) }
            }
            WireErrorKind::Ended { key, status } => StoreError::Ended { location, key, status },
            WireErrorKind::Corrupt { key, what } => StoreError::Corrupt { location, key, what },
            WireErrorKind::Unstorable { key, what } => {
                StoreError::Unstorable { location, key, what }
            }
            WireErrorKind::Open { code, text } => {
                StoreError::Open { location, code, source: text.into() }
            }
            WireErrorKind::Failed { action, key, code, text } => {
                let action = to_static(&action);
                StoreError::Failed { location, action, key, code, source: text.into() }
            }
        }
    }
}

/// Returns the static text that equals `name`. Returns `value` for a name that only a later build
/// knows.
fn to_static(name: &str) -> &'static str {
    NAMES.into_iter().find(|known| *known == name).unwrap_or("value")
}

impl Serialize for StoreError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        WireError::from(self).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for StoreError {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(WireError::deserialize(deserializer)?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_errors_keep_type_code_and_text_when_sent() {
        let location = || "the store".to_owned();
        let key = || "attempt 1".to_owned();
        let failed = StoreError::Failed {
            location: location(),
            action: "record",
            key: key(),
            code: Code::Full,
            source: "disk full".into(),
        };
        let all = [
            failed,
            StoreError::NotEmpty { location: location() },
            StoreError::ReadOnly { location: location(), key: key() },
            StoreError::OtherRun { location: location(), found: "a".into(), expected: "b".into() },
            StoreError::Leased { location: location(), holder: "h".into(), seconds: 60 },
            StoreError::Fenced { location: location(), key: key(), holder: "h".into() },
            StoreError::Unknown { location: location(), key: key() },
            StoreError::Conflict { location: location(), key: key(), field: "score" },
            StoreError::Ended { location: location(), key: key(), status: Status::Abandoned },
            StoreError::Corrupt { location: location(), key: key(), what: "w".into() },
            StoreError::Unstorable { location: location(), key: key(), what: "w".into() },
            StoreError::Open { location: location(), code: Code::NotFound, source: "none".into() },
        ];
        for error in all {
            let text = serde_json::to_string(&error).unwrap();
            let read: StoreError = serde_json::from_str(&text).unwrap();
            assert_eq!(format!("{read:?}"), format!("{error:?}"));
            assert_eq!((read.code(), read.to_string()), (error.code(), error.to_string()));
        }
    }
}
