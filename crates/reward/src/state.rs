//! Scores an attempt by the state in which it left its tools.
//!
//! A toolbox returns its final state as JSON, for example the database that its tools change, and
//! may return the state that the task expects. The two must be equal. A state that is missing on
//! either side cannot be compared, so the attempt is unscored.

use async_trait::async_trait;
use levade_tree::Component;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::decimal::Decimal;
use crate::scorer::task_field;
use crate::{ScoreError, Scorer, ScorerInput, json};

/// Scorer that gives 1 if the final state of a toolbox equals the expected state, else 0. Members
/// of objects can have any order. Numbers are compared by their exact values.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StateScorer {
    /// Name of the toolbox whose state is compared. Empty for all toolboxes that have a state.
    pub tool: String,
    /// Field of a task or of its row that contains the expected state, as JSON or as JSON text.
    /// Empty if the expected state is the one that the toolbox returns.
    pub field: String,
}

/// State of a toolbox at the end of an attempt, and the expected state that the toolbox returned.
struct ReportedState<'a> {
    /// Name of the toolbox, or of a class in the toolbox.
    name: String,
    facts: &'a Map<String, Value>,
}

#[async_trait]
impl Scorer for StateScorer {
    fn needs_reported_score(&self, _task: &Value) -> bool {
        true
    }

    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        if self.field.is_empty() { Ok(()) } else { self.expected_state_in_row(task).map(drop) }
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let states = self.reported_states(input.toolbox_data());
        if states.is_empty() {
            let problem = match self.tool.as_str() {
                "" => "no toolbox returned a state".to_owned(),
                name => format!("toolbox {name} returned no state"),
            };
            return Err(ScoreError::Unusable(format!(
                "{problem}: give the class of the tools a method `final_state`"
            )));
        }
        if !self.field.is_empty() && states.len() > 1 {
            let names: Vec<String> = states.into_iter().map(|state| state.name).collect();
            return Err(ScoreError::Unusable(format!(
                "the field `{}` has one expected state, but the toolboxes {} have states; set \
                 `tool`",
                self.field,
                names.join(", ")
            )));
        }
        let mut difference = None;
        for ReportedState { name, facts } in &states {
            let expected = if self.field.is_empty() {
                expected_state_of_tool(name, facts)?.clone()
            } else {
                self.expected_state_in_row(&input.task)?
            };
            difference = difference.or_else(|| first_difference(name, &facts[STATE], &expected));
        }
        let value = f64::from(u8::from(difference.is_none()));
        Ok(vec![Component { extracted: difference, ..Component::score(value) }])
    }
}

/// Key under which a toolbox's data contains its final state.
const STATE: &str = "state";

impl StateScorer {
    /// Returns the states in the data of an attempt's toolboxes: of each toolbox, and of each class
    /// in a toolbox.
    fn reported_states<'a>(&self, data: &'a Map<String, Value>) -> Vec<ReportedState<'a>> {
        let is_chosen = |name: &&String| self.tool.is_empty() || **name == self.tool;
        let toolboxes = data.iter().filter(|(name, _)| is_chosen(name));
        let mut states = Vec::new();
        for (name, facts) in toolboxes {
            let Some(facts) = facts.as_object() else { continue };
            if facts.contains_key(STATE) {
                states.push(ReportedState { name: name.clone(), facts });
                continue;
            }
            let classes =
                facts.iter().filter_map(|(class, facts)| Some((class, facts.as_object()?)));
            let with_state = classes.filter(|(_, facts)| facts.contains_key(STATE));
            states.extend(with_state.map(|(class, facts)| {
                let name = format!("{name}.{class}");
                ReportedState { name, facts }
            }));
        }
        states
    }

    /// Returns the expected state that the row of a task contains.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unusable`] if the row lacks the field, or if its text is not JSON.
    fn expected_state_in_row(&self, task: &Value) -> Result<Value, ScoreError> {
        let field = &self.field;
        match task_field(task, field) {
            None => Err(ScoreError::Unusable(format!(
                "the task has no field `{field}`, which must contain the expected state"
            ))),
            Some(Value::String(text)) => json::parse(text).map_err(|error| {
                ScoreError::Unusable(format!(
                    "the field `{field}` contains text that is not JSON: {error}"
                ))
            }),
            Some(state) => Ok(state.clone()),
        }
    }
}

