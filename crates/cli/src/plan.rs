//! `dressage plan`: memory, time and cost of a run, before anything is started.

mod devices;
mod fleet;
mod memory;
mod shape;
mod time;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use dressage_model::ModelFiles;
use dressage_trainer::recipe::{LearnerKeys, Override, Phase, Recipe, RlKeys};

use crate::failure::unusable;
use crate::policies::{EnginePlan, Planned};
use crate::screen::{self, Style};
use crate::{model, recipe};
use devices::Device;
use memory::{Bytes, Learner, gib};
use shape::Shape;

/// Most devices that are simulated.
const MOST_DEVICES: usize = 16384;

/// Say what a run will take: memory of every device, tokens a second, time and cost
///
/// Works from the model's shape (its config.json) and starts nothing. Times are estimates from the peaks of a
/// device and shares of them that are usual; every assumption is printed.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  dressage plan recipes/calculator
  dressage plan my-recipe --device h100 --devices 8 --price 2.5
  dressage plan my-recipe --config Qwen2.5-7B/config.json --device h100 --prompt 500 --reply 2000
  dressage plan my-recipe --device h100 --fleet 8,64,512,4096 --tool 2")]
pub struct Args {
    /// A TOML file, or a folder that holds recipe.toml
    recipe: PathBuf,

    /// Change a key of the recipe. Can be given many times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// The config.json of the model, in place of fetching model.source
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// The device that samples and trains: a100, h100, h200, b200, l40s, rtx4090; without it no time is
    /// estimated
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Devices that sample; those that learn are as many as the recipe's learner has
    #[arg(long, value_name = "N", default_value_t = 1)]
    devices: u32,

    /// Tokens of a prompt with all that tools say
    #[arg(long, value_name = "TOKENS", default_value_t = 500)]
    prompt: u64,

    /// Tokens that an attempt samples; half of agent.max_tokens where not given
    #[arg(long, value_name = "TOKENS")]
    reply: Option<u64>,

    /// Simulate fleets of so many devices: staleness, idle shares, what is at its end first
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    fleet: Vec<usize>,

    /// Seconds of a tool between two replies, for --fleet
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    tool: f64,

    /// Replies of an attempt, for --fleet; agent.max_turns where not given
    #[arg(long, value_name = "N")]
    turns: Option<usize>,

    /// Standard deviation of the length of replies over its mean, for --fleet
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    spread: f64,

    /// Tokens that are learnt from, over those sampled and the prompts of groups, for --fleet: groups whose
    /// attempts all fare alike teach nothing, and beginnings that replies share are learnt from once
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    learnt: f64,

    /// A JSON file with measured seconds, for --fleet in place of the device's: prompt, batch, sequence,
    /// learn, update, publish
    #[arg(long, value_name = "FILE")]
    service: Option<PathBuf>,

    /// Price of a device for an hour, in any currency
    #[arg(long, value_name = "PRICE")]
    price: Option<f64>,
}

pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let recipe = recipe::load(&args.recipe, &args.overrides)?;
    let (shape, files) = match &args.config {
        Some(file) => {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("cannot read --config {}", file.display()))?;
            (Shape::read(&text).map_err(|why| unusable(format!("{}: {why}", file.display())))?, None)
        }
        None => {
            let files = ModelFiles::open(&model::get(&recipe.model.source)?)?;
            (Shape::of(&files.config), Some(files))
        }
    };
    let device = args.device.as_deref().map(Device::named).transpose().map_err(unusable)?;
    let style = Style::stdout();
    screen::say(&format!("{} {}", style.bold("model  "), shape.describe()));

    let context = recipe.model.context.map_or(shape.context, |context| context as u64);
    let learners = of_learner(&recipe, &shape, files.as_ref(), device)?;
    let running = of_sampler(&recipe, &shape, context, device, args.devices)?;
    let reply = args.reply.unwrap_or((recipe.agent.max_tokens as u64).div_ceil(2));
    if !args.fleet.is_empty() {
        of_fleets(args, &recipe, &shape, device, (running, reply))?;
    }
    let Some(device) = device else {
        screen::say("\nname a device with --device for tokens a second, time and cost");
        return Ok(ExitCode::SUCCESS);
    };
    let work = time::Work { prompt: args.prompt, reply, running, samplers: args.devices, learners };
    let mut hours = 0.0;
    for (index, phase) in recipe.phase.iter().enumerate() {
        let Phase::Rl(keys) = phase else { continue };
        hours += of_phase(index, keys, &shape, device, &work);
    }
    let devices = args.devices + learners;
    screen::say(&format!("\n{} {hours:.1} h of training phases on {devices} devices", style.bold("time   ")));
    if let Some(price) = args.price {
        let all = hours * f64::from(devices);
        screen::say(&format!(
            "{} {:.0} ({all:.0} device hours at {price})",
            style.bold("cost   "),
            all * price
        ));
    }
    screen::say(&format!("\n{}", style.dim(&time::assumptions(device))));
    Ok(ExitCode::SUCCESS)
}

