//! Implements `levade export`, which writes the recorded attempts of a run as rows that other
//! programs read.

use std::path::PathBuf;
use std::process::ExitCode;

use levade_export::{
    Exporter, Filter, Format, Part, Pattern, Progress, Range, RowOptions, SequenceReader, Target,
};
use levade_run::dir::RunDir;
use levade_store::Status;
use levade_tree::{AttemptId, Purpose};

use crate::failure::unusable;
use crate::recorded::{find_attempt, open_run_chats};
use crate::screen::Style;

/// Write the recorded attempts of a run as rows for other programs
///
/// Reads the run only, also while it is training. An interrupted export continues if the same
/// command is repeated.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade export runs/calculator --out attempts.jsonl              everything, one line per sequence
  levade export runs/calculator --out attempts.parquet --tokens   the same columns and the tokens, typed
  levade export runs/calculator --format trl-sft --reward 1.. --out sft.jsonl
  levade export runs/calculator --format trl-preference --step 10..20 --out pairs.jsonl
  levade export runs/calculator --format verl --out train.parquet
  levade export runs/calculator --format atif --attempt train/1/3/0/2 --out trajectories/

A range A..B contains both ends; A.., ..B and a single number are ranges, too.")]
pub struct Args {
    /// Run directory
    run: PathBuf,

    /// Format of the rows [default: parquet if --out ends with .parquet, otherwise jsonl]
    #[arg(long, value_enum)]
    format: Option<FormatName>,

    /// File of JSON lines; a Parquet file, if the name ends with .parquet; for atif, a directory,
    /// if the name ends with /; - for standard output
    #[arg(long, value_name = "PATH", default_value = "-")]
    out: String,

    /// Export only attempts of this phase, from 0
    #[arg(long)]
    phase: Option<u32>,

    /// Export only attempts that were started for these steps, from 0
    #[arg(long, value_name = "A..B")]
    step: Option<Range<u32>>,

    /// Export only attempts with these rewards
    #[arg(long, value_name = "MIN..MAX", allow_hyphen_values = true)]
    reward: Option<Range<f64>>,

    /// Export only attempts with these scores
    #[arg(long, value_name = "MIN..MAX", allow_hyphen_values = true)]
    score: Option<Range<f64>>,

    /// Export only sequences of this agent
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,

    /// Export only attempts at tasks with this id; * and ? match any text and any character
    #[arg(long, value_name = "GLOB")]
    task: Option<Pattern>,

    /// Purposes of the exported attempts, separated by commas: train, eval, baseline,
    /// demonstration, session
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "train",
        value_parser = parse_purpose)]
    purpose: Vec<Purpose>,

    /// Statuses of the exported attempts, separated by commas: completed, unscored, failed,
    /// superseded, abandoned
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "completed",
        value_parser = parse_status)]
    status: Vec<Status>,

    /// Export only this attempt, by its slot or its id, whatever its purpose and status
    #[arg(long, value_name = "ID", conflicts_with_all = ["phase", "step", "reward", "score", "task",
        "purpose", "status"])]
    attempt: Option<String>,

    /// Add the tokens with log-probabilities, loss mask and weight versions (jsonl, parquet, atif)
    #[arg(long)]
    tokens: bool,

    /// Keep reasoning, tool calls and descriptions of tools in the text of messages, as the model
    /// read and wrote them (always so for verl-sft)
    #[arg(long)]
    raw: bool,

    /// Write prompt and completion in place of messages (trl-sft)
    #[arg(long)]
    split_prompt: bool,

    /// Minimum difference between the two scores of a pair; equal scores never form a pair
    /// (trl-preference)
    #[arg(long, value_name = "GAP", default_value_t = 0.0)]
    min_gap: f64,
}

/// Format of exported rows, as the user names it on the command line.
#[derive(Debug, Clone, Copy, PartialEq, clap::ValueEnum)]
enum FormatName {
    /// One row per sequence, with everything that is recorded
    Jsonl,
    /// The same rows as jsonl, in a Parquet file
    Parquet,
    /// Prompts for reinforcement learning with verl, one row per task
    Verl,
    /// Conversations for supervised fine-tuning with TRL
    TrlSft,
    /// Pairs of the best and the worst attempt of each group, for TRL
    TrlPreference,
    /// Conversations for supervised fine-tuning with verl
    VerlSft,
    /// Trajectories of Harbor's Agent Trajectory Interchange Format
    Atif,
}