/// Returns the expected state that the toolbox `name` has returned in its data `facts`.
///
/// # Errors
/// Returns [`ScoreError::Unusable`] if the toolbox has no expected state, or could not reach it.
fn expected_state_of_tool<'a>(
    name: &str,
    facts: &'a Map<String, Value>,
) -> Result<&'a Value, ScoreError> {
    if let Some(why) = facts.get("expected_error").and_then(Value::as_str) {
        return Err(ScoreError::Unusable(format!(
            "toolbox {name} could not reach its expected state: {why}"
        )));
    }
    facts.get("expected_state").ok_or_else(|| {
        ScoreError::Unusable(format!(
            "toolbox {name} has no expected state: give the rows `expected_actions`, or set \
             `field`"
        ))
    })
}

/// Maximum length of a value in the description of a difference, in characters.
const MAX_SHOWN: usize = 80;

/// Describes the first difference between two states, or returns `None` if the states are equal.
/// `path` names the compared value.
fn first_difference(path: &str, found: &Value, expected: &Value) -> Option<String> {
    match (found, expected) {
        (Value::Object(found), Value::Object(expected)) => {
            let missing = expected.keys().find(|key| !found.contains_key(*key));
            if let Some(key) = missing {
                return Some(format!("{path}.{key} is missing"));
            }
            found.iter().find_map(|(key, value)| match expected.get(key) {
                None => Some(format!("{path}.{key} is not expected")),
                Some(expected) => first_difference(&format!("{path}.{key}"), value, expected),
            })
        }
        (Value::Array(found), Value::Array(expected)) if found.len() == expected.len() => {
            let items = found.iter().zip(expected).enumerate();
            items.into_iter().find_map(|(index, (found, expected))| {
                first_difference(&format!("{path}.{index}"), found, expected)
            })
        }
        (found, expected) if are_equal_values(found, expected) => None,
        (found, expected) => {
            Some(format!("{path} is {}, expected {}", excerpt(found), excerpt(expected)))
        }
    }
}

/// Returns whether two JSON values that have no members are equal.
fn are_equal_values(found: &Value, expected: &Value) -> bool {
    match (found, expected) {
        (Value::Number(found), Value::Number(expected)) => {
            let decimals = [found, expected].map(|number| Decimal::parse(&number.to_string()));
            match decimals {
                [Some(found), Some(expected)] => found.equals_as_number(&expected),
                _ => found == expected,
            }
        }
        (found, expected) => found == expected,
    }
}