/// Says what learns, and what it takes. Returns how many devices it has of its own.
fn of_learner(
    recipe: &Recipe,
    shape: &Shape,
    files: Option<&ModelFiles>,
    device: Option<&Device>,
) -> anyhow::Result<u32> {
    let style = Style::stdout();
    let needs = |needs: fn(&RlKeys) -> bool| {
        recipe.phase.iter().any(|phase| matches!(phase, Phase::Rl(keys) if needs(keys)))
    };
    let Some(LearnerKeys::Torch(keys)) = &recipe.cluster.learner else {
        if files.is_none() {
            screen::say("the embedded engine learns: its plan needs the model itself, leave out --config");
            return Ok(0);
        }
        for EnginePlan { what, plan, .. } in Planned::open(recipe)?.plans(recipe)? {
            let what = if what.is_empty() { "this machine" } else { what };
            screen::say(&format!("{} {what}: {plan}", style.bold("engine ")));
        }
        return Ok(0);
    };
    let processes = keys.of_node().saturating_mul(keys.nodes);
    let learner = Learner {
        processes: processes.into(),
        tensor: keys.tp.into(),
        context: keys.cp.into(),
        pipeline: keys.pp.into(),
        compute: keys.dtype.bytes() as u64,
        recompute: keys.args.iter().any(|arg| arg == "--checkpoint-activations"),
        head_rows: memory::head_rows(&keys.args),
        tokens: recipe.engine.micro_batch_tokens as u64,
        lora: recipe.model.lora.as_ref().map(|lora| lora.rank as u64),
        reference: needs(RlKeys::needs_reference),
        critic: needs(RlKeys::needs_critic),
        on_gpu: keys.gpus > 0,
    };
    let plan = learner.plan(shape);
    let total: u64 = plan.iter().map(|(_, bytes)| bytes).sum();
    screen::say(&format!(
        "{} {processes} processes of PyTorch, each {} GiB",
        style.bold("learner"),
        gib(total)
    ));
    say_parts(&plan);
    fits(
        total,
        device.filter(|_| keys.gpus > 0),
        "take more processes, --checkpoint-activations, `tp`, `pp`, or fewer \
         `engine.micro_batch_tokens`",
    );
    Ok(processes)
}

fn say_parts(parts: &[(&str, Bytes)]) {
    for (name, bytes) in parts.iter().filter(|(_, bytes)| *bytes > 0) {
        screen::say(&format!("          {name:<34} {:>9} GiB", gib(*bytes)));
    }
}

fn fits(total: u64, device: Option<&Device>, way_out: &str) {
    if let Some(device) = device.filter(|device| total > device.memory) {
        screen::say(&format!(
            "          does not fit: a {} has {} GiB; {way_out}",
            device.name,
            gib(device.memory)
        ));
    }
}

