//! Scores final answers with a program of the user.
//!
//! The program is started once per answer. It reads one line of JSON, `{"text": …, "expected": …}`,
//! from standard input, and prints a number in 0..=1, or `{"value": …, "extracted": …}`. It must
//! exit with code 0; otherwise, the error contains the last line of its standard error. The
//! program's environment has the usual variables, such as `PATH` and `HOME`, and those that
//! [`CommandKeys::environment`] names.

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use levade_policy::process_time::with_timeout;
use levade_process::{Launch, ProgramRun, Supervisor, Tail, exit_status};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::scorer::{answer_components, excerpt, expected_value};
use crate::{Component, Score, ScoreError, Scorer, ScorerInput};

/// Maximum number of bytes that are kept from the beginning, and from the end, of a program's
/// output.
const MAX_OUTPUT: usize = 512 << 10;

/// Recipe keys of a scorer that runs a program of the user on each final answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandKeys {
    /// Program and its arguments.
    pub command: Vec<String>,
    /// Timeout for one run of the program, in seconds. Above 0 and at most 1e9. Default: 60.
    #[serde(default = "default_timeout_seconds")]
    pub seconds: f64,
    /// Working directory of the program. Default: the directory of the recipe.
    #[serde(default)]
    pub folder: PathBuf,
    /// Names of environment variables that the program gets in addition to the usual ones, such as
    /// `PATH` and `HOME`.
    #[serde(default)]
    pub environment: Vec<String>,
}

fn default_timeout_seconds() -> f64 {
    60.0
}

/// Scorer that starts a program of the user for each final answer.
#[derive(Debug, Clone)]
pub struct CommandScorer {
    keys: CommandKeys,
    supervisor: Supervisor,
}

/// Parses a program's output as a score: a number, or an object with the field `value`. Returns
/// `None` for any other output.
fn parse_score(text: &str) -> Option<Score> {
    let number = serde_json::from_str(text).map(|value| Score { value, extracted: None });
    number.or_else(|_| serde_json::from_str(text)).ok()
}

#[async_trait]
impl Scorer for CommandScorer {
    async fn check_ready(&self, task: &Value) -> Result<(), ScoreError> {
        self.grade("", expected_value(task)).await.map(drop)
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        if !input.is_answered() {
            // There is no final answer to score.
            return Ok(vec![Component::score(0.0)]);
        }
        answer_components(input, self.grade(input.text(), input.expected_value()).await)
    }
}

impl CommandKeys {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        if self.command.first().is_none_or(String::is_empty) {
            return Err(self.failure("command is empty: set it to a program and its arguments"));
        }
        if !(self.seconds > 0.0 && self.seconds <= 1e9) {
            return Err(self.failure(format!(
                "seconds = {}, but it must be above 0 and at most 1e9",
                self.seconds
            )));
        }
        Ok(())
    }

    fn failure(&self, what: impl Into<String>) -> ScoreError {
        ScoreError::Command { command: self.command.join(" "), what: what.into() }
    }
}

impl CommandScorer {
    /// Creates a scorer that starts its programs through `supervisor`.
    pub fn new(keys: CommandKeys, supervisor: Supervisor) -> Self {
        CommandScorer { keys, supervisor }
    }

    /// Runs the program on a final answer, and returns the score that it prints.
    ///
    /// # Errors
    /// Returns [`ScoreError::Command`] if the program cannot be started, fails, exceeds its
    /// timeout, or prints anything except a score in 0..=1.
    pub async fn grade(&self, text: &str, expected: &Value) -> Result<Score, ScoreError> {
        self.keys.check()?;
        let limit = Duration::from_secs_f64(self.keys.seconds);
        match with_timeout(limit, self.run_program(text, expected)).await {
            Some(score) => score,
            None => Err(self.failure(format!("the program did not respond within {limit:?}"))),
        }
    }

    async fn run_program(&self, text: &str, expected: &Value) -> Result<Score, ScoreError> {
        let CommandKeys { command, folder: work_dir, environment, .. } = &self.keys;
        let dir = work_dir.clone();
        let passes = environment.clone();
        let launch = Launch { dir, passes, ..Launch::new(command) };
        let question = format!("{}\n", json!({ "text": text, "expected": expected }));
        let started = ProgramRun::start(
            &self.supervisor,
            &launch,
            question,
            Tail::new(MAX_OUTPUT, MAX_OUTPUT),
        );
        // Dropping `run` also ends all processes that the program has started.
        let mut run =
            started.map_err(|error| self.failure(format!("cannot start the program: {error}")))?;
        let output = run.wait().await.map_err(|error| self.failure(error))?;
        if let Some(why) = output.start_error() {
            return Err(self.failure(format!("cannot start the program: {why}")));
        }
        if output.code != Some(0) {
            let last =
                output.stderr.last_line().unwrap_or_else(|| "nothing on standard error".into());
            return Err(self
                .failure(format!("the program exited with {}: {last}", exit_status(output.code))));
        }
        let stdout_text = output.stdout.text();
        let Some(score) = parse_score(stdout_text.trim()) else {
            let start = excerpt(&stdout_text);
            return Err(self.failure(format!(
                "the program printed {start:?}, which is neither a number nor a score"
            )));
        };
        if !(0.0..=1.0).contains(&score.value) {
            return Err(self.failure(format!(
                "the program printed {}, but a score must be in 0..=1",
                score.value
            )));
        }
        Ok(score)
    }

