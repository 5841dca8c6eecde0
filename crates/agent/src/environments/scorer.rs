//! Scorer whose scores come from environments.

use async_trait::async_trait;
use levade_reward::{ProgramScorer, RewardSource, ScoreError, Scorer, ScorerInput};
use levade_tree::Component;
use serde_json::{Value, json};

use super::{Environment, EnvironmentOptions, Environments};

/// Scorer that returns the score from the task's environment. An environment that led the attempt
/// has already reported the score at the attempt's end. Any other environment is called to score
/// the final answer.
#[derive(Debug, Clone)]
pub struct EnvironmentScorer {
    environments: Environments,
}

impl EnvironmentScorer {
    /// Creates a scorer that takes the scores from `environments`.
    pub fn new(environments: Environments) -> Self {
        EnvironmentScorer { environments }
    }

    fn find_environment(&self, task: &Value) -> Result<&Environment, ScoreError> {
        let source = task["source"].as_str().unwrap_or_default();
        self.environments.find(source).ok_or_else(|| {
            ScoreError::Unusable(format!(
                "the task {} is of the source {source:?}, which is not an environment; select \
                 another scorer for its tasks with `when`",
                task["id"]
            ))
        })
    }
}

#[async_trait]
impl Scorer for EnvironmentScorer {
    fn needs_reported_score(&self, task: &Value) -> bool {
        self.find_environment(task).is_ok_and(|environment| environment.options.leads_attempts())
    }

    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        self.find_environment(task).map(drop)
    }

    async fn score(&self, scorer_input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let environment = self.find_environment(&scorer_input.task)?;
        let EnvironmentOptions::ReasoningGym(options) = &environment.options else {
            return ProgramScorer { from: RewardSource::LastLine }.score(scorer_input).await;
        };
        let task = &scorer_input.task;
        let order = json!({
            "row": task["row"],
            "question": task["question"],
            "text": scorer_input.text(),
            "tag": options.tag,
        });
        let response = environment.send_query("score", order).await.map_err(|error| {
            let what = format!("failed: {}", error.why);
            ScoreError::Command { command: error.name, what }
        })?;
        let score = response["score"].as_f64().ok_or_else(|| {
            ScoreError::Unusable(format!(
                "the environment {} returned no score",
                environment.name()
            ))
        })?;
        Ok(vec![Component::score(score)])
    }
}