/// Says what a device that samples holds. Returns how many sequences run on it together.
fn of_sampler(
    recipe: &Recipe,
    shape: &Shape,
    context: u64,
    device: Option<&Device>,
    devices: u32,
) -> anyhow::Result<u64> {
    let attempts = recipe.concurrency() as u64;
    let of_device = attempts.div_ceil(devices.max(1).into());
    let Some(device) = device else { return Ok(of_device) };
    let weights = shape.parameters() * 2;
    let path = shape.cache_of_token(2) * context;
    let room = (device.memory / 10 * 9).saturating_sub(weights);
    let most = room / path.max(1);
    let style = Style::stdout();
    screen::say(&format!(
        "{} {} GiB of weights (bf16) and {} GiB for keys and values, {} GiB for a path of {context} tokens",
        style.bold("sampler"),
        gib(weights),
        gib(room),
        gib(path),
    ));
    if most == 0 {
        return Err(unusable(format!(
            "a {} does not hold the model and one path of {context} tokens: lower `model.context`, or sample with \
             tensor parallelism",
            device.name
        )));
    }
    screen::say(&format!(
        "          {} of {attempts} attempts run together on each of {devices}",
        of_device.min(most)
    ));
    Ok(of_device.min(most))
}

/// Simulates the last phase that makes attempts on fleets of several sizes.
fn of_fleets(
    args: &Args,
    recipe: &Recipe,
    shape: &Shape,
    device: Option<&Device>,
    (running, reply): (u64, u64),
) -> anyhow::Result<()> {
    let service = match (&args.service, device) {
        (Some(file), _) => {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("cannot read --service {}", file.display()))?;
            serde_json::from_str(&text)
                .map_err(|why| unusable(format!("--service {}: {why}", file.display())))?
        }
        (None, Some(device)) => time::service(shape, device, args.prompt, reply),
        (None, None) => {
            return Err(unusable(
                "--fleet needs to know how long things take: name a --device, or give measured seconds with --service",
            ));
        }
    };
    let keys = recipe.phase.iter().rev().find_map(|phase| match phase {
        Phase::Rl(keys) => Some(keys),
        Phase::Sft(_) => None,
    });
    let keys = keys.ok_or_else(|| unusable("--fleet needs a phase that makes attempts (kind = \"rl\")"))?;
    let apart = recipe.cluster.learner.is_some();
    let least = if apart { 2 } else { 1 };
    if let Some(devices) = args.fleet.iter().find(|devices| !(least..=MOST_DEVICES).contains(*devices)) {
        return Err(unusable(format!("--fleet {devices}: give {least} to {MOST_DEVICES} devices")));
    }
    let limits =
        [("--tool", args.tool, 1e6), ("--spread", args.spread, 10.0), ("--learnt", args.learnt, 1000.0)];
    if let Some((name, value, most)) =
        limits.into_iter().find(|(_, value, most)| !(0.0..=*most).contains(value))
    {
        return Err(unusable(format!("{name} {value}: give 0 to {most}")));
    }
    let fleet = fleet::Fleet {
        samplers: 1,
        learners: usize::from(apart),
        rows: running.max(1) as usize,
        groups: keys.groups,
        group_size: keys.group_size,
        ahead: keys.staleness as usize,
        turns: args.turns.unwrap_or(recipe.agent.max_turns as usize).max(1),
        prompt: args.prompt as f64,
        reply: reply as f64,
        spread: args.spread,
        tool: args.tool,
        learnt: args.learnt,
        service,
    };
    fleet::print(&fleet::Sizes { devices: &args.fleet, fleet, apart });
    Ok(())
}

/// Says how long a phase takes. Returns hours.
fn of_phase(index: usize, keys: &RlKeys, shape: &Shape, device: &Device, work: &time::Work) -> f64 {
    let attempts = (keys.groups * keys.group_size) as u64;
    let step = work.step(shape, device, attempts, (keys.group_size as u64, keys.epochs as u64));
    let style = Style::stdout();
    screen::say(&format!(
        "{} {index}: {} attempts a step, {} tokens sampled, {} learnt from",
        style.bold("phase  "),
        attempts,
        screen::count(step.sampled),
        screen::count(step.learnt)
    ));
    let seconds = step.seconds(keys.staleness > 0 && work.learners > 0);
    screen::say(&format!(
        "          sampling {:.0} s ({} tokens/s), learning {:.0} s ({} tokens/s), together {seconds:.0} s a step",
        step.sampling,
        screen::count((step.sampled as f64 / step.sampling) as u64),
        step.learning,
        screen::count((step.learnt as f64 / step.learning) as u64),
    ));
    seconds * f64::from(keys.steps) / 3600.0
}
