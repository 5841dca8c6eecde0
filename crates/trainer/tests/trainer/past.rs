//! Past versions of a trained policy as its opponents.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_agent::{AgentLoop, Attempt, AttemptContext, Backend};
use levade_policy::{
    CRASH_AT, Learner as _, SampleRequest, Sampler, SamplingParams, Simulator, SimulatorConfig,
};
use levade_recipe::{Override, Recipe};
use levade_store::testing::wait;
use levade_store::{Sqlite, Store};
use levade_text::testing::tiny_chat;
use levade_trainer::{
    AgentSpec, ChatBackend, Policy, RunEnd, RunParts, StartMode, StopFlag, Trainer, TrainerError,
    checkpoints, replay, rewind,
};
use levade_tree::{Finish, Kind, Outcome, Purpose, Segment, Trajectory};
use serde_json::json;

use crate::common::{last_checkpoint, metrics, parts, simulated, trained};

/// Environment variable with the directory in which the child process runs.
const DIR_VARIABLE: &str = "LEVADE_TEST_PAST";
/// Number of snapshots in the pool.
const KEEP: u64 = 2;
const STEPS: u32 = 6;

/// A dialogue of the agent with an opponent. The agent wins if it says more even tokens.
struct Dialogue;

const SPEAKERS: [&str; 3] = ["default", "opponent", "default"];

fn request(context: &AttemptContext, turn: usize, prompt: Vec<u32>) -> SampleRequest {
    SampleRequest {
        seed: context.seed,
        stream: context.stream ^ (turn as u64) << 60,
        prompt,
        params: SamplingParams { max_tokens: 6, ..context.params.clone() },
        ..SampleRequest::default()
    }
}

#[async_trait]
impl AgentLoop for Dialogue {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let mut trajectory = Trajectory::new();
        let opening = vec![1, 2, (context.group_stream % 7) as u32];
        let mut leaf = trajectory.push(Segment::context(None, opening, 0)).unwrap();
        let mut cast = BTreeMap::new();
        let mut evens: BTreeMap<&str, f64> = BTreeMap::new();
        let mut draw = String::new();
        for (turn, name) in SPEAKERS.into_iter().enumerate() {
            let player = context.select_player(context.roster.find(name).unwrap()).unwrap();
            let Backend::Tokens(sampler) = &player.backend else { panic!() };
            let request = request(&context, turn, trajectory.sequence_tokens(leaf));
            let params = request.params.clone();
            draw = request.stream.to_string();
            let completion = sampler.sample(request).await.unwrap();
            let completion = completion.collect(Duration::from_secs(60)).await.unwrap();
            let even = completion.tokens.iter().filter(|token| *token % 2 == 0).count();
            *evens.entry(name).or_default() += even as f64 / completion.tokens.len() as f64;
            cast.insert(name.to_owned(), player.policy.clone());
            let names = (name.to_owned(), player.policy.clone());
            let segment = completion.into_segment(Some(leaf), &params, turn as u32);
            let segment = Segment { agent: names.0.clone(), policy: names.1.clone(), ..segment };
            leaf = trajectory.push(segment).unwrap();
            let between = Segment::context(Some(leaf), vec![9], turn as u32 + 1);
            let between = Segment { agent: names.0, policy: names.1, ..between };
            leaf = trajectory.push(between).unwrap();
        }
        let won = evens["default"] / 2.0 > evens["opponent"];
        let reward = json!({"agent": "default", "value": if won { 1.0 } else { -1.0 }});
        let sampled_tokens = trajectory.sampled_tokens();
        let mut outcome = Outcome { turns: 3, sampled_tokens, cast, ..Outcome::initial() };
        outcome.finish = Finish::Ended;
        outcome.scorer_inputs.insert("program".into(), json!({"rewards": [reward]}));
        outcome.scorer_inputs.insert("last_stream".into(), json!(draw));
        Attempt::new(trajectory, outcome)
    }
}

