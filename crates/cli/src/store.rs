//! Implements `levade store`: `serve`, which serves rollouts to runners, tracers and trainers, and
//! stores of runs to trainers, `list` and `remove` for the runs of a server, and `check`.

mod check;
mod runs;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use levade_http::Access;
use levade_store::rollouts::SystemClock;
use levade_store_client::{open_rollouts, rollouts_file};
use levade_store_server::{ServerOptions, serve};
use tokio::net::TcpListener;

use crate::failure::unusable;
use crate::screen::Style;
use crate::stop::StopRequests;

/// Keep rollouts, spans and the records of runs for any machine; list, remove and check runs
#[derive(clap::Args)]
#[command(after_help = "Examples:
  levade store serve --db rollouts.db                          for runners on this machine
  levade store serve --db memory: --scan-debounce-seconds 0    for tests
  levade store serve --host 0.0.0.0 --api-key $KEY             for runners on other machines
  levade train RECIPE --store http://127.0.0.1:4747            keeps the record of a run there
  levade store list http://127.0.0.1:4747                      runs and workers of a server
  levade store remove http://127.0.0.1:4747 calculator         removes the record of a run
  levade store check runs/calculator --out rescued.db          what a damaged record has lost

Clients of Agent Lightning 0.3 use it as LightningStoreClient(\"http://127.0.0.1:4747\").")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Serve(ServeArgs),
    List(runs::ListArgs),
    Remove(runs::RemoveArgs),
    Check(check::Args),
}

/// Serve rollouts and runs over HTTP: the protocol of Agent Lightning 0.3, OTLP, Prometheus metrics
///
/// Keys are required to listen on an address that other machines can reach, unless --no-keys is
/// given.
#[derive(clap::Args)]
struct ServeArgs {
    /// Address to listen on, or a name that resolves to it
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST),
        value_parser = crate::serve::parse_host)]
    host: IpAddr,

    /// Port to listen on; 0 for any free port
    #[arg(long, default_value_t = 4747)]
    port: u16,

    /// SQLite file, which is created if it does not exist, memory: to keep nothing, or
    /// mongodb://HOST/NAME. Runs are files in the directory PATH.runs
    #[arg(long, value_name = "PATH", default_value = "memory:")]
    db: String,

    /// Origin whose web pages can call the server, such as http://localhost:3000, or * for all; can
    /// be repeated
    #[arg(long, value_name = "ORIGIN", alias = "allow-origin")]
    cors_origin: Vec<String>,

    /// Host name that a server without keys accepts, besides localhost and its address; can be
    /// repeated
    #[arg(long, value_name = "HOST")]
    allow_host: Vec<String>,

    /// Minimum interval between two searches for timeouts that requests cause, in seconds; with 0,
    /// every request causes a search
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = parse_seconds)]
    scan_debounce_seconds: f64,

    /// API key that clients must send, in addition to the keys of --key-env; can be repeated. Other
    /// users of this machine can see the key
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,

    /// Environment variable with the accepted API keys, separated by commas
    #[arg(long, value_name = "NAME", default_value = "LEVADE_API_KEYS")]
    key_env: String,

    /// Require no keys, even if other machines can reach the address
    #[arg(long, conflicts_with = "api_key")]
    no_keys: bool,
}

/// Parses a number of seconds, which must not be negative.
fn parse_seconds(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0);
    number.ok_or_else(|| format!("{text:?} is not a number of seconds from 0"))
}

pub fn main(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Serve(args) => {
            let keys = read_accepted_keys(&args)?;
            crate::create_runtime()?.block_on(run_server(&args, keys))
        }
        Command::List(args) => runs::print_runs(&args),
        Command::Remove(args) => runs::remove(&args),
        Command::Check(args) => check::main(&args),
    }
}

/// Returns the API keys that the server accepts.
///
/// # Errors
/// Returns an error if other machines can reach the address, but no key is required.
fn read_accepted_keys(args: &ServeArgs) -> anyhow::Result<Vec<String>> {
    if args.no_keys {
        return Ok(Vec::new());
    }
    if let Some(key) = args.api_key.iter().find(|key| key.trim().is_empty()) {
        return Err(unusable(format!("--api-key is {key:?}; give a key, or leave the option out")));
    }
    if args.api_key.is_empty() {
        return crate::serve::require_api_keys(
            &args.key_env,
            args.host,
            "read and change all rollouts and runs",
        );
    }
    let mut keys =
        crate::serve::require_api_keys(&args.key_env, IpAddr::V4(Ipv4Addr::LOCALHOST), "")?;
    keys.extend(args.api_key.iter().cloned());
    Ok(keys)
}

/// Returns the directory for the stores of runs: next to the file of rollouts, or in the current
/// directory if the rollouts are in MongoDB. Returns `None` if the rollouts are kept in memory.
fn runs_dir(db: &str) -> Option<PathBuf> {
    match db {
        "memory:" => None,
        url if url.starts_with("mongodb") && url.contains("://") => Some("levade.runs".into()),
        file => Some(format!("{}.runs", rollouts_file(file)).into()),
    }
}

async fn run_server(args: &ServeArgs, keys: Vec<String>) -> anyhow::Result<ExitCode> {
    if args.db.is_empty() || args.db.starts_with("http://") || args.db.starts_with("https://") {
        return Err(unusable(format!(
            "--db is {:?}, but must be an SQLite file, memory: or mongodb://HOST/NAME",
            args.db
        )));
    }
    let address = SocketAddr::new(args.host, args.port);
    let bound = TcpListener::bind(address).await;
    let listener =
        bound.with_context(|| format!("cannot listen at {address}; choose another --port"))?;
    let access = Access::new(&args.allow_host, &args.cors_origin);
    let access = access.map_err(|error| unusable(error.to_string()))?.with_address(args.host);
    let store = open_rollouts(&args.db, Arc::new(SystemClock::default())).await?;
    let signals = StopRequests::listen()?;
    eprintln!(
        "{} {} at http://{}",
        Style::stderr().dim("serving rollouts and runs of"),
        store.location(),
        listener.local_addr()?
    );
    let options = ServerOptions {
        keys,
        access,
        cors_origins: args.cors_origin.clone(),
        scan_debounce: Duration::from_secs_f64(args.scan_debounce_seconds),
        runs_dir: runs_dir(&args.db),
        ..ServerOptions::default()
    };
    signals.serve(|stop| serve(store, options, listener, stop), || {}).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_dir_is_never_named_after_a_url() {
        assert_eq!(runs_dir("memory:"), None);
        assert_eq!(runs_dir("a/rollouts.db"), Some("a/rollouts.db.runs".into()));
        assert_eq!(runs_dir("sqlite:a/rollouts.db"), Some("a/rollouts.db.runs".into()));
        assert_eq!(runs_dir("mongodb://u:secret@h/x"), Some("levade.runs".into()));
    }

    #[test]
    fn seconds_rejects_negative_and_infinite_numbers() {
        assert_eq!((parse_seconds("0"), parse_seconds("2.5")), (Ok(0.0), Ok(2.5)));
        for wrong in ["-1", "inf", "nan", "soon", ""] {
            assert!(parse_seconds(wrong).unwrap_err().contains("seconds"), "{wrong}");
        }
    }
}
