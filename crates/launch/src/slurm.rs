//! Slurm: one batch job, with one task per node.

use std::path::PathBuf;

use anyhow::Context as _;

use levade_run::unusable;

use crate::follow::{JobState, SchedulerJob, Watcher, follow, report_status};
use crate::job::Job;
use crate::shell::{quoted, run_command};
use crate::{INTERRUPTED, LaunchOutcome, STABLE};

/// Options of the Slurm launcher.
#[derive(Debug, Clone)]
pub struct SlurmOptions {
    /// Additional options of `sbatch` as `NAME=VALUE`, such as `partition=gpu` or `time=12:00:00`.
    pub sbatch: Vec<String>,
}

/// Batch job of Slurm that is ready to be submitted.
pub struct SlurmBatch {
    script: PathBuf,
}

/// Options of `sbatch` that the job itself sets, each with a hint how to change the value.
const OWNED: [(&str, &str); 5] = [
    ("nodes", "set `cluster.learner.nodes`"),
    ("ntasks", "each node has one task"),
    ("ntasks-per-node", "each node has one task"),
    ("array", "a job has one run"),
    ("wrap", "the job has a script"),
];

/// Exit code of a task whose part failed with an error that the user must correct. srun returns the
/// highest code of all tasks. The codes are ordered so that the code of the failed task exceeds the
/// codes of tasks that were stopped because of the failure.
const EXIT_USER_ERROR: i32 = 202;
/// Exit code of a task whose part failed for any other reason.
const EXIT_FAILED: i32 = 203;

/// Shell script of one Slurm task, which runs the part of one machine.
const TASK: &str = "#!/bin/sh
# The shell waits for its part, which receives the signal, too.
trap : TERM
code=0
sh {script} \"$SLURM_PROCID\" || code=$?
case $code in
    0 | 130) exit $code ;;
    2) exit {users} ;;
    *) echo \"machine $SLURM_PROCID ended with exit code $code\"; exit {died} ;;
esac
";

/// Shell script of the batch job, which restarts all tasks when one of the tasks has failed.
const BATCH: &str = "
# The address by which the nodes reach the first node, which trains.
first=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)
LEVADE_HEAD=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
# Without an address, use the name of the node.
export LEVADE_HEAD=\"${LEVADE_HEAD:-$first}\"
# A step of a failed node may hold its resources for a while; restarted steps overlap with it.
export SLURM_OVERLAP=1
died=0
while :; do
    since=$(date +%s)
    code=0
    srun --kill-on-bad-exit=1 --open-mode=append --output={log} sh {task} || code=$?
    case $code in
        0) exit 0 ;;
        130)
            # A preempted job that stops in time would not continue later: requeue it.
            if scontrol show job -o \"$SLURM_JOB_ID\" | grep ' JobState=RUNNING ' | grep -qv ' \
            PreemptTime=None'; then
                scontrol requeue \"$SLURM_JOB_ID\" && sleep 600
            fi
            exit 130
            ;;
        {users}) exit 2 ;;
    esac
    [ $(($(date +%s) - since)) -lt {fresh} ] || died=0
    died=$((died + 1))
    if [ $died -gt {restarts} ]; then
        echo \"a machine failed $died times in a row\"
        exit 1
    fi
    echo \"a machine failed (exit code $code); restarting all machines ($died of {restarts})\"
done
";