/// Returns a recipe in which the current policy and two of its past versions are opponents.
fn recipe(dir: &Path, overrides: &[&str]) -> Recipe {
    let file = dir.with_extension("toml");
    let text = format!(
        "[run]\nname = 'past'\nseed = 3\ncheckpoint_every = 2\nkeep = 1\n[model]\n\
         source = 'simulated'\n[engine]\nmicro_batch_tokens = 90\nconcurrency = 5\n\
         [policy.learner]\nkind = 'trained'\n\
         [policy.past]\nkind = 'past'\nof = 'learner'\nevery = 1\nkeep = {KEEP}\n\
         draw = 'hardest'\n\
         [agent]\npolicy = 'learner'\n[agent.opponent]\ntrain = false\n\
         policy = [{{ name = 'learner', weight = 1 }}, {{ name = 'past', weight = 3 }}]\n\
         [[tasks]]\nkind = 'arithmetic'\ntrain = 50\n[reward]\nscorer = 'program'\n\
         [eval]\ntasks = 3\nevery = 2\n\
         [[phase]]\nkind = 'rl'\nsteps = {STEPS}\ngroups = 3\ngroup_size = 4\n\
         learning_rate = 0.05\nadvantage = {{ kind = 'group' }}\n"
    );
    fs::write(&file, text).unwrap();
    let mut all: Vec<Override> = overrides.iter().map(|text| text.parse().unwrap()).collect();
    all.push(format!("run.folder={}", dir.display()).parse().unwrap());
    Recipe::load(&file, &all).unwrap()
}

fn fresh(seed: u64) -> Arc<Simulator> {
    Arc::new(Simulator::new(SimulatorConfig { seed, order: 3, ..simulated() }))
}

/// Returns the parts of a run. The samplers of the pool have other weights until they load a
/// snapshot.
fn parts_of(learner: &Arc<Simulator>) -> RunParts {
    let mut parts = parts(learner, Duration::ZERO);
    parts.policies = vec![trained("learner", learner)];
    let slots =
        (0..KEEP).map(|slot| Policy { learner: None, ..trained("past", &fresh(90 + slot)) });
    parts.policies.extend(slots);
    let chat = Arc::new(tiny_chat().unwrap());
    parts.agents[0].custom = Some(Arc::new(Dialogue));
    let mut opponent = AgentSpec::new("opponent", chat.clone(), Default::default());
    opponent.backends.push(ChatBackend::Policy(chat));
    opponent.pick = Some(Arc::new(|_, stream, _| usize::from(!stream.is_multiple_of(4))));
    parts.agents.push(opponent);
    parts
}

async fn train(recipe: Recipe, start: StartMode) -> Result<(), TrainerError> {
    let mut trainer = Trainer::new(recipe, parts_of(&fresh(1)), start).await?;
    let ended = trainer.run(&mut (), &StopFlag::default()).await?;
    assert!(matches!(ended, RunEnd::Finished(_)), "{ended:?}");
    Ok(())
}

fn attempts(dir: &Path) -> Vec<levade_store::Attempt> {
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let all = wait(store.summaries(Purpose::Train)).unwrap();
    all.iter().map(|summary| wait(store.attempt(&summary.id)).unwrap().unwrap()).collect()
}

