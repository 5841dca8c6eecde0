//! Phases that improve a system prompt.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use levade_agent::Teacher;
use levade_policy::Simulator;
use levade_recipe::{PromptTarget, Recipe, ToolTarget};
use levade_reward::{ScoreError, Scorer, ScorerInput};
use levade_store::testing::wait;
use levade_store::{Attempt, Sqlite, Status, Store};
use levade_text::Message;
use levade_tools::Calculator;
use levade_trainer::{
    Event, Observer, RunEnd, RunParts, StartMode, StopFlag, Trainer, TrainerError, checkpoints,
    improved_prompts,
};
use levade_tree::{Component, Kind, Purpose, Trajectory};
use serde_json::Value;

use crate::common::{metrics, parts, recipe, simulator};

/// A prompt phase with an external editor, then a step of reinforcement learning.
const IMPROVED: [&str; 5] = [
    "policy.default={kind='trained'}",
    "policy.editor={kind='external', url='http://127.0.0.1:9/v1', model='m'}",
    "phase=[{kind='prompt', editor='editor', rounds=3, beam_width=2, branch_factor=2, \
      gradient_tasks=2, selection_tasks=4, candidates=['Think.']}, \
      {kind='rl', steps=1, groups=2, group_size=2, learning_rate=0.05}]",
    "eval.tasks=2",
    "agent.max_tokens=40",
];

