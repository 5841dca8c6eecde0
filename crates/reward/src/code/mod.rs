//! Programs, right where they pass tests, which run in a sandbox.
//!
//! A test is for itself: it starts the program afresh. Whatever the program does (it hangs, floods, forks,
//! ends its own process) costs the attempt its score and nothing else; a sandbox that fails is an outage, and
//! never a score of 0.

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

use crate::answer::in_tag;
use crate::{Component, Evidence, ScoreError, Scorer, blocks};
use case::Case;
use compare::Tolerance;

/// `kind = "code"`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CodeKeys {
    /// Field of a task or its row that has the tests; where there is none, the expected answer has them.
    pub tests: String,
    /// Language of the program. This machine's sandbox knows `python` and `bash`; a service may know more.
    /// Tests that are code themselves are Python.
    pub language: String,
    /// Worth of a program that passes some of the tests.
    pub value: Passing,
    /// Most tests that are run, the first ones; all where 0.
    pub most_tests: usize,
    /// Longest time of a test, in seconds.
    pub seconds: f64,
    /// Most memory of a test's processes, in MiB.
    pub memory_mb: u64,
    /// Difference that a number may have from an expected one with a decimal point or an exponent. An integer
    /// that is expected is met exactly.
    pub tolerance: f64,
    /// The same difference, relative to the expected number; the larger of both counts. 0 for none.
    pub relative_tolerance: f64,
    /// Protection without which nothing runs.
    pub protection: Walls,
    /// The interpreter: a name, a file, or the folder of a virtual environment.
    pub python: String,
    /// Modules that are loaded before any program runs.
    pub preload: Vec<String>,
    /// Most tests that run at once, of all attempts; one on each core where 0.
    pub concurrency: usize,
    /// A service of SandboxFusion's API, in place of this machine.
    pub url: Option<String>,
    /// Environment variable with the key of that service.
    pub key_env: Option<String>,
}

impl Default for CodeKeys {
    fn default() -> Self {
        CodeKeys {
            tests: "tests".into(),
            language: PYTHON.into(),
            value: Passing::default(),
            most_tests: 0,
            seconds: 10.0,
            memory_mb: 1024,
            tolerance: 1e-6,
            relative_tolerance: 0.0,
            protection: Walls::default(),
            python: "python3".into(),
            preload: Vec::new(),
            concurrency: 0,
            url: None,
            key_env: None,
        }
    }
}

const PYTHON: &str = "python";

/// Worth of a program that passes some tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Passing {
    /// 1 where all tests pass, else 0. The first that does not is the last one that runs.
    #[default]
    All,
    /// The share of tests that pass.
    Share,
}

/// Protection that programs run behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Walls {
    /// All walls of the sandbox.
    #[default]
    Full,
    /// Walls that the kernel has, however few.
    BestEffort,
}

/// A program to run once.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    /// Language of the code, by its name in the recipe.
    pub language: String,
    /// Source code.
    pub code: String,
    /// Standard input.
    pub stdin: String,
    /// Bytes of standard output that must be kept of it.
    pub output_bytes: usize,
}

/// Result of a program.
#[derive(Debug, Clone, PartialEq)]
pub struct Ran {
    /// Standard output, of a longer one the beginning and the end.
    pub stdout: String,
    /// Whether that is all of it.
    pub is_whole: bool,
    /// Way in which it ended.
    pub end: ProgramEnd,
}

/// Way in which a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramEnd {
    /// By itself, with this exit code; signals are below 0.
    Exit(i32),
    /// At its deadline.
    TimeLimit,
    /// Because it held too much memory.
    MemoryLimit,
}

/// Runs programs that nobody trusts, within the limits of the scorer's keys.
#[async_trait]
pub trait Runner: Debug + Send + Sync {
    /// Starts whatever programs need.
    ///
    /// # Errors
    /// When none could be run.
    async fn ready(&self) -> Result<(), ScoreError>;

    /// Runs a program to its end. Whatever it does is no error.
    ///
    /// # Errors
    /// [`ScoreError::Unavailable`] where it was not run, but may be later; [`ScoreError::Unusable`] where it
    /// cannot be.
    async fn run(&self, program: &Program) -> Result<Ran, ScoreError>;
}

/// The scorer with the sandbox that runs its tests.
#[derive(Debug)]
pub struct CodeScorer {
    keys: CodeKeys,
    runner: Arc<dyn Runner>,
    /// Validations of tests that are code, by the hash of the code.
    checks: Mutex<HashMap<u64, Arc<TestCheck>>>,
}

/// Validation of a test that is code, once it has run: the reason why the test is unusable, or `None`.
type TestCheck = OnceCell<Option<String>>;

/// Maximum number of validations that are kept; when it is reached, all are dropped.
const MAX_CHECKS: usize = 1 << 14;

