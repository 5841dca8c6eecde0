//! Implements `levade store list`, which shows the runs and workers of a store server, and
//! `levade store remove`, which removes a run.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use levade_store::rollouts::{
    PageRequest, RolloutStatistics, SystemClock, Worker, WorkerFilter, WorkerStatus,
};
use levade_store::wire::RunEntry;
use levade_store_client::{list_runs, open_rollouts, remove_run};
use serde_json::json;

use crate::failure::unusable;
use crate::screen::{self, clock};

/// Time since the last heartbeat after which a worker counts as lost, in seconds. Runners of Agent
/// Lightning send a heartbeat every 10 s.
const SILENCE: f64 = 60.0;

/// Show the runs, queues and workers of a store server
///
/// A worker that has sent no heartbeat for 60 seconds is shown as lost. LEVADE_STORE_KEY is the key
/// of the server.
#[derive(clap::Args)]
pub struct ListArgs {
    /// URL of the server, such as http://127.0.0.1:4747
    url: String,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// Remove a run and its record from a store server
///
/// A run whose trainer renews its lease is not removed. A later run of the name starts anew.
/// LEVADE_STORE_KEY is the key of the server.
#[derive(clap::Args)]
pub struct RemoveArgs {
    /// URL of the server, such as http://127.0.0.1:4747
    url: String,

    /// Name of the run, as `levade store list` shows it
    run: String,
}

pub fn print_runs(args: &ListArgs) -> anyhow::Result<ExitCode> {
    let url = check_server_url(&args.url)?;
    crate::create_runtime()?.block_on(async {
        // Reports an unreachable server within seconds.
        let runs = list_runs(url).await?;
        let rollouts = open_rollouts(url, Arc::new(SystemClock::default())).await?;
        let statistics = rollouts.statistics().await?;
        let all = PageRequest { limit: None, ..PageRequest::default() };
        let workers = rollouts.query_workers(&WorkerFilter::default(), &all).await?.items;
        let now = rollouts.now();
        if args.json {
            let document = json!({
                "runs": runs, "workers": workers, "statistics": statistics, "now": now,
            });
            screen::print_line(&document.to_string());
        } else {
            screen::print(&format_overview(&runs, &workers, &statistics, now));
        }
        Ok(ExitCode::SUCCESS)
    })
}

pub fn remove(args: &RemoveArgs) -> anyhow::Result<ExitCode> {
    let url = check_server_url(&args.url)?;
    crate::create_runtime()?.block_on(async {
        remove_run(url, &args.run).await?;
        screen::print_line(&format!("removed the run {} of {url}", args.run));
        Ok(ExitCode::SUCCESS)
    })
}

/// Checks the URL of a store server, and returns it without a trailing slash.
///
/// # Errors
/// Returns an error if the URL is not an HTTP URL, or if it contains a user.
fn check_server_url(url: &str) -> anyhow::Result<&str> {
    if url.contains('@') {
        return Err(unusable(
            "the URL must not contain a user or a key; set LEVADE_STORE_KEY to the key",
        ));
    }
    if !url.starts_with("http://") && !url.starts_with("https://") {
        return Err(unusable(format!(
            "{url:?} is not the URL of a store server, such as http://127.0.0.1:4747"
        )));
    }
    Ok(url.trim_end_matches('/'))
}

/// Formats runs, workers and counts of a store server, one line each.
fn format_overview(
    runs: &[RunEntry],
    workers: &[Worker],
    statistics: &RolloutStatistics,
    now: f64,
) -> String {
    let mut lines = Vec::new();
    for RunEntry { name, bytes, idle_seconds, trainer } in runs {
        let mut parts = Vec::new();
        if let Some(seconds) = idle_seconds {
            let megabytes = *bytes as f64 / 1e6;
            parts.push(format!("{megabytes:.1} MB, changed {} ago", format_seconds(*seconds)));
        }
        parts.extend(trainer.as_ref().map(|trainer| format!("trained by {trainer}")));
        lines.push(format!("run     {name}  {}", parts.join("; ")));
    }
    for worker in workers {
        let seconds = worker.last_heartbeat_time.map(|time| (now - time).max(0.0));
        let state = match (worker.status, seconds) {
            (_, Some(seconds)) if seconds > SILENCE => "lost",
            (WorkerStatus::Idle, _) => "idle",
            (WorkerStatus::Busy, _) => "busy",
            (WorkerStatus::Unknown, _) => "unknown",
        };
        let heartbeat = match seconds {
            Some(seconds) => format!("heartbeat {} ago", format_seconds(seconds)),
            None => "no heartbeat".to_owned(),
        };
        let rollout = worker.current_rollout_id.as_ref();
        let rollout = rollout.map_or(String::new(), |id| format!("; at {id}"));
        lines.push(format!("worker  {}  {state}, {heartbeat}{rollout}", worker.id));
    }
    let RolloutStatistics { rollouts, tries, spans, .. } = statistics;
    lines.push(format!(
        "{} runs, {} workers, {rollouts} rollouts, {tries} attempts, {spans} spans",
        runs.len(),
        workers.len()
    ));
    lines.join("\n") + "\n"
}

fn format_seconds(seconds: f64) -> String {
    clock(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_url_rejects_files_and_users() {
        assert_eq!(check_server_url("http://h:4747/").unwrap(), "http://h:4747");
        for wrong in ["rollouts.db", "mongodb://h/x", "http://me:secret@h"] {
            let error = check_server_url(wrong).unwrap_err().to_string();
            assert!(error.contains("URL") && !error.contains("secret"), "{wrong}: {error}");
        }
    }

    #[test]
    fn silent_worker_is_shown_as_lost() {
        let worker = |id: &str, last_heartbeat_time| Worker {
            id: id.to_owned(),
            status: WorkerStatus::Busy,
            heartbeat_stats: None,
            last_heartbeat_time,
            last_dequeue_time: None,
            last_busy_time: None,
            last_idle_time: None,
            current_rollout_id: Some("ro-1".to_owned()),
            current_try_id: None,
        };
        let runs = [RunEntry {
            name: "sums".to_owned(),
            bytes: 2_500_000,
            idle_seconds: Some(65.0),
            trainer: Some("process 3 in /runs/sums".to_owned()),
        }];
        let workers = [worker("a", Some(990.0)), worker("b", Some(900.0)), worker("c", None)];
        let shown = format_overview(&runs, &workers, &RolloutStatistics::default(), 1000.0);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(
            lines[..4],
            [
                "run     sums  2.5 MB, changed 1:05 ago; trained by process 3 in /runs/sums",
                "worker  a  busy, heartbeat 0:10 ago; at ro-1",
                "worker  b  lost, heartbeat 1:40 ago; at ro-1",
                "worker  c  busy, no heartbeat; at ro-1",
            ]
        );
    }
}
