//! Reads the options and saved positions of games.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::GameError;

/// Reads the options of a game. Null stands for no options.
///
/// # Errors
/// Returns [`GameError::Options`] if an option is unknown or has the wrong type.
pub fn read_options<T: DeserializeOwned>(game: &str, options: &Value) -> Result<T, GameError> {
    let options = if options.is_null() { Value::Object(Map::new()) } else { options.clone() };
    serde_json::from_value(options)
        .map_err(|error| GameError::Options { game: game.to_owned(), message: error.to_string() })
}

/// Reads a saved position of a game.
///
/// # Errors
/// Returns [`GameError::Position`] if the position is not one of the game.
pub(crate) fn read_position<T: DeserializeOwned>(
    game: &str,
    position: &Value,
) -> Result<T, GameError> {
    serde_json::from_value(position.clone())
        .map_err(|error| GameError::Position { game: game.to_owned(), message: error.to_string() })
}
