//! Implements `levade plan`, which estimates the memory, time and cost of a run without starting
//! it.

mod fleets;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use levade_model::ModelFiles;
use levade_plan::memory::{Bytes, format_gib};
use levade_plan::{Device, Learner, Shape, fleet, memory, time};
use levade_recipe::{LearnerKeys, Override, Phase, Placement, Recipe, RlKeys};
use levade_run::model;
use levade_run::policies::{EnginePlan, PlannedModels};

use crate::failure::unusable;
use crate::screen::{self, Style};
use crate::{host, recipe};

/// Maximum number of devices of a simulated fleet.
const MAX_DEVICES: usize = 16384;
/// Maximum number of tokens of a prompt, and maximum number of sampled tokens of an attempt.
const MAX_TOKENS: u64 = memory::MAX_TOKENS << 8;
/// Fraction of a device's memory that a server uses, as in vLLM's default.
const SERVER_MEMORY_FRACTION: f64 = 0.9;
/// Default number of tokens of a prompt with its tool results.
const DEFAULT_PROMPT: u64 = 500;
/// Memory of a device that a sleeping server keeps for the CUDA context and captured graphs, in
/// bytes.
const SLEEPING_SERVER_MEMORY: Bytes = 1500 << 20;

/// Estimate the resources of a run: memory of every device, tokens per second, time and cost
///
/// Computes the plan from the model's config.json and starts nothing. Times are estimated from the
/// peak performance of a device and the fractions of it that are usually reached. Every assumption
/// is printed.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade plan recipes/calculator
  levade plan my-recipe --device h100 --devices 8 --price 2.5
  levade plan my-recipe --config Qwen2.5-7B/config.json --device h100 --prompt 500 --completion 2000
  levade plan my-recipe --device h100 --fleet 8,64,512,4096 --tool 2")]
pub struct Args {
    /// A TOML file, or a directory that contains recipe.toml
    recipe: PathBuf,

    /// Override a key of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// File config.json of the model; if set, model.source is not fetched
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Device that samples and trains: a100, h100, h200, b200, l40s, rtx4090; without it, no time
    /// is estimated
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Number of devices that sample [default: the devices of the servers that the recipe starts].
    /// The recipe's learner determines the number of devices that train
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=MAX_DEVICES as i64))]
    devices: Option<u32>,

    /// Number of tokens in the prompt and the tool results of an attempt [default: 500, or the
    /// context if it is smaller]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(..=MAX_TOKENS))]
    prompt: Option<u64>,

    /// Number of tokens that an attempt samples [default: half of agent.max_tokens]
    #[arg(
        long,
        alias = "reply",
        value_name = "TOKENS",
        value_parser = clap::value_parser!(u64).range(..=MAX_TOKENS)
    )]
    completion: Option<u64>,

    /// Simulate fleets with these numbers of devices: staleness, idle fractions, and the bottleneck
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    fleet: Vec<usize>,

    /// Duration of a tool call between two turns, in seconds, for --fleet
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    tool: f64,

    /// Number of turns of an attempt, for --fleet [default: agent.max_turns]
    #[arg(long, value_name = "N")]
    turns: Option<usize>,

    /// Standard deviation of the sampled tokens per attempt over their mean, for --fleet
    #[arg(long, value_name = "RATIO", default_value_t = 0.5)]
    spread: f64,

    /// Ratio of trained tokens to the sum of sampled tokens and one prompt per group, for --fleet;
    /// below 1 if groups have zero variance, or if completions share prefixes, which are trained on
    /// once
    #[arg(long, alias = "learnt", value_name = "RATIO", default_value_t = 1.0)]
    trained: f64,

    /// JSON file with measured times in seconds, for --fleet, which replace the times of the
    /// device: prompt, batch, sequence, learn, update, publish
    #[arg(long, value_name = "FILE")]
    service: Option<PathBuf>,

    /// Price of one device hour, in any currency
    #[arg(long, value_name = "PRICE")]
    price: Option<f64>,
}

pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    let recipe = recipe::load(&args.recipe, &args.overrides)?;
    let (shape, files) = match &args.config {
        Some(file) => {
            let text = read_option_file("--config", file)?;
            (
                Shape::parse(&text)
                    .map_err(|why| unusable(format!("{}: {why}", file.display())))?,
                None,
            )
        }
        None => {
            let files = ModelFiles::open(&model::fetch_model(
                &recipe.model.source,
                &host::create_host()?,
            )?)?;
            (Shape::new(&files.config), Some(files))
        }
    };
    let device = args.device.as_deref().map(Device::by_name).transpose().map_err(unusable)?;
    let style = Style::stdout();
    screen::print_line(&format!("{} {}", style.bold("model  "), shape.describe()));

    if let Some(price) = args.price.filter(|price| !(0.0..1e12).contains(price)) {
        return Err(unusable(format!(
            "--price is {price}, but must be at least 0 and less than 1e12"
        )));
    }
    let context = recipe.model.context.map_or(shape.context, |context| context as u64);
    let prompt = args.prompt.unwrap_or(DEFAULT_PROMPT.min(context));
    if prompt > context {
        return Err(unusable(format!(
            "--prompt is {prompt}, but the context is {context} tokens (`model.context`); lower \
             --prompt"
        )));
    }
    let learner = print_learner(&recipe, &shape, files.as_ref(), device)?;
    let servers = print_samplers(&recipe, &shape, context, device, (args.devices, &learner))?;
    // The tasks determine which agents act, and the plan does not read them: the agent with the
    // most tokens is assumed.
    let max_tokens = recipe.agents().iter().map(|(_, agent)| agent.max_tokens).max().unwrap_or(0);
    let completion = args.completion.unwrap_or((max_tokens as u64).div_ceil(2));
    let is_colocated = learner.is_colocated;
    let handoff = if is_colocated { time::handoff_seconds(&shape, learner.moved) } else { 0.0 };
    if !args.fleet.is_empty() {
        simulate_fleets(args, &recipe, &shape, device, (&servers, (prompt, completion), handoff))?;
    }
    let Some(device) = device else {
        screen::print_line(
            "\nset --device to estimate tokens per second, time and cost; `levade check RECIPE \
             --measure` measures a step on this machine",
        );
        return Ok(ExitCode::SUCCESS);
    };
    let work = time::Workload {
        prompt,
        completion_tokens: completion,
        running: servers.running,
        tensor: servers.tensor,
        samplers: servers.count,
        learners: learner.devices,
        stages: learner.stages,
        round: learner.round,
        handoff_seconds: handoff,
    };
    let mut hours = 0.0;
    for (index, phase) in recipe.phase.iter().enumerate() {
        let Phase::Rl(keys) = phase else { continue };
        hours += print_phase(index, keys, &shape, device, &work);
    }
    let sampling = servers.count.saturating_mul(servers.tensor);
    let devices = if is_colocated {
        sampling.max(learner.devices)
    } else {
        sampling.saturating_add(learner.devices)
    };
    screen::print_line(&format!(
        "\n{} {} of phases of kind \"rl\" on {}, without evaluations and other phases",
        style.bold("time   "),
        format_duration(3600.0 * hours),
        screen::plural(devices, "device")
    ));
    if let Some(price) = args.price {
        let all = hours * f64::from(devices);
        screen::print_line(&format!(
            "{} {:.2} ({all:.2} device hours at {price})",
            style.bold("cost   "),
            all * price
        ));
    }
    screen::print_line(&format!(
        "\n{}",
        style.dim(&time::describe_assumptions(device, is_colocated, learner.stages))
    ));
    Ok(ExitCode::SUCCESS)
}

/// Formats a duration with at least two digits and its unit.
fn format_duration(seconds: f64) -> String {
    match seconds {
        ..1.0 => format!("{:.0} ms", 1000.0 * seconds),
        ..10.0 => format!("{seconds:.1} s"),
        ..600.0 => format!("{seconds:.0} s"),
        ..36_000.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.1} h", seconds / 3600.0),
    }
}

/// Reads the file that the option `option` names.
fn read_option_file(option: &str, file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file)
        .map_err(|error| unusable(format!("cannot read {option} {}: {error}", file.display())))
}

/// Properties of the learner that determine the time of a step.
struct LearnerEstimate {
    /// Number of devices of the learner. 0 for the embedded engine.
    devices: u32,
    /// Bytes of memory that each device offloads to its host while servers use the device.
    moved: Bytes,
    /// Bytes of memory that the learner keeps on each device while servers use the device.
    resident: Bytes,
    /// Number of pipeline stages of the learner.
    stages: u64,
    /// Number of tokens in the micro-batches that all ranks process concurrently.
    round: u64,
    /// Whether the servers are colocated on the learner's devices.
    is_colocated: bool,
}