impl FormatName {
    fn to_format(self) -> Format {
        match self {
            FormatName::Jsonl | FormatName::Parquet => Format::Table,
            FormatName::Verl => Format::Verl,
            FormatName::TrlSft => Format::TrlSft,
            FormatName::TrlPreference => Format::TrlPreference,
            FormatName::VerlSft => Format::VerlSft,
            FormatName::Atif => Format::Atif,
        }
    }

    /// Returns whether rows of the format can contain tokens.
    fn has_tokens(self) -> bool {
        matches!(self.to_format(), Format::Table | Format::Atif)
    }
}

fn parse_purpose(text: &str) -> Result<Purpose, String> {
    Purpose::parse(text)
        .ok_or_else(|| format!("\"{text}\" is not train, eval, baseline, demonstration or session"))
}

fn parse_status(text: &str) -> Result<Status, String> {
    Status::parse(text).filter(|status| status.is_end()).ok_or_else(|| {
        format!("\"{text}\" is not completed, unscored, failed, superseded or abandoned")
    })
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    let ends_with_parquet = args.out.ends_with(".parquet");
    if args.format == Some(FormatName::Parquet) && !ends_with_parquet {
        return Err(unusable(format!(
            "--format parquet needs a file whose name ends with .parquet, but --out is {}",
            args.out
        )));
    }
    if let Some(format) = args.format
        && args.tokens
        && !format.has_tokens()
    {
        let name = clap::ValueEnum::to_possible_value(&format);
        return Err(unusable(format!(
            "rows of --format {} have no columns for --tokens; leave it out, or choose jsonl, \
             parquet or atif",
            name.as_ref().map_or("", |name| name.get_name())
        )));
    }
    let options =
        RowOptions { tokens: args.tokens, split_prompt: args.split_prompt, min_gap: args.min_gap };
    let format = args.format.map_or(Format::Table, FormatName::to_format);
    let target = Target::parse(&args.out, format, &options)?;
    let filter = Filter {
        purposes: args.purpose.clone(),
        statuses: args.status.clone(),
        phase: args.phase,
        steps: args.step,
        reward: args.reward,
        score: args.score,
        task: args.task.clone(),
        agent: args.agent.clone(),
    };
    let runtime = crate::create_runtime()?;
    let run = RunDir::open(&args.run)?;
    let store = runtime.block_on(run.open_store())?;
    let only = match &args.attempt {
        None => None,
        Some(name) => {
            let found = runtime.block_on(find_attempt(&*store, name))?;
            Some(found.ok_or_else(|| unusable(format!("the run has no {name}")))?.id)
        }
    };
    let chats = open_run_chats(&run)?;
    let find_chat = |agent: &str, policy: &str| {
        let chat = chats.chat(agent, policy).cloned();
        chat.ok_or_else(|| format!("policy {policy} has no chat template in this run"))
    };
    let read = |id: &AttemptId| runtime.block_on(store.attempt(id));
    let sequences = SequenceReader::new(&find_chat, args.raw || format.needs_raw_messages());
    let exporter = Exporter::new(store.run(), &filter, (format, options), sequences, &read);
    let select = || match only {
        Some(id) => Ok(vec![vec![id]]),
        None => runtime.block_on(filter.select(&*store)),
    };
    let (progress, location) = match &target {
        Target::Stream => {
            let mut to = std::io::BufWriter::new(std::io::stdout().lock());
            (exporter.write_stream(&select()?, &mut to)?, "standard output".to_owned())
        }
        Target::JsonLines(path) | Target::Parquet(path) | Target::Directory(path) => {
            let options = format!(
                "{} {} {format:?} {options:?} {filter:?} {only:?} raw {}",
                env!("CARGO_PKG_VERSION"),
                store.run(),
                args.raw
            );
            let part = Part::open(path, &options, || Ok(select()?))?;
            let done = part.progress().groups;
            if done > 0 {
                eprintln!(
                    "{} an interrupted export after {done} of {} groups",
                    Style::stderr().dim("continuing"),
                    part.num_groups()
                );
            }
            (exporter.write_part(part, &target, &mut |_| {})?, args.out.clone())
        }
    };
    print_summary(&progress, &location);
    Ok(ExitCode::SUCCESS)
}

/// Prints a summary of the export to standard error.
fn print_summary(progress: &Progress, location: &str) {
    let Progress { groups, rows, skipped, first_skipped, .. } = progress;
    eprintln!("{} {rows} rows of {groups} groups to {location}", Style::stderr().dim("wrote"));
    if let Some(first) = first_skipped {
        eprintln!("{} {skipped} without a row; the first: {first}", Style::stderr().dim("note:"));
    }
}
