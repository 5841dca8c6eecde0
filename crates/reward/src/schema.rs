//! Scores answers that must be JSON conforming to a JSON Schema.

use std::borrow::Cow;

use async_trait::async_trait;
use jsonschema::{Keyword, ValidationError, Validator};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::answer::{answer_schema, text_in_tag};
use crate::decimal::Decimal;
use crate::scorer::{answer_components, task_field};
use crate::{Component, Score, ScoreError, Scorer, ScorerInput, blocks, json};

/// Scorer that gives 1 if the JSON in an answer conforms to a schema, else 0.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SchemaScorer {
    /// JSON schema for all tasks that have no schema of their own. `$ref` may refer only to parts
    /// of the schema itself: nothing is fetched.
    pub schema: Option<Map<String, Value>>,
    /// Field of a task or of its row that contains the task's own JSON schema, as an object or as
    /// JSON text. `None` if tasks have no schemas of their own.
    pub field: Option<String>,
}

#[async_trait]
impl Scorer for SchemaScorer {
    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        self.compile_task_schema(task).map(drop)
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        answer_components(input, self.grade(input.text(), &input.task))
    }
}

impl SchemaScorer {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        match (&self.schema, &self.field) {
            (None, None) => Err(ScoreError::Unusable(
                "no schema is set: set `schema`, or `field` to the field of a task that contains \
                 the schema"
                    .into(),
            )),
            (Some(schema), _) => compile_schema(&Value::Object(schema.clone())).map(drop),
            _ => Ok(()),
        }
    }

    /// Compiles the JSON schema of a task: the task's own schema, or else the scorer's schema.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unusable`] if the task has no schema, or if the schema is invalid.
    fn compile_task_schema(&self, task: &Value) -> Result<Validator, ScoreError> {
        let own = self.field.as_deref().and_then(|field| task_field(task, field));
        match (own, &self.schema, &self.field) {
            // Tabular data sets store the schema as JSON text.
            (Some(Value::String(text)), ..) => {
                let schema = json::parse(text);
                compile_schema(&schema.map_err(|error| {
                    ScoreError::Unusable(format!("the schema is not JSON: {error}"))
                })?)
            }
            (Some(own), ..) => compile_schema(own),
            (None, Some(schema), _) => compile_schema(&Value::Object(schema.clone())),
            (None, None, field) => {
                let field = field.as_deref().unwrap_or("schema");
                Err(ScoreError::Unusable(format!(
                    "the task has no field {field:?}, which must contain its schema"
                )))
            }
        }
    }

    /// Scores a final answer: 1 if its JSON conforms to the schema, else 0. The answer is JSON, or
    /// contains JSON in the tag that the task names or in a code block.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unusable`] if there is no schema, or if the schema is invalid.
    pub fn grade(&self, text: &str, task: &Value) -> Result<Score, ScoreError> {
        let validator = self.compile_task_schema(task)?;
        let tag = answer_schema(task)?;
        let Some((json, written)) = find_json(text, &tag) else {
            return Ok(Score { value: 0.0, extracted: None });
        };
        let value = f64::from(u8::from(validator.is_valid(&json)));
        Ok(Score { value, extracted: Some(written.trim().to_owned()) })
    }
}

fn compile_schema(schema: &Value) -> Result<Validator, ScoreError> {
    let options = KEYWORDS.into_iter().fold(jsonschema::options(), |options, keyword| {
        options.with_keyword(keyword.name(), move |parent, limit, _| {
            let limit = Some(limit).filter(|limit| limit.is_number()).map(to_decimal);
            let is_exclusive = |name: &str| parent.get(name).and_then(Value::as_bool) == Some(true);
            // In draft 4, `exclusiveMinimum` is a Boolean next to `minimum`.
            let keyword = match keyword {
                NumberKeyword::Minimum if is_exclusive("exclusiveMinimum") => {
                    NumberKeyword::ExclusiveMinimum
                }
                NumberKeyword::Maximum if is_exclusive("exclusiveMaximum") => {
                    NumberKeyword::ExclusiveMaximum
                }
                other => other,
            };
            Ok(Box::new(KeywordLimit { keyword, limit: limit.flatten() }))
        })
    });
    let made = options.build(schema);
    made.map_err(|error| ScoreError::Unusable(format!("the schema is invalid: {error}")))
}

