//! Requests for moves: the permitted choices, their JSON schema, and the check of a move.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Request for a move of one seat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MoveRequest {
    /// Index of the seat that acts.
    pub seat: usize,
    /// Kind of decision, such as `vote`. Metrics are grouped by this kind.
    pub kind: String,
    /// Text that requests the move from the player. Only this seat sees the text.
    pub prompt: String,
    /// Whether the move contains a public statement. The rules determine which seats observe the
    /// statement.
    #[serde(default)]
    pub has_speech: bool,
    /// Choices that the rules permit for the move.
    #[serde(default)]
    pub choice: Choice,
    /// Default move, which is played if the seat makes no legal move.
    #[serde(default)]
    pub default: Move,
}

/// Choices that the rules permit for a move.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// The move has no choice and consists only of a statement.
    #[default]
    None,
    /// The choice must be one of these values.
    OneOf(Vec<Value>),
    /// The choice must conform to this JSON schema.
    Schema(Value),
}

/// Move of one seat.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Move {
    /// Public statement of the move. Empty if the move has no statement.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub say: String,
    /// Choice of the move. Null if the request permits no choice.
    #[serde(default, rename = "move", skip_serializing_if = "Value::is_null")]
    pub choice: Value,
}

impl Move {
    /// Creates a move without a statement.
    pub fn choice(choice: Value) -> Self {
        Move { choice, ..Move::default() }
    }

    /// Creates a move that consists only of a statement.
    pub fn say(text: impl Into<String>) -> Self {
        Move { say: text.into(), ..Move::default() }
    }
}

impl MoveRequest {
    /// Creates a request for a move without a statement. The prompt and the default move are empty.
    pub fn new(seat: usize, kind: &str, choice: Choice) -> Self {
        let (kind, prompt) = (kind.to_owned(), String::new());
        MoveRequest { seat, kind, prompt, has_speech: false, choice, default: Move::default() }
    }

    /// Returns this request, changed so that the move contains a public statement.
    pub fn with_speech(mut self) -> Self {
        self.has_speech = true;
        self
    }

    /// Returns the JSON schema of a completion that answers this request: private `reasoning`,
    /// `say` if the move has a statement, and `move` if the move has a choice.
    pub fn schema(&self) -> Value {
        let mut properties = json!({"reasoning": {"type": "string"}});
        let mut required = Vec::new();
        if self.has_speech {
            properties["say"] = json!({"type": "string"});
            required.push("say");
        }
        let choice = match &self.choice {
            Choice::None => None,
            Choice::OneOf(values) => Some(json!({"enum": values})),
            Choice::Schema(schema) => Some(schema.clone()),
        };
        if let Some(choice) = choice {
            properties["move"] = choice;
            required.push("move");
        }
        json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        })
    }

    /// Checks that a move is legal: the request permits its choice. If the request permits no
    /// choice, the move must have the requested statement.
    ///
    /// # Errors
    /// Returns the reason, as a message for the player, if the move is illegal.
    pub fn check(&self, played: &Move) -> Result<(), String> {
        if self.has_speech && played.say.trim().is_empty() && self.choice == Choice::None {
            return Err("\"say\" must be a text that is not empty".to_owned());
        }
        match &self.choice {
            Choice::None if played.choice.is_null() => Ok(()),
            Choice::None => Err("this turn has no \"move\"".to_owned()),
            Choice::OneOf(values) if values.contains(&played.choice) => Ok(()),
            Choice::OneOf(values) => {
                let values: Vec<String> = values.iter().map(Value::to_string).collect();
                let values = values.join(", ");
                Err(format!("\"move\" is {}, but it must be one of: {values}", played.choice))
            }
            Choice::Schema(schema) => {
                let validator = jsonschema::validator_for(schema)
                    .map_err(|error| format!("the schema of the game is invalid: {error}"))?;
                let valid = validator.validate(&played.choice);
                valid.map_err(|error| format!("\"move\" is {}: {error}", played.choice))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_accepts_only_permitted_choices() {
        let vote =
            MoveRequest::new(0, "vote", Choice::OneOf(vec![json!("Player1"), json!("none")]));
        assert_eq!(vote.check(&Move::choice(json!("none"))), Ok(()));
        let error = vote.check(&Move::choice(json!("Player9"))).unwrap_err();
        assert!(error.contains("\"Player9\"") && error.contains("\"Player1\""), "{error}");
        let text = MoveRequest::new(0, "vote", Choice::Schema(json!({"type": "string"})));
        assert_eq!(text.check(&Move::choice(json!("left"))), Ok(()));
        assert!(text.check(&Move::choice(json!(3))).is_err());
        let speech = MoveRequest::new(0, "vote", Choice::None).with_speech();
        assert_eq!(speech.check(&Move::say("hello")), Ok(()));
        assert!(speech.check(&Move::say(" ")).is_err());
        assert!(speech.check(&Move::choice(json!(1))).is_err());
    }

    #[test]
    fn schema_separates_reasoning_from_statement() {
        let schema = MoveRequest::new(0, "vote", Choice::OneOf(vec![json!(true), json!(false)]))
            .with_speech()
            .schema();
        let valid = |value: Value| jsonschema::is_valid(&schema, &value);
        assert!(valid(json!({"reasoning": "I am a wolf.", "say": "hi", "move": true})));
        assert!(!valid(json!({"say": "hi"})));
        assert!(!valid(json!({"say": "hi", "move": 3})));
        assert!(!valid(json!({"say": "hi", "move": true, "secret": 1})));
    }
}
