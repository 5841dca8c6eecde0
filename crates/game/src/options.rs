//! Reads the options and saved positions of games.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::GameError;

/// Parses the options of a game. Null means that no option is set.
///
/// # Errors
/// Returns [`GameError::Options`] if the options are not a JSON object, if an option is unknown, or
/// if an option has the wrong type.
pub fn read_options<T: DeserializeOwned>(game: &str, options: &Value) -> Result<T, GameError> {
    let invalid = |message: String| GameError::Options { game: game.to_owned(), message };
    let options = match options {
        Value::Null => Value::Object(Map::new()),
        Value::Object(_) => options.clone(),
        // serde would accept a list, and assign its items to the options in the order of their
        // declaration.
        other => {
            return Err(invalid(format!(
                "the options are {other}, but must be an object such as {{\"name\": value}}"
            )));
        }
    };
    serde_json::from_value(options.clone()).map_err(|error| {
        // Each option has a default, so the options can be checked one at a time.
        let is_wrong = |(name, value): &(&String, &Value)| {
            let single = Map::from_iter([((*name).clone(), (*value).clone())]);
            serde_json::from_value::<T>(Value::Object(single)).is_err()
        };
        let wrong = options.as_object().and_then(|options| options.iter().find(is_wrong));
        let name = wrong.map(|(name, value)| format!("`{name}` is {value}: ")).unwrap_or_default();
        invalid(format!("{name}{error}"))
    })
}

/// Parses a saved position of a game.
///
/// # Errors
/// Returns [`GameError::Position`] if the position does not belong to the game.
pub(crate) fn read_position<T: DeserializeOwned>(
    game: &str,
    position: &Value,
) -> Result<T, GameError> {
    serde_json::from_value(position.clone())
        .map_err(|error| GameError::Position { game: game.to_owned(), message: error.to_string() })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Debug, PartialEq, serde::Deserialize)]
    #[serde(default, deny_unknown_fields)]
    struct Options {
        seats: u32,
    }

    impl Default for Options {
        fn default() -> Self {
            Options { seats: 2 }
        }
    }

    #[test]
    fn read_options_accepts_only_objects_and_null() {
        let read = |options| read_options::<Options>("g", &options);
        assert_eq!(read(Value::Null).unwrap(), Options { seats: 2 });
        assert_eq!(read(json!({ "seats": 3 })).unwrap(), Options { seats: 3 });
        let error = read(json!({ "seats": -1 })).unwrap_err().to_string();
        assert!(error.starts_with("options of the game g: `seats` is -1: "), "{error}");
        let error = read(json!({ "seats": 3, "sets": 2 })).unwrap_err().to_string();
        assert!(error.contains("`sets` is 2: unknown field `sets`"), "{error}");
        for wrong in [json!([]), json!([3]), json!(3), json!("seats")] {
            let error = read(wrong.clone()).unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong}, but must be an object")), "{error}");
        }
    }
}