/// Name of the component that is the share of tests that passed.
const PASSED: &str = "passed";
/// Name of the component that says whether a limit of time or memory was met.
const LIMITED: &str = "limited";

/// Least output that is kept of a test, in bytes.
const OUTPUT: usize = 64 << 10;

/// Word by which the runner says that the tests, and not the program, are at fault.
const UNUSABLE: &str = "unusable";

const RUNNER: &str = include_str!("runner.py");

impl CodeKeys {
    pub(crate) fn check(&self) -> Result<(), ScoreError> {
        let refuse = |what: String| Err(ScoreError::Unusable(what));
        if !(self.seconds > 0.0 && self.seconds <= 86_400.0) {
            return refuse(format!("seconds = {}, but it must be above 0 and at most 86400", self.seconds));
        }
        if !(32..=1 << 24).contains(&self.memory_mb) {
            return refuse(format!("memory_mb = {}, but it must be in 32..={}", self.memory_mb, 1 << 24));
        }
        let tolerances = [("tolerance", self.tolerance), ("relative_tolerance", self.relative_tolerance)];
        if let Some((name, value)) = tolerances.iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
            return refuse(format!("{name} = {value}, but it must be in 0..1"));
        }
        let known = [PYTHON, "bash"];
        match &self.url {
            Some(url) if !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme)) => {
                refuse(format!("url = {url:?}, but it must begin with http:// or https://"))
            }
            None if !known.contains(&&*self.language) => refuse(format!(
                "language = {:?}, but the sandbox of this machine runs {}: give the `url` of a service that knows it",
                self.language,
                known.join(" and ")
            )),
            _ => Ok(()),
        }
    }
}

impl CodeScorer {
    /// A scorer whose tests run there.
    pub fn new(keys: CodeKeys, runner: Arc<dyn Runner>) -> Arc<Self> {
        Arc::new(CodeScorer { keys, runner, checks: Mutex::default() })
    }

    fn cases(&self, task: &Value) -> Result<Vec<Case>, ScoreError> {
        let mut cases = case::of(task, &self.keys.tests).map_err(ScoreError::Unusable)?;
        if self.keys.most_tests > 0 {
            cases.truncate(self.keys.most_tests);
        }
        let prints = |case: &Case| matches!(case, Case::Prints { .. });
        if self.keys.language != PYTHON && !cases.iter().all(prints) {
            return Err(ScoreError::Unusable(format!(
                "a test of the task is code in Python, but programs are in {}: give inputs and outputs",
                self.keys.language
            )));
        }
        Ok(cases)
    }

    /// Validates a test that is code: it must fail without a program, and with one whose functions do
    /// nothing. Concurrent attempts share one validation, and later attempts use its result.
    ///
    /// # Errors
    /// Returns [`ScoreError::Unusable`] if the test passes nevertheless, or cannot be run.
    async fn check_test(&self, case: &Case) -> Result<(), ScoreError> {
        let Case::Asserts { code, start } = case else { return Ok(()) };
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
            let mut test = asserted(code, start.as_ref());
            test["control"] = true.into();
            let ran = self.runner.run(&order(test, "", token, OUTPUT)).await?;
            Ok::<_, ScoreError>(unusable(&ran, token))
        };
        check.get_or_try_init(run).await?.clone().map_or(Ok(()), |why| Err(ScoreError::Unusable(why)))
    }

    /// Runs a test; `token` is what nobody else knows.
    async fn passes(&self, code: &str, case: &Case, token: &str) -> Result<(bool, ProgramEnd), ScoreError> {
        let program = match case {
            Case::Prints { input, output } => Program {
                language: self.keys.language.clone(),
                code: if self.keys.language == PYTHON { limited(code) } else { code.to_owned() },
                stdin: input.clone(),
                output_bytes: OUTPUT.max(2 * output.len()),
            },
            Case::Asserts { code: tests, start } => {
                order(asserted(tests, start.as_ref()), code, token, OUTPUT)
            }
            Case::Returns { function, arguments, values } => {
                // Half of the output is its end, and escapes take up to three times as many bytes.
                let longest = values.iter().map(|value| value.to_string().len()).max().unwrap_or(0);
                let test = json!({ "function": function, "arguments": arguments });
                order(test, code, token, OUTPUT.max(8 * longest))
            }
        };
        let ran = self.runner.run(&program).await?;
        if let Some(why) = unusable(&ran, token) {
            return Err(ScoreError::Unusable(why));
        }
        let Ran { stdout, is_whole, end } = ran;
        let tolerance = Tolerance { absolute: self.keys.tolerance, relative: self.keys.relative_tolerance };
        let passed = end == ProgramEnd::Exit(0)
            && match case {
                Case::Prints { output, .. } => is_whole && compare::same_output(&stdout, output, tolerance),
                Case::Asserts { .. } => stdout.trim_end().ends_with(token),
                Case::Returns { values, .. } => returned(&stdout, token).is_some_and(|found| {
                    values.iter().any(|want| compare::same_value(&found, want, tolerance))
                }),
            };
        Ok((passed, end))
    }
}

