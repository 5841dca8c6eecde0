//! Scores programs by running tests in a sandbox.
//!
//! Each test starts the program in a new process. A program may hang, flood its output, fork or end
//! its own process; this costs only its own attempt the score. A failure of the sandbox is reported
//! as an outage and never scores 0.

mod case;
mod compare;
mod packed;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::answer::text_in_tag;
use crate::{Component, ScoreError, Scorer, ScorerInput, blocks};
use case::TestCase;
use compare::Tolerance;

/// Recipe keys of a scorer of kind `code`, which runs the tests of a program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CodeKeys {
    /// Field of a task or its row that contains the tests. If the field is missing, the expected
    /// answer is used. Default: `tests`.
    pub tests: String,
    /// Language of the program. The local sandbox supports `python` (the default) and `bash`; a
    /// service may support more. Tests that are code are always Python.
    pub language: String,
    /// Rule that maps the number of passed tests to the score.
    pub value: TestScoring,
    /// Maximum number of tests that run, in the order of the task. 0 (the default) runs all.
    #[serde(alias = "most_tests")]
    pub max_tests: usize,
    /// Timeout for one test, in seconds. Above 0 and at most 86400. Default: 10.
    pub seconds: f64,
    /// Maximum memory of the processes of one test, in MiB. Default: 1024.
    pub memory_mb: u64,
    /// Maximum absolute difference from an expected number that has a decimal point or an exponent.
    /// An expected integer must match exactly. In 0..1. Default: 1e-6.
    pub tolerance: f64,
    /// Maximum difference relative to the expected number; the larger of the two tolerances
    /// applies. In 0..1. 0 (the default) disables it.
    pub relative_tolerance: f64,
    /// Isolation that the sandbox must provide; without it, no program runs.
    pub protection: Isolation,
    /// Python interpreter: a command name, a file, or the directory of a virtual environment.
    /// Default: `python3`.
    pub python: String,
    /// Python modules that are imported before any program runs.
    pub preload: Vec<String>,
    /// Maximum number of concurrent tests over all attempts. 0 (the default) means one per core.
    pub concurrency: usize,
    /// URL of a service with the SandboxFusion API. If `None`, tests run on this machine.
    pub url: Option<String>,
    /// Environment variable that contains the API key of the service at `url`.
    pub key_env: Option<String>,
}

impl Default for CodeKeys {
    fn default() -> Self {
        CodeKeys {
            tests: "tests".into(),
            language: PYTHON.into(),
            value: TestScoring::default(),
            max_tests: 0,
            seconds: 10.0,
            memory_mb: 1024,
            tolerance: 1e-6,
            relative_tolerance: 0.0,
            protection: Isolation::default(),
            python: "python3".into(),
            preload: Vec::new(),
            concurrency: 0,
            url: None,
            key_env: None,
        }
    }
}

const PYTHON: &str = "python";

/// Rule that maps the number of passed tests to the score of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TestScoring {
    /// The score is 1 if all tests pass, else 0. Testing stops at the first failure.
    #[default]
    All,
    /// The score is the fraction of tests that pass.
    #[serde(alias = "share")]
    Fraction,
}

/// Isolation that the sandbox must provide to the programs of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    /// All isolation mechanisms of the sandbox are required.
    #[default]
    Full,
    /// The isolation mechanisms that the kernel supports are used, even if it supports none.
    BestEffort,
}

/// A program that a [`Runner`] runs once.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Language of the code, as named in the recipe: `python` or `bash`, for example.
    pub language: String,
    /// Source code.
    pub code: String,
    /// Standard input.
    pub stdin: String,
    /// Minimum number of bytes of standard output that the runner must keep.
    pub output_bytes: usize,
}

/// Result of running a program.
#[derive(Debug, Clone, PartialEq)]
pub struct ProgramResult {
    /// Standard output. Output that is too long is truncated to its beginning and end.
    pub stdout: String,
    /// Whether `stdout` is complete.
    pub is_complete: bool,
    /// Reason why the program ended.
    pub end: ProgramEnd,
}

/// Reason why a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramEnd {
    /// The program exited with this code. A negative code means that a signal ended the program.
    Exit(i32),
    /// The program exceeded its time limit.
    TimeLimit,
    /// The program exceeded its memory limit.
    MemoryLimit,
}

