//! Configures logging: where the events of all crates are written, and from which level.
//!
//! Crates emit events with `tracing`. Only this module decides whether they go to standard error or
//! to a file. The default level is `warn`.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use levade_policy::environment::read_variable;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;
use tracing_subscriber::{Layer, Registry, fmt};

use crate::failure::unusable;
use crate::screen::{self, Style};

/// Environment variable that contains the filter if `--log` is not set.
const VARIABLE: &str = "LEVADE_LOG";

/// Crates whose levels a filter can set by name.
const CRATES: [&str; 32] = [
    "agent",
    "call",
    "cli",
    "cluster",
    "conversation",
    "engine",
    "export",
    "game",
    "gateway",
    "http",
    "launch",
    "model",
    "plan",
    "policy",
    "process",
    "recipe",
    "remote",
    "reward",
    "rl",
    "run",
    "sandbox",
    "search",
    "store",
    "store_client",
    "store_mongo",
    "store_server",
    "tasks",
    "text",
    "tools",
    "traces",
    "trainer",
    "tree",
];

/// Logging options of all subcommands.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Log level (off, error, warn, info, debug, trace), or levels of crates: `info,store=debug`;
    /// also set by LEVADE_LOG
    #[arg(long, value_name = "LEVEL|FILTER", global = true, help_heading = "Logging")]
    log: Option<String>,

    /// Append the log to this file instead of standard error; the level is info unless --log sets
    /// another
    #[arg(long, value_name = "FILE", global = true, help_heading = "Logging")]
    log_file: Option<PathBuf>,
}

impl Args {
    /// Installs the global subscriber, which filters and writes the events of all crates.
    ///
    /// # Errors
    /// Returns an error if the filter is invalid, the file cannot be opened, or a subscriber is
    /// already installed.
    pub fn install(&self) -> anyhow::Result<()> {
        let filter = match &self.log {
            Some(text) => parse_filter("--log", text)?,
            None => match read_variable(VARIABLE) {
                Some(text) => parse_filter(VARIABLE, &text.to_string_lossy())?,
                _ if self.log_file.is_some() => Targets::new().with_default(LevelFilter::INFO),
                _ => default_filter(),
            },
        };
        let layer: Box<dyn Layer<Registry> + Send + Sync> = match &self.log_file {
            Some(path) => {
                let file = OpenOptions::new().create(true).append(true).open(path);
                let file = file.map_err(|error| {
                    unusable(format!("--log-file: cannot open {}: {error}", screen::path(path)))
                })?;
                fmt::layer()
                    .with_ansi(false)
                    .with_writer(Arc::new(file))
                    .log_internal_errors(false)
                    .boxed()
            }
            // An event that cannot be written is lost: to report the failure, the library would
            // write to standard error or panic.
            None => fmt::layer()
                .with_ansi(Style::stderr().is_on())
                .with_writer(|| BarSuspendingWriter)
                .log_internal_errors(false)
                .boxed(),
        };
        Ok(tracing_subscriber::registry().with(layer.with_filter(filter)).try_init()?)
    }
}

/// Writer to standard error that suspends the progress bar while it writes.
struct BarSuspendingWriter;

impl Write for BarSuspendingWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        screen::with_bar_suspended(|| io::stderr().lock().write_all(line))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Returns the default filter: warnings and errors of all crates. Those of the MCP SDK are
/// excluded, because the tool itself reports them.
fn default_filter() -> Targets {
    Targets::new().with_default(LevelFilter::WARN).with_target("rmcp", LevelFilter::OFF)
}

fn parse_level(origin: &str, level: &str) -> anyhow::Result<LevelFilter> {
    level.parse().map_err(|_| {
        let known = "off, error, warn, info, debug or trace";
        unusable(format!(
            "{origin}: `{level}` is not a level; give {known}, or levels of crates: \
             info,store=debug"
        ))
    })
}

/// Parses a comma-separated list of levels: a default level, and levels of crates or modules of
/// crates. `origin` is the option or variable that error messages name.
fn parse_filter(origin: &str, text: &str) -> anyhow::Result<Targets> {
    let mut filter = Targets::new().with_default(LevelFilter::WARN);
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        filter = match part.split_once('=') {
            None => filter.with_default(parse_level(origin, part)?),
            Some((target, target_level)) => {
                let (crate_name, module) = target.split_once("::").unwrap_or((target, ""));
                if !CRATES.contains(&crate_name) {
                    return Err(unusable(format!(
                        "{origin}: there is no crate `{crate_name}`; the crates are {}",
                        CRATES.join(", ")
                    )));
                }
                let crate_name = if crate_name == "cli" {
                    "levade".to_owned()
                } else {
                    format!("levade_{crate_name}")
                };
                // `levade` is also a prefix of the other crates' names, so its target ends with
                // `::`.
                let target = if crate_name == "levade" || !module.is_empty() {
                    format!("{crate_name}::{module}")
                } else {
                    crate_name
                };
                filter.with_target(target, parse_level(origin, target_level)?)
            }
        };
    }
    Ok(filter)
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn filter_sets_levels_of_crates_and_modules() {
        let warnings = parse_filter("--log", "").unwrap();
        assert!(warnings.would_enable("levade_store::handle", &Level::WARN));
        assert!(!warnings.would_enable("levade_store::handle", &Level::INFO));
        let mixed =
            parse_filter("--log", "info, store=debug,engine::service=trace,cli=off").unwrap();
        assert!(mixed.would_enable("levade_store::handle", &Level::DEBUG));
        assert!(mixed.would_enable("levade_engine::service", &Level::TRACE));
        assert!(!mixed.would_enable("levade_engine::engine", &Level::DEBUG));
        assert!(mixed.would_enable("levade_trainer::trainer", &Level::INFO));
        assert!(!mixed.would_enable("levade::train", &Level::ERROR));
    }

    #[test]
    fn default_filter_silences_mcp_sdk() {
        assert!(!default_filter().would_enable("rmcp::service", &Level::ERROR));
        assert!(default_filter().would_enable("levade_tools", &Level::WARN));
        assert!(parse_filter("--log", "warn").unwrap().would_enable("rmcp::service", &Level::WARN));
    }

    #[test]
    fn filter_reports_invalid_part_and_origin() {
        for (text, part) in [
            ("loud", "`loud` is not a level"),
            ("store=loud", "off, error, warn"),
            ("stor=info", "no crate `stor`"),
        ] {
            let message = parse_filter("LEVADE_LOG", text).unwrap_err().to_string();
            assert!(message.starts_with("LEVADE_LOG: ") && message.contains(part), "{message}");
        }
    }

    #[test]
    fn log_filter_knows_every_crate() {
        let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for crate_name in std::fs::read_dir(crates).unwrap() {
            let name = crate_name.unwrap().file_name().into_string().unwrap();
            assert!(CRATES.contains(&name.as_str()), "{name}");
        }
    }
}
