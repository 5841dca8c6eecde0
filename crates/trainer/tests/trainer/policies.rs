//! Several policies in one run. Each learns from its own tokens, bitwise as it would as the only
//! policy.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use levade_agent::{AgentLoop, Attempt, AttemptContext};
use levade_policy::{
    CRASH_AT, SampleRequest, Sampler as _, SamplingParams, Simulator, SimulatorConfig,
};
use levade_recipe::{Override, Recipe};
use levade_store::{PolicyPlan, Sqlite, StepPlan, Store};
use levade_trainer::{
    Policy, RunEnd, RunParts, StartMode, StopFlag, Trainer, TrainerError, replay,
};
use levade_tree::{Finish, Outcome, Purpose, Segment, Trajectory};

use crate::common::{last_checkpoint, metrics, parts, simulated, trained};

/// Environment variable with the directory in which the child process runs.
const DIR_VARIABLE: &str = "LEVADE_TEST_FOLDER";

/// Two agents of two policies that speak in turn.
struct Dialogue {
    a: Arc<Simulator>,
    b: Arc<Simulator>,
}

const SPEAKERS: [(&str, &str); 3] = [("asks", "a"), ("answers", "b"), ("asks", "a")];

#[async_trait]
impl AgentLoop for Dialogue {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let AttemptContext { seed, stream, params, .. } = context;
        let params = SamplingParams { max_tokens: 6, ..params };
        let mut trajectory = Trajectory::new();
        let mut leaf =
            trajectory.push(Segment::context(None, vec![1, 2, (stream % 7) as u32], 0)).unwrap();
        for (turn, (agent, policy)) in SPEAKERS.into_iter().enumerate() {
            let prompt = trajectory.sequence_tokens(leaf);
            let request = SampleRequest {
                seed,
                stream: stream ^ (turn as u64) << 60,
                prompt,
                params: params.clone(),
                ..SampleRequest::default()
            };
            let sampler = if policy == "a" { &self.a } else { &self.b };
            let completion = sampler.sample(request).await.unwrap();
            let completion = completion.collect(Duration::from_secs(60)).await.unwrap();
            let names = (agent.to_owned(), policy.to_owned());
            let segment = completion.into_segment(Some(leaf), &params, turn as u32);
            leaf = trajectory.push(Segment { agent: names.0, policy: names.1, ..segment }).unwrap();
            let between = Segment {
                agent: agent.into(),
                policy: policy.into(),
                ..Segment::context(Some(leaf), vec![9], turn as u32 + 1)
            };
            leaf = trajectory.push(between).unwrap();
        }
        let sampled = trajectory.sampled_tokens();
        let evens = trajectory.sequence_tokens(leaf).iter().filter(|token| *token % 2 == 0).count();
        // If most tokens are odd, the attempt counts as truncated, which lowers its reward.
        let finish = if 2 * evens > sampled { Finish::Answered } else { Finish::MaxTurns };
        let outcome = Outcome { finish, turns: 3, sampled_tokens: sampled, ..Outcome::initial() };
        Attempt::new(trajectory, outcome)
    }
}

/// Returns a recipe with two policies of the given `kinds`. The first phase trains both, the second
/// only `a`.
fn recipe(dir: &Path, kinds: [&str; 2], overrides: &[&str]) -> Recipe {
    let [a, b] = kinds;
    let file = dir.with_extension("toml");
    let phase = |text: &str, policies: &str| {
        format!(
            "[[phase]]\nkind = 'rl'\ngroups = 3\ngroup_size = 4\nlearning_rate = 0.05\n\
             mini_batches = 2\nepochs = 2\n\
             advantage = {{ kind = 'group' }}\n{text}\npolicies = [{policies}]\n\
             kl = {{ estimator = 'k3', coefficient = 0.01, reference_every = 2 }}\n"
        )
    };
    let both = phase("steps = 4", "");
    let one = phase("steps = 3", "'a'");
    let phases = if kinds == ["trained", "trained"] { both + &one } else { phase("steps = 1", "") };
    // The dialogue selects the speakers, but the recipe must name a trained policy.
    let speaks = if a == "trained" { "a" } else { "b" };
    let text = format!(
        "[run]\nname = 'two'\nseed = 3\ncheckpoint_every = 1\nkeep = 50\n[model]\n\
         source = 'simulated'\n\
         [engine]\nmicro_batch_tokens = 90\nconcurrency = 5\n\
         [policy.a]\nkind = '{a}'\n[policy.b]\nkind = '{b}'\n[agent]\npolicy = '{speaks}'\n\
         [[tasks]]\nkind = 'arithmetic'\ntrain = 50\n[reward]\nunfinished = -0.5\n[eval]\n\
         tasks = 0\n{phases}"
    );
    std::fs::write(&file, text).unwrap();
    let mut all: Vec<Override> = overrides.iter().map(|text| text.parse().unwrap()).collect();
    all.push(format!("run.folder={}", dir.display()).parse().unwrap());
    Recipe::load(&file, &all).unwrap()
}

