//! Scores an attempt with the rewards that the agent's own program posts or prints.

use async_trait::async_trait;
use levade_tree::{Component, CreditTarget};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{Evidence, ScoreError, Scorer};

/// Way in which an agent's program reports the rewards of its attempt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Said {
    /// The program posts rewards to the attempt's reward endpoint, `LEVADE_REWARD_URL`.
    #[default]
    Posted,
    /// The last line that the program prints is a number, `{"reward": …}`, or `{"rewards": […]}`,
    /// whose items have the format of posted rewards.
    LastLine,
}

/// Scorer that takes the rewards that the program of an attempt reports. If the attempt came to its own
/// end and the program reported no reward, the attempt is unscored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProgramScorer {
    /// Way in which the program reports rewards. Default: posted.
    pub from: Said,
}

/// A reward in the format that the gateway accepts.
#[derive(Deserialize)]
struct Posted {
    value: f64,
    #[serde(default = "reward")]
    name: String,
    agent: Option<String>,
    turn: Option<u32>,
}

fn reward() -> String {
    REWARD.to_owned()
}

/// Name of a reward that counts toward the score, and default name of a reward.
const REWARD: &str = "reward";

/// Key of a list of rewards in the last line.
const REWARDS: &str = "rewards";

#[async_trait]
impl Scorer for ProgramScorer {
    fn is_led(&self, _task: &Value) -> bool {
        true
    }

    async fn score(&self, evidence: &Evidence) -> Result<Vec<Component>, ScoreError> {
        let program = evidence.handed().get("program").unwrap_or(&Value::Null);
        match self.from {
            Said::LastLine => last_line(evidence, &program["last_line"]),
            Said::Posted => {
                posted(evidence, &program["rewards"], "the program has posted no reward to LEVADE_REWARD_URL")
            }
        }
    }
}

/// Scores an attempt without a reward.
///
/// An attempt that was truncated or failed gets 0, because it ended before it could report a reward.
///
/// # Errors
/// Returns [`ScoreError::Unusable`] with `why` if the attempt came to its own end.
fn none(evidence: &Evidence, why: &str) -> Result<Vec<Component>, ScoreError> {
    match evidence.is_answered() {
        true => Err(ScoreError::Unusable(why.to_owned())),
        false => Ok(vec![Component::score(0.0)]),
    }
}

fn last_line(evidence: &Evidence, line: &Value) -> Result<Vec<Component>, ScoreError> {
    let text = line.as_str().unwrap_or_default();
    let said = crate::json::parse(text).unwrap_or_default();
    if let Some(rewards) = said.get(REWARDS) {
        return posted(evidence, rewards, "the last line of the program has no reward among its `rewards`");
    }
    let value = match &said {
        Value::Number(number) => number.as_f64(),
        said => said.get(REWARD).and_then(Value::as_f64),
    };
    match value.filter(|value| value.is_finite()) {
        Some(value) => Ok(vec![Component::score(value)]),
        None => {
            let start: String = text.chars().take(80).collect();
            none(
                evidence,
                &format!(
                    "the program's last line is {start:?}, which is neither a number nor {{\"reward\": …}}"
                ),
            )
        }
    }
}

fn posted(evidence: &Evidence, rewards: &Value, why: &str) -> Result<Vec<Component>, ScoreError> {
    let rewards = match serde_json::from_value::<Option<Vec<Posted>>>(rewards.clone()) {
        Ok(rewards) => rewards.unwrap_or_default(),
        Err(error) => return none(evidence, &format!("a reward of the program is invalid: {error}")),
    };
    if rewards.is_empty() {
        return none(evidence, why);
    }
    // Rewards with the same name and the same credited turn or agent are summed.
    let mut components: Vec<Component> = Vec::new();
    for Posted { value, name, agent, turn } in rewards {
        let name = if name == REWARD { Component::SCORE.to_owned() } else { name };
        let on = match (turn, agent) {
            (Some(turn), _) => Some(CreditTarget::Turn(turn)),
            (None, Some(agent)) => Some(CreditTarget::Agent(agent)),
            (None, None) => None,
        };
        match components.iter_mut().find(|component| component.name == name && component.on == on) {
            Some(component) => component.value += value,
            None => components.push(Component { on, ..Component::new(name, value) }),
        }
    }
    if components.iter().all(|component| component.name != Component::SCORE) {
        components.push(Component::score(0.0));
    }
    Ok(components)
}