/// Samplers of a run: servers, or single devices.
struct SamplerEstimate {
    /// Number of devices of each server.
    tensor: u32,
    /// Number of servers of the run.
    count: u32,
    /// Number of sequences that each server samples concurrently.
    running: u64,
}

/// Prints the learner and its memory, and returns the learner's properties.
fn print_learner(
    recipe: &Recipe,
    shape: &Shape,
    files: Option<&ModelFiles>,
    device: Option<&Device>,
) -> anyhow::Result<LearnerEstimate> {
    let style = Style::stdout();
    let none = LearnerEstimate {
        devices: 0,
        moved: 0,
        resident: 0,
        stages: 1,
        round: u64::MAX,
        is_colocated: false,
    };
    let Some(LearnerKeys::Torch(keys)) = &recipe.cluster.learner else {
        if files.is_none() {
            screen::print_line(
                "the embedded engine trains: its plan needs the model files; leave out --config",
            );
            return Ok(none);
        }
        for EnginePlan { what, plan, .. } in
            PlannedModels::open(recipe, &host::create_host()?)?.plans(recipe, None)?
        {
            let what = if what.is_empty() { "this machine" } else { what };
            screen::print_line(&format!("{} {what}: {plan}", style.bold("engine ")));
        }
        return Ok(none);
    };
    memory::check_split(keys, shape).map_err(unusable)?;
    let processes = keys.processes_per_node().saturating_mul(keys.nodes);
    let plan = Learner::new(recipe, keys).plan_memory(shape);
    let total = memory::total_bytes(&plan);
    screen::print_line(&format!(
        "{} {processes} processes of PyTorch, each {} GiB",
        style.bold("learner"),
        format_gib(total)
    ));
    print_memory_parts(&plan);
    let is_colocated = recipe.cluster.placement == Placement::Colocated;
    let moved = memory::offloaded_bytes(&plan);
    let sleeping_server = if is_colocated && keys.gpus > 0 { SLEEPING_SERVER_MEMORY } else { 0 };
    if is_colocated {
        let host = moved.saturating_mul(keys.processes_per_node().into());
        screen::print_line(&format!(
            "          {} GiB more for a sleeping server; {} GiB of each machine's memory while \
             servers sample",
            format_gib(sleeping_server),
            format_gib(host)
        ));
    }
    warn_if_too_large(
        total.saturating_add(sleeping_server),
        device.filter(|_| keys.gpus > 0),
        "use more processes, --checkpoint-activations, `tp` or `pp`, or lower \
         `engine.micro_batch_tokens`",
    );
    let ranks =
        u64::from(processes) / (u64::from(keys.tp) * u64::from(keys.cp) * u64::from(keys.pp));
    Ok(LearnerEstimate {
        devices: processes,
        moved,
        resident: if is_colocated && keys.gpus > 0 { memory::CUDA_CONTEXT_BYTES } else { 0 },
        stages: keys.pp.into(),
        round: ranks.max(1).saturating_mul(recipe.engine.micro_batch_tokens as u64),
        is_colocated,
    })
}

fn print_memory_parts(parts: &[(&str, Bytes)]) {
    for (name, bytes) in parts.iter().filter(|(_, bytes)| *bytes > 0) {
        screen::print_line(&format!("          {name:<34} {:>9} GiB", format_gib(*bytes)));
    }
}

fn warn_if_too_large(total: u64, device: Option<&Device>, way_out: &str) {
    if let Some(device) = device.filter(|device| total > device.memory) {
        screen::print_line(&format!(
            "          does not fit: a {} has {} GiB; {way_out}",
            device.name,
            format_gib(device.memory)
        ));
    }
}

