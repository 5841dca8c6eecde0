//! Starts a run on one machine or many, through a launcher: this process, ssh, Slurm, Ray or
//! Kubernetes.
//!
//! All files of a launch are in the directory `launch` of the run: the recipe, one script that each
//! machine runs with its number, and the launcher's own files. Machine 0 trains; the other machines
//! join its learner. All machines reach the run directory under the same path.
//!
//! # Guarantees
//! - [`Launch::new`] starts nothing and writes nothing. It returns the files and commands, so a
//!   caller can print them.
//! - A run that already exists in the directory is resumed.
//! - A machine whose processes fail is restarted, at most [`Job::restarts`] times in a row. Exit
//!   code 2 (an error that the user has to correct) is never retried.
//! - A job that its launcher accepted is followed through outages of the launcher. Every wait has a
//!   deadline, and its error names the commands that show and end the job.
//!
//! # Example
//! Prints what would be submitted to Slurm.
//! ```no_run
//! use levade_launch::{Job, Launch, Launcher, SlurmOptions};
//! use levade_recipe::Recipe;
//!
//! # fn example() -> anyhow::Result<()> {
//! let recipe = Recipe::load("recipes/calculator/recipe.toml".as_ref(), &[])?;
//! let job = Job::new(&recipe, "/shared/bin/levade".into(), 3)?;
//! let launcher = Launcher::Slurm(SlurmOptions { sbatch: vec!["partition=gpu".into()] });
//! let launch = Launch::new(job, &recipe, &launcher)?;
//! println!("{:?} {:?}", launch.files(), launch.commands());
//! # Ok(()) }
//! ```
//!
//! Out of scope: the processes of a machine (`levade-run`), and arguments and printing (the
//! binary).

mod follow;
mod hosts;
mod job;
mod k8s;
mod ray;
mod shell;
mod slurm;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use levade_recipe::Recipe;
use levade_run::unusable;

pub use follow::Watcher;
pub use hosts::SshOptions;
pub use job::Job;
pub use k8s::K8sOptions;
pub use ray::RayOptions;
pub use shell::quoted;
pub use slurm::SlurmOptions;

/// Exit code of a run that stopped after a request: 128 + SIGINT, as in shells.
pub const INTERRUPTED: u8 = 130;
/// Interval between two checks of the state of a job.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Uptime of a machine's processes after which the count of their consecutive failures is reset.
const STABLE: Duration = Duration::from_secs(600);

/// Launcher of a run's processes, with its options.
#[derive(Debug, Clone)]
pub enum Launcher {
    /// This process starts all processes on this machine. Each node is a group of processes.
    Local,
    /// This process starts the processes on other machines by ssh.
    Ssh(SshOptions),
    /// A Slurm cluster runs the job, which is submitted with `sbatch`.
    Slurm(SlurmOptions),
    /// A Ray cluster runs the job, which is submitted through the cluster's HTTP API.
    Ray(RayOptions),
    /// A Kubernetes cluster runs the job, which is submitted with `kubectl`.
    K8s(K8sOptions),
}

/// Outcome of a job that this process has followed or detached from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaunchOutcome {
    /// The run has ended with this exit code.
    Code(u8),
    /// The job continues independently of this process.
    Detached {
        /// Shell command that shows the state of the job.
        watch: String,
        /// Shell command that ends the job.
        end: String,
    },
}

/// Job that is ready to be submitted to its launcher.
pub struct Launch {
    job: Job,
    files: Vec<(PathBuf, String)>,
    submission: Submission,
}

/// Way in which the launcher submits the job.
enum Submission {
    Hosts(hosts::Hosts),
    Slurm(slurm::SlurmBatch),
    Ray(ray::RayJob),
    K8s(k8s::Manifests),
}

impl Launch {
    /// Renders the files of a job for a launcher.
    ///
    /// # Errors
    /// Returns an error that names the option if the launcher cannot start the job with the given
    /// options.
    pub fn new(job: Job, recipe: &Recipe, launcher: &Launcher) -> anyhow::Result<Self> {
        let mut files = job.render_files(recipe)?;
        let submission = match launcher {
            Launcher::Local => Submission::Hosts(hosts::on_this_machine(&job)?),
            Launcher::Ssh(options) => Submission::Hosts(hosts::over_ssh(&job, options)?),
            Launcher::Slurm(options) => {
                let (batch, rendered) = slurm::render(&job, options)?;
                files.extend(rendered);
                Submission::Slurm(batch)
            }
            Launcher::Ray(options) => {
                let (ray, driver) = ray::render(&job, options)?;
                files.push(driver);
                Submission::Ray(ray)
            }
            Launcher::K8s(options) => {
                let (manifests, file) = k8s::render(&job, options)?;
                files.push(file);
                Submission::K8s(manifests)
            }
        };
        Ok(Launch { job, files, submission })
    }

    /// Returns the job that will be launched.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Returns the paths and texts of the files that the machines and the launcher read.
    pub fn files(&self) -> &[(PathBuf, String)] {
        &self.files
    }

    /// Returns the shell commands that submit the job.
    pub fn commands(&self) -> Vec<String> {
        match &self.submission {
            Submission::Hosts(hosts) => hosts.commands(),
            Submission::Slurm(batch) => vec![batch.command()],
            Submission::Ray(job) => vec![job.command()],
            Submission::K8s(manifests) => vec![manifests.command()],
        }
    }

    /// Writes the files, submits the job, and follows it to its end. If `detach` is true, returns
    /// after the submission.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written. Also returns an error if the launcher rejects
    /// the job, does not report its state for too long, or does not end the job after a request.
    pub async fn run(self, detach: bool, watcher: Watcher) -> anyhow::Result<LaunchOutcome> {
        let Launch { job, files, submission } = self;
        if detach && matches!(submission, Submission::Hosts(_)) {
            return Err(unusable(
                "--detach requires a launcher whose jobs continue without this command (slurm, \
                 ray, k8s); the processes of this launcher end with it",
            ));
        }
        std::fs::create_dir_all(&job.dir)
            .with_context(|| format!("cannot create {}", job.dir.display()))?;
        for (path, text) in &files {
            std::fs::write(path, text)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        match submission {
            Submission::Hosts(hosts) => hosts.run(&job, watcher).await,
            Submission::Slurm(batch) => batch.run(&job, detach, watcher).await,
            Submission::Ray(ray) => ray.run(&job, detach, watcher).await,
            Submission::K8s(manifests) => manifests.run(&job, detach, watcher).await,
        }
    }
}