/// Returns the text of the first prompt of an attempt. The tokens of the tiny tokenizer are bytes.
fn prompt_text(trajectory: &Trajectory) -> String {
    let contexts = trajectory.segments().iter().take_while(|segment| segment.kind == Kind::Context);
    let tokens = contexts.flat_map(|segment| segment.tokens.iter());
    let bytes: Vec<u8> = tokens.filter_map(|token| u8::try_from(*token).ok()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Scores an attempt by the number of rules in its system prompt; three are enough.
#[derive(Debug)]
struct RuleScorer;

#[async_trait]
impl Scorer for RuleScorer {
    async fn score(&self, input: &ScorerInput) -> Result<Vec<Component>, ScoreError> {
        let rules = prompt_text(&input.trajectory).matches("RULE").count();
        Ok(vec![Component::score((rules as f64 / 3.0).min(1.0))])
    }
}

/// An editor that adds one rule or two, by the kind of its instruction.
fn editor(num_requests: &Arc<AtomicUsize>) -> Teacher {
    editor_with(num_requests, |_, _| Ok(()))
}

/// The same editor, with a function of the request and its number that can fail.
fn editor_with(
    num_requests: &Arc<AtomicUsize>,
    admit: impl Fn(&str, usize) -> Result<(), String> + Send + Sync + 'static,
) -> Teacher {
    let num_requests = Arc::clone(num_requests);
    Teacher::from_rule(move |messages| {
        let request = messages[0].content.as_str().to_owned();
        admit(&request, num_requests.fetch_add(1, Ordering::Relaxed))?;
        if !request.contains("# Advice") {
            assert!(request.contains("## Attempt 2\n\nTask: ") && request.contains("Score: "));
            return Ok(Message::assistant("Add a rule."));
        }
        let (_, titled) = request.split_once("\n\n# ").unwrap();
        let (title, rest) = titled.split_once("\n\n").unwrap();
        assert!(
            ["System prompt", "Description of the tool `calculator`"].contains(&title),
            "{request}"
        );
        let (prompt, rest) = rest.split_once("\n\n# Advice\n\n").unwrap();
        assert!(rest.starts_with("Add a rule."), "{rest}");
        let rules = if request.contains("one change") { "RULE" } else { "RULE RULE" };
        Ok(Message::assistant(format!("Here it is: <prompt>{prompt} {rules}</prompt>")))
    })
}

async fn run(
    dir: &Path,
    policy: &Arc<Simulator>,
    editor: Teacher,
    start: StartMode,
    with: (&[&str], &StopFlag),
) -> Result<RunEnd, TrainerError> {
    run_to((2, 1), dir, policy, editor, start, with).await
}

/// Runs the recipe, and stops the run after a step, given by its phase and its number from 1.
async fn run_to(
    last: (usize, u32),
    dir: &Path,
    policy: &Arc<Simulator>,
    editor: Teacher,
    start: StartMode,
    (overrides, stop): (&[&str], &StopFlag),
) -> Result<RunEnd, TrainerError> {
    let scorer: Arc<dyn Scorer> = Arc::new(RuleScorer);
    let parts = RunParts {
        teachers: BTreeMap::from([("editor".to_owned(), editor)]),
        scorers: BTreeMap::from([("numeric".to_owned(), scorer)]),
        ..parts(policy, Duration::ZERO)
    };
    let overrides = [&IMPROVED[..], overrides].concat();
    let mut observer = StopAtStep { last, stop: stop.clone() };
    Trainer::new(recipe(dir, &overrides), parts, start).await?.run(&mut observer, stop).await
}

/// Stops the run after a step, given by its phase and its number from 1.
struct StopAtStep {
    last: (usize, u32),
    stop: StopFlag,
}

impl Observer for StopAtStep {
    fn event(&mut self, event: &Event) {
        if matches!(event, Event::Step { phase, step, .. } if (*phase, *step) == self.last) {
            self.stop.stop();
        }
    }
}

fn attempts(dir: &Path, purpose: Purpose) -> Vec<Attempt> {
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let summaries = wait(store.summaries(purpose)).unwrap();
    summaries.iter().map(|summary| wait(store.attempt(&summary.id)).unwrap().unwrap()).collect()
}

fn pool(dir: &Path) -> Value {
    pool_of(dir, 0)
}

/// Returns the prompts of a phase.
fn pool_of(dir: &Path, phase: usize) -> Value {
    let text = std::fs::read_to_string(dir.join(format!("prompts/phase-{phase}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Returns the prompt with which a phase started.
fn start_prompt(pool: &Value) -> &str {
    let prompts = pool["prompts"].as_array().unwrap();
    prompts.iter().find(|prompt| prompt["version"] == 0).unwrap()["text"].as_str().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_phase_finds_better_prompt_and_later_phases_use_it() {
    for algorithm in ["apo", "gepa"] {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("run");
        let num_requests = Arc::new(AtomicUsize::new(0));
        let policy = simulator(Duration::ZERO, 0.0);
        let set = format!("phase.0.algorithm={algorithm}");
        let with = (&[set.as_str()][..], &StopFlag::default());
        run(&dir, &policy, editor(&num_requests), StartMode::Fresh, with).await.unwrap();

        let pool = pool(&dir);
        let best = &pool["prompts"][0];
        assert_eq!(best["score"], 1.0, "{algorithm}: {pool:#}");
        assert!(best["parent"].is_u64());
        let text = best["text"].as_str().unwrap();
        assert!(text.starts_with("Use the tool.") || text.starts_with("Think."), "{text}");

        // Every attempt of the last phase and of the evaluations after the search has the prompt.
        let trained = attempts(&dir, Purpose::Train);
        assert_eq!(trained.len(), 4);
        assert!(trained.iter().all(|attempt| prompt_text(&attempt.trajectory).contains(text)));
        assert!(trained.iter().all(|attempt| attempt.score == Some(1.0)));
        let evals = attempts(&dir, Purpose::Eval);
        let last = evals.iter().filter(|attempt| attempt.slot.phase == 1 && attempt.slot.step == 1);
        assert!(last.clone().count() > 0);
        assert!(last.clone().all(|attempt| prompt_text(&attempt.trajectory).contains(text)));
        assert!(evals.iter().any(|attempt| !prompt_text(&attempt.trajectory).contains("RULE")));

        // Critiques and new prompts are in the record, and nothing of the search is trained on.
        let made = attempts(&dir, Purpose::Prompt);
        let edits = made.iter().filter(|attempt| attempt.outcome.final_text.contains("<prompt>"));
        let critiques = made.iter().filter(|attempt| attempt.outcome.final_text == "Add a rule.");
        assert_eq!(edits.count() + critiques.count(), num_requests.load(Ordering::Relaxed));
        assert!(made.iter().all(|attempt| attempt.status == Status::Completed));
        let lines = metrics(&dir);
        let steps: Vec<&Value> = lines.iter().filter(|line| line["kind"] == algorithm).collect();
        assert_eq!(steps.len(), 4, "the given prompts, then three rounds");
        assert_eq!(steps[0]["prompt/candidates"], 2.0);
        assert_eq!(steps[3]["prompt/score/max"], 1.0);
    }
}

/// Adds a phase that imitates completions without the prompt that they were sampled with.
const BAKED: &str = "phase=[{kind='prompt', editor='editor', rounds=3, beam_width=2, \
    branch_factor=2, gradient_tasks=2, selection_tasks=4}, \
    {kind='rl', steps=1, groups=2, group_size=2, learning_rate=0.05}, \
    {kind='sft', source={policy='default', tasks=64}, system='', demonstrations=4, batch=2, epochs=1, \
    learning_rate=0.05}]";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completions_of_own_policy_are_imitated_without_their_prompt() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let num_requests = Arc::new(AtomicUsize::new(0));
    let mut start = StartMode::Fresh;
    for is_last in [false, true] {
        // The run stops after the first of two steps of the last phase.
        let (stop, editor) = (StopFlag::default(), editor(&num_requests));
        let ended = run(&dir, &policy, editor, start, (&[BAKED], &stop)).await.unwrap();
        assert_eq!(matches!(ended, RunEnd::Finished(_)), is_last);
        start = StartMode::Resume;
    }

    let of_phase = attempts(&dir, Purpose::Demonstration);
    let of_phase = of_phase.iter().filter(|attempt| attempt.slot.phase == 2);
    let (sampled, imitated): (Vec<_>, Vec<_>) = of_phase.partition(|a| a.slot.step == 0);
    assert_eq!(imitated.len(), 4);
    for imitated in &imitated {
        let sampled =
            sampled.iter().find(|attempt| attempt.slot.group == imitated.slot.group).unwrap();
        assert_eq!(sampled.score, Some(1.0));
        let [from, to] = [sampled, imitated].map(|attempt| attempt.trajectory.segments());
        assert!(prompt_text(&sampled.trajectory).contains("RULE"));
        let shown = prompt_text(&imitated.trajectory);
        assert!(!shown.contains("RULE"), "{shown}");
        assert!(to[0].tokens.len() < from[0].tokens.len());
        assert_eq!(from.len(), to.len());
        for (from, to) in from.iter().zip(to).skip(1) {
            assert_eq!(
                (&from.tokens, from.parent, &from.agent),
                (&to.tokens, to.parent, &to.agent)
            );
            assert_ne!(to.kind, Kind::Sampled);
            assert_eq!(from.kind == Kind::Sampled, to.kind == Kind::Demonstrated);
        }
    }
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let plans = [0, 1].map(|step| wait(store.step_plan(2, step)).unwrap().unwrap());
    let planned: BTreeSet<_> =
        plans.iter().flat_map(|plan| plan.sequences()).map(|sequence| sequence.attempt).collect();
    assert_eq!(planned, imitated.iter().map(|attempt| attempt.id).collect());

    // From the first step of the phase on, the agent has the other prompt.
    let checkpoints = checkpoints(&dir).unwrap();
    let prompt = improved_prompts(&checkpoints.last().unwrap().dir).unwrap();
    assert_eq!(prompt.get("default", &PromptTarget::System).unwrap().text, "");
    let evals = attempts(&dir, Purpose::Eval);
    let last = evals.iter().filter(|attempt| attempt.slot.phase == 2 && attempt.slot.step == 2);
    assert!(last.clone().count() > 0);
    assert!(last.clone().all(|attempt| !prompt_text(&attempt.trajectory).contains("RULE")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resumed_prompt_phase_repeats_no_request_and_ends_the_same() {
    let root = tempfile::tempdir().unwrap();
    let whole = root.path().join("whole");
    let num_requests = Arc::new(AtomicUsize::new(0));
    let policy = simulator(Duration::ZERO, 0.0);
    let never = StopFlag::default();
    run(&whole, &policy, editor(&num_requests), StartMode::Fresh, (&[], &never)).await.unwrap();
    let (weights, all) = (policy.weights(), num_requests.load(Ordering::Relaxed));

    // Stops in the middle of the requests of each round in turn.
    let interrupted = root.path().join("interrupted");
    let num_requests = Arc::new(AtomicUsize::new(0));
    let policy = simulator(Duration::ZERO, 0.0);
    let mut start = StartMode::Fresh;
    for stop_at in [3, 9, 14, usize::MAX] {
        let stop = StopFlag::default();
        let stopped = stop.clone();
        let stopping = editor_with(&num_requests, move |_, number| {
            if number >= stop_at {
                stopped.stop();
            }
            Ok(())
        });
        let ended = run(&interrupted, &policy, stopping, start, (&[], &stop)).await.unwrap();
        assert_eq!(matches!(ended, RunEnd::Finished(_)), stop_at == usize::MAX);
        start = StartMode::Resume;
    }
    assert_eq!(pool(&interrupted), pool(&whole));
    assert_eq!(policy.weights(), weights);
    // Requests that were in progress when the run stopped are made again; there were at most four
    // of them at each of the three stops.
    let requests = num_requests.load(Ordering::Relaxed);
    assert!((all..=all + 12).contains(&requests), "{requests} of {all}");
    let recorded = attempts(&interrupted, Purpose::Prompt);
    let mut slots: Vec<_> = recorded.iter().map(|attempt| attempt.slot).collect();
    slots.dedup();
    assert_eq!(slots.len(), attempts(&whole, Purpose::Prompt).len());
}

/// Two prompt phases, one after the other.
const TWICE: &str = "phase=[{kind='prompt', editor='editor', rounds=1, beam_width=2, \
    branch_factor=2, gradient_tasks=2, selection_tasks=4}, {kind='prompt', editor='editor', \
    rounds=2, beam_width=2, branch_factor=2, gradient_tasks=2, selection_tasks=4}]";

/// A run that is stopped between two prompt phases, or within the second one when that phase
/// already has a better prompt, ends like an uninterrupted run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_phase_starts_from_prompt_of_earlier_phase() {
    let root = tempfile::tempdir().unwrap();
    let policy = simulator(Duration::ZERO, 0.0);
    let num_requests = Arc::new(AtomicUsize::new(0));
    let uninterrupted = root.path().join("uninterrupted");
    let never = StopFlag::default();
    let with = (&[TWICE][..], &never);
    run(&uninterrupted, &policy, editor(&num_requests), StartMode::Fresh, with).await.unwrap();
    let [first, second] = [0, 1].map(|phase| pool_of(&uninterrupted, phase));
    let best = first["prompts"][0]["text"].as_str().unwrap();
    assert!(best.starts_with("Use the tool.") && best.contains("RULE"), "{first:#}");
    assert_eq!(start_prompt(&first), "Use the tool.");
    assert_eq!(start_prompt(&second), best);
    // The prompt was scored, and later prompts are rewritten from it.
    let started = attempts(&uninterrupted, Purpose::Prompt);
    let mut started =
        started.iter().filter(|attempt| (attempt.slot.phase, attempt.slot.step) == (1, 0));
    assert!(started.clone().count() > 0);
    assert!(started.all(|attempt| prompt_text(&attempt.trajectory).contains(best)));
    let prompts = second["prompts"].as_array().unwrap();
    assert!(prompts.len() > 1);
    assert!(prompts.iter().all(|prompt| prompt["text"].as_str().unwrap().starts_with(best)));

    let interrupted = root.path().join("interrupted");
    let policy = simulator(Duration::ZERO, 0.0);
    let mut start = StartMode::Fresh;
    for last in [Some((0, 2)), Some((1, 1)), Some((1, 2)), None] {
        let (stop, editor) = (StopFlag::default(), editor(&num_requests));
        let with = (&[TWICE][..], &stop);
        let last_step = last.unwrap_or((9, 9));
        let ended = run_to(last_step, &interrupted, &policy, editor, start, with).await.unwrap();
        assert_eq!(matches!(ended, RunEnd::Finished(_)), last.is_none(), "{last:?}");
        start = StartMode::Resume;
    }
    for phase in [0, 1] {
        assert_eq!(pool_of(&interrupted, phase), pool_of(&uninterrupted, phase));
    }
}

/// A phase that improves the description of a tool, one that improves the system prompt, and a step
/// of reinforcement learning.
const TOOL_THEN_SYSTEM: &str = "phase=[{kind='prompt', editor='editor', rounds=3, beam_width=2, \
    branch_factor=2, gradient_tasks=2, selection_tasks=4, candidates=['Computes.'], \
    target={kind='tool', name='calculator'}}, {kind='prompt', editor='editor', rounds=1, \
    beam_width=1, branch_factor=1, gradient_tasks=2, selection_tasks=4}, \
    {kind='rl', steps=1, groups=2, group_size=2, learning_rate=0.05}]";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tool_description_is_improved_and_used_by_later_phases_and_resumed_runs() {
    let root = tempfile::tempdir().unwrap();
    let target =
        PromptTarget::Tool(ToolTarget { name: "calculator".into(), parameter: String::new() });
    let mut pools = Vec::new();
    for stops in [vec![], vec![(0, 2), (0, 4), (1, 1)]] {
        let dir = root.path().join(format!("{} stops", stops.len()));
        let policy = simulator(Duration::ZERO, 0.0);
        let num_requests = Arc::new(AtomicUsize::new(0));
        let mut start = StartMode::Fresh;
        for last in stops.into_iter().chain([(9, 9)]) {
            let (stop, editor) = (StopFlag::default(), editor(&num_requests));
            let with = (&[TOOL_THEN_SYSTEM][..], &stop);
            run_to(last, &dir, &policy, editor, start, with).await.unwrap();
            start = StartMode::Resume;
        }
        let [tool, system] = [0, 1].map(|phase| pool_of(&dir, phase));
        assert_eq!(tool["target"]["tool"]["name"], "calculator");
        assert_eq!(system["target"], "system");
        assert_eq!(start_prompt(&tool), Calculator::spec().description);
        assert_eq!(start_prompt(&system), "Use the tool.");
        let (best, system_best) = (&tool["prompts"][0], &system["prompts"][0]["text"]);
        let text = best["text"].as_str().unwrap();
        assert!(best["score"] == 1.0 && text.matches("RULE").count() >= 3, "{tool:#}");

        // Later attempts read the best description, and the prompt of the second phase with it.
        let trained = attempts(&dir, Purpose::Train);
        assert_eq!(trained.len(), 4);
        for attempt in &trained {
            let shown = prompt_text(&attempt.trajectory);
            assert!(
                shown.contains(text) && shown.contains(system_best.as_str().unwrap()),
                "{shown}"
            );
            assert!(!shown.contains(&Calculator::spec().description) || text.starts_with("Eval"));
        }
        let evals = attempts(&dir, Purpose::Eval);
        let mut last = evals.iter().filter(|attempt| attempt.slot.phase == 2);
        assert!(last.all(|attempt| prompt_text(&attempt.trajectory).contains(text)));
        assert!(evals.iter().any(|attempt| !prompt_text(&attempt.trajectory).contains("RULE")));

        let checkpoint = checkpoints(&dir).unwrap().pop().unwrap();
        let prompts = improved_prompts(&checkpoint.dir).unwrap();
        assert_eq!(prompts.iter().count(), 2);
        assert_eq!(prompts.get("default", &target).unwrap().text, text);
        pools.push((tool, system, num_requests.load(Ordering::Relaxed), policy.weights()));
    }
    // Stops at step boundaries change no result, and no request is made twice.
    assert_eq!(pools[0], pools[1]);
}

/// A run that an older build started keeps starting its prompt phases from the recipe's prompt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_phase_of_older_run_starts_from_recipe() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let num_requests = Arc::new(AtomicUsize::new(0));
    let stop = StopFlag::default();
    let with = (&[TWICE][..], &stop);
    let first = editor(&num_requests);
    run_to((0, 2), &dir, &policy, first, StartMode::Fresh, with).await.unwrap();
    let file = dir.join("origin.json");
    let mut origin: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert!(origin.as_object_mut().unwrap().remove("rules").is_some());
    std::fs::write(&file, origin.to_string()).unwrap();

    let never = StopFlag::default();
    let with = (&[TWICE][..], &never);
    run(&dir, &policy, editor(&num_requests), StartMode::Resume, with).await.unwrap();
    assert!(pool_of(&dir, 0)["prompts"][0]["text"].as_str().unwrap().contains("RULE"));
    assert_eq!(start_prompt(&pool_of(&dir, 1)), "Use the tool.");
}

/// A given prompt, a phase that imitates its completions under another prompt, and a prompt phase.
const AFTER_SFT: &str = "phase=[{kind='prompt', editor='editor', rounds=0, gradient_tasks=2, \
    selection_tasks=4, candidates=['RULE RULE RULE']}, \
    {kind='sft', source={policy='default', tasks=64}, system='Be brief.', demonstrations=1, \
    batch=1, epochs=1, learning_rate=0.05}, \
    {kind='prompt', editor='editor', rounds=0, gradient_tasks=2, selection_tasks=4, \
    candidates=['RULE']}]";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_phase_starts_from_prompt_of_sft_phase() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let policy = simulator(Duration::ZERO, 0.0);
    let num_requests = Arc::new(AtomicUsize::new(0));
    let never = StopFlag::default();
    let with = (&[AFTER_SFT][..], &never);
    let last = (9, 9);
    run_to(last, &dir, &policy, editor(&num_requests), StartMode::Fresh, with).await.unwrap();
    assert_eq!(pool_of(&dir, 0)["prompts"][0]["text"], "RULE RULE RULE");
    assert_eq!(start_prompt(&pool_of(&dir, 2)), "Be brief.");
    assert_eq!(num_requests.load(Ordering::Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_requests_drop_their_prompts_unless_all_fail() {
    let root = tempfile::tempdir().unwrap();
    let policy = simulator(Duration::ZERO, 0.0);
    let inner = Arc::new(AtomicUsize::new(0));
    // The editor rejects requests that contain a word.
    let refusing = |word: &'static str| {
        editor_with(&inner, move |request, _| match request.contains(word) {
            true => Err("the editor sleeps".to_owned()),
            false => Ok(()),
        })
    };
    let dir = root.path().join("some");
    let never = StopFlag::default();
    run(&dir, &policy, refusing("Think."), StartMode::Fresh, (&[], &never)).await.unwrap();
    let pool = pool(&dir);
    let prompts = pool["prompts"].as_array().unwrap();
    let texts = prompts.iter().map(|prompt| prompt["text"].as_str().unwrap());
    assert_eq!(texts.filter(|text| text.starts_with("Think.")).count(), 1, "{pool:#}");
    assert!(prompts.len() > 2);

    let dir = root.path().join("all");
    let error =
        run(&dir, &policy, refusing(""), StartMode::Fresh, (&[], &never)).await.unwrap_err();
    assert!(error.to_string().contains("the editor sleeps"), "{error}");
    // The run continues when the editor responds again.
    run(&dir, &policy, editor(&inner), StartMode::Resume, (&[], &never)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompt_phase_rejects_recipes_that_cannot_work() {
    let root = tempfile::tempdir().unwrap();
    let policy = simulator(Duration::ZERO, 0.0);
    let never = StopFlag::default();
    let dir = root.path().join("few");
    let inner = Arc::new(AtomicUsize::new(0));
    let set = (&["phase.0.selection_tasks=49"][..], &never);
    let error = run(&dir, &policy, editor(&inner), StartMode::Fresh, set).await.unwrap_err();
    assert!(error.to_string().contains("50 training tasks") && error.is_user_error(), "{error}");

    let of_tool = |target: &str| format!("phase.0.target={{kind='tool', {target}}}");
    for (target, why) in [
        (
            "name='calc'",
            "\"calc\" cannot be used: `phase.0.target` names this tool, which the agent default does \
             not have; it has calculator",
        ),
        (
            "name='calculator', parameter='x'",
            "its parameter \"x\", which the agent default does not have; it has expression",
        ),
    ] {
        let target = of_tool(target);
        let set = (&[target.as_str()][..], &never);
        let error = run(&dir, &policy, editor(&inner), StartMode::Fresh, set).await.unwrap_err();
        assert!(error.to_string().contains(why) && error.is_user_error(), "{error}");
    }

    let file = root.path().join("wrong.toml");
    let nameless = of_tool("name=''");
    let long = format!("phase.0.candidates=['{}']", "x".repeat(32_001));
    std::fs::write(&file, crate::common::RECIPE).unwrap();
    for (set, why) in [
        ("phase.0.editor=nobody", "`phase.0.editor` is nobody"),
        ("phase.0.agent=nobody", "`phase.0.agent` is nobody"),
        ("phase.0.candidates=['']", "phase.0.candidates.0"),
        (long.as_str(), "`phase.0.candidates.0` is 32001 characters long"),
        ("phase.0.target=summary_instruction", "set `agent.context = \"summarize\"`"),
        (nameless.as_str(), "`phase.0.target.name` is \"\""),
        ("phase.0.target=summary", "phase.0.target"),
        ("phase.0.selection_tasks=0", "phase.0.selection_tasks"),
    ] {
        let all = [&IMPROVED[..], &[set]].concat();
        let all: Vec<_> = all.iter().map(|text| text.parse().unwrap()).collect();
        let error = Recipe::load(&file, &all).unwrap_err().to_string();
        assert!(error.contains(why), "{set}: {error}");
    }
}