/// Prints the memory and the concurrency of the samplers, and returns the samplers' properties.
fn print_samplers(
    recipe: &Recipe,
    shape: &Shape,
    context: u64,
    device: Option<&Device>,
    (devices, learner): (Option<u32>, &LearnerEstimate),
) -> anyhow::Result<SamplerEstimate> {
    let keys = recipe.cluster.samplers.as_ref().map(|keys| keys.servers());
    let tensor = keys.map_or(1, |keys| keys.gpus.max(1));
    let started = keys.filter(|keys| keys.start).map(|keys| keys.count as u32);
    let count = match devices {
        Some(devices) if !devices.is_multiple_of(tensor) || devices < tensor => {
            return Err(unusable(format!(
                "--devices is {devices}, but must be a multiple of {tensor}, the devices of a \
                 server (`cluster.samplers.gpus`)"
            )));
        }
        Some(devices) => devices / tensor,
        None => started.unwrap_or(1),
    };
    let attempts = recipe.concurrency() as u64;
    let attempts_per_server = attempts.div_ceil(count.into());
    let Some(device) = device else {
        return Ok(SamplerEstimate { tensor, count, running: attempts_per_server });
    };
    let weights = shape.parameters() * 2;
    let sequence = shape.kv_cache_bytes_per_token(2).saturating_mul(context);
    let free = device.memory - learner.resident;
    let usable = free.min((device.memory as f64 * SERVER_MEMORY_FRACTION) as Bytes);
    let room = usable.saturating_mul(tensor.into()).saturating_sub(weights);
    let max_attempts = room / sequence.max(1);
    let style = Style::stdout();
    let each =
        if tensor > 1 { format!("servers of {tensor} devices, each ") } else { String::new() };
    screen::print_line(&format!(
        "{} {each}{} GiB of weights (bf16) and {} GiB of KV cache, {} GiB for a sequence of \
         {context} tokens",
        style.bold("sampler"),
        format_gib(weights),
        format_gib(room),
        format_gib(sequence),
    ));
    if learner.resident > 0 {
        let resident = format_gib(learner.resident);
        screen::print_line(&format!(
            "          {resident} GiB of each device stay with the offloaded learner"
        ));
    }
    if max_attempts == 0 {
        let (who, way) = match tensor {
            1 => (
                format!("a {} does", device.name),
                "use several devices per server (`cluster.samplers.gpus`)",
            ),
            _ => (format!("{tensor} of {} do", device.name), "raise `cluster.samplers.gpus`"),
        };
        return Err(unusable(format!(
            "{who} not hold the model and one sequence of {context} tokens: lower `model.context`, \
             or {way}"
        )));
    }
    screen::print_line(&format!(
        "          {} of {attempts} attempts run concurrently on each of {count}",
        attempts_per_server.min(max_attempts)
    ));
    Ok(SamplerEstimate { tensor, count, running: attempts_per_server.min(max_attempts) })
}

/// Simulates the last RL phase of the recipe on fleets of several sizes.
fn simulate_fleets(
    args: &Args,
    recipe: &Recipe,
    shape: &Shape,
    device: Option<&Device>,
    (servers, (prompt, completion), handoff): (&SamplerEstimate, (u64, u64), f64),
) -> anyhow::Result<()> {
    let service = match (&args.service, device) {
        (Some(file), _) => {
            let text = read_option_file("--service", file)?;
            let service: fleet::ServiceTimes = serde_json::from_str(&text)
                .map_err(|why| unusable(format!("--service {}: {why}", file.display())))?;
            service
                .check()
                .map_err(|why| unusable(format!("--service {}: {why}", file.display())))?;
            service
        }
        (None, Some(device)) => time::estimate_service_times(
            shape,
            device,
            (prompt, completion),
            servers.tensor,
            handoff,
        ),
        (None, None) => {
            return Err(unusable(
                "--fleet needs times: set --device, or pass measured times with --service",
            ));
        }
    };
    let keys = recipe.phase.iter().enumerate().rev().find_map(|(index, phase)| match phase {
        Phase::Rl(keys) => Some((index, keys)),
        Phase::Sft(_) | Phase::Prompt(_) => None,
    });
    let (index, keys) =
        keys.ok_or_else(|| unusable("--fleet needs a phase of kind \"rl\" in the recipe"))?;
    let disaggregated =
        recipe.cluster.learner.is_some() && recipe.cluster.placement == Placement::Disaggregated;
    let min_devices = if disaggregated { 2 } else { 1 };
    if let Some(devices) =
        args.fleet.iter().find(|devices| !(min_devices..=MAX_DEVICES).contains(*devices))
    {
        return Err(unusable(format!(
            "--fleet is {devices}, but must be in {min_devices}..={MAX_DEVICES}"
        )));
    }
    let limits = [
        ("--tool", args.tool, 1e6),
        ("--spread", args.spread, 10.0),
        ("--trained", args.trained, 1000.0),
    ];
    if let Some((name, value, max_value)) =
        limits.into_iter().find(|(_, value, max_value)| !(0.0..=*max_value).contains(value))
    {
        return Err(unusable(format!("{name} is {value}, but must be in 0..={max_value}")));
    }
    let fleet = fleet::Fleet {
        samplers: 1,
        learners: usize::from(disaggregated),
        // The fleet counts devices, so the rows of a server are divided by its devices.
        rows: servers.running.div_ceil(servers.tensor.into()).max(1) as usize,
        groups: keys.groups,
        group_size: keys.group_size,
        ahead: keys.staleness as usize,
        turns: args.turns.unwrap_or(recipe.agent.max_turns as usize).max(1),
        prompt: prompt as f64,
        completion_tokens: completion as f64,
        spread: args.spread,
        tool: args.tool,
        trained_fraction: args.trained,
        service,
    };
    let sizes = fleet::FleetSizes { devices: &args.fleet, fleet, disaggregated };
    let num_completions = sizes.num_completions();
    if num_completions > fleet::MAX_COMPLETIONS {
        let turns_key = if args.turns.is_some() { "--turns" } else { "`agent.max_turns`" };
        let key = |name: &str| format!("`phase.{index}.{name}`");
        let counts = [
            (turns_key.to_owned(), sizes.fleet.turns),
            (key("groups"), keys.groups),
            (key("group_size"), keys.group_size),
            (key("staleness"), sizes.fleet.ahead),
        ];
        let largest = counts.into_iter().max_by_key(|(_, value)| *value);
        let (name, value) = largest.unwrap_or_default();
        return Err(unusable(format!(
            "--fleet would simulate {num_completions} completions of the largest fleet, more than \
             {}: lower {name}, which is {value}, or set fleet sizes that differ less",
            fleet::MAX_COMPLETIONS
        )));
    }
    fleets::print_fleets(&sizes);
    Ok(())
}

