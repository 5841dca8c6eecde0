//! Parses completions of players, and describes the expected format.

use levade_game::{Choice, Move, MoveRequest};
use serde_json::Value;

/// Parses the move that a completion contains.
///
/// # Errors
/// Returns the reason, as a text for the player, if the completion contains no legal move.
pub(super) fn parse_move(request: &MoveRequest, completion: &str) -> Result<Move, String> {
    let object = find_object(completion)?;
    let say = match object.get("say") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(say)) => say.clone(),
        Some(other) => return Err(format!("\"say\" is {other}, but it must be a text")),
    };
    // A statement that the turn does not have reaches no other seat.
    let say = if request.has_speech { say } else { String::new() };
    let played = Move { say, choice: object.get("move").cloned().unwrap_or_default() };
    request.check(&played).map(|()| played)
}

/// Finds the JSON object in a completion. A code fence or prose may surround the object.
fn find_object(completion: &str) -> Result<Value, String> {
    let start = completion.find('{').ok_or("the reply has no JSON object")?;
    let end = completion.rfind('}').filter(|end| *end > start);
    let text = end.map_or(&completion[start..], |end| &completion[start..=end]);
    let parsed: Value = serde_json::from_str(text)
        .map_err(|error| format!("the reply has no complete JSON object: {error}"))?;
    Ok(parsed)
}

/// Returns the shortest completion that makes the move `choice`.
pub(super) fn write_move(choice: &Value) -> String {
    format!("{{\"move\": {choice}}}")
}

/// Returns the JSON schema of the completions that answer a request for a move.
pub(super) fn move_schema(request: &MoveRequest, has_reasoning: bool) -> Value {
    let mut schema = request.schema();
    if let Some(properties) = schema["properties"].as_object_mut().filter(|_| !has_reasoning) {
        properties.remove("reasoning");
    }
    schema
}

/// Describes the expected format of a completion, as a text for the player.
pub(super) fn describe_format(request: &MoveRequest, has_reasoning: bool) -> String {
    let mut fields = Vec::new();
    if has_reasoning {
        fields.push("\"reasoning\": \"private thoughts\"".to_owned());
    }
    if request.has_speech {
        fields.push("\"say\": \"what you say\"".to_owned());
    }
    match &request.choice {
        Choice::None => {}
        Choice::OneOf(values) => {
            let values: Vec<String> = values.iter().map(Value::to_string).collect();
            fields.push(format!("\"move\": {}", values.join(" | ")));
        }
        Choice::Schema(schema) => fields.push(format!("\"move\": a value of the schema {schema}")),
    }
    format!("{{{}}}", fields.join(", "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parse_finds_object_in_fences_and_prose() {
        let vote = MoveRequest::new(0, "vote", Choice::OneOf(vec![json!("A"), json!("B")]));
        let legal = Ok(Move::choice(json!("A")));
        for completion in [
            r#"{"move": "A"}"#,
            "```json\n{\"reasoning\": \"}{\", \"move\": \"A\"}\n```",
            r#"I vote: {"say": "loud", "move": "A"}."#,
        ] {
            assert_eq!(parse_move(&vote, completion), legal, "{completion}");
        }
    }

    #[test]
    fn parse_reports_reason_of_rejection() {
        let vote = MoveRequest::new(0, "vote", Choice::OneOf(vec![json!("A"), json!("B")]));
        for (completion, why) in [
            ("I vote for A", "no JSON object"),
            (r#"{"move": "A""#, "no complete JSON object"),
            (r#"{"move": "C"}"#, "one of: \"A\", \"B\""),
            (r#"{"vote": "A"}"#, "\"move\" is null"),
            (r#"{"say": 3, "move": "A"}"#, "must be a text"),
        ] {
            let error = parse_move(&vote, completion).unwrap_err();
            assert!(error.contains(why), "{completion}: {error}");
        }
        let speech = MoveRequest::new(0, "vote", Choice::None).with_speech();
        assert_eq!(parse_move(&speech, r#"{"say": "hi"}"#), Ok(Move::say("hi")));
        assert!(parse_move(&speech, r#"{"reasoning": "secret"}"#).is_err());
    }

    #[test]
    fn format_lists_fields_of_request() {
        let both = MoveRequest::new(0, "vote", Choice::OneOf(vec![json!(true), json!(false)]))
            .with_speech();
        let format = describe_format(&both, true);
        assert!(
            format.contains("\"say\"") && format.contains("\"move\": true | false"),
            "{format}"
        );
        assert!(
            !describe_format(&MoveRequest::new(0, "vote", Choice::None).with_speech(), true)
                .contains("\"move\"")
        );
    }

    #[test]
    fn format_without_reasoning_has_only_move() {
        let card = MoveRequest::new(0, "vote", Choice::OneOf(vec![json!("bet"), json!(4)]));
        assert_eq!(describe_format(&card, false), "{\"move\": \"bet\" | 4}");
        let allows = |has_reasoning: bool| {
            let schema = move_schema(&card, has_reasoning);
            schema["properties"].as_object().unwrap().contains_key("reasoning")
        };
        assert!(allows(true) && !allows(false));
    }

    #[test]
    fn write_move_round_trips_through_parse_move() {
        let card = MoveRequest::new(0, "vote", Choice::OneOf(vec![json!("bet"), json!(4)]));
        for choice in [json!("bet"), json!(4)] {
            assert_eq!(parse_move(&card, &write_move(&choice)), Ok(Move::choice(choice)));
        }
    }
}