/// Renders the batch job and its files.
///
/// # Errors
/// Returns an error if an option is malformed or set by the job itself, or if the directory's name
/// contains a backslash, which Slurm would interpret.
pub fn render(
    job: &Job,
    options: &SlurmOptions,
) -> anyhow::Result<(SlurmBatch, [(PathBuf, String); 2])> {
    let script = job.dir.join("job.sbatch");
    let task = job.dir.join("task.sh");
    if job.dir.display().to_string().contains('\\') {
        return Err(unusable(format!(
            "{} contains a backslash, which Slurm interprets in paths; choose another directory \
             (--run)",
            job.root.display()
        )));
    }
    let mut directives = vec![
        format!("--job-name={}", job.name),
        format!("--nodes={}", job.nodes),
        "--ntasks-per-node=1".into(),
        format!("--cpus-per-task={}", job.processors),
        // The job is restarted, and resumes its run, after the loss of a node or a preemption.
        "--requeue".into(),
        "--open-mode=append".into(),
        // Time for a checkpoint, in seconds.
        "--signal=TERM@120".into(),
        format!("--output={}", log_path(job, "slurm.log")),
    ];
    if job.gpus > 0 {
        directives.push(format!("--gpus-per-node={}", job.gpus));
    }
    for option in &options.sbatch {
        if option.contains('\n') || !option.starts_with(|c: char| c.is_ascii_lowercase()) {
            return Err(unusable(format!(
                "--sbatch {option:?} is not an option; use NAME=VALUE, without hyphens"
            )));
        }
        let name = option.split('=').next().unwrap_or_default();
        if let Some((_, way)) = OWNED.iter().find(|(owned, _)| *owned == name) {
            return Err(unusable(format!("--sbatch {option:?} is set by the launcher: {way}")));
        }
        directives.retain(|other| other.trim_start_matches('-').split('=').next() != Some(name));
        directives.push(format!("--{option}"));
    }
    let directives: String =
        directives.iter().map(|line| format!("#SBATCH {}\n", quote_directive(line))).collect();
    let values = [
        ("{log}", quoted(&log_path(job, "node-%t.log"))),
        ("{task}", quoted(&task.display())),
        ("{script}", quoted(&job.script_path().display())),
        ("{users}", EXIT_USER_ERROR.to_string()),
        ("{died}", EXIT_FAILED.to_string()),
        ("{restarts}", job.restarts.to_string()),
        ("{fresh}", STABLE.as_secs().to_string()),
    ];
    let filled = |text: &str| fill_placeholders(text, &values);
    let batch = format!("#!/bin/sh\n{directives}{}", filled(BATCH.trim_start_matches('\n')));
    let files = [(task.clone(), filled(TASK)), (script.clone(), batch)];
    Ok((SlurmBatch { script }, files))
}

fn log_path(job: &Job, name: &str) -> String {
    // Slurm expands patterns after a percent sign. A backslash would disable the expansion in
    // the complete name.
    let dir = job.dir.display().to_string();
    format!("{}/{name}", dir.replace('%', "%%"))
}

/// Quotes a word for an `#SBATCH` line. Within the quotes of sbatch, a backslash escapes the next
/// character.
fn quote_directive(word: &str) -> String {
    if word.chars().all(|c| c.is_ascii_alphanumeric() || "._-/=+:,@%".contains(c)) {
        word.to_owned()
    } else {
        format!("\"{}\"", word.replace('\\', r"\\").replace('"', "\\\""))
    }
}

/// Replaces the placeholders in a text with their values. Placeholders within values are not
/// replaced.
fn fill_placeholders(text: &str, values: &[(&str, String)]) -> String {
    let mut all = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        all.push_str(before);
        match values.iter().find(|(name, _)| from.starts_with(name)) {
            Some((name, value)) => {
                all.push_str(value);
                rest = &from[name.len()..];
            }
            None => {
                all.push('{');
                rest = &from[1..];
            }
        }
    }
    all + rest
}

/// Fields of a Slurm job that determine the state of the job.
#[derive(Debug, PartialEq, Eq)]
struct SlurmJobFields {
    name: String,
    reason: String,
    exit: u8,
    /// Whether Slurm requeues the job after the loss of a node or a preemption.
    again: bool,
}

impl SlurmJobFields {
    /// Parses a line of the output of `scontrol show job -o`. Returns `None` if the line contains
    /// no job state.
    fn parse(line: &str) -> Option<Self> {
        let exit =
            find_field(line, "ExitCode").and_then(|code| code.split(':').next()?.parse().ok());
        Some(SlurmJobFields {
            name: find_field(line, "JobState")?,
            reason: find_field(line, "Reason")
                .filter(|reason| reason != "None")
                .unwrap_or_default(),
            exit: exit.unwrap_or(0),
            again: find_field(line, "Requeue").is_some_and(|again| again != "0"),
        })
    }

    /// Returns the exit code of the job, or `None` if the job may still run.
    fn exit_code(&self) -> Option<u8> {
        match self.name.as_str() {
            "COMPLETED" => Some(0),
            "CANCELLED" => Some(INTERRUPTED),
            "FAILED" => Some(self.exit.max(1)),
            "NODE_FAIL" | "PREEMPTED" if !self.again => Some(1),
            "TIMEOUT" | "DEADLINE" | "OUT_OF_MEMORY" | "BOOT_FAIL" => Some(1),
            _ => None,
        }
    }
}