/// Prints the estimated time of a phase, and returns the time in hours.
fn print_phase(
    index: usize,
    keys: &RlKeys,
    shape: &Shape,
    device: &Device,
    work: &time::Workload,
) -> f64 {
    let groups = keys.groups as u64;
    let group_size = keys.group_size as u64;
    // Attempts that are cancelled count as complete ones.
    let attempts = time::StepAttempts {
        sampled: groups.saturating_mul(keys.attempts_per_task() as u64),
        trained: groups.saturating_mul(group_size),
    };
    let epochs = keys.epochs as u64;
    let batches = keys.mini_batches as u64;
    let passes =
        time::StepPasses { group: group_size, updates: epochs.saturating_mul(batches), epochs };
    let step = work.estimate_step(shape, device, attempts, passes);
    let style = Style::stdout();
    screen::print_line(&format!(
        "{} {index}: {} attempts per step, {} tokens sampled, {} trained on",
        style.bold("phase  "),
        attempts.sampled,
        screen::count(step.sampled),
        screen::count(step.trained)
    ));
    let seconds = step.seconds(keys.staleness > 0 && work.learners > 0);
    let handoff = if step.handoff_seconds > 0.0 {
        format!("device handoff {}, ", format_duration(step.handoff_seconds))
    } else {
        String::new()
    };
    let bubble = match step.bubble {
        0.0 => String::new(),
        bubble => format!(", {:.0} % of it waiting for other stages", 100.0 * bubble),
    };
    screen::print_line(&format!(
        "          sampling {} ({} tokens/s), learning {} ({} tokens/s{bubble}), {handoff}together \
         {} per step",
        format_duration(step.sampling),
        screen::count((step.sampled as f64 / step.sampling) as u64),
        format_duration(step.learning),
        screen::count((step.trained as f64 / step.learning) as u64),
        format_duration(seconds),
    ));
    seconds * f64::from(keys.steps) / 3600.0
}

#[cfg(test)]
mod tests {
    use super::format_duration;

    #[test]
    fn duration_has_digits_at_every_scale() {
        let expected = [
            (0.0042, "4 ms"),
            (0.5, "500 ms"),
            (2.3, "2.3 s"),
            (48.0, "48 s"),
            (1500.0, "25 min"),
            (90_000.0, "25.0 h"),
        ];
        for (seconds, text) in expected {
            assert_eq!(format_duration(seconds), text);
        }
    }
}