/// Returns what the runner gets to test a program by code.
fn asserted(code: &str, start: Option<&(String, String)>) -> Value {
    let mut test = json!({ "asserts": code });
    if let Some((start, entry)) = start {
        (test["start"], test["entry"]) = (start.as_str().into(), entry.as_str().into());
    }
    test
}

/// Creates the order to run the runner on a program and its test.
fn order(mut test: Value, code: &str, token: &str, output_bytes: usize) -> Program {
    test["program"] = code.into();
    test["sign"] = format!("end of {token}").into();
    Program {
        language: PYTHON.into(),
        code: RUNNER.to_owned(),
        stdin: format!("{test}\n{}\n", json!({ "token": token })),
        output_bytes,
    }
}

/// Returns why the tests are at fault, if the runner says that they are.
fn unusable(ran: &Ran, token: &str) -> Option<String> {
    let (_, why) = ran.stdout.split_once(&format!("{token} {UNUSABLE} "))?;
    Some(format!("the tests of the task cannot be used: {}", why.lines().next().unwrap_or_default()))
}

/// Returns the value that the runner prints after the token.
fn returned(stdout: &str, token: &str) -> Option<Value> {
    let (_, after) = stdout.rsplit_once(token)?;
    crate::json::parse(after.lines().next()?).ok()
}

/// Returns a program of Python with the limits of LiveCodeBench's harness: integers of 50,000 digits are read
/// and printed, and functions call each other 50,000 deep.
fn limited(code: &str) -> String {
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
        self.cases(task).map(drop)
    }

    async fn check_ready(&self, task: &Value) -> Result<(), ScoreError> {
        self.runner.ready().await?;
        // Tests that are code say only in the sandbox that they cannot be used.
        let cases = self.cases(task).unwrap_or_default();
        match cases.iter().find(|case| matches!(case, Case::Asserts { .. })) {
            Some(case) => self.check_test(case).await,
            None => Ok(()),
        }
    }

    async fn score(&self, evidence: &Evidence) -> Result<Vec<Component>, ScoreError> {
        let cases = self.cases(&evidence.task)?;
        let code = program_in(evidence.text(), &self.keys.language).filter(|_| evidence.is_answered());
        let (mut passed, mut limited) = (0, false);
        for (number, case) in cases.iter().enumerate() {
            let Some(code) = &code else { break };
            self.check_test(case).await?;
            let token = format!("passed {} {number}", evidence.attempt);
            let (ok, end) = self.passes(code, case, &token).await?;
            passed += usize::from(ok);
            limited = !matches!(end, ProgramEnd::Exit(_));
            // A program that hangs once would do so in every test.
            if limited || (!ok && self.keys.value == Passing::All) {
                break;
            }
        }
        let share = passed as f64 / cases.len() as f64;
        let value = match self.keys.value {
            Passing::Share => share,
            Passing::All => f64::from(u8::from(passed == cases.len())),
        };
        let score = Component { extracted: code.map(Cow::into_owned), ..Component::score(value) };
        let limited = Component::new(LIMITED, f64::from(u8::from(limited)));
        Ok(vec![score, Component::new(PASSED, share), limited])
    }
}

/// Returns the program in a text, or in its `<answer>`: the last block of code in its language, or all of it.
fn program_in<'t>(text: &'t str, language: &str) -> Option<Cow<'t, str>> {
    let names: &[&str] = match language {
        "python" => &["python", "py", "python3"],
        "bash" => &["bash", "sh", "shell"],
        other => &[other],
    };
    let answer = in_tag(text, "answer").unwrap_or(text);
    let code = match blocks::has_fence(answer) && !is_bare_python(answer, language) {
        true => blocks::last_in(answer, names),
        false => Some(answer.into()),
    };
    code.filter(|code| !code.trim().is_empty())
}

/// Returns whether a text is a program of Python without a fence around it, which may have backticks in its
/// texts.
fn is_bare_python(text: &str, language: &str) -> bool {
    let first = text.trim_start().lines().next().unwrap_or_default();
    let begins =
        ["import ", "def ", "class ", "async def ", "@", "#!"].iter().any(|word| first.starts_with(word))
            || (first.starts_with("from ") && first.contains(" import "));
    // In a program by itself, fences stand within texts of its functions.
    let is_fence = |line: &str| ["```", "~~~"].iter().any(|fence| line.starts_with(fence));
    language == PYTHON && begins && !text.lines().any(is_fence)
}

#[cfg(test)]
mod tests;