/// JSON Schema keyword that restricts a number.
#[derive(Debug, Clone, Copy)]
enum NumberKeyword {
    Minimum,
    Maximum,
    ExclusiveMinimum,
    ExclusiveMaximum,
    MultipleOf,
}

impl NumberKeyword {
    /// Returns the name of the keyword in a schema.
    fn name(self) -> &'static str {
        match self {
            NumberKeyword::Minimum => "minimum",
            NumberKeyword::Maximum => "maximum",
            NumberKeyword::ExclusiveMinimum => "exclusiveMinimum",
            NumberKeyword::ExclusiveMaximum => "exclusiveMaximum",
            NumberKeyword::MultipleOf => "multipleOf",
        }
    }
}

/// Keywords that this module evaluates on exact decimals. The library rounds some numbers to `f64`,
/// so it finds that 598731845373330050.5 is at most 598731845373330050.
const KEYWORDS: [NumberKeyword; 5] = [
    NumberKeyword::Minimum,
    NumberKeyword::Maximum,
    NumberKeyword::ExclusiveMinimum,
    NumberKeyword::ExclusiveMaximum,
    NumberKeyword::MultipleOf,
];

/// A JSON Schema keyword that restricts a number, with its limit.
#[derive(Debug)]
struct KeywordLimit {
    keyword: NumberKeyword,
    /// Limit of the number. `None` if the schema's value is not a number; every number then
    /// conforms.
    limit: Option<Decimal>,
}

fn to_decimal(number: &Value) -> Option<Decimal> {
    Decimal::parse(number.as_number()?.as_str())
}