fn excerpt(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(MAX_SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::scorer_input;

    async fn score(
        scorer: &StateScorer,
        data: Value,
        task: Value,
    ) -> Result<Component, ScoreError> {
        let mut input = scorer_input("", task);
        input.outcome.scorer_inputs = data.as_object().unwrap().clone();
        scorer.score(&input).await.map(|mut components| components.remove(0))
    }

    async fn score_of_tool(state: Value, expected: Value) -> Component {
        let data = json!({ "desk": { "Desk": { "state": state, "expected_state": expected } } });
        score(&StateScorer::default(), data, json!({})).await.unwrap()
    }

    #[tokio::test]
    async fn equal_states_score_one_and_differences_are_named() {
        let order =
            json!({ "orders": { "7": { "status": "open", "items": [1, 2.5] } }, "log": [] });
        let same: Value = serde_json::from_str(
            r#"{"log": [], "orders": {"7": {"items": [1.0, 2.50], "status": "open"}}}"#,
        )
        .unwrap();
        let equal = score_of_tool(order.clone(), same).await;
        assert_eq!((equal.value, equal.extracted), (1.0, None));
        let large = |digits: &str| serde_json::from_str::<Value>(digits).unwrap();
        for (found, expected, why) in [
            (json!({ "a": 1 }), json!({ "a": 2 }), "desk.Desk.a is 1, expected 2"),
            (json!({ "a": 1 }), json!({ "a": "1" }), "desk.Desk.a is 1, expected \"1\""),
            (json!({ "a": 1 }), json!({ "a": true }), "desk.Desk.a is 1, expected true"),
            (json!({}), json!({ "a": null }), "desk.Desk.a is missing"),
            (json!({ "a": null }), json!({}), "desk.Desk.a is not expected"),
            (json!([[1, 2]]), json!([[2, 1]]), "desk.Desk.0.0 is 1, expected 2"),
            (json!([1]), json!([1, 1]), "desk.Desk is [1], expected [1,1]"),
            (
                large("9007199254740993"),
                large("9007199254740992"),
                "desk.Desk is 9007199254740993, expected 9007199254740992",
            ),
        ] {
            let different = score_of_tool(found, expected).await;
            assert_eq!((different.value, different.extracted.as_deref()), (0.0, Some(why)));
        }
    }

    #[tokio::test]
    async fn all_toolboxes_must_match_unless_one_is_chosen() {
        let data = json!({
            "shop": { "state": 1, "expected_state": 1 },
            "bank": { "state": 2, "expected_state": 3 },
            "search": { "queries": 4 },
        });
        let all = score(&StateScorer::default(), data.clone(), json!({})).await.unwrap();
        assert_eq!((all.value, all.extracted.as_deref()), (0.0, Some("bank is 2, expected 3")));
        let shop = StateScorer { tool: "shop".into(), ..StateScorer::default() };
        assert_eq!(score(&shop, data, json!({})).await.unwrap().value, 1.0);
    }

    #[tokio::test]
    async fn row_field_holds_expected_state() {
        let scorer = StateScorer { field: "after".into(), ..StateScorer::default() };
        let data = json!({ "desk": { "state": { "a": [1] } } });
        for (after, value) in [(json!({ "a": [1] }), 1.0), (json!("{\"a\": [2]}"), 0.0)] {
            let task = json!({ "row": { "after": after } });
            scorer.check_task(&task).unwrap();
            assert_eq!(score(&scorer, data.clone(), task).await.unwrap().value, value);
        }
        let missing = scorer.check_task(&json!({ "row": {} })).unwrap_err().to_string();
        assert!(missing.contains("no field `after`"), "{missing}");
        let wrong = scorer.check_task(&json!({ "row": { "after": "{" } })).unwrap_err();
        assert!(wrong.to_string().contains("not JSON"), "{wrong}");
    }

    #[tokio::test]
    async fn undecidable_state_is_an_error() {
        let own = StateScorer::default();
        let chosen = StateScorer { tool: "desk".into(), ..StateScorer::default() };
        let in_row = StateScorer { field: "after".into(), ..StateScorer::default() };
        for (scorer, data, why) in [
            (&own, json!({}), "no toolbox returned a state"),
            (&chosen, json!({ "other": { "state": 1 } }), "toolbox desk returned no state"),
            (&own, json!({ "desk": { "state": 1 } }), "no expected state"),
            (
                &own,
                json!({ "desk": { "state": 1, "expected_error": "no order 7" } }),
                "could not reach its expected state: no order 7",
            ),
            (&in_row, json!({ "a": { "state": 1 }, "b": { "state": 1 } }), "set `tool`"),
        ] {
            let task = json!({ "row": { "after": 1 } });
            let error = score(scorer, data, task).await.unwrap_err();
            assert!(error.to_string().contains(why) && !error.is_temporary(), "{error}");
        }
    }
}
