//! Logging: events of the rooms, to standard error or a file, and warnings alone unless more is asked for.
//!
//! Rooms write events with `tracing`; this is the one place that decides where they go.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use levade_policy::environment::own;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;
use tracing_subscriber::{Layer, Registry, fmt};

use crate::failure::unusable;
use crate::screen::{self, Style};

/// The environment variable that counts where `--log` is not given.
const VARIABLE: &str = "LEVADE_LOG";

/// Rooms whose events can be asked for by name.
const ROOMS: [&str; 26] = [
    "agent",
    "call",
    "cli",
    "cluster",
    "conversation",
    "engine",
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
    "tasks",
    "text",
    "tools",
    "trainer",
    "tree",
];

/// Options of all subcommands.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Log up to a level (off, error, warn, info, debug, trace), or by room: `info,store=debug`; also
    /// LEVADE_LOG
    #[arg(long, value_name = "LEVEL|FILTER", global = true, help_heading = "Logging")]
    log: Option<String>,

    /// Append the log to a file instead of standard error; from level info on unless --log says otherwise
    #[arg(long, value_name = "FILE", global = true, help_heading = "Logging")]
    log_file: Option<PathBuf>,
}

impl Args {
    /// Sends what the rooms log where it is wanted, from now on.
    ///
    /// # Errors
    /// When the filter cannot be read, or the file not be opened.
    pub fn install(&self) -> anyhow::Result<()> {
        let filter = match &self.log {
            Some(text) => filter("--log", text)?,
            None => match own(VARIABLE) {
                Some(text) => filter(VARIABLE, &text.to_string_lossy())?,
                _ if self.log_file.is_some() => Targets::new().with_default(LevelFilter::INFO),
                _ => quiet(),
            },
        };
        let layer: Box<dyn Layer<Registry> + Send + Sync> = match &self.log_file {
            Some(path) => {
                let file = OpenOptions::new().create(true).append(true).open(path);
                let file = file.map_err(|error| {
                    unusable(format!("--log-file: cannot open {}: {error}", screen::path(path)))
                })?;
                fmt::layer().with_ansi(false).with_writer(Arc::new(file)).log_internal_errors(false).boxed()
            }
            // What cannot be written is lost: to say so, its library would write to standard error or panic.
            None => fmt::layer()
                .with_ansi(Style::stderr().is_on())
                .with_writer(|| BesideBars)
                .log_internal_errors(false)
                .boxed(),
        };
        Ok(tracing_subscriber::registry().with(layer.with_filter(filter)).try_init()?)
    }
}

/// Standard error, without drawing over a bar.
struct BesideBars;

impl Write for BesideBars {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        screen::beside_bar(|| io::stderr().lock().write_all(line))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Returns the filter of a user who asks for no log. What the SDK of MCP warns of is reported by the tool, in
/// words.
fn quiet() -> Targets {
    Targets::new().with_default(LevelFilter::WARN).with_target("rmcp", LevelFilter::OFF)
}

/// Reads a list of levels: one for all, and others for rooms or modules of rooms.
fn filter(origin: &str, text: &str) -> anyhow::Result<Targets> {
    let level = |level: &str| {
        level.parse::<LevelFilter>().map_err(|_| {
            let known = "off, error, warn, info, debug or trace";
            unusable(format!(
                "{origin}: `{level}` is no level; give {known}, or levels of rooms: info,store=debug"
            ))
        })
    };
    let mut filter = Targets::new().with_default(LevelFilter::WARN);
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        filter = match part.split_once('=') {
            None => filter.with_default(level(part)?),
            Some((target, of_target)) => {
                let (room, module) = target.split_once("::").unwrap_or((target, ""));
                if !ROOMS.contains(&room) {
                    return Err(unusable(format!(
                        "{origin}: there is no room `{room}`; there are {}",
                        ROOMS.join(", ")
                    )));
                }
                let room = if room == "cli" { "levade".to_owned() } else { format!("levade_{room}") };
                // The binary's name begins those of the rooms.
                let target =
                    if room == "levade" || !module.is_empty() { format!("{room}::{module}") } else { room };
                filter.with_target(target, level(of_target)?)
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
    fn filters_name_levels_and_rooms() {
        let warnings = filter("--log", "").unwrap();
        assert!(warnings.would_enable("levade_store::handle", &Level::WARN));
        assert!(!warnings.would_enable("levade_store::handle", &Level::INFO));
        let mixed = filter("--log", "info, store=debug,engine::service=trace,cli=off").unwrap();
        assert!(mixed.would_enable("levade_store::handle", &Level::DEBUG));
        assert!(mixed.would_enable("levade_engine::service", &Level::TRACE));
        assert!(!mixed.would_enable("levade_engine::engine", &Level::DEBUG));
        assert!(mixed.would_enable("levade_trainer::trainer", &Level::INFO));
        assert!(!mixed.would_enable("levade::train", &Level::ERROR));
    }

    #[test]
    fn sdk_of_mcp_logs_only_when_asked() {
        assert!(!quiet().would_enable("rmcp::service", &Level::ERROR));
        assert!(quiet().would_enable("levade_tools", &Level::WARN));
        assert!(filter("--log", "warn").unwrap().would_enable("rmcp::service", &Level::WARN));
    }

    #[test]
    fn what_is_wrong_with_a_filter_is_said() {
        for (text, part) in [
            ("loud", "`loud` is no level"),
            ("store=loud", "off, error, warn"),
            ("stor=info", "no room `stor`"),
        ] {
            let message = filter("LEVADE_LOG", text).unwrap_err().to_string();
            assert!(message.starts_with("LEVADE_LOG: ") && message.contains(part), "{message}");
        }
    }

    #[test]
    fn every_room_can_be_named() {
        let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for room in std::fs::read_dir(crates).unwrap() {
            let name = room.unwrap().file_name().into_string().unwrap();
            assert!(ROOMS.contains(&name.as_str()), "{name}");
        }
    }
}
