//! A span, as a reader of traces needs it: times, attributes, agent and reward.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::rollouts::Span;

/// Prefix of the attributes in which Agent Lightning 0.3 reports a reward: `PREFIX.INDEX.name` and
/// `PREFIX.INDEX.value`. Index 0 is the primary reward.
const REWARD: &str = "agentlightning.reward";

/// Name of the attribute with the reward of a call that a client of Agent Lightning 0.1 reported.
pub const TRIPLET_REWARD: &str = "agentlightning.triplet.reward";

/// The reward that a span reports, if any.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum SpanReward {
    /// The span reports no reward.
    Absent,
    /// The span reports these dimensions of a reward as (name, value), the primary dimension first.
    Values(Vec<(String, f64)>),
    /// The span reports a reward that is not a finite number. The text contains the reported value.
    Malformed(String),
}

/// A span with parsed attributes.
#[derive(Debug, Clone)]
pub(super) struct TracedSpan {
    pub id: String,
    pub parent_id: Option<String>,
    pub name: String,
    pub start_time: f64,
    pub end_time: f64,
    pub attributes: Map<String, Value>,
    pub reward: SpanReward,
}

/// The fields of [`Span::body`] that rewards and calls are read from.
#[derive(Deserialize)]
struct SpanBody {
    span_id: String,
    #[serde(default)]
    parent_id: Option<String>,
    #[serde(default)]
    name: String,
    #[serde(default)]
    start_time: Option<f64>,
    #[serde(default)]
    end_time: Option<f64>,
    #[serde(default)]
    attributes: Map<String, Value>,
}

impl TracedSpan {
    /// Parses a stored span. If the span has only a start or only an end, both times are equal.
    /// Without either, both are 0.
    ///
    /// # Errors
    /// Returns an error if the body is not a span.
    pub fn parse(span: &Span) -> serde_json::Result<Self> {
        let body: SpanBody = serde_json::from_str(span.body.get())?;
        let reward = parse_reward(&body.name, &body.attributes);
        let start_time = body.start_time.or(body.end_time).unwrap_or(0.0);
        Ok(TracedSpan {
            id: body.span_id,
            parent_id: body.parent_id.filter(|id| !id.is_empty()),
            name: body.name,
            start_time,
            end_time: body.end_time.unwrap_or(start_time),
            attributes: body.attributes,
            reward,
        })
    }

    /// Returns the text of the first attribute among `names` that contains a text, or `None` if no
    /// attribute does.
    pub fn first_text(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.attributes.get(*name)?.as_str())
    }

    /// Returns the token ids of the first attribute among `names` that contains a list of token
    /// ids. Empty if no attribute does.
    pub fn first_token_ids(&self, names: &[&str]) -> Vec<u32> {
        let mut lists = names.iter().filter_map(|name| self.attributes.get(*name)?.as_array());
        lists
            .find_map(|list| list.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect())
            .unwrap_or_default()
    }

    /// Returns the attributes below the first prefix in `prefixes` that has attributes, as a JSON
    /// tree: dots in the names separate levels, and names that count from 0 become a list. Names
    /// with 64 or more dots are left out. Returns null if no prefix has attributes.
    pub fn nest_attributes(&self, prefixes: &[&str]) -> Value {
        for prefix in prefixes {
            let mut root = Value::Null;
            for (name, value) in &self.attributes {
                let Some(path) = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.'))
                else {
                    continue;
                };
                if path.matches('.').count() < MAX_DEPTH {
                    insert_at_path(&mut root, path, value);
                }
            }
            if !root.is_null() {
                return convert_to_lists(root);
            }
        }
        Value::Null
    }

    /// Returns the name of the agent that the span belongs to, from the attributes of the
    /// frameworks that Agent Lightning supports. Returns `None` if the span names no agent.
    pub fn agent_name(&self) -> Option<&str> {
        let is_agentops_agent = self.first_text(&["agentops.span.kind"]) == Some("agent");
        let is_weave_agent = self.first_text(&["type"]) == Some("agent");
        // OpenAI Agents SDK.
        self.first_text(&["agent.name"])
            // AgentOps' decorator `@agent`.
            .or_else(|| self.first_text(&["operation.name"]).filter(|_| is_agentops_agent))
            // AutoGen, LangGraph and Agent Framework.
            .or_else(|| {
                self.first_text(&["recipient_agent_type", "langchain.chain.type", "executor.id"])
            })
            // Weave, without and with LangChain.
            .or_else(|| {
                self.first_text(&["agentlightning.operation.input.name"]).filter(|_| is_weave_agent)
            })
            .or_else(|| {
                self.first_text(&["lc_name"]).filter(|_| self.name.starts_with("langchain.Chain."))
            })
    }

    /// Returns whether the span computes or reports a reward.
    pub fn is_reward_span(&self) -> bool {
        self.reward != SpanReward::Absent
            || self.name == "agentlightning.operation"
                && self.first_text(&["agentlightning.operation.name"]) == Some(REWARD)
    }
}