/// Returns an untrained policy.
fn fresh(seed: u64) -> Arc<Simulator> {
    Arc::new(Simulator::new(SimulatorConfig { seed, order: 3, ..simulated() }))
}

fn policies(of: &[(&str, &Arc<Simulator>)]) -> Vec<Policy> {
    let reference = |name: &str| fresh(if name == "a" { 1 } else { 2 });
    of.iter()
        .map(|(name, simulator)| {
            let mut policy = trained(name, simulator);
            policy.learner.as_mut().unwrap().reference = Some(reference(name));
            policy
        })
        .collect()
}

fn parts_of(a: &Arc<Simulator>, b: &Arc<Simulator>) -> RunParts {
    let mut parts = parts(a, Duration::ZERO);
    parts.policies = policies(&[("a", a), ("b", b)]);
    parts.agents[0].custom = Some(Arc::new(Dialogue { a: Arc::clone(a), b: Arc::clone(b) }));
    parts
}

async fn run(recipe: Recipe, parts: RunParts, start: StartMode) {
    let mut trainer = Trainer::new(recipe, parts, start).await.unwrap();
    let ended = trainer.run(&mut (), &StopFlag::default()).await.unwrap();
    assert!(matches!(ended, RunEnd::Finished(_)), "{ended:?}");
}

/// Each policy ends with the weights of a learner that receives only its part of the plans.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_learn_independently_in_one_run() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let [a, b] = [fresh(1), fresh(2)];
    let initial_weights = [a.weights(), b.weights()];
    run(recipe(&dir, ["trained"; 2], &[]), parts_of(&a, &b), StartMode::Fresh).await;
    assert!(
        a.weights() != initial_weights[0] && b.weights() != initial_weights[1],
        "both have learnt"
    );

    let store = Sqlite::open_existing(&dir.join("run.db")).await.unwrap();
    let mut plans: Vec<StepPlan> = Vec::new();
    for (phase, step) in store.planned_steps().await.unwrap() {
        plans.push(store.step_plan(phase, step).await.unwrap().unwrap());
    }
    // Versions count per policy. The second phase trains only one of them.
    let versions = |name: &str| -> Vec<u64> {
        let of = plans.iter().flat_map(|plan| &plan.policies).filter(|of| of.policy == name);
        of.map(|of| of.version).collect()
    };
    assert_eq!((versions("a"), versions("b")), ((0..7).collect(), (0..4).collect()));
    let mut attempts = Vec::new();
    for summary in store.summaries(Purpose::Train).await.unwrap() {
        attempts.push(store.attempt(&summary.id).await.unwrap().unwrap());
    }
    for attempt in &attempts {
        let step = attempt.slot.phase * 4 + attempt.slot.step;
        for segment in attempt.trajectory.segments().iter().filter(|s| !s.versions.is_empty()) {
            let newest = if segment.policy == "a" { step } else { step.min(4) };
            assert!(
                segment.versions.iter().all(|run| run.version == u64::from(newest)),
                "{segment:?}"
            );
        }
    }
    let state = std::fs::read_to_string(last_checkpoint(&dir).join("trainer.json")).unwrap();
    assert!(state.contains("\"a\": 7") && state.contains("\"b\": 4"), "{state}");

    // A store that contains only one policy's part.
    for (name, learner, uninterrupted) in [("a", fresh(1), &a), ("b", fresh(2), &b)] {
        let separate = root.path().join(name);
        std::fs::create_dir_all(separate.join("checkpoints")).unwrap();
        let part = Sqlite::open(&separate.join("run.db"), store.run()).await.unwrap();
        part.record_attempts(&attempts).await.unwrap();
        let mut steps = 0;
        for plan in &plans {
            let own: Vec<PolicyPlan> =
                plan.policies.iter().filter(|of| of.policy == name).cloned().collect();
            let trains = !own.is_empty();
            if trains {
                part.record_step(&StepPlan { policies: own, ..plan.clone() }).await.unwrap();
                steps += 1;
            }
        }
        let mut recipe = recipe(&dir, ["trained"; 2], &[]);
        recipe.policy.retain(|policy, _| policy == name);
        if name == "b" {
            recipe.phase.truncate(1);
        }
        let done = replay(&recipe, &separate, policies(&[(name, &learner)]), &mut (), &mut |_| ())
            .await
            .unwrap();
        assert_eq!(done, steps);
        assert!(learner.weights() == uninterrupted.weights(), "{name} learns otherwise alone");
    }
}

