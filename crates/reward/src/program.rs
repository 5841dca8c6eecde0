//! Scores an attempt with the rewards that the agent's own program posts or prints.

use async_trait::async_trait;
use levade_tree::{Component, CreditTarget};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{ScoreError, Scorer, ScorerInput};

/// Way in which an agent's program reports the rewards of an attempt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardSource {
    /// The program posts rewards to the attempt's reward endpoint, `LEVADE_REWARD_URL`.
    #[default]
    Posted,
    /// The last line that the program prints is a number, `{"reward": …}`, or `{"rewards": […]}`,
    /// whose items have the format of posted rewards.
    LastLine,
}

/// Scorer that takes the rewards that the program of an attempt reports. If the attempt came to its
/// own end and the program reported no reward, the attempt is unscored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProgramScorer {
    /// Way in which the program reports rewards. Default: posted.
    pub from: RewardSource,
}

/// A reward in the format that the gateway accepts.
#[derive(Deserialize)]
struct PostedReward {
    value: f64,
    #[serde(default = "default_reward_name")]
    name: String,
    agent: Option<String>,
    turn: Option<u32>,
}

fn default_reward_name() -> String {
    REWARD.to_owned()
}

/// Name of the rewards that count toward the score, and default name of a reward.
const REWARD: &str = "reward";

/// Key of the list of rewards in the last line that a program prints.
const REWARDS: &str = "rewards";

#[async_trait]
impl Scorer for ProgramScorer {
    fn needs_reported_score(&self, _task: &Value) -> bool {
        true
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let program = input.toolbox_data().get("program").unwrap_or(&Value::Null);
        match self.from {
            RewardSource::LastLine => rewards_in_last_line(input, &program["last_line"]),
            RewardSource::Posted => posted_rewards(
                input,
                &program["rewards"],
                "the program has posted no reward to LEVADE_REWARD_URL",
            ),
        }
    }
}

/// Scores an attempt whose program reported no reward.
///
/// An attempt that was truncated or failed gets 0, because it ended before it could report a
/// reward.
///
/// # Errors
/// Returns [`ScoreError::Unusable`] with `why` if the attempt came to its own end.
fn score_without_reward(input: &ScorerInput, why: &str) -> Result<Vec<Component>, ScoreError> {
    if input.is_answered() {
        Err(ScoreError::Unusable(why.to_owned()))
    } else {
        Ok(vec![Component::score(0.0)])
    }
}

fn rewards_in_last_line(input: &ScorerInput, line: &Value) -> Result<Vec<Component>, ScoreError> {
    let text = line.as_str().unwrap_or_default();
    let parsed = crate::json::parse(text).unwrap_or_default();
    if let Some(rewards) = parsed.get(REWARDS) {
        return posted_rewards(
            input,
            rewards,
            "the last line of the program has no reward among its `rewards`",
        );
    }
    let value = match &parsed {
        Value::Number(number) => number.as_f64(),
        parsed => parsed.get(REWARD).and_then(Value::as_f64),
    };
    match value.filter(|value| value.is_finite()) {
        Some(value) => Ok(vec![Component::score(value)]),
        None => {
            let start: String = text.chars().take(80).collect();
            score_without_reward(
                input,
                &format!(
                    "the program's last line is {start:?}, which is neither a number nor \
                     {{\"reward\": …}}"
                ),
            )
        }
    }
}

fn posted_rewards(
    input: &ScorerInput,
    rewards: &Value,
    why: &str,
) -> Result<Vec<Component>, ScoreError> {
    let rewards = match serde_json::from_value::<Option<Vec<PostedReward>>>(rewards.clone()) {
        Ok(rewards) => rewards.unwrap_or_default(),
        Err(error) => {
            return score_without_reward(
                input,
                &format!("a reward of the program is invalid: {error}"),
            );
        }
    };
    if rewards.is_empty() {
        return score_without_reward(input, why);
    }
    // Rewards with the same name and the same credited turn or agent are summed.
    let mut components: Vec<Component> = Vec::new();
    for PostedReward { value, name, agent, turn } in rewards {
        let name = if name == REWARD { Component::SCORE.to_owned() } else { name };
        let on = match (turn, agent) {
            (Some(turn), _) => Some(CreditTarget::Turn(turn)),
            (None, Some(agent)) => Some(CreditTarget::Agent(agent)),
            (None, None) => None,
        };
        match components
            .iter_mut()
            .find(|component| component.name == name && component.credit_target == on)
        {
            Some(component) => component.value += value,
            None => components.push(Component { credit_target: on, ..Component::new(name, value) }),
        }
    }
    if components.iter().all(|component| component.name != Component::SCORE) {
        components.push(Component::score(0.0));
    }
    Ok(components)
}