/// Runs untrusted programs within the limits of [`CodeKeys`].
#[async_trait]
pub trait Runner: Debug + Send + Sync {
    /// Prepares the sandbox, so that programs can run.
    ///
    /// # Errors
    /// Returns an error if no program can run.
    async fn ready(&self) -> Result<(), ScoreError>;

    /// Runs a program until it ends or exceeds a limit. A failure of the program itself is not an
    /// error.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unavailable`] if the program was not run but a later call may succeed,
    /// and [`ScoreError::Unusable`] if it can never run.
    async fn run(&self, program: &Program) -> Result<ProgramResult, ScoreError>;
}

/// Scorer that runs the tests of a program in a sandbox.
#[derive(Debug)]
pub struct CodeScorer {
    keys: CodeKeys,
    runner: Arc<dyn Runner>,
    /// Results of validating tests that are code, by the hash of the code.
    checks: Mutex<HashMap<u64, Arc<TestCheck>>>,
}

/// Result of validating a test that is code: the reason why the test is unusable, or `None` if it
/// is usable. Unset until the test has run.
type TestCheck = OnceCell<Option<String>>;

/// Maximum number of validation results that are kept. When it is reached, all results are dropped.
const MAX_CHECKS: usize = 1 << 14;

/// Name of the score component with the fraction of tests that passed.
const PASSED: &str = "passed";
/// Name of the score component that is 1 if a time or memory limit was exceeded, else 0.
const LIMIT_EXCEEDED: &str = "limited";

/// Minimum number of bytes of a test's output that are kept.
const MIN_OUTPUT_BYTES: usize = 64 << 10;

/// Word with which `runner.py` reports that the tests, rather than the program, are at fault.
const UNUSABLE: &str = "unusable";

const RUNNER: &str = include_str!("runner.py");

impl CodeKeys {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        let invalid = |what: String| Err(ScoreError::Unusable(what));
        if !(self.seconds > 0.0 && self.seconds <= 86_400.0) {
            return invalid(format!(
                "seconds = {}, but it must be above 0 and at most 86400",
                self.seconds
            ));
        }
        if !(32..=1 << 24).contains(&self.memory_mb) {
            return invalid(format!(
                "memory_mb = {}, but it must be in 32..={}",
                self.memory_mb,
                1 << 24
            ));
        }
        let tolerances =
            [("tolerance", self.tolerance), ("relative_tolerance", self.relative_tolerance)];
        if let Some((name, value)) =
            tolerances.iter().find(|(_, value)| !(0.0..1.0).contains(value))
        {
            return invalid(format!("{name} = {value}, but it must be in 0..1"));
        }
        let known = [PYTHON, "bash"];
        match &self.url {
            Some(url) if !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) => {
                invalid(format!("url = {url:?}, but it must start with http:// or https://"))
            }
            None if !known.contains(&&*self.language) => invalid(format!(
                "language = {:?}, but the local sandbox runs {}: set `url` to a service that \
                 supports the language",
                self.language,
                known.join(" and ")
            )),
            _ => Ok(()),
        }
    }
}

impl CodeScorer {
    /// Creates a scorer that runs tests in `runner`.
    pub fn new(keys: CodeKeys, runner: Arc<dyn Runner>) -> Arc<Self> {
        Arc::new(CodeScorer { keys, runner, checks: Mutex::default() })
    }

    fn parse_task_tests(&self, task: &Value) -> Result<Vec<TestCase>, ScoreError> {
        let mut cases = case::parse_cases(task, &self.keys.tests).map_err(ScoreError::Unusable)?;
        if self.keys.max_tests > 0 {
            cases.truncate(self.keys.max_tests);
        }
        let prints = |case: &TestCase| matches!(case, TestCase::Prints { .. });
        if self.keys.language != PYTHON && !cases.iter().all(prints) {
            return Err(ScoreError::Unusable(format!(
                "a test of the task is Python code, but programs are in {}: give inputs and \
                 outputs instead",
                self.keys.language
            )));
        }
        Ok(cases)
    }

