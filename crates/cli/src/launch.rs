//! `levade launch`: starts a run on one machine or many, with the launcher that starts processes there.

use std::path::PathBuf;
use std::process::ExitCode;

use levade_launch::{
    Ended, Job, K8sOptions, Launch, Launcher, RayOptions, SlurmOptions, SshOptions, Watcher,
};
use levade_recipe::Override;

use crate::host;
use crate::recipe;
use crate::screen::{self, Style};
use crate::stop::Requests;

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
    on: On,

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
    ssh: Ssh,

    #[command(flatten)]
    slurm: Slurm,

    #[command(flatten)]
    ray: Ray,

    #[command(flatten)]
    k8s: K8s,
}

/// Options of `--on ssh`
#[derive(clap::Args)]
struct Ssh {
    /// A machine for --on ssh, as ssh knows it; the first one trains. Can be given many times
    #[arg(long = "host", value_name = "HOST")]
    hosts: Vec<String>,

    /// A further argument of ssh, such as -p or -F. Can be given many times
    #[arg(long = "ssh-arg", value_name = "ARG", allow_hyphen_values = true)]
    ssh_args: Vec<String>,
}

/// Options of `--on slurm`
#[derive(clap::Args)]
struct Slurm {
    /// An option of sbatch, for --on slurm, such as partition=gpu or time=12:00:00. Can be given many times
    #[arg(long = "sbatch", value_name = "NAME=VALUE")]
    sbatch: Vec<String>,
}

/// Options of `--on ray`
#[derive(clap::Args)]
struct Ray {
    /// The dashboard of a Ray cluster, for --on ray
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8265")]
    address: String,

    /// The Python that runs the job, as machines of the cluster know it
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    ray_python: String,
}

/// Options of `--on k8s`
#[derive(clap::Args)]
struct K8s {
    /// Image with levade and the learner's environment, for --on k8s
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,

    /// A volume claim that all pods share, and where it is mounted, for --on k8s: the folder of the run, its
    /// model and its environment lie below. Can be given many times
    #[arg(long = "claim", value_name = "NAME:FOLDER")]
    claims: Vec<String>,

    /// The namespace, for --on k8s
    #[arg(long, default_value = "default")]
    namespace: String,

    /// Memory of a pod, for --on k8s
    #[arg(long, value_name = "QUANTITY", default_value = "16Gi")]
    memory: String,
}

/// Programs that start processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum On {
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

impl Args {
    /// Returns the launcher with its options.
    fn launcher(&self) -> Launcher {
        match self.on {
            On::Local => Launcher::Local,
            On::Ssh => {
                Launcher::Ssh(SshOptions { hosts: self.ssh.hosts.clone(), args: self.ssh.ssh_args.clone() })
            }
            On::Slurm => Launcher::Slurm(SlurmOptions { sbatch: self.slurm.sbatch.clone() }),
            On::Ray => Launcher::Ray(RayOptions {
                address: self.ray.address.clone(),
                python: self.ray.ray_python.clone(),
            }),
            On::K8s => Launcher::K8s(K8sOptions {
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
    let launch = Launch::new(job, &recipe, &args.launcher())?;
    if args.dry_run {
        for (path, text) in launch.files() {
            screen::say(&format!("{}\n{text}", Style::stdout().dim(&format!("# {}", path.display()))));
        }
        for command in launch.commands() {
            screen::say(&format!("$ {command}"));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let Job { nodes, root, folder, .. } = launch.job().clone();
    let machines = screen::plural(nodes, "machine");
    eprintln!("{} {} on {machines}", Style::stderr().dim("launch"), screen::path(&root));
    let ended = crate::runtime()?.block_on(async {
        let (log, stops) = (Box::new(std::io::stderr()), Requests::listen()?.stream());
        launch.run(args.detach, Watcher { host: host::host()?, log, stops }).await
    })?;
    match ended {
        Ended::Code(code) => {
            screen::say(&format!("logs   {}", screen::path(&folder)));
            Ok(ExitCode::from(code))
        }
        Ended::Detached { watch, end } => {
            screen::say(&format!("it goes on\nwatch it  {watch}\nend it    {end}"));
            Ok(ExitCode::SUCCESS)
        }
    }
}
