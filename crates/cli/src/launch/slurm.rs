//! Slurm: one batch job, a task on each node.

use std::path::PathBuf;

use super::files::Job;
use super::{Ended, Follow, LOOK, Plan, asked};
use crate::failure::{INTERRUPTED, unusable};
use crate::screen::{Style, quoted};
use crate::stop::Requests;

/// Options of `--on slurm`
#[derive(clap::Args)]
pub struct Options {
    /// An option of sbatch, for --on slurm, such as partition=gpu or time=12:00:00. Can be given many times
    #[arg(long = "sbatch", value_name = "NAME=VALUE")]
    sbatch: Vec<String>,
}

/// A batch job.
pub struct Batch {
    pub files: Vec<(PathBuf, String)>,
    script: PathBuf,
}

/// Renders the job.
///
/// # Errors
/// When an option is not one.
pub fn plan(job: &Job, options: &Options) -> anyhow::Result<Plan> {
    let script = job.folder.join("job.sbatch");
    let log = |name: &str| job.folder.join(name).display().to_string();
    let mut directives = vec![
        format!("--job-name={}", job.name),
        format!("--nodes={}", job.nodes),
        "--ntasks-per-node=1".into(),
        format!("--cpus-per-task={}", job.processors),
        // A node that is lost, or a job that is put off for another, begins again where its run was.
        "--requeue".into(),
        "--open-mode=append".into(),
        // In time for a checkpoint.
        "--signal=TERM@120".into(),
        format!("--output={}", log("slurm.log")),
    ];
    if job.gpus > 0 {
        directives.push(format!("--gpus-per-node={}", job.gpus));
    }
    for option in &options.sbatch {
        if option.contains('\n') || !option.starts_with(|c: char| c.is_ascii_lowercase()) {
            return Err(unusable(format!(
                "--sbatch {option:?} is no option; give NAME=VALUE, without hyphens"
            )));
        }
        let name = option.split('=').next().unwrap_or_default();
        directives.retain(|other| other.trim_start_matches('-').split('=').next() != Some(name));
        directives.push(format!("--{option}"));
    }
    let directives: String = directives.iter().map(|line| format!("#SBATCH {}\n", quoted(line))).collect();
    let text = format!(
        "#!/bin/sh\n{directives}\
         # The address by which nodes reach the first one, which trains.\n\
         first=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)\n\
         DRESSAGE_HEAD=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')\n\
         export DRESSAGE_HEAD\n\
         exec srun --kill-on-bad-exit=1 --open-mode=append --output={} \\\n    \
             sh -c 'exec sh {} \"$SLURM_PROCID\"'\n",
        quoted(&log("node-%t.log")),
        quoted(&job.script().display()).replace('\'', r"'\''"),
    );
    Ok(Plan::Slurm(Batch { files: vec![(script.clone(), text)], script }))
}

/// State of a job that Slurm knows.
#[derive(Debug, PartialEq, Eq)]
struct State {
    name: String,
    reason: String,
    exit: u8,
}

impl State {
    /// From a line of `scontrol show job -o`.
    fn of(line: &str) -> Option<Self> {
        let field = |name: &str| {
            let found = line.split_whitespace().find_map(|word| word.strip_prefix(name));
            found.and_then(|rest| rest.strip_prefix('=')).map(str::to_owned)
        };
        let exit = field("ExitCode").and_then(|code| code.split(':').next()?.parse().ok());
        Some(State {
            name: field("JobState")?,
            reason: field("Reason").filter(|reason| reason != "None").unwrap_or_default(),
            exit: exit.unwrap_or(0),
        })
    }

    /// Whether it will not run any more; the exit code.
    fn ended(&self) -> Option<u8> {
        match self.name.as_str() {
            "COMPLETED" => Some(0),
            "CANCELLED" => Some(INTERRUPTED),
            "FAILED" => Some(self.exit.max(1)),
            "TIMEOUT" | "DEADLINE" | "OUT_OF_MEMORY" | "BOOT_FAIL" => Some(1),
            _ => None,
        }
    }
}

impl Batch {
    /// The command that submits it.
    pub fn command(&self) -> String {
        format!("sbatch --parsable {}", quoted(&self.script.display()))
    }

    /// Submits the job and follows it.
    pub async fn run(self, job: &Job, detach: bool) -> anyhow::Result<Ended> {
        let said = asked(&["sbatch", "--parsable", &self.script.display().to_string()]).await?;
        let id = said.trim().split(';').next().unwrap_or_default().to_owned();
        anyhow::ensure!(!id.is_empty(), "sbatch named no job: {said:?}");
        let dim = |text| Style::stderr().dim(text);
        eprintln!("{} job {id}", dim("slurm "));
        if detach {
            let watch = format!("squeue -j {id}; tail -f {}", quoted(&job.log(0).display()));
            return Ok(Ended::Detached { watch, end: format!("scancel {id}") });
        }
        let mut stop = Requests::listen()?;
        let (mut shown, mut last) = (Follow::new(&job.log(0)), String::new());
        loop {
            tokio::select! {
                _ = stop.next() => {
                    eprintln!("{} ends job {id}", dim("slurm "));
                    asked(&["scancel", &id]).await?;
                    return Ok(Ended::Code(INTERRUPTED));
                }
                () = tokio::time::sleep(LOOK) => {}
            }
            shown.show();
            let line = asked(&["scontrol", "show", "job", "-o", &id]).await?;
            let Some(state) = State::of(&line) else {
                anyhow::bail!("scontrol says nothing of job {id}: {line}")
            };
            let now = format!("{} {}", state.name, state.reason);
            if now != last {
                eprintln!("{} {}", dim("slurm "), now.trim());
                last = now;
            }
            if let Some(code) = state.ended() {
                shown.show();
                return Ok(Ended::Code(code));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_has_a_task_on_each_node() {
        let job = Job::new("calc", "/runs/a b".into(), "/opt/dressage".into()).unwrap();
        let job = Job { nodes: 2, processors: 4, gpus: 8, ..job };
        let options = Options { sbatch: vec!["partition=gpu".into(), "cpus-per-task=9".into()] };
        let Plan::Slurm(batch) = plan(&job, &options).unwrap() else { panic!() };
        let text = &batch.files[0].1;
        for line in [
            "#SBATCH --job-name=dressage-calc",
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --cpus-per-task=9",
            "#SBATCH --gpus-per-node=8",
            "#SBATCH --partition=gpu",
            "#SBATCH --requeue",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        assert!(!text.contains("cpus-per-task=4"));
        assert!(
            text.contains(r#"sh -c 'exec sh '\''/runs/a b/launch/node.sh'\'' "$SLURM_PROCID"'"#),
            "{text}"
        );
        let wrong = Options { sbatch: vec!["--time=1".into()] };
        assert!(plan(&job, &wrong).is_err());
    }

    #[test]
    fn states_are_read() {
        let line = "JobId=7 JobName=x UserId=root(0) JobState=PENDING Reason=Resources Dependency=(null) ExitCode=0:0";
        let state = State::of(line).unwrap();
        assert_eq!(state, State { name: "PENDING".into(), reason: "Resources".into(), exit: 0 });
        assert_eq!(state.ended(), None);
        let ended =
            |state: &str| State::of(&format!("JobState={state} Reason=None ExitCode=2:0")).unwrap().ended();
        assert_eq!(ended("FAILED"), Some(2));
        assert_eq!(ended("COMPLETED"), Some(0));
        assert_eq!(ended("NODE_FAIL"), None, "it is requeued");
        assert_eq!(State::of("slurm_load_jobs error"), None);
    }
}
