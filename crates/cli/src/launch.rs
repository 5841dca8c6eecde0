//! Implements `levade launch`, which starts a run on one or more machines with a launcher such as
//! Slurm.

use std::path::PathBuf;
use std::process::ExitCode;

use levade_launch::{
    Job, K8sOptions, Launch, LaunchOutcome, Launcher, RayOptions, SlurmOptions, SshOptions, Watcher,
};
use levade_recipe::Override;

use crate::host;
use crate::recipe;
use crate::screen::{self, Style};
use crate::stop::StopRequests;

/// Start a run on one or more machines, watch it, and collect its logs
///
/// Renders the scripts and manifests into the directory `launch` of the run, submits the job and
/// follows it to its end. Ctrl-C stops the job. An existing run is resumed.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade launch recipes/calculator --on local
  levade launch my-recipe --on ssh --host east --host west
  levade launch my-recipe --on slurm --sbatch partition=gpu --sbatch time=12:00:00
  levade launch my-recipe --on ray --address http://head:8265
  levade launch my-recipe --on k8s --image registry/levade:1 --claim runs:/runs --run /runs/mine \
  --dry-run")]
pub struct Args {
    /// A TOML file, or a directory that contains recipe.toml
    recipe: PathBuf,

    /// Launcher that starts the processes
    #[arg(long)]
    on: LaunchTarget,

    /// Override a key of the recipe; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<Override>,

    /// Run directory, instead of the directory in the recipe's run.folder
    #[arg(long, value_name = "DIR")]
    run: Option<PathBuf>,

    /// Print the files and commands without writing or submitting anything
    #[arg(long)]
    dry_run: bool,

    /// Submit the job and return, if the launcher runs it independently (slurm, ray, k8s)
    #[arg(long)]
    detach: bool,

    /// Path of `levade` on the machines [default: the path of this program]
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,

    /// Maximum number of restarts in a row of a machine's processes
    #[arg(long, value_name = "N", default_value_t = 3)]
    restarts: u32,

    #[command(flatten)]
    ssh: Ssh,

    #[command(flatten)]
    slurm: Slurm,

    #[command(flatten)]
    ray: Ray,

    #[command(flatten)]
    k8s: K8s,
}

/// Options of the launcher `--on ssh`
#[derive(clap::Args)]
struct Ssh {
    /// Name of a machine for --on ssh, as ssh accepts it; the first machine trains; can be repeated
    #[arg(long = "host", value_name = "HOST")]
    hosts: Vec<String>,

    /// Additional argument of ssh, such as -p or -F; can be repeated
    #[arg(long = "ssh-arg", value_name = "ARG", allow_hyphen_values = true)]
    ssh_args: Vec<String>,
}

/// Options of the launcher `--on slurm`
#[derive(clap::Args)]
struct Slurm {
    /// Option of sbatch for --on slurm, such as partition=gpu or time=12:00:00; can be repeated
    #[arg(long = "sbatch", value_name = "NAME=VALUE")]
    sbatch: Vec<String>,
}

/// Options of the launcher `--on ray`
#[derive(clap::Args)]
struct Ray {
    /// URL of the dashboard of a Ray cluster, for --on ray
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8265")]
    address: String,

    /// Python interpreter that runs the job, by its name on the machines of the cluster
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    ray_python: String,
}

/// Options of the launcher `--on k8s`
#[derive(clap::Args)]
struct K8s {
    /// Image with levade and the learner's environment, for --on k8s
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,

    /// Volume claim that all pods share and its mount point, for --on k8s; the run directory, the
    /// model and the environment must be below it; can be repeated
    #[arg(long = "claim", value_name = "NAME:DIR")]
    claims: Vec<String>,

    /// Namespace of the job, for --on k8s
    #[arg(long, default_value = "default")]
    namespace: String,

    /// Memory of a pod, for --on k8s
    #[arg(long, value_name = "QUANTITY", default_value = "16Gi")]
    memory: String,
}

/// Launcher: starts the processes of a run on machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum LaunchTarget {
    /// This machine; each node is a group of processes on this machine
    Local,
    /// Machines that ssh reaches without a password
    Ssh,
    /// A Slurm cluster, with sbatch
    Slurm,
    /// A Ray cluster, through its HTTP API
    Ray,
    /// A Kubernetes cluster, with kubectl
    K8s,
}

impl Args {
    /// Creates the launcher that the options select, with its settings.
    fn create_launcher(&self) -> Launcher {
        match self.on {
            LaunchTarget::Local => Launcher::Local,
            LaunchTarget::Ssh => Launcher::Ssh(SshOptions {
                hosts: self.ssh.hosts.clone(),
                args: self.ssh.ssh_args.clone(),
            }),
            LaunchTarget::Slurm => {
                Launcher::Slurm(SlurmOptions { sbatch: self.slurm.sbatch.clone() })
            }
            LaunchTarget::Ray => Launcher::Ray(RayOptions {
                address: self.ray.address.clone(),
                python: self.ray.ray_python.clone(),
            }),
            LaunchTarget::K8s => Launcher::K8s(K8sOptions {
                image: self.k8s.image.clone(),
                claims: self.k8s.claims.clone(),
                namespace: self.k8s.namespace.clone(),
                memory: self.k8s.memory.clone(),
            }),
        }
    }
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let recipe = recipe::load_run(&args.recipe, &args.overrides, args.run.as_deref())?;
    let binary = match &args.binary {
        Some(binary) => binary.clone(),
        None => std::env::current_exe()?,
    };
    let job = Job::new(&recipe, binary, args.restarts)?;
    let launch = Launch::new(job, &recipe, &args.create_launcher())?;
    if args.dry_run {
        for (path, text) in launch.files() {
            screen::print_line(&format!(
                "{}\n{text}",
                Style::stdout().dim(&format!("# {}", path.display()))
            ));
        }
        for command in launch.commands() {
            screen::print_line(&format!("$ {command}"));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let Job { nodes, root, dir, .. } = launch.job().clone();
    let machines = screen::plural(nodes, "machine");
    eprintln!("{} {} on {machines}", Style::stderr().dim("launch"), screen::path(&root));
    let ended = crate::create_runtime()?.block_on(async {
        let log = Box::new(std::io::stderr());
        let stops = StopRequests::listen()?.into_stream();
        launch.run(args.detach, Watcher { host: host::create_host()?, log, stops }).await
    })?;
    match ended {
        LaunchOutcome::Code(code) => {
            screen::print_line(&format!("logs   {}", screen::path(&dir)));
            Ok(ExitCode::from(code))
        }
        LaunchOutcome::Detached { watch, end } => {
            screen::print_line(&format!("the run continues\nwatch it  {watch}\nend it    {end}"));
            Ok(ExitCode::SUCCESS)
        }
    }
}
