//! Implements `levade withdraw`, which adds tombstones for attempts, and erases them on request.

use std::collections::{BTreeSet, HashSet};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use levade_recipe::Recipe;
use levade_run::dir::{RECIPE, RunDir};
use levade_store::{StoreAccess, WithdrawRequest, erase_quotes};
use levade_trainer::{LockedRunDir, PolicyDescendants, find_descendants, seconds, trained_steps};
use levade_tree::{AttemptId, Purpose};
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::audit::{AuditSubject, select_attempts};
use crate::screen;

/// Withdraw attempts, so that they are never used again, and list what was trained on them
///
/// Adds a tombstone to the record and overwrites nothing. With --erase, the texts and tokens of the
/// attempts are also removed; their ids, scores and the plans of steps stay. Weights that were
/// trained on the attempts do not change: the command names them.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade withdraw runs/calculator --task gsm8k-17 --reason 'consent was withdrawn' --erase
  levade withdraw runs/calculator --person alice --erase
  levade withdraw runs/calculator --attempt train/1/3/0/2")]
#[command(group = clap::ArgGroup::new("subject").required(true))]
pub struct Args {
    /// Run directory
    run: PathBuf,

    /// Id of a task: withdraw all attempts at the task, including those of evaluations and failed
    /// tries
    #[arg(long, group = "subject", value_name = "ID")]
    task: Option<String>,

    /// Slot of an attempt, such as train/1/3/0/2, or its id: withdraw this attempt
    #[arg(long, group = "subject", value_name = "ID")]
    attempt: Option<String>,

    /// Key of a person, as the field `person` of tasks and sessions has it: withdraw all attempts
    /// at the person's tasks
    #[arg(long, group = "subject", value_name = "KEY")]
    person: Option<String>,

    /// Reason for the withdrawal, which the tombstone keeps
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,

    /// Also remove the texts and tokens of the attempts
    #[arg(long)]
    erase: bool,
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    crate::create_runtime()?.block_on(withdraw(args))
}

async fn withdraw(args: Args) -> anyhow::Result<ExitCode> {
    let run = RunDir::open(&args.run)?;
    // A process that works on the run would continue to use the attempts.
    let _guard = LockedRunDir::lock(run.root())?;
    let location = Recipe::store_location(&run.root().join(RECIPE))?;
    let id = run.recipe()?.run.id();
    let store = levade_store_client::open(&location, run.root(), StoreAccess::Resume(&id)).await?;
    let subject = match (&args.task, &args.person) {
        (Some(id), _) => AuditSubject::Task(id),
        (None, Some(key)) => AuditSubject::Person(key),
        (None, None) => AuditSubject::Attempt(args.attempt.as_deref().unwrap_or_default()),
    };
    let mut request = WithdrawRequest {
        task: subject.tombstone_subject(),
        reason: args.reason.clone(),
        at: seconds(SystemTime::now()),
        erase: args.erase,
        ..WithdrawRequest::default()
    };
    if let Some(name) = &request.task {
        let mut tasks: Vec<Value> = Vec::new();
        for purpose in Purpose::ALL {
            tasks.extend(store.tasks(purpose).await?);
        }
        tasks.retain(|known| subject.includes_task(known));
        let earlier = store.withdrawals().await?.into_iter();
        let earlier = earlier.filter(|earlier| earlier.task.as_ref() == Some(name));
        request.attempts = earlier.map(|earlier| earlier.id).collect();
        if tasks.is_empty() && request.attempts.is_empty() {
            return Err(subject.missing_attempts_error());
        }
        request.tasks = tasks;
    } else {
        request.attempts = select_attempts(&*store, subject).await?.into_iter().collect();
    }
    let added = store.withdraw(&request).await?;
    let withdrawn: BTreeSet<AttemptId> =
        added.iter().map(|entry| entry.id).chain(request.attempts.iter().copied()).collect();
    if args.erase {
        // Also those that a command erased which was interrupted before it reached the file.
        let erased = store.withdrawals().await?.into_iter();
        let erased = erased.filter(|entry| entry.erased && withdrawn.contains(&entry.id));
        let names = erased.map(|entry| entry.slot.name()).collect();
        erase_quotes_in_lines(&run.root().join("events.jsonl"), &names)?;
    }
    for entry in &added {
        let verb = if entry.erased { "erased" } else { "withdrew" };
        screen::print_line(&format!("{verb} {} {}", entry.slot.name(), entry.id));
    }
    if added.is_empty() {
        screen::print_line("nothing to do: the attempts were withdrawn before");
    }
    let trained = find_descendants(&trained_steps(&*store).await?, &withdrawn);
    for PolicyDescendants { policy, steps, first, last } in &trained {
        let steps: Vec<String> = steps.iter().map(|step| step.global_step.to_string()).collect();
        screen::print_line(&format!(
            "trained on: versions {first} to {last} of policy {policy} (steps {})",
            steps.join(", ")
        ));
    }
    if trained.is_empty() {
        screen::print_line("no step trained on them");
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes quotes of the attempts `names` from a file with one JSON document per line. The changed
/// file replaces the original file by a rename. A missing file is accepted.
///
/// # Errors
/// Returns an error if the file cannot be read or replaced.
fn erase_quotes_in_lines(file: &Path, names: &HashSet<String>) -> anyhow::Result<()> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            let why = format!(
                "cannot erase quotes of the attempts in {}; make the file readable and repeat the \
                 command",
                file.display()
            );
            return Err(anyhow::Error::new(error).context(why));
        }
    };
    let mut changed = false;
    let mut lines = String::with_capacity(text.len());
    for line in text.lines() {
        let document = serde_json::from_str::<Value>(line).ok();
        let erased = document.and_then(|mut document| {
            erase_quotes(&mut document, names).then(|| document.to_string())
        });
        changed |= erased.is_some();
        lines += erased.as_deref().unwrap_or(line);
        lines.push('\n');
    }
    if changed {
        let mut new = NamedTempFile::new_in(file.parent().unwrap_or(Path::new(".")))?;
        new.write_all(lines.as_bytes())?;
        new.as_file().set_permissions(std::fs::metadata(file)?.permissions())?;
        new.as_file().sync_data()?;
        new.persist(file)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_of_named_attempts_are_erased_line_by_line() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("events.jsonl");
        let names = HashSet::from(["train/0/0/0/0".to_owned()]);
        erase_quotes_in_lines(&file, &names).unwrap();
        assert!(!file.exists(), "a missing file is accepted");
        let lines = "{\"attempt\":\"train/0/0/0/0\",\"why\":\"secret\"}\nno JSON\n\
                     {\"attempt\":\"train/0/0/0/1\",\"why\":\"kept\"}\n";
        std::fs::write(&file, lines).unwrap();
        erase_quotes_in_lines(&file, &names).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), lines.replace("secret", ""));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        std::fs::write(&file, b"\xff\n").unwrap();
        let error = erase_quotes_in_lines(&file, &names).unwrap_err().to_string();
        assert!(error.contains("events.jsonl") && error.contains("repeat the command"), "{error}");
    }
}