/// A policy gets the same weights whether the other policy is frozen or trained, because its part
/// of the plan is the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_opponent_does_not_change_training() {
    let root = tempfile::tempdir().unwrap();
    let mut ends = Vec::new();
    for (i, kinds) in
        [["trained", "trained"], ["trained", "frozen"], ["frozen", "trained"]].iter().enumerate()
    {
        let dir = root.path().join(i.to_string());
        let [a, b] = [fresh(1), fresh(2)];
        let mut parts = parts_of(&a, &b);
        for (policy, kind) in parts.policies.iter_mut().zip(kinds) {
            policy.learner.take_if(|_| *kind == "frozen");
        }
        let mut recipe = recipe(&dir, *kinds, &[]);
        recipe.phase.truncate(1);
        if let levade_recipe::Phase::Rl(keys) = &mut recipe.phase[0] {
            keys.steps = 1;
        }
        run(recipe, parts, StartMode::Fresh).await;
        let lines = metrics(&dir);
        // The age and the mismatch of an opponent's tokens do not count.
        let step = lines.last().unwrap().as_object().unwrap();
        let prefix = if i == 0 { "a/" } else { "" };
        assert_eq!(step[&format!("{prefix}training/logprob_mismatch")], 0.0);
        assert_eq!(step[&format!("{prefix}training/staleness/max")], 0.0);
        assert!(step[&format!("{prefix}training/targets")].as_f64().unwrap() > 0.0);
        ends.push([a.weights(), b.weights()]);
    }
    let [both, without_b, without_a] = &ends[..] else { panic!() };
    assert!(both[0] == without_b[0] && both[1] == without_a[1]);
    assert!(both[1] != without_b[1] && both[0] != without_a[0], "a frozen one stays as it is");
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
    runtime.block_on(run(recipe(dir, ["trained"; 2], &[]), parts_of(&fresh(1), &fresh(2)), start));
}

fn spawn(dir: &Path, crash_at: Option<&str>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "policies::child", "--nocapture"])
        .stdout(Stdio::null())
        .stderr(Stdio::inherit());
    command.env(DIR_VARIABLE, dir).env_remove(CRASH_AT);
    if let Some(crash_point) = crash_at {
        command.env(CRASH_AT, crash_point);
    }
    command.spawn().unwrap()
}

/// Returns weights and optimizer states of both policies at the end of a run.
fn final_files(dir: &Path) -> Vec<Vec<u8>> {
    let last = last_checkpoint(dir);
    let files = ["simulator.weights", "simulator.optimiser"];
    let files_by_policy = ["", "policies/b/"]
        .into_iter()
        .flat_map(|policy_dir| files.map(|file| format!("{policy_dir}{file}")));
    files_by_policy.map(|file| std::fs::read(last.join(file)).unwrap()).collect()
}

#[test]
fn two_policy_run_recovers_after_kills_and_replays() {
    let root = tempfile::tempdir().unwrap();
    let calm = root.path().join("calm");
    assert!(spawn(&calm, None).wait().unwrap().success());
    let points = [
        "attempt_recorded:5",
        "ledger_written:2",
        // Between the optimizer steps of the two policies.
        "after_optim_step:2",
        "before_optim_step:3",
        "micro_batch:4",
        "weights_saved:2",
        "before_rename:3",
        "metrics_written:2",
        // In the phase that trains only one policy.
        "in_optim_step:30",
    ];
    let killed = root.path().join("killed");
    let mut kills = 0;
    for point in points {
        let status = spawn(&killed, Some(point)).wait().unwrap();
        kills += u32::from(status.signal() == Some(9));
    }
    assert!(kills >= 7, "{kills}");
    assert!(spawn(&killed, None).wait().unwrap().success());
    assert!(final_files(&killed) == final_files(&calm), "the killed run ends otherwise");
    assert_eq!(metrics(&killed), metrics(&calm));

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut compared = Vec::new();
    let recipe = recipe(&killed, ["trained"; 2], &[]);
    let policies = policies(&[("a", &fresh(1)), ("b", &fresh(2))]);
    let steps = runtime
        .block_on(replay(&recipe, &killed, policies, &mut (), &mut |one| compared.push(one)))
        .unwrap();
    assert_eq!(steps, 7);
    assert!(
        compared.len() == 7 && compared.iter().all(|one| one.differs.is_none()),
        "{compared:?}"
    );
}

