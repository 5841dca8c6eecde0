//! `levade launch`: a run on one machine or many, by whatever starts processes there.
//!
//! Everything is rendered into the folder `launch` of the run: the recipe, one script that every machine runs
//! with its number, and what the launcher itself reads. The first machine trains, the others take part in its
//! learner; all reach the folder of the run under the same path.

mod files;
mod follow;
mod hosts;
mod k8s;
mod ray;
mod slurm;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use levade_recipe::{LearnerKeys, Override, Recipe};
use levade_run::gpus::Shares;

use crate::failure::unusable;
use crate::recipe;
use crate::screen::{self, Style};
use files::Job;

/// Start a run on one machine or many, watch it, and collect its logs
///
/// Renders what is needed into the folder `launch` of the run, submits it, follows it to its end, and takes
/// it down with Ctrl-C. A run that is there already is gone on with.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade launch recipes/calculator --on local
  levade launch my-recipe --on ssh --host east --host west
  levade launch my-recipe --on slurm --sbatch partition=gpu --sbatch time=12:00:00
  levade launch my-recipe --on ray --address http://head:8265
  levade launch my-recipe --on k8s --image registry/levade:1 --claim runs:/runs --run /runs/mine --dry-run")]
pub struct Args {
    /// A TOML file, or a folder that holds recipe.toml
    recipe: PathBuf,

    /// The launcher, which starts processes
    #[arg(long)]
    on: Launcher,

    /// Change a key of the recipe. Can be given many times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// Where to write, in place of the recipe's run.folder
    #[arg(long, value_name = "FOLDER")]
    run: Option<PathBuf>,

    /// Print what would be written and submitted, and do nothing
    #[arg(long)]
    dry_run: bool,

    /// Submit and return, where the launcher goes on by itself (slurm, ray, k8s)
    #[arg(long)]
    detach: bool,

    /// The program `levade` on the machines; this one where not given
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,

    /// Times in a row that a machine whose part has died is started again
    #[arg(long, value_name = "N", default_value_t = 3)]
    restarts: u32,

    #[command(flatten)]
    hosts: hosts::Options,

    #[command(flatten)]
    slurm: slurm::Options,

    #[command(flatten)]
    ray: ray::Options,

    #[command(flatten)]
    k8s: k8s::Options,
}

/// Programs that start processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Launcher {
    /// This machine; several nodes are several groups of processes on it
    Local,
    /// Machines that are reached by ssh, without a password
    Ssh,
    /// A cluster under Slurm
    Slurm,
    /// A cluster of Ray
    Ray,
    /// A cluster under Kubernetes, by kubectl
    K8s,
}