fn find_field(line: &str, name: &str) -> Option<String> {
    let found = line.split_whitespace().find_map(|word| word.strip_prefix(name));
    found.and_then(|rest| rest.strip_prefix('=')).map(str::to_owned)
}

impl SlurmBatch {
    /// Returns the shell command that submits the batch job.
    pub fn command(&self) -> String {
        format!("sbatch --parsable {}", quoted(&self.script.display()))
    }

    /// Submits the batch job, and follows it to its end.
    pub async fn run(
        self,
        job: &Job,
        detach: bool,
        watcher: Watcher,
    ) -> anyhow::Result<LaunchOutcome> {
        let job_line =
            run_command(&["sbatch", "--parsable", &self.script.display().to_string()]).await?;
        let id = job_line.trim().split(';').next().unwrap_or_default().to_owned();
        anyhow::ensure!(!id.is_empty(), "sbatch returned no job id: {job_line:?}");
        let submitted = SlurmJob { id, log: job.log(0) };
        report_status::<SlurmJob>(&watcher.host, &submitted.name());
        follow(&submitted, &job.log(0), detach, watcher).await
    }
}

/// Job that was submitted to a Slurm cluster.
struct SlurmJob {
    id: String,
    log: PathBuf,
}

impl SchedulerJob for SlurmJob {
    const LAUNCHER: &'static str = "slurm";

    fn name(&self) -> String {
        format!("job {}", self.id)
    }

    fn watch_command(&self) -> String {
        format!("squeue -j {}; tail -f {}", self.id, quoted(&self.log.display()))
    }

    fn end_command(&self) -> String {
        format!("scancel {}", self.id)
    }

    async fn query_state(&self) -> anyhow::Result<JobState> {
        let line = run_command(&["scontrol", "show", "job", "-o", &self.id]).await?;
        let state = SlurmJobFields::parse(&line);
        let state = state
            .with_context(|| format!("scontrol returned no state of the job: {}", line.trim()))?;
        let text = format!("{} {}", state.name, state.reason).trim().to_owned();
        Ok(JobState { text, ended: state.exit_code() })
    }