/// Maximum depth of nested attributes. Nested values are built, changed and dropped recursively,
/// and a client chooses the names.
const MAX_DEPTH: usize = 64;

/// Sets the value at `path` in a JSON tree, and creates the objects on the way. Dots separate the
/// names in the path.
fn insert_at_path(at: &mut Value, path: &str, value: &Value) {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    if !at.is_object() {
        *at = Value::Object(Map::new());
    }
    match rest {
        Some(rest) => insert_at_path(&mut at[name], rest, value),
        None => at[name] = value.clone(),
    }
}

/// Converts every object in `value` whose keys are `0`, `1`, … to a list.
fn convert_to_lists(value: Value) -> Value {
    let Value::Object(fields) = value else { return value };
    let count = fields.len();
    let fields: Map<String, Value> =
        fields.into_iter().map(|(name, value)| (name, convert_to_lists(value))).collect();
    let list: Option<Vec<Value>> =
        (0..count).map(|index| fields.get(&index.to_string()).cloned()).collect();
    list.filter(|list| !list.is_empty()).map_or(Value::Object(fields), Value::Array)
}

/// Parses the reward that the attributes of a span report. The formats of Agent Lightning 0.3,
/// AgentOps and Agent Lightning 0.2 are tried in this order.
fn parse_reward(name: &str, attributes: &Map<String, Value>) -> SpanReward {
    let mut dimensions: Vec<(usize, &str)> = Vec::new();
    for (key, value) in attributes {
        let Some(rest) = key.strip_prefix(REWARD).and_then(|rest| rest.strip_prefix('.')) else {
            continue;
        };
        match rest.split_once('.').map(|(index, field)| (index.parse(), field)) {
            Some((Ok(index), "value")) => dimensions.push((index, key)),
            Some((Ok(_), "name")) => {}
            _ => return SpanReward::Malformed(format!("the attribute {key} ({value}) is unknown")),
        }
    }
    if !dimensions.is_empty() {
        dimensions.sort_unstable();
        if dimensions[0].0 != 0 {
            return SpanReward::Malformed(format!(
                "{REWARD}.0.value, the primary reward, is missing"
            ));
        }
        let read = |(index, key): (usize, &str)| {
            let title = attributes.get(&format!("{REWARD}.{index}.name")).and_then(Value::as_str);
            Ok((title.unwrap_or("primary").to_owned(), parse_finite_number(key, &attributes[key])?))
        };
        return match dimensions.into_iter().map(read).collect() {
            Ok(values) => SpanReward::Values(values),
            Err(text) => SpanReward::Malformed(text),
        };
    }
    for key in ["agentops.task.output", "agentops.entity.output"] {
        let parsed = match attributes.get(key) {
            Some(Value::String(text)) => serde_json::from_str(text).unwrap_or_default(),
            Some(output) => output.clone(),
            None => continue,
        };
        if parsed["type"] == "reward" {
            return parse_single_reward(key, parsed.get("value"));
        }
    }
    match name {
        "agentlightning.annotation" => parse_single_reward("reward", attributes.get("reward")),
        _ => SpanReward::Absent,
    }
}

/// Converts the value of a reward that has no named dimensions. Returns [`SpanReward::Absent`] if
/// the value is missing or null.
fn parse_single_reward(key: &str, value: Option<&Value>) -> SpanReward {
    match value {
        None | Some(Value::Null) => SpanReward::Absent,
        Some(value) => match parse_finite_number(key, value) {
            Ok(value) => SpanReward::Values(vec![("primary".to_owned(), value)]),
            Err(text) => SpanReward::Malformed(text),
        },
    }
}

fn parse_finite_number(key: &str, value: &Value) -> Result<f64, String> {
    let number = value.as_f64().filter(|number| number.is_finite());
    number.ok_or_else(|| format!("the reward {key} is {value}, but must be a finite number"))
}