    /// Validates a test that is code: it must fail without a program, and with one whose functions
    /// do nothing. Concurrent attempts share one validation, and later attempts use its result.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unusable`] if the test passes nevertheless, or cannot be run.
    async fn validate_test(&self, case: &TestCase) -> Result<(), ScoreError> {
        let TestCase::Asserts { code, start } = case else { return Ok(()) };
        let mut hasher = DefaultHasher::new();
        (code, start).hash(&mut hasher);
        let check = {
            let mut checks = self.checks.lock().unwrap_or_else(PoisonError::into_inner);
            if checks.len() >= MAX_CHECKS {
                checks.clear();
            }
            checks.entry(hasher.finish()).or_default().clone()
        };
        let run = || async {
            let token = "control";
            let mut test = assertion_input(code, start.as_ref());
            test["control"] = true.into();
            let result =
                self.runner.run(&runner_program(test, "", token, MIN_OUTPUT_BYTES)).await?;
            Ok::<_, ScoreError>(unusable_test_reason(&result, token))
        };
        check
            .get_or_try_init(run)
            .await?
            .clone()
            .map_or(Ok(()), |why| Err(ScoreError::Unusable(why)))
    }

    /// Runs a test, and returns whether it passed and how the program ended. `token` marks the
    /// runner's own output, so it must be unknown to the program.
    async fn run_test(
        &self,
        code: &str,
        case: &TestCase,
        token: &str,
    ) -> Result<(bool, ProgramEnd), ScoreError> {
        let program = match case {
            TestCase::Prints { input, output } => Program {
                language: self.keys.language.clone(),
                code: if self.keys.language == PYTHON {
                    raise_interpreter_limits(code)
                } else {
                    code.to_owned()
                },
                stdin: input.clone(),
                output_bytes: MIN_OUTPUT_BYTES.max(2 * output.len()),
            },
            TestCase::Asserts { code: tests, start } => runner_program(
                assertion_input(tests, start.as_ref()),
                code,
                token,
                MIN_OUTPUT_BYTES,
            ),
            TestCase::Returns { function, arguments, values } => {
                // Half of the kept output is its end, and escapes take up to three times as many
                // bytes.
                let max_length =
                    values.iter().map(|value| value.to_string().len()).max().unwrap_or(0);
                let test = json!({ "function": function, "arguments": arguments });
                runner_program(test, code, token, MIN_OUTPUT_BYTES.max(8 * max_length))
            }
        };
        let result = self.runner.run(&program).await?;
        if let Some(why) = unusable_test_reason(&result, token) {
            return Err(ScoreError::Unusable(why));
        }
        let ProgramResult { stdout, is_complete, end } = result;
        let tolerance =
            Tolerance { absolute: self.keys.tolerance, relative: self.keys.relative_tolerance };
        let passed = end == ProgramEnd::Exit(0)
            && match case {
                TestCase::Prints { output, .. } => {
                    is_complete && compare::outputs_match(&stdout, output, tolerance)
                }
                TestCase::Asserts { .. } => stdout.trim_end().ends_with(token),
                TestCase::Returns { values, .. } => {
                    returned_value(&stdout, token).is_some_and(|found| {
                        values.iter().any(|want| compare::values_match(&found, want, tolerance))
                    })
                }
            };
        Ok((passed, end))
    }
}

/// Returns the JSON input of `runner.py` for a test that is code.
fn assertion_input(code: &str, start: Option<&(String, String)>) -> Value {
    let mut test = json!({ "asserts": code });
    if let Some((start, entry)) = start {
        (test["start"], test["entry"]) = (start.as_str().into(), entry.as_str().into());
    }
    test
}

/// Creates the program that runs `runner.py` on `code` and its test.
fn runner_program(mut test: Value, code: &str, token: &str, output_bytes: usize) -> Program {
    test["program"] = code.into();
    test["sign"] = format!("end of {token}").into();
    Program {
        language: PYTHON.into(),
        code: RUNNER.to_owned(),
        stdin: format!("{test}\n{}\n", json!({ "token": token })),
        output_bytes,
    }
}

/// Returns the reason why the tests are unusable, or `None` if `runner.py` reported none.
fn unusable_test_reason(result: &ProgramResult, token: &str) -> Option<String> {
    let (_, why) = result.stdout.split_once(&format!("{token} {UNUSABLE} "))?;
    Some(format!(
        "the tests of the task cannot be used: {}",
        why.lines().next().unwrap_or_default()
    ))
}