/// Returns the versions whose snapshots exist.
fn snapshots(dir: &Path) -> BTreeSet<u64> {
    let entries = fs::read_dir(dir.join("past/past")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
}

/// Returns the versions that the checkpoints of a run need.
fn needed(dir: &Path, every: u64) -> BTreeSet<u64> {
    let steps = checkpoints(dir).unwrap().into_iter().map(|c| u64::from(c.position.global_step));
    let newest = steps.map(|step| step / every);
    newest.flat_map(|n| (n + 1).saturating_sub(KEEP)..=n).map(|n| n * every).collect()
}

/// Returns weights and optimizer state at the end of a run.
fn final_files(dir: &Path) -> Vec<Vec<u8>> {
    let last = last_checkpoint(dir);
    ["simulator.weights", "simulator.optimiser"]
        .map(|file| fs::read(last.join(file)).unwrap())
        .into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_versions_play_and_are_not_trained() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    train(recipe(&dir, &["run.keep=20"]), StartMode::Fresh).await.unwrap();
    assert_eq!(snapshots(&dir), needed(&dir, 1), "checkpoints need all but the first");
    let attempts = attempts(&dir);
    let mut ages = BTreeMap::new();
    for attempt in &attempts {
        let step = u64::from(attempt.slot.step);
        let sampled = attempt.trajectory.segments().iter().filter(|s| s.kind == Kind::Sampled);
        for segment in sampled {
            let [run] = &segment.versions[..] else { panic!("{segment:?}") };
            if segment.policy == "learner" {
                assert_eq!(run.version, step);
                continue;
            }
            assert_eq!((segment.policy.as_str(), segment.agent.as_str()), ("past", "opponent"));
            assert_eq!(attempt.outcome.cast["opponent"], "past");
            assert!(run.version <= step && run.version + KEEP > step, "{} {step}", run.version);
            *ages.entry(step - run.version).or_insert(0) += 1;
            // The policy at that version samples the same tokens. The first snapshot was removed.
            let version = fresh(1);
            if run.version > 0 {
                let snapshot = dir.join(format!("past/past/{:06}", run.version));
                version.load(&snapshot, false).await.unwrap();
            }
            version.publish(run.version).await.unwrap();
            let own = attempt.outcome.scorer_inputs["last_stream"].as_str().unwrap();
            let stream = own.parse::<u64>().unwrap() ^ (2 << 60) ^ (1 << 60);
            let prompt = attempt.trajectory.sequence_tokens(segment.parent.unwrap());
            let temperature = segment.temperature;
            let params = SamplingParams { max_tokens: 6, temperature, ..SamplingParams::default() };
            let request =
                SampleRequest { seed: 3, stream, prompt, params, ..SampleRequest::default() };
            let completion = version.sample(request).await.unwrap();
            let completion = completion.collect(Duration::from_secs(60)).await.unwrap();
            assert_eq!(
                (&completion.tokens, &completion.logprobs),
                (&segment.tokens, &segment.logprobs)
            );
        }
    }
    assert!(ages[&0] > 3 && ages[&1] > 3, "both versions play: {ages:?}");

    // Every term of a plan is a token of the learner's own agent.
    let store = Sqlite::open_existing(&dir.join("run.db")).await.unwrap();
    for (phase, step) in store.planned_steps().await.unwrap() {
        let plan = store.step_plan(phase, step).await.unwrap().unwrap();
        assert!(plan.policies.iter().all(|plan| plan.policy == "learner"));
    }
    let last = metrics(&dir).into_iter().rfind(|line| line["kind"] == "grpo").unwrap();
    let targets = last["training/targets"].as_f64().unwrap();
    let own: usize = attempts
        .iter()
        .filter(|attempt| attempt.slot.step + 1 == STEPS)
        .flat_map(|attempt| attempt.trajectory.segments())
        .filter(|s| s.kind == Kind::Sampled && s.agent == "default")
        .map(|segment| segment.tokens.len())
        .sum();
    assert!(targets > 0.0 && targets <= own as f64, "{targets} of {own}");
    assert!(last["past/past/attempts"].as_f64().unwrap() > 0.0, "{last}");
    assert!(last["past/past/age/max"].as_f64().unwrap() < KEEP as f64, "{last}");
    let mut compared = Vec::new();
    let recipe = recipe(&dir, &["run.keep=20"]);
    let policies = vec![trained("learner", &fresh(1))];
    replay(&recipe, &dir, policies, &mut (), &mut |one| compared.push(one)).await.unwrap();
    assert!(compared.len() == 3 && compared.iter().all(|one| one.differs.is_none()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resumed_and_rewound_runs_meet_same_opponents() {
    let root = tempfile::tempdir().unwrap();
    let [calm, resumed] = ["calm", "resumed"].map(|name| root.path().join(name));
    train(recipe(&calm, &[]), StartMode::Fresh).await.unwrap();
    assert_eq!(snapshots(&calm), needed(&calm, 1));
    assert!(!snapshots(&calm).contains(&0), "the oldest is removed");
    train(recipe(&resumed, &["phase.0.steps=4", "run.keep=20"]), StartMode::Fresh).await.unwrap();
    train(recipe(&resumed, &["run.keep=20"]), StartMode::Resume).await.unwrap();
    assert!(attempts(&resumed) == attempts(&calm), "other attempts");
    assert_eq!(final_files(&resumed), final_files(&calm));

    // The steps after a rewind are made anew, with the opponents of that step.
    let again = recipe(&resumed, &["run.keep=20"]);
    assert_eq!(rewind(&again, 2).await.unwrap().step, 2);
    train(again, StartMode::Resume).await.unwrap();
    assert_eq!(final_files(&resumed), final_files(&calm));
    assert!(attempts(&resumed) == attempts(&calm), "other attempts");

    // A pool of other versions changes the run.
    let other = root.path().join("other");
    train(recipe(&other, &["policy.past.every=3"]), StartMode::Fresh).await.unwrap();
    assert_ne!(final_files(&other), final_files(&calm));
    assert_eq!(snapshots(&other), needed(&other, 3));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_and_damaged_snapshots_are_named() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    train(recipe(&dir, &["phase.0.steps=4"]), StartMode::Fresh).await.unwrap();
    let weights = dir.join("past/past/000003/simulator.weights");
    let before = fs::read(&weights).unwrap();
    let resume = || train(recipe(&dir, &[]), StartMode::Resume);
    let mut damaged = before.clone();
    damaged[before.len() / 2] ^= 1;
    for damage in [Some(damaged), None] {
        match &damage {
            Some(bytes) => fs::write(&weights, bytes).unwrap(),
            None => fs::remove_file(&weights).unwrap(),
        }
        let error = resume().await.unwrap_err();
        assert!(error.is_user_error());
        let text = error.to_string();
        let reason = if damage.is_some() { "has the checksum" } else { "cannot read" };
        for want in ["version 3 of the policy past", "past/past/000003", "--from", reason] {
            assert!(text.contains(want), "{want}: {text}");
        }
    }
    fs::remove_dir_all(dir.join("past/past/000003")).unwrap();
    let text = resume().await.unwrap_err().to_string();
    assert!(text.contains("version 3 of the policy past") && text.contains("snapshot.json"));
    fs::create_dir(dir.join("past/past/000003")).unwrap();
    fs::copy(dir.join("past/past/000004/snapshot.json"), weights.with_file_name("snapshot.json"))
        .unwrap();
    fs::write(&weights, before).unwrap();
    let text = resume().await.unwrap_err().to_string();
    assert!(text.contains("has the checksum"), "the snapshot of another version: {text}");
}

/// Child process: starts or resumes the run, and runs it to its end. Returns at once when run as a
/// normal test.
#[test]
fn child() {
    let Ok(dir) = std::env::var(DIR_VARIABLE) else { return };
    let dir = Path::new(&dir);
    let start = if dir.join("recipe.toml").exists() { StartMode::Resume } else { StartMode::Fresh };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(train(recipe(dir, &[]), start)).unwrap();
}

fn run_child(dir: &Path, crash_at: &str) -> Option<i32> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "past::child", "--nocapture"])
        .stdout(Stdio::null())
        .env(DIR_VARIABLE, dir)
        .env(CRASH_AT, crash_at);
    let status = command.status().unwrap();
    assert!(status.success() || status.signal() == Some(9), "{crash_at}: {status}");
    status.signal()
}

#[test]
fn run_with_past_opponents_recovers_after_kills() {
    let root = tempfile::tempdir().unwrap();
    let [calm, killed] = ["calm", "killed"].map(|name| root.path().join(name));
    assert_eq!(run_child(&calm, ""), None);
    let points = [
        // The first snapshot, before and after a checkpoint.
        "snapshot_written:1",
        "snapshot_written:2",
        "snapshot_written:3",
        "attempt_recorded:5",
        "metrics_written:2",
        "weights_saved:1",
        "after_rename:1",
        "attempt_recorded:7",
        "before_rename:1",
        "snapshot_written:3",
    ];
    let kills = points.into_iter().filter_map(|point| run_child(&killed, point)).count();
    assert!(kills >= 8, "{kills} kills");
    assert_eq!(run_child(&killed, ""), None);
    assert!(final_files(&killed) == final_files(&calm), "the killed run ends otherwise");
    assert_eq!(metrics(&killed), metrics(&calm));
    assert!(attempts_without_tries(&killed) == attempts_without_tries(&calm));
}

/// Returns the slot and the segments of each attempt. Ids are left out, because they depend on the
/// number of the try.
fn attempts_without_tries(dir: &Path) -> Vec<(levade_tree::AttemptSlot, Vec<Segment>)> {
    let attempts = attempts(dir).into_iter();
    attempts.map(|a| (a.slot, a.trajectory.segments().to_vec())).collect()
}
