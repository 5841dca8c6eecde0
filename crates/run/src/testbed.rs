//! Runners of programs that models wrote: a sandbox of this process, or a service with
//! SandboxFusion's API.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use levade_reward::{
    CodeKeys, CodeScorer, Isolation, Program, ProgramEnd, ProgramResult, Runner, ScoreError, Scorer,
};
use levade_sandbox::service::{CodeResponse, CommandStatus, RunCode};
use levade_sandbox::{
    Demand, EndReason, Language, Limits, Options, Outcome, Remote, Run, Sandbox, SandboxError,
};
use tokio::sync::OnceCell;

/// Creates the scorer of programs with these keys. The scorer's sandbox starts when it is first
/// used.
///
/// # Errors
/// Returns an error if an API key is not set, or if the address of a service is invalid.
pub fn create_code_scorer(keys: &CodeKeys) -> Result<Arc<dyn Scorer>, String> {
    let runner: Arc<dyn Runner> = match &keys.url {
        Some(url) => Arc::new(RemoteRunner::new(keys, url)?),
        None => Arc::new(LocalRunner {
            options: sandbox_options(keys),
            limits: program_limits(keys),
            started: OnceCell::new(),
        }),
    };
    Ok(CodeScorer::new(keys.clone(), runner))
}

fn sandbox_options(keys: &CodeKeys) -> Options {
    let mut options = Options {
        python: (&keys.python).into(),
        preload: keys.preload.clone(),
        protection: match keys.protection {
            Isolation::Full => Demand::Full,
            Isolation::BestEffort => Demand::BestEffort,
        },
        // Never reject an attempt's program because the queue is full.
        waiting: usize::MAX,
        ..Options::default()
    };
    if keys.concurrency > 0 {
        options.concurrency = keys.concurrency;
    }
    options
}

fn program_limits(keys: &CodeKeys) -> Limits {
    Limits { seconds: keys.seconds, memory_mb: keys.memory_mb, ..Limits::default() }
}

/// Converts an error of a sandbox into an error of a scorer.
fn to_score_error(error: &SandboxError) -> ScoreError {
    match error {
        SandboxError::Busy { .. } | SandboxError::Sessions { .. } | SandboxError::Broken(_) => {
            ScoreError::Unavailable(error.to_string())
        }
        _ => ScoreError::Unusable(error.to_string()),
    }
}

/// Runner of tests in a sandbox of this process.
#[derive(Debug)]
struct LocalRunner {
    options: Options,
    limits: Limits,
    started: OnceCell<Sandbox>,
}

impl LocalRunner {
    async fn sandbox(&self) -> Result<&Sandbox, ScoreError> {
        let start = || Sandbox::start(self.options.clone());
        self.started.get_or_try_init(start).await.map_err(|error| to_score_error(&error))
    }
}

#[async_trait]
impl Runner for LocalRunner {
    async fn ready(&self) -> Result<(), ScoreError> {
        self.sandbox().await.map(drop)
    }

    async fn run(&self, program: &Program) -> Result<ProgramResult, ScoreError> {
        let Program { language, code, stdin, output_bytes } = program;
        let language = Language::from_name(language).ok_or_else(|| {
            ScoreError::Unusable(format!("the sandbox does not support the language {language}"))
        })?;
        let mut run = Run::new(language, code.as_str());
        run.stdin = stdin.clone().into_bytes();
        run.limits = Limits { output_bytes: *output_bytes, ..self.limits };
        let Outcome { ended, stdout, .. } =
            self.sandbox().await?.run(&run).await.map_err(|error| to_score_error(&error))?;
        let end = match ended {
            EndReason::Exit(code) => ProgramEnd::Exit(code),
            EndReason::Signal(signal) => ProgramEnd::Exit(-signal),
            EndReason::TimeLimit => ProgramEnd::TimeLimit,
            EndReason::MemoryLimit => ProgramEnd::MemoryLimit,
        };
        Ok(ProgramResult { stdout: stdout.text(), is_complete: stdout.omitted_bytes() == 0, end })
    }
}

/// Runner of tests at a sandbox service.
#[derive(Debug)]
struct RemoteRunner {
    service: Remote,
    limits: Limits,
    /// Permits for concurrent requests.
    permits: tokio::sync::Semaphore,
}

/// Maximum number of concurrent requests to a sandbox service if the recipe does not set it.
const REQUESTS: usize = 32;

impl RemoteRunner {
    fn new(keys: &CodeKeys, url: &str) -> Result<Self, String> {
        let key = keys.key_env.as_ref().map(|name| {
            let key = std::env::var(name).ok().filter(|key| !key.is_empty());
            key.ok_or_else(|| {
                format!(
                    "key_env is {name:?}, but this environment variable contains no key; set it"
                )
            })
        });
        let service = Remote::new(url, key.transpose()?).map_err(|error| error.to_string())?;
        let permits = if keys.concurrency > 0 { keys.concurrency } else { REQUESTS };
        Ok(RemoteRunner {
            service,
            limits: program_limits(keys),
            permits: tokio::sync::Semaphore::new(permits),
        })
    }
}

#[async_trait]
impl Runner for RemoteRunner {
    async fn ready(&self) -> Result<(), ScoreError> {
        let language = "bash".to_owned();
        let code = "true".to_owned();
        self.run(&Program { language, code, stdin: String::new(), output_bytes: 0 }).await.map(drop)
    }

    async fn run(&self, program: &Program) -> Result<ProgramResult, ScoreError> {
        let Program { language, code, stdin, .. } = program.clone();
        let request = RunCode {
            code,
            language,
            run_timeout: self.limits.seconds,
            compile_timeout: self.limits.seconds.max(30.0),
            memory_limit_mb: self.limits.memory_mb as i64,
            stdin: Some(stdin),
            files: BTreeMap::new(),
            fetch_files: Vec::new(),
        };
        let closed = |_| ScoreError::Unavailable("the sandbox is closed".into());
        let _permit = self.permits.acquire().await.map_err(closed)?;
        let response =
            self.service.run_code(&request).await.map_err(|error| to_score_error(&error))?;
        Ok(to_program_result(response))
    }
}

/// Converts a response of a sandbox service into the result of a program. If the program did not
/// compile, the result is the result of the compiler.
fn to_program_result(response: CodeResponse) -> ProgramResult {
    let compiled = response.compile_result.filter(|_| response.run_result.is_none());
    let Some(result) = response.run_result.or(compiled) else {
        return ProgramResult {
            stdout: String::new(),
            is_complete: true,
            end: ProgramEnd::Exit(1),
        };
    };
    let end = match (result.status, result.return_code) {
        (CommandStatus::TimeLimitExceeded, _) => ProgramEnd::TimeLimit,
        (CommandStatus::Finished, code) => ProgramEnd::Exit(code.unwrap_or(1)),
        (CommandStatus::Error, code) => {
            ProgramEnd::Exit(code.filter(|code| *code != 0).unwrap_or(1))
        }
    };
    ProgramResult { stdout: result.stdout.unwrap_or_default(), is_complete: true, end }
}

#[cfg(test)]
#[path = "testbed_tests.rs"]
mod tests;