/// Returns the JSON value that `runner.py` prints after the token, or `None` if it printed none.
fn returned_value(stdout: &str, token: &str) -> Option<Value> {
    let (_, after) = stdout.rsplit_once(token)?;
    crate::json::parse(after.lines().next()?).ok()
}

/// Returns a Python program with the limits of LiveCodeBench's harness: integers of up to 50,000
/// digits can be parsed and printed, and the recursion limit is 50,000.
fn raise_interpreter_limits(code: &str) -> String {
    let limits = "getattr(__import__(\"sys\"), \"set_int_max_str_digits\", int)(50000)\n\
                  __import__(\"sys\").setrecursionlimit(50000)\n";
    // Imports from `__future__` must come first.
    if code.contains("__future__") {
        format!("{limits}exec(compile({}, \"program.py\", \"exec\"))\n", Value::from(code))
    } else {
        format!("{limits}{code}")
    }
}

#[async_trait]
impl Scorer for CodeScorer {
    fn check_task(&self, task: &Value) -> Result<(), ScoreError> {
        self.parse_task_tests(task).map(drop)
    }

    async fn check_ready(&self, task: &Value) -> Result<(), ScoreError> {
        self.runner.ready().await?;
        // Whether tests that are code can be used is known only after they ran in the sandbox.
        let cases = self.parse_task_tests(task).unwrap_or_default();
        match cases.iter().find(|case| matches!(case, TestCase::Asserts { .. })) {
            Some(case) => self.validate_test(case).await,
            None => Ok(()),
        }
    }

    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let cases = self.parse_task_tests(&input.task)?;
        let code =
            extract_program(input.text(), &self.keys.language).filter(|_| input.is_answered());
        let mut passed = 0;
        let mut limited = false;
        for (number, case) in cases.iter().enumerate() {
            let Some(code) = &code else { break };
            self.validate_test(case).await?;
            let token = format!("passed {} {number}", input.attempt);
            let (ok, end) = self.run_test(code, case, &token).await?;
            passed += usize::from(ok);
            limited = !matches!(end, ProgramEnd::Exit(_));
            // A program that exceeds a limit in one test would probably do so in every test.
            if limited || (!ok && self.keys.value == TestScoring::All) {
                break;
            }
        }
        let fraction = passed as f64 / cases.len() as f64;
        let value = match self.keys.value {
            TestScoring::Fraction => fraction,
            TestScoring::All => f64::from(u8::from(passed == cases.len())),
        };
        let score = Component { extracted: code.map(Cow::into_owned), ..Component::score(value) };
        let limited = Component::new(LIMIT_EXCEEDED, f64::from(u8::from(limited)));
        Ok(vec![score, Component::new(PASSED, fraction), limited])
    }
}

/// Returns the program in a completion: the last code block in `language`, or the complete text if
/// it has no code block. If the text has an `<answer>` tag, only the tag's content counts.
fn extract_program<'t>(text: &'t str, language: &str) -> Option<Cow<'t, str>> {
    let names: &[&str] = match language {
        "python" => &["python", "py", "python3"],
        "bash" => &["bash", "sh", "shell"],
        other => &[other],
    };
    let answer = text_in_tag(text, "answer").unwrap_or(text);
    let code = if blocks::has_code_fence(answer) && !is_bare_python(answer, language) {
        blocks::last_code_block(answer, names)
    } else {
        Some(answer.into())
    };
    code.filter(|code| !code.trim().is_empty())
}

/// Returns whether a text is a Python program without a code fence around it. String literals of
/// the program may contain backticks.
fn is_bare_python(text: &str, language: &str) -> bool {
    let first = text.trim_start().lines().next().unwrap_or_default();
    let starts_like_python = ["import ", "def ", "class ", "async def ", "@", "#!"]
        .iter()
        .any(|word| first.starts_with(word))
        || (first.starts_with("from ") && first.contains(" import "));
    // In a bare program, fences occur only inside indented strings, such as docstrings.
    let is_fence = |line: &str| ["```", "~~~"].iter().any(|fence| line.starts_with(fence));
    language == PYTHON && starts_like_python && !text.lines().any(is_fence)
}

#[cfg(test)]
mod tests;
