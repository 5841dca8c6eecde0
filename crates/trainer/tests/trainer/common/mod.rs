//! A small run on the simulated policy, for tests of the complete trainer.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use levade_policy::{Simulator, SimulatorConfig};
use levade_recipe::{Override, Recipe};
use levade_reward::ScorerInput;
use levade_text::testing::{VOCABULARY, tiny_chat};
use levade_tools::{Calculator, DelayedToolbox, ToolSet, Toolbox};
use levade_trainer::{
    AgentSpec, CustomScorers, Event, Observer, Policy, PolicyLearner, RunParts, replay,
};
use levade_tree::{Component, DEFAULT};
use serde_json::{Map, Value};

/// SFT on a few demonstrations, then GRPO with several updates per step. Rewards depend on how
/// attempts end.
pub const RECIPE: &str = r#"
[run]
name = "tiny"
seed = 3
checkpoint_every = 2
keep = 2

[model]
source = "simulated"

[engine]
concurrency = 5
micro_batch_tokens = 700

[[tasks]]
kind = "arithmetic"
operands = 2
min_digits = 1
max_digits = 1
words = 0.0
train = 50

[agent]
system = "Use the tool."
tools = ["calculator"]
tool_prompt = "compact"
max_turns = 3
max_tokens = 120
tool_seconds = 5.0
completion_seconds = 60.0

[reward]
malformed_call = -0.1
failed_call = -0.05
unfinished = -0.5

[eval]
tasks = 6
unseen_wordings = 3
split_seed = 3
every = 3

[[phase]]
kind = "sft"
demonstrations = 10
epochs = 2
batch = 4
learning_rate = 3.0

[[phase]]
kind = "rl"
steps = 5
groups = 3
group_size = 4
learning_rate = 0.05
mini_batches = 2
temperature = 0.9
kl = { estimator = "k3", coefficient = 0.01 }
optimizer = { schedule = "linear", warmup = 1 }
"#;

/// Returns the recipe, to run in `dir`.
pub fn recipe(dir: &Path, overrides: &[&str]) -> Recipe {
    let file = dir.with_extension("toml");
    std::fs::write(&file, RECIPE).unwrap();
    let mut all: Vec<Override> = overrides.iter().map(|text| text.parse().unwrap()).collect();
    all.push(format!("run.folder={}", dir.display()).parse().unwrap());
    Recipe::load(&file, &all).unwrap()
}

/// Returns the configuration of the simulator.
pub fn simulated() -> SimulatorConfig {
    SimulatorConfig {
        vocabulary: VOCABULARY,
        order: 14,
        rows: 4096,
        context: 2000,
        ..SimulatorConfig::default()
    }
}

pub fn simulator(latency: Duration, failures: f64) -> Arc<Simulator> {
    Arc::new(Simulator::new(SimulatorConfig { latency, failures, ..simulated() }))
}

/// Scores each attempt of a group by the fraction of attempts that are shorter.
pub fn ranks(group: &[ScorerInput]) -> Vec<Vec<Component>> {
    let lengths: Vec<_> = group.iter().map(|input| input.trajectory.sampled_tokens()).collect();
    lengths
        .iter()
        .map(|own| {
            let shorter = lengths.iter().filter(|other| *other < own).count();
            vec![Component::score(shorter as f64 / group.len() as f64)]
        })
        .collect()
}

/// Returns a trainer's parts with a simulated policy.
pub fn parts(policy: &Arc<Simulator>, latency: Duration) -> RunParts {
    let tools: Vec<Arc<dyn Toolbox>> = vec![Arc::new(DelayedToolbox::new(
        Arc::new(Calculator::default()),
        Duration::ZERO..=latency,
    ))];
    let tools = ToolSet::new(tools, Duration::from_secs(5)).unwrap();
    let agent = AgentSpec::new(DEFAULT, Arc::new(tiny_chat().unwrap()), tools);
    RunParts {
        policies: vec![trained(DEFAULT, policy)],
        agents: vec![agent],
        scorers: CustomScorers::new(),
        environments: Default::default(),
        started_at: 0,
        model_files: Vec::new(),
        teachers: Default::default(),
    }
}

/// Returns a trained simulated policy with a reference and a critic.
pub fn trained(name: &str, policy: &Arc<Simulator>) -> Policy {
    Policy {
        name: name.into(),
        sampler: policy.clone(),
        context: 2000,
        learner: Some(PolicyLearner {
            learner: policy.clone(),
            reference: Some(simulator(Duration::ZERO, 0.0)),
            critic: Some(simulator(Duration::ZERO, 0.0)),
            extra_files: Arc::new(|dir: &Path| std::fs::write(dir.join("tokenizer.json"), "{}")),
        }),
    }
}

/// Replays a run by the recipe in its directory. Returns the number of steps, and whether all
/// checkpoints are identical.
pub async fn replayed(dir: &Path) -> (u32, bool) {
    let policies = vec![trained("default", &simulator(Duration::ZERO, 0.0))];
    let recipe = Recipe::load(&dir.join("recipe.toml"), &[]).unwrap();
    let mut same = true;
    let steps = replay(&recipe, dir, policies, &mut (), &mut |one| same &= one.differs.is_none())
        .await
        .unwrap();
    (steps, same)
}

/// Returns a trainer's parts with a simulated policy, whose agent has these tools.
pub fn parts_with(policy: &Arc<Simulator>, tools: ToolSet) -> RunParts {
    let mut parts = parts(policy, Duration::ZERO);
    parts.agents[0].tools = tools;
    parts
}

/// An observer that collects notes for the user.
#[derive(Default)]
pub struct Notes(pub Vec<String>);

impl Observer for Notes {
    fn event(&mut self, event: &Event) {
        if let Event::Note(note) = event {
            self.0.push(note.clone());
        }
    }
}

/// Returns the newest checkpoint of a run.
pub fn last_checkpoint(dir: &Path) -> PathBuf {
    let mut names: Vec<PathBuf> = std::fs::read_dir(dir.join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    names.sort();
    names.pop().unwrap()
}

/// Returns the lines of the metrics file without metrics that depend on wall-clock time.
pub fn metrics(dir: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    text.lines()
        .map(|line| {
            let mut line: Map<String, Value> = serde_json::from_str(line).unwrap();
            let by_the_clock = ["timing_s/", "perf/", "sampler/"];
            // Names of a policy's metrics start with the name of the policy.
            line.retain(|name, _| !by_the_clock.iter().any(|part| name.contains(part)));
            Value::Object(line)
        })
        .collect()
}