/// How a run that was launched ended.
enum Ended {
    /// With an exit code of its own.
    Code(u8),
    /// Not yet; how to look after it, and how to end it.
    Detached { watch: String, end: String },
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let recipe = recipe::load_run(&args.recipe, &args.overrides, args.run.as_deref())?;
    let job = job(&args, &recipe)?;
    let mut rendered = job.files(&recipe)?;
    let plan = match args.on {
        Launcher::Local => hosts::local(&job)?,
        Launcher::Ssh => hosts::ssh(&job, &args.hosts)?,
        Launcher::Slurm => slurm::plan(&job, &args.slurm)?,
        Launcher::Ray => ray::plan(&job, &args.ray)?,
        Launcher::K8s => k8s::plan(&job, &args.k8s)?,
    };
    rendered.extend(plan.files().iter().cloned());
    if args.dry_run {
        for (path, text) in &rendered {
            screen::say(&format!("{}\n{text}", Style::stdout().dim(&format!("# {}", path.display()))));
        }
        for command in plan.commands() {
            screen::say(&format!("$ {command}"));
        }
        return Ok(ExitCode::SUCCESS);
    }
    std::fs::create_dir_all(&job.folder)
        .with_context(|| format!("cannot create {}", job.folder.display()))?;
    for (path, text) in &rendered {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let machines = screen::plural(job.nodes, "machine");
    eprintln!("{} {} on {machines}", Style::stderr().dim("launch"), screen::path(&job.root));
    let ended = crate::runtime()?.block_on(plan.run(&job, args.detach))?;
    match ended {
        Ended::Code(code) => {
            screen::say(&format!("logs   {}", screen::path(&job.folder)));
            Ok(ExitCode::from(code))
        }
        Ended::Detached { watch, end } => {
            screen::say(&format!("it goes on\nwatch it  {watch}\nend it    {end}"));
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The job to launch.
fn job(args: &Args, recipe: &Recipe) -> anyhow::Result<Job> {
    let root = std::path::absolute(&recipe.run.folder)?;
    let (nodes, processes, threads) = match &recipe.cluster.learner {
        Some(LearnerKeys::Torch(keys)) if keys.start => (keys.nodes, keys.of_node(), keys.threads),
        Some(LearnerKeys::Torch(_)) | None => (1, 1, recipe.engine.threads.max(1) as u32),
    };
    let binary = match &args.binary {
        Some(binary) => binary.clone(),
        None => std::env::current_exe()?,
    };
    let mut job = Job::new(&recipe.run.name, root, binary)?;
    (job.nodes, job.processors) = (nodes, processes.saturating_mul(threads).max(1));
    // Machines of a job are alike: each has those of the servers that the first one starts.
    job.gpus = Shares::of(recipe).all();
    job.restarts = args.restarts;
    Ok(job)
}

/// Something that can be submitted and followed.
enum Plan {
    Hosts(hosts::Hosts),
    Slurm(slurm::Batch),
    Ray(ray::RayJob),
    K8s(k8s::Manifests),
}

impl Plan {
    /// Files that the launcher reads, beside those of every job.
    fn files(&self) -> &[(PathBuf, String)] {
        match self {
            Plan::Hosts(_) => &[],
            Plan::Slurm(batch) => &batch.files,
            Plan::Ray(job) => &job.files,
            Plan::K8s(manifests) => &manifests.files,
        }
    }

    /// Commands that submit it.
    fn commands(&self) -> Vec<String> {
        match self {
            Plan::Hosts(hosts) => hosts.commands(),
            Plan::Slurm(batch) => vec![batch.command()],
            Plan::Ray(job) => vec![job.command()],
            Plan::K8s(manifests) => vec![manifests.command()],
        }
    }

    async fn run(self, job: &Job, detach: bool) -> anyhow::Result<Ended> {
        match self {
            Plan::Hosts(_) if detach => Err(unusable(
                "--detach is for launchers that go on by themselves (slurm, ray, k8s); these processes end with this one",
            )),
            Plan::Hosts(hosts) => hosts.run(job).await,
            Plan::Slurm(batch) => batch.run(job, detach).await,
            Plan::Ray(ray) => ray.run(job, detach).await,
            Plan::K8s(manifests) => manifests.run(job, detach).await,
        }
    }
}

/// How often a launcher is asked how its job is.
const LOOK: Duration = Duration::from_secs(2);
/// A part that lived for so long has done something: the count of restarts begins anew.
const FRESH: Duration = Duration::from_secs(600);

/// The output of a program that a launcher is asked with.
///
/// # Errors
/// When it cannot be started or fails: what it says.
async fn asked(words: &[&str]) -> anyhow::Result<String> {
    const LONGEST: Duration = Duration::from_secs(120);
    let command = words.join(" ");
    let run = tokio::process::Command::new(words[0]).args(&words[1..]).kill_on_drop(true).output();
    let output = tokio::time::timeout(LONGEST, run).await;
    let output = output.map_err(|_| anyhow::anyhow!("waited {LONGEST:?} for `{command}`"))?;
    let output = output.map_err(|error| {
        unusable(format!("cannot start {}: {error}; is it installed on this machine?", words[0]))
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::bail!("`{command}` failed ({}): {}", output.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