impl<'i> Keyword<'i> for KeywordLimit {
    fn validate(&self, instance: &'i Value) -> Result<(), ValidationError<'i>> {
        if self.is_valid(instance) {
            Ok(())
        } else {
            Err(ValidationError::custom(format!(
                "the number {instance} violates the keyword {}",
                self.keyword.name()
            )))
        }
    }

    fn is_valid(&self, instance: &'i Value) -> bool {
        let Some(limit) = self.limit.as_ref().filter(|_| instance.is_number()) else { return true };
        // A number whose exponent does not fit into 32 bits violates every limit.
        let Some(number) = to_decimal(instance) else { return false };
        match self.keyword {
            NumberKeyword::Minimum => number.compare(limit).is_ge(),
            NumberKeyword::Maximum => number.compare(limit).is_le(),
            NumberKeyword::ExclusiveMinimum => number.compare(limit).is_gt(),
            NumberKeyword::ExclusiveMaximum => number.compare(limit).is_lt(),
            NumberKeyword::MultipleOf => limit.digits.is_empty() || number.is_multiple_of(limit),
        }
    }
}

/// Returns the JSON in a text, as a parsed value and as it is written: the complete text, the text
/// in `tag`, or the last code block, whichever parses first.
fn find_json<'t>(text: &'t str, tag: &str) -> Option<(Value, Cow<'t, str>)> {
    let block = blocks::last_code_block(text, &["json", "jsonc", "json5"]);
    let candidates: [Option<Cow<str>>; 3] =
        [Some(text.into()), text_in_tag(text, tag).map(Cow::from), block];
    candidates.into_iter().flatten().find_map(|written| {
        let json = json::parse(written.trim_start_matches('\u{feff}').trim()).ok()?;
        Some((json, written))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::Dice;

    fn scorer() -> SchemaScorer {
        let schema = json!({
            "type": "object",
            "properties": { "name": { "type": "string" }, "age": { "type": "integer", "minimum": 0 } },
            "required": ["name"],
            "additionalProperties": false,
        });
        SchemaScorer { schema: schema.as_object().cloned(), field: None }
    }

    #[test]
    fn grade_validates_json_against_schema() {
        scorer().check().unwrap();
        for (text, value) in [
            (r#"{"name": "Ada", "age": 36}"#, 1.0),
            ("Here it is:\n```json\n{\"name\": \"Ada\"}\n```\nDone.", 1.0),
            ("```\n{\"name\": \"Ada\"}\n```", 1.0),
            ("```JSON\r\n{\"name\": \"Ada\"}\r\n```", 1.0),
            ("<answer>```jsonc\n{\"name\": \"Ada\"}\n```</answer>", 1.0),
            (r#"<answer>{"name": "Ada"}</answer>"#, 1.0),
            (r#"{"name": "Ada", "age": -1}"#, 0.0),
            (r#"{"age": 1}"#, 0.0),
            (r#"{"name": "Ada", "more": 1}"#, 0.0),
            (r#"{"name": "Ada""#, 0.0),
            ("", 0.0),
        ] {
            assert_eq!(scorer().grade(text, &Value::Null).unwrap().value, value, "{text}");
        }
        // The task names the tag of its answer.
        let named = json!({ "row": { "answer_schema": "result" } });
        let text = "<answer>no</answer> <result>{\"name\": \"Ada\"}</result>";
        assert_eq!(scorer().grade(text, &named).unwrap().value, 1.0);
        assert_eq!(scorer().grade(text, &Value::Null).unwrap().value, 0.0);
        // Deep nesting does not overflow the stack.
        assert_eq!(scorer().grade(&"[".repeat(100_000), &Value::Null).unwrap().value, 0.0);
    }

    #[test]
    fn grade_compares_numbers_of_any_length_exactly() {
        let own = SchemaScorer { field: Some("format".into()), schema: None };
        for (schema, text, value) in [
            (r#"{"multipleOf": 1e-08}"#, "0.00000003", 1.0),
            (r#"{"multipleOf": 1e-08}"#, "0.000000035", 0.0),
            (r#"{"minimum": 1e-06}"#, "0.000002", 1.0),
            (r#"{"minimum": 1e-06}"#, "0.0000001", 0.0),
            (r#"{"const": 1234567890123456789012345}"#, "1234567890123456789012345", 1.0),
            (r#"{"const": 1234567890123456789012345}"#, "1234567890123456789012346", 0.0),
            (r#"{"const": 1234567890123456789012345}"#, "1.234567890123456789012345e24", 1.0),
            (r#"{"enum": [1, 1234567890123456789012345]}"#, "1234567890123456789012344", 0.0),
            (r#"{"enum": [1.10]}"#, "1.1", 1.0),
            (r#"{"type": "integer"}"#, "1234567890123456789012345", 1.0),
            (r#"{"type": "integer"}"#, "3.0", 1.0),
            (r#"{"type": "integer"}"#, "1234567890123456789012345.5", 0.0),
            (r#"{"multipleOf": 1000000000000000000000003}"#, "3000000000000000000000009", 1.0),
            (r#"{"multipleOf": 1000000000000000000000003}"#, "3000000000000000000000010", 0.0),
            (r#"{"maximum": 18446744073709551616}"#, "18446744073709551617", 0.0),
            (r#"{"exclusiveMaximum": 18446744073709551616}"#, "18446744073709551615", 1.0),
            // Numbers between 2^53 and 2^64, with a fraction or written with a decimal point.
            (r#"{"minimum": 598731845373330050}"#, "598731845373330050.0", 1.0),
            (r#"{"maximum": 598731845373330050}"#, "598731845373330050.5", 0.0),
            (r#"{"maximum": 598731845373330050}"#, "598731845373330078.0", 0.0),
            (r#"{"minimum": 598731845373330050.0}"#, "598731845373330049.5", 0.0),
            (r#"{"exclusiveMaximum": 598731845373330050}"#, "598731845373330050.0", 0.0),
            (r#"{"exclusiveMinimum": 598731845373330050}"#, "59873184537333005.1e1", 1.0),
            (r#"{"multipleOf": 3}"#, "37037036703703701.5", 0.0),
            (
                r#"{"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 5, "exclusiveMinimum": true}"#,
                "5",
                0.0,
            ),
            (
                r#"{"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 5, "exclusiveMinimum": true}"#,
                "6",
                1.0,
            ),
            (r#"{"minimum": 5}"#, r#""4""#, 1.0),
            (r#"{"maximum": 5}"#, "1e99999999999", 0.0),
        ] {
            let row: Value =
                serde_json::from_str(&format!("{{\"row\": {{\"format\": {schema}}}}}")).unwrap();
            own.check_task(&row).unwrap();
            assert_eq!(own.grade(text, &row).unwrap().value, value, "{schema} {text}");
        }
    }

    #[test]
    fn object_with_private_key_is_not_a_number() {
        let own = SchemaScorer { field: Some("format".into()), schema: None };
        let object = r#"{"$serde_json::private::Number": "5"}"#;
        for (schema, text, value) in [
            (r#"{"type": "integer"}"#, object, 0.0),
            (r#"{"type": "object"}"#, object, 1.0),
            (r#"{"items": {"type": "integer"}}"#, format!("[{object}]").as_str(), 0.0),
            (format!(r#"{{"const": {object}}}"#).as_str(), "5", 0.0),
            (format!(r#"{{"const": {object}}}"#).as_str(), object, 1.0),
        ] {
            let task = json!({ "row": { "format": schema } });
            assert_eq!(own.grade(text, &task).unwrap().value, value, "{schema} {text}");
        }
    }

    #[test]
    fn grade_finds_json_in_any_fence() {
        for text in [
            "~~~json\n{\"name\": \"Ada\"}\n~~~",
            "1. So:\n   ```json\n   {\n     \"name\": \"Ada\"\n   }\n   ```",
            "```json {.x}\n{\"name\": \"use ``` here\"}\n```",
            "````json\n{\"name\":\n\"```\"}\n````",
            "> ```json\n> {\"name\": \"Ada\"}\n> ```",
        ] {
            assert_eq!(scorer().grade(text, &Value::Null).unwrap().value, 1.0, "{text}");
        }
    }

    /// Compares numbers that equal an expected constant, or differ in one respect that changes the
    /// value.
    #[test]
    fn grade_distinguishes_generated_numbers() {
        let frames = [
            "{}",
            "```json\n{}\n```",
            "So:\n~~~\n{}\n~~~",
            "<answer>{}</answer>",
            "- x\n  ```json\n  {}\n  ```",
        ];
        let own = SchemaScorer { field: Some("format".into()), schema: None };
        let mut dice = Dice::new(4);
        let mut right = 0;
        let mut found = 0;
        let mut wrong = 0;
        for _ in 0..3_500 {
            let number = dice.number(40);
            let schema = [
                format!("{{\"const\": {number}}}"),
                format!("{{\"enum\": [\"x\", {number}]}}"),
                format!("{{\"minimum\": {number}, \"maximum\": {number}}}"),
                format!(
                    "{{\"items\": {{\"const\": {number}}}, \"minItems\": 1, \"type\": \"array\"}}"
                ),
            ];
            let kind = dice.below(4);
            let row: Value =
                serde_json::from_str(&format!("{{\"row\": {{\"format\": {}}}}}", schema[kind]))
                    .unwrap();
            let frame = frames[dice.below(frames.len())];
            let value = |number: &str| {
                let json = if kind == 3 { format!("[{number}]") } else { number.to_owned() };
                own.grade(&frame.replace("{}", &json), &row).unwrap().value
            };
            let same = match number.contains('.') {
                true => format!("{number}0"),
                false if dice.below(2) == 0 => format!("{number}.0"),
                false => number.clone(),
            };
            right += 1;
            found += usize::from(value(&same) == 1.0);
            for other in [dice.changed(&number), dice.changed(&number)] {
                wrong += 1;
                assert_eq!(value(&other), 0.0, "{} {other}", schema[kind]);
            }
        }
        println!("json_schema: {found} of {right} right, 0 of {wrong} wrong");
        assert!(found == right && right + wrong > 10_000);
    }

    #[test]
    fn task_schema_is_read_from_field() {
        let own = SchemaScorer { field: Some("format".into()), schema: None };
        let task = json!({ "row": { "format": { "type": "integer" } } });
        assert_eq!(
            (own.grade("5", &task).unwrap().value, own.grade("x", &task).unwrap().value),
            (1.0, 0.0)
        );
        let text = json!({ "row": { "format": "{\"type\": \"array\"}" } });
        assert_eq!(own.grade("[5]", &text).unwrap().value, 1.0);
        for (task, want) in [
            (json!({}), "no field \"format\""),
            (json!({ "format": { "type": "nothing" } }), "the schema is invalid"),
            (json!({ "format": "{" }), "the schema is not JSON"),
            // External references are not fetched.
            (
                json!({ "format": { "$ref": "https://example.com/schema.json" } }),
                "the schema is invalid",
            ),
            (json!({ "format": { "$ref": "file:///etc/passwd" } }), "the schema is invalid"),
        ] {
            let error = own.check_task(&task).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
        assert!(
            SchemaScorer::default().check().unwrap_err().to_string().contains("no schema is set")
        );
    }
}
