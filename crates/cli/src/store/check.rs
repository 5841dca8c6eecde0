//! Implements `levade store check`, which finds damage in the record of a run.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use levade_run::dir::RunDir;
use levade_store::{CheckReport, Location, ValueCounts, check_file};

use crate::failure::unusable;
use crate::screen;

/// Maximum number of findings that are printed as sentences. `--json` prints all findings.
const MAX_PRINTED: usize = 50;

/// Report what a damaged record has lost, and save the undamaged part
///
/// Reads every attempt, step plan and evaluation, and compares it with its checksum. The record is
/// not changed. Exit code 0: not damaged; 1: damaged.
#[derive(clap::Args)]
pub struct Args {
    /// SQLite file of a record, or the directory of a run
    record: PathBuf,

    /// New file for everything that is not damaged. If it replaces the damaged file, the run can
    /// resume
    #[arg(long, value_name = "RESCUED")]
    out: Option<PathBuf>,

    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

pub fn main(args: &Args) -> anyhow::Result<ExitCode> {
    if !args.record.exists() {
        return Err(unusable(format!(
            "{} does not exist; name the directory of a run, or the SQLite file of its record",
            args.record.display()
        )));
    }
    if let Some(out) = args.out.as_ref().filter(|out| out.exists()) {
        return Err(unusable(format!(
            "--out {} exists already; name a new file, or remove this one",
            out.display()
        )));
    }
    let (file, run) = match RunDir::find(&args.record) {
        None if args.record.is_dir() => {
            // Reports that the directory contains no run.
            RunDir::open(&args.record)?;
            (args.record.clone(), None)
        }
        None => (args.record.clone(), None),
        Some(run) => {
            let recipe = run.recipe()?;
            let file = recipe.run.store.file(run.root()).ok_or_else(|| {
                let location = match &recipe.run.store {
                    // The URL may contain a password.
                    Location::Mongo(_) => "MongoDB".to_owned(),
                    other => other.to_string(),
                };
                unusable(format!(
                    "{} has no file on this machine: its store is {location}; of a store server, \
                     check the file NAME.db on the server's machine",
                    args.record.display()
                ))
            })?;
            (file, Some(recipe.run.id()))
        }
    };
    let report = check_file(&file, run.as_ref(), args.out.as_deref())?;
    if args.json {
        let text = serde_json::to_string_pretty(&report).context("the report is not JSON")?;
        screen::print_line(&text);
    } else {
        screen::print(&format_sentences(&report));
    }
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Formats a report on a record: one sentence per finding, and then the counts.
fn format_sentences(report: &CheckReport) -> String {
    let mut lines: Vec<String> =
        report.findings.iter().take(MAX_PRINTED).map(|finding| finding.message.clone()).collect();
    if let Some(more @ 1..) = report.findings.len().checked_sub(MAX_PRINTED) {
        lines.push(format!("{more} more findings are printed with --json."));
    }
    let count = |ValueCounts { whole, lost }: ValueCounts, name: &str| match lost {
        0 => format!("{whole} {name}"),
        _ => format!("{whole} {name} ({lost} lost)"),
    };
    let verdict = if report.is_clean() { "is not damaged" } else { "is damaged" };
    lines.push(format!(
        "{} {verdict}: {}, {}, {}.",
        report.location,
        count(report.attempts, "attempts"),
        count(report.plans, "step plans"),
        count(report.evaluations, "evaluations")
    ));
    if report.rows_without_checksum > 0 {
        lines.push(format!(
            "{} rows have no checksum, because an earlier build wrote them; only their structure \
             was checked.",
            report.rows_without_checksum
        ));
    }
    if let Some(rescued) = &report.rescued {
        lines.push(format!("Everything that is whole was written to {}.", rescued.display()));
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use levade_store::{Finding, FindingKind};

    use super::*;

    #[test]
    fn sentences_count_losses_and_shorten_long_lists() {
        let finding = |i: usize| Finding {
            kind: FindingKind::Attempt,
            subject: format!("train/0/0/{i}/0"),
            message: format!("Attempt train/0/0/{i}/0 is lost: the row is missing."),
        };
        let mut report = CheckReport {
            location: "run.db".into(),
            run: Some("r".into()),
            attempts: ValueCounts { whole: 7, lost: 0 },
            plans: ValueCounts { whole: 2, lost: 0 },
            evaluations: ValueCounts { whole: 1, lost: 0 },
            rows_without_checksum: 0,
            findings: Vec::new(),
            rescued: None,
        };
        let clean = "run.db is not damaged: 7 attempts, 2 step plans, 1 evaluations.\n";
        assert_eq!(format_sentences(&report), clean);
        report.findings = (0..MAX_PRINTED + 3).map(finding).collect();
        report.attempts.lost = 53;
        report.rescued = Some("new.db".into());
        let text = format_sentences(&report);
        assert!(text.starts_with("Attempt train/0/0/0/0 is lost: the row is missing.\n"), "{text}");
        for part in ["3 more findings", "7 attempts (53 lost)", "is damaged", "to new.db"] {
            assert!(text.contains(part), "no {part:?} in {text}");
        }
        assert_eq!(text.lines().count(), MAX_PRINTED + 3);
    }
}