#[tokio::test]
async fn recipe_rejects_unknown_policy_and_agent_names() {
    let root = tempfile::tempdir().unwrap();
    let load = |overrides: &[&str]| {
        let file = root.path().join("r.toml");
        std::fs::write(&file, crate::common::RECIPE).unwrap();
        let all: Vec<Override> = overrides.iter().map(|text| text.parse().unwrap()).collect();
        Recipe::load(&file, &all).map_err(|error| error.to_string())
    };
    for (overrides, want) in [
        (&["agent.policy=x"][..], "`agent.policy` is \"x\", but must be one of `default`"),
        (&["policy.x={kind='frozen'}"], "`policy` is all frozen"),
        (
            &["policy.x={kind='frozen', lora={rank=1}}", "policy.y={kind='trained'}"],
            "`policy.x.lora`",
        ),
        (
            &["policy.x={kind='trained'}", "policy.y={kind='trained'}"],
            "`agent.policy` is \"\", but must be one of `x`, `y`",
        ),
        (&["policy.x={kind='external', url='u', model='m'}"], "`policy.x.url` is \"u\""),
        (&["policy.x={kind='external', url='http://u', model=''}"], "`policy.x.model`"),
        (
            &["policy.x={kind='external', url='http://u', model='m', concurrency=0}"],
            "`policy.x.concurrency`",
        ),
        (
            &[
                "policy.x={kind='external', url='http://u', model='m'}",
                "policy.y={kind='trained'}",
                "agent.policy='y'",
                "agent.judge={policy='x'}",
            ],
            "only programs (kind = \"program\")",
        ),
        (
            &[
                "policy.x={kind='external', url='http://u', model='m'}",
                "policy.y={kind='trained'}",
                "agent.policy='x'",
                "agent.kind='program'",
                "agent.command=['true']",
            ],
            "attempts start with this agent",
        ),
        (&["policy.x={kind='trainde'}"], "did you mean `trained`?"),
        (
            &["policy.x={kind='trained', surce='y'}"],
            "unknown key `policy.x.surce`; did you mean `source`?",
        ),
        (&["agent.x={max_tunrs=3}"], "unknown key `agent.x.max_tunrs`; did you mean `max_turns`?"),
        (&["agent.x={max_turns=0}"], "`agent.x.max_turns` is 0"),
        (&["agent.sampling.top_p=0.5"], "`agent.sampling` is greedy or filtered"),
        (
            &["phase.1.policies=['x']"],
            "`phase.1.policies` is x, but must be a list of trained policies, one of `default`",
        ),
        (
            &["phase.1.only.agents=['x']"],
            "`phase.1.only.agents` is x, but must be a list of agents, one of `default`",
        ),
    ] {
        let error = load(overrides).unwrap_err();
        assert!(error.contains(want), "{overrides:?}\n  gave: {error}\n  want: {want}");
    }
    let recipe = load(&[
        "policy.x={kind='external', url='http://u', model='m', key_env='K', requests_per_minute=3}",
        "policy.y={kind='trained'}",
        "agent.policy='y'",
        "agent.kind='program'",
        "agent.command=['true']",
        "agent.judge={policy='x'}",
    ])
    .unwrap();
    let external = recipe.external_of(&recipe.agents["judge"]).unwrap();
    assert_eq!((external.requests_per_minute, external.concurrency), (3, 16));
    assert!(recipe.external_of(&recipe.agent).is_none());
    let recipe = load(&["agent.x={system='x', train=false}"]).unwrap();
    assert_eq!(recipe.agents["x"].max_turns, recipe.agent.max_turns, "it has the keys of all");
    // A written recipe loads back unchanged.
    let file = root.path().join("again.toml");
    std::fs::write(&file, recipe.to_toml().unwrap()).unwrap();
    assert_eq!(Recipe::load(&file, &[]).unwrap(), recipe);

    let missing = RunParts { agents: Vec::new(), ..parts(&fresh(1), Duration::ZERO) };
    let rejected = Trainer::new(recipe, missing, StartMode::Fresh).await.err().unwrap();
    assert!(matches!(rejected, TrainerError::MissingPart(_)), "{rejected}");
}