    fn failure(&self, what: impl Into<String>) -> ScoreError {
        self.keys.failure(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn shell_scorer(script: &str) -> CommandScorer {
        let command = vec!["sh".into(), "-c".into(), script.into()];
        let keys =
            CommandKeys { command, seconds: 5.0, folder: PathBuf::new(), environment: Vec::new() };
        CommandScorer::new(keys, Supervisor::default())
    }

    fn scorer_with_keys(script: &str, change: impl FnOnce(&mut CommandKeys)) -> CommandScorer {
        let mut scorer = shell_scorer(script);
        change(&mut scorer.keys);
        scorer
    }

    #[tokio::test]
    async fn program_output_is_parsed_as_score() {
        let scorer = shell_scorer(
            r#"read line; case "$line" in *'"expected":"72"'*) echo 0.5;; *) echo 0;; esac"#,
        );
        let score = scorer.grade("it is 72", &"72".into()).await.unwrap();
        assert_eq!(score, Score { value: 0.5, extracted: None });
        assert_eq!(scorer.grade("it is 72", &"73".into()).await.unwrap().value, 0.0);
        let input = testing::scorer_input("x", json!({ "answer": "1E5", "answer_number": 1e5 }));
        let number = shell_scorer(
            r#"read line; case "$line" in *'"expected":"'*) echo 0;; *) echo 1;; esac"#,
        );
        assert_eq!(number.score(&input).await.unwrap(), [Component::score(1.0)]);
        let full = shell_scorer(r#"echo '{"value": 1, "extracted": "72"}'"#)
            .grade("", &Value::Null)
            .await
            .unwrap();
        assert_eq!(full, Score { value: 1.0, extracted: Some("72".into()) });
        for number in
            ["0.50", "5e-1", r#"{"value": 0.50}"#, r#"{"extracted": null, "value": 5E-1}"#]
        {
            let score =
                shell_scorer(&format!("echo '{number}'")).grade("", &Value::Null).await.unwrap();
            assert_eq!(score, Score { value: 0.5, extracted: None }, "{number}");
        }
        // A program that does not read its standard input, even if the input exceeds a pipe's
        // buffer.
        let deaf = shell_scorer("echo 1").grade(&"x".repeat(1 << 20), &Value::Null).await.unwrap();
        assert_eq!(deaf.value, 1.0);
    }

    #[tokio::test]
    async fn program_gets_only_named_variables() {
        // Cargo sets this variable, which stands in for a secret.
        let secret = "CARGO_PKG_NAME";
        assert!(std::env::var(secret).is_ok());
        let scorer = shell_scorer(&format!("test -n \"$PATH\" && test -z \"${secret}\" && echo 1"));
        assert_eq!(scorer.grade("", &Value::Null).await.unwrap().value, 1.0);
        let scorer = scorer_with_keys(&format!("test -n \"${secret}\" && echo 1"), |keys| {
            keys.environment = vec![secret.into()];
        });
        assert_eq!(scorer.grade("", &Value::Null).await.unwrap().value, 1.0);
    }

    /// The timeout also ends child processes of the program.
    #[tokio::test]
    async fn timeout_ends_child_processes() {
        let dir = tempfile::tempdir().unwrap();
        let script = "(sleep 0.4; touch late) & wait";
        let scorer =
            scorer_with_keys(script, |keys| (keys.seconds, keys.folder) = (0.1, dir.path().into()));
        scorer.grade("", &Value::Null).await.unwrap_err();
        tokio::time::sleep(Duration::from_millis(600)).await;
        assert!(!dir.path().join("late").exists());
    }

    #[tokio::test]
    async fn program_failures_are_reported() {
        for (scorer, want) in [
            (shell_scorer("echo oh no >&2; exit 3"), "exited with exit status: 3: oh no"),
            (shell_scorer("echo many"), "printed \"many\", which is neither a number nor a score"),
            (shell_scorer("echo 2"), "printed 2, but a score must be in 0..=1"),
            (
                scorer_with_keys("sleep 9", |keys| keys.seconds = 0.05),
                "did not respond within 50ms",
            ),
            (scorer_with_keys("", |keys| keys.command = vec!["/no/such".into()]), "cannot start"),
            (scorer_with_keys("", |keys| keys.folder = "/no/such".into()), "cannot start"),
            (scorer_with_keys("", |keys| keys.command = vec![]), "is empty"),
        ] {
            let error = scorer.grade("", &Value::Null).await.unwrap_err().to_string();
            assert!(error.contains(want), "{error}\n  want: {want}");
        }
    }
}
