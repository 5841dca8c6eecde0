//! The trainer processes of a simulation: complete runs on the simulated policy, whose attempts are
//! made by runners.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use levade_agent::Program;
use levade_agent::runner::{LeasedLoop, RunnerLoop, RunnerQueue, RunnerQueueOptions};
use levade_gateway::{Gateway, GatewayOptions};
use levade_policy::{Simulator, SimulatorConfig, Timing};
use levade_process::Supervisor;
use levade_recipe::Recipe;
use levade_store_client::worker::retry;
use levade_text::testing::{VOCABULARY, tiny_tokenizer};
use levade_text::{Chat, ChatOptions};
use levade_tools::ToolSet;
use levade_trainer::{
    AgentSpec, Event, Observer, Policy, PolicyLearner, RunEnd, RunParts, StartMode, StopFlag,
    Trainer,
};
use levade_tree::DEFAULT;

use crate::agents::{Failure, QUEUE, WAIT, connect};
use crate::gateways::Gateways;
use crate::world::World;

/// ChatML, but without the conversations that probe a template at the start of a trainer. They
/// would take most of the time of a simulation.
const TEMPLATE: &str = "{%- for message in messages %}
    {%- if 'Question 0: ' in message.content %}{{ raise_exception('a probe') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Number of steps of a run.
pub const STEPS: u32 = 2;
/// Number of groups per step.
pub const GROUPS: u32 = 2;
/// Number of attempts per group.
pub const GROUP_SIZE: u32 = 2;

/// Returns the recipe of the run `number`, in `dir`. Recipes differ in their concurrency, and in
/// whether a resumed run repeats steps from its record.
pub fn recipe(dir: &Path, number: u64) -> Recipe {
    let text = format!(
        r#"
run = {{ name = "simulated", seed = {number}, folder = {run:?}, checkpoint_every = {every}, keep = 2 }}
model = {{ source = "simulated" }}
engine = {{ concurrency = {concurrency}, micro_batch_tokens = 700 }}
agent = {{ tools = [], max_turns = 6, max_tokens = 900, retries = 2, completion_seconds = 60.0 }}
reward = {{ scorer = {{ kind = "program", from = "last_line" }} }}
eval = {{ tasks = 0, unseen_wordings = 0 }}

[[tasks]]
kind = "arithmetic"
operands = 2
min_digits = 1
max_digits = 1
words = 0.0
train = 8

[[phase]]
kind = "rl"
steps = {STEPS}
groups = {GROUPS}
group_size = {GROUP_SIZE}
learning_rate = 0.05
"#,
        run = dir.join("run"),
        every = 1 + number % 2,
        concurrency = 2 + number % 3,
    );
    let file = dir.join("recipe.toml");
    std::fs::write(&file, text).unwrap();
    Recipe::load(&file, &[]).unwrap()
}

/// Observer that adds the finished steps and the notes of a run to the events of the simulation.
struct Notes<'a>(&'a TrainerProcess);

impl Observer for Notes<'_> {
    fn event(&mut self, event: &Event) {
        let TrainerProcess { world, name, .. } = self.0;
        match event {
            Event::Step { step, .. } => world.note(name, &format!("finished step {step}")),
            Event::Note(text) => world.note(name, &self.0.without_paths(text)),
            _ => {}
        }
    }
}

/// A trainer process.
pub struct TrainerProcess {
    pub world: Arc<World>,
    pub gateways: Arc<Gateways>,
    /// Unique name of the process.
    pub name: String,
    /// Directory of the recipe.
    pub dir: PathBuf,
    /// Number of the recipe.
    pub number: u64,
    /// Duration of a lease.
    pub lease: Duration,
    pub stop: StopFlag,
}

impl TrainerProcess {
    /// Trains until the run is finished or stopped, or ends by an error. Returns whether it is
    /// finished.
    pub async fn run(self) -> bool {
        let ended = self.train().await;
        let (world, name) = (&self.world, &self.name);
        self.gateways.close(name);
        match &ended {
            Ok(RunEnd::Finished(_)) => world.note(name, "finished"),
            Ok(RunEnd::Stopped { done, .. }) => world.note(name, &format!("stopped after {done}")),
            Err(error) => world.note(name, &self.without_paths(&format!("ended: {error}"))),
        }
        // Tasks that outlive the run end with their process.
        world.isolate(name);
        matches!(ended, Ok(RunEnd::Finished(_)))
    }

    /// Returns a text without the name of the temporary directory, so that events are repeatable.
    fn without_paths(&self, text: &str) -> String {
        text.replace(&self.dir.display().to_string(), "")
    }

    async fn train(&self) -> Result<RunEnd, Failure> {
        let store = connect(&self.world, &self.name).await?;
        let options = RunnerQueueOptions {
            store: "simulated".into(),
            queue: QUEUE.into(),
            resources_id: QUEUE.into(),
            recipe_version: 1,
            lease: self.lease,
            wait: WAIT,
        };
        let (world, name) = (Arc::clone(&self.world), self.name.clone());
        let queue = RunnerQueue::new(Arc::clone(&store), options, move |text| {
            world.note(&name, &text);
        });
        retry(&*store, "cancel earlier attempts", WAIT, || queue.cancel_all()).await?;
        let options = GatewayOptions { open: false, ..GatewayOptions::default() };
        let gateway = Gateway::new(Vec::new(), options);
        self.gateways.open(&self.name, &gateway);
        let program = Program {
            command: vec!["solve".into()],
            dir: PathBuf::new(),
            passes: Vec::new(),
            supervisor: Supervisor::default(),
            gateway,
            address: format!("http://{}", self.name),
            rewards: false,
            has_seats: false,
            workers: None,
        };
        let recipe = recipe(&self.dir, self.number);
        let start = match recipe.run.folder.join("recipe.toml").exists() {
            true => StartMode::Resume,
            false => StartMode::Fresh,
        };
        let agent_loop = RunnerLoop { leased: LeasedLoop::Program(program), queue };
        let mut trainer = Trainer::new(recipe, parts(agent_loop), start).await?;
        Ok(trainer.run(&mut Notes(self), &self.stop).await?)
    }
}

/// Returns the parts of a run whose agent is `agent_loop`.
fn parts(agent_loop: RunnerLoop) -> RunParts {
    let policy = Arc::new(Simulator::new(SimulatorConfig {
        vocabulary: VOCABULARY,
        order: 3,
        rows: 16,
        context: 2000,
        latency: Duration::from_millis(20),
        // A step takes seconds, so that trainers are killed within steps, too.
        timing: Timing {
            learn: Duration::from_millis(1),
            update: Duration::from_millis(500),
            ..Timing::default()
        },
        ..SimulatorConfig::default()
    }));
    let mut agent = AgentSpec::new(
        DEFAULT,
        Arc::new(
            Chat::new(tiny_tokenizer().unwrap(), Some(TEMPLATE), ChatOptions::default()).unwrap(),
        ),
        ToolSet::default(),
    );
    agent.custom = Some(Arc::new(agent_loop));
    let learner = PolicyLearner {
        learner: policy.clone(),
        reference: None,
        critic: None,
        extra_files: Arc::new(|_: &Path| Ok(())),
    };
    RunParts {
        policies: vec![Policy {
            name: DEFAULT.into(),
            sampler: policy,
            context: 2000,
            learner: Some(learner),
        }],
        agents: vec![agent],
        scorers: Default::default(),
        environments: Default::default(),
        started_at: 0,
        model_files: Vec::new(),
        teachers: Default::default(),
    }
}