    async fn request_end(&self) -> anyhow::Result<()> {
        run_command(&["scancel", &self.id]).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn render_writes_directives_and_task_per_node() {
        let job = Job::named("calc", "/runs/a b".into(), "/opt/levade".into()).unwrap();
        let job = Job { nodes: 2, processors: 4, gpus: 8, ..job };
        let options =
            SlurmOptions { sbatch: vec!["partition=gpu".into(), "cpus-per-task=9".into()] };
        let (_, files) = render(&job, &options).unwrap();
        let [(_, task), (_, text)] = &files;
        for line in [
            "#SBATCH --job-name=levade-calc",
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --cpus-per-task=9",
            "#SBATCH --gpus-per-node=8",
            "#SBATCH --partition=gpu",
            "#SBATCH --requeue",
            "#SBATCH \"--output=/runs/a b/launch/slurm.log\"",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        assert!(!text.contains("cpus-per-task=4"));
        assert!(
            text.contains(
                "--output='/runs/a b/launch/node-%t.log' sh '/runs/a b/launch/task.sh' ||"
            )
        );
        assert!(task.contains(r#"sh '/runs/a b/launch/node.sh' "$SLURM_PROCID" ||"#), "{task}");
        let wrong = |option: &str| match render(&job, &SlurmOptions { sbatch: vec![option.into()] })
        {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{option} is taken"),
        };
        assert!(wrong("--time=1").contains("is not an option"));
        assert!(wrong("nodes=4").contains("set `cluster.learner.nodes`"));
    }

    /// Parses a line as sbatch does (`_get_argument` in its source): a backslash escapes the next
    /// character, also in quotes.
    fn read_by_sbatch(line: &str) -> Vec<String> {
        let mut words = Vec::new();
        let mut word = None;
        let mut quote = None;
        let mut chars = line.chars();
        while let Some(c) = chars.next() {
            match (c, quote) {
                ('\\', _) => word.get_or_insert_with(String::new).extend(chars.next()),
                (c, Some(open)) if c == open => quote = None,
                ('"' | '\'', None) => {
                    word.get_or_insert_with(String::new);
                    quote = Some(c);
                }
                ('#', None) => break,
                (c, None) if c.is_whitespace() => words.extend(word.take()),
                (c, _) => word.get_or_insert_with(String::new).push(c),
            }
        }
        words.extend(word);
        words
    }

    #[test]
    fn render_quotes_special_characters_in_paths() {
        for name in ["a b", "it's", "50%j", "{task}{fresh}", "$HOME`x`", "é\"q\"", "#1"] {
            let root = std::path::Path::new("/runs").join(name);
            let job = Job::named("calc", root, "/opt/levade".into()).unwrap();
            let (_, files) = render(&job, &SlurmOptions { sbatch: Vec::new() }).unwrap();
            let [(_, task), (_, text)] = &files;
            let directives: Vec<String> = text
                .lines()
                .filter_map(|line| line.strip_prefix("#SBATCH "))
                .flat_map(read_by_sbatch)
                .collect();
            let log = format!("--output=/runs/{}/launch/slurm.log", name.replace('%', "%%"));
            assert!(directives.contains(&log), "{log} in {directives:?}");
            let node_log = format!("/runs/{}/launch/node-%t.log", name.replace('%', "%%"));
            let words = [quoted(&node_log), quoted(&format!("/runs/{name}/launch/task.sh"))];
            assert!(text.contains(&format!("--output={} sh {} ||", words[0], words[1])), "{text}");
            assert!(task.contains(&quoted(&format!("/runs/{name}/launch/node.sh"))), "{task}");
        }
        let job = Job::named("calc", r"/runs/a\b".into(), "/opt/levade".into()).unwrap();
        assert!(render(&job, &SlurmOptions { sbatch: Vec::new() }).is_err());
    }

    /// Returns the exit code of a task whose part runs the script `part`.
    #[cfg(unix)]
    fn task_exit_code(part: &str) -> Option<i32> {
        let dir = tempfile::tempdir().unwrap();
        let job = Job::named("calc", dir.path().to_owned(), "/opt/levade".into()).unwrap();
        std::fs::create_dir(&job.dir).unwrap();
        std::fs::write(job.script_path(), part).unwrap();
        let (_, files) = render(&job, &SlurmOptions { sbatch: Vec::new() }).unwrap();
        let (path, text) = &files[0];
        std::fs::write(path, text).unwrap();
        let task =
            std::process::Command::new("sh").arg(path).env("SLURM_PROCID", "1").output().unwrap();
        task.status.code()
    }

    #[cfg(unix)]
    #[test]
    fn task_exit_code_separates_failure_from_stop() {
        for (part, code) in [
            ("exit 0", 0),
            ("exit 130", 130),
            ("exit 2", EXIT_USER_ERROR),
            ("exit 1", EXIT_FAILED),
            ("kill -9 $$", EXIT_FAILED),
            // Slurm signals all processes of a task.
            ("trap 'exit 130' TERM; kill -TERM $PPID; kill -TERM $$", 130),
        ] {
            assert_eq!(task_exit_code(part), Some(code), "{part}");
        }
    }

    #[test]
    fn fields_map_slurm_states_to_exit_codes() {
        let line =
            "JobId=7 UserId=root(0) JobState=PENDING Reason=Resources Requeue=1 ExitCode=0:0";
        let state = SlurmJobFields::parse(line).unwrap();
        assert_eq!(
            state,
            SlurmJobFields {
                name: "PENDING".into(),
                reason: "Resources".into(),
                exit: 0,
                again: true
            }
        );
        assert_eq!(state.exit_code(), None);
        assert_eq!(exit_code_of("FAILED"), Some(2));
        assert_eq!(exit_code_of("COMPLETED"), Some(0));
        assert_eq!(exit_code_of("NODE_FAIL"), None, "it is requeued");
        assert_eq!(
            SlurmJobFields::parse("JobState=NODE_FAIL Requeue=0").unwrap().exit_code(),
            Some(1)
        );
        assert_eq!(SlurmJobFields::parse("slurm_load_jobs error"), None);
    }

    fn exit_code_of(state: &str) -> Option<u8> {
        SlurmJobFields::parse(&format!("JobState={state} Requeue=1 ExitCode=2:0"))
            .unwrap()
            .exit_code()
    }
}
