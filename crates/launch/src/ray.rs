//! Ray: one job over its HTTP API, with one actor per node.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, StatusCode};
use levade_http::{Bounds, Client, ClientRequest, Hosts};
use levade_run::unusable;
use serde_json::{Value, json};

use crate::follow::{JobState, SchedulerJob, Watcher, follow, report_status};
use crate::job::Job;
use crate::shell::quoted;
use crate::{INTERRUPTED, LaunchOutcome, STABLE};

/// Options of the Ray launcher.
#[derive(Debug, Clone)]
pub struct RayOptions {
    /// URL of the Ray cluster's dashboard.
    pub address: String,

    /// Python interpreter that runs the job on the cluster's machines.
    pub python: String,
}

/// Ray job that is ready to be submitted.
pub struct RayJob {
    entrypoint: String,
    address: String,
    name: String,
}

/// Python source of the job's driver. The driver starts one actor per machine. The actor holds the
/// standard input of the supervisor of the machine's processes.
const DRIVER: &str = include_str!("driver.py");

/// Renders the Ray job. Also returns the path and the text of its driver.
///
/// # Errors
/// Returns an error if the address is not an HTTP URL.
pub fn render(job: &Job, options: &RayOptions) -> anyhow::Result<(RayJob, (PathBuf, String))> {
    let address = options.address.trim_end_matches('/').to_owned();
    if !address.starts_with("http://") && !address.starts_with("https://") {
        return Err(unusable(format!("--address {address:?} must start with http:// or https://")));
    }
    // The file is not named after the package `ray`, because Python searches the script's directory
    // first.
    let driver = job.dir.join("driver.py");
    let facts = json!({
        "root": job.root, "folder": job.dir, "script": job.script_path(), "binary": job.binary, "nodes": job.nodes,
        "processors": job.processors, "gpus": job.gpus, "restarts": job.restarts, "fresh": STABLE.as_secs(),
    });
    let words = [options.python.clone(), driver.display().to_string(), facts.to_string()];
    let entrypoint = words.iter().map(quoted).collect::<Vec<_>>().join(" ");
    Ok((RayJob { entrypoint, address, name: job.name.clone() }, (driver, DRIVER.to_owned())))
}

/// Timeout for one response of the Ray cluster.
const TIMEOUT: Duration = Duration::from_secs(60);

impl RayJob {
    /// Returns the `curl` command that submits the job.
    pub fn command(&self) -> String {
        let url = quoted(&format!("{}/api/jobs/", self.address));
        format!("curl -X POST {url} -d {}", quoted(&self.submission_request(&self.name)))
    }

    fn submission_request(&self, id: &str) -> Value {
        json!({ "entrypoint": self.entrypoint, "submission_id": id })
    }

    /// Submits the job to the cluster, and follows it to its end.
    pub async fn run(
        self,
        job: &Job,
        detach: bool,
        watcher: Watcher,
    ) -> anyhow::Result<LaunchOutcome> {
        let client = Client::new(Hosts::default(), None)?;
        // Ray requires a new id for each submission.
        let seconds = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        let id = format!("{}-{seconds}", self.name);
        let order = self.submission_request(&id);
        let submitted = AcceptedRayJob { client, address: self.address, id, log: job.log(0) };
        submitted.send_request(Method::POST, "", &order).await.map_err(|error| {
            unusable(format!(
                "the Ray cluster at {} does not accept the job: {error}; see --address",
                submitted.address
            ))
        })?;
        report_status::<AcceptedRayJob>(&watcher.host, &submitted.name());
        let host = watcher.host.clone();
        let ended = follow(&submitted, &job.log(0), detach, watcher).await?;
        if matches!(ended, LaunchOutcome::Code(_)) {
            let log = job.dir.join("ray.log");
            match submitted
                .send_request(Method::GET, &format!("{}/logs", submitted.id), &Value::Null)
                .await
            {
                Ok(found) => std::fs::write(&log, found["logs"].as_str().unwrap_or_default())?,
                Err(error) => report_status::<AcceptedRayJob>(
                    &host,
                    &format!("cannot read the driver's log: {error:#}"),
                ),
            }
        }
        Ok(ended)
    }
}

/// Job that a Ray cluster has accepted.
struct AcceptedRayJob {
    client: Client,
    address: String,
    id: String,
    log: PathBuf,
}

impl AcceptedRayJob {
    async fn send_request(
        &self,
        method: Method,
        path: &str,
        body: &Value,
    ) -> anyhow::Result<Value> {
        let url = format!("{}/api/jobs/{path}", self.address);
        let headers =
            HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        let body = if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) };
        let request = ClientRequest { method, url: url.clone(), headers, body };
        let bounds = Bounds { deadline: TIMEOUT, bytes: 64 << 20, redirects: 2 };
        let response = self.client.send(request, bounds).await?;
        if response.status != StatusCode::OK {
            anyhow::bail!("{url} returned {}: {}", response.status, response.text().trim());
        }
        Ok(serde_json::from_slice(&response.body)?)
    }
}

impl SchedulerJob for AcceptedRayJob {
    const LAUNCHER: &'static str = "ray";

    fn name(&self) -> String {
        format!("job {}", self.id)
    }

    fn watch_command(&self) -> String {
        let url = quoted(&format!("{}/api/jobs/{}", self.address, self.id));
        format!("curl {url}; tail -f {}", quoted(&self.log.display()))
    }

    fn end_command(&self) -> String {
        format!("curl -X POST {}", quoted(&format!("{}/api/jobs/{}/stop", self.address, self.id)))
    }

    async fn query_state(&self) -> anyhow::Result<JobState> {
        parse_state(&self.send_request(Method::GET, &self.id, &Value::Null).await?)
    }

    async fn request_end(&self) -> anyhow::Result<()> {
        self.send_request(Method::POST, &format!("{}/stop", self.id), &Value::Null).await.map(drop)
    }
}

/// Converts Ray's description of a job into a state.
fn parse_state(found: &Value) -> anyhow::Result<JobState> {
    let status =
        found["status"].as_str().with_context(|| format!("the response has no status: {found}"))?;
    let mut text = status.to_owned();
    let mut ended = None;
    match status {
        "SUCCEEDED" => ended = Some(0),
        "STOPPED" => ended = Some(INTERRUPTED),
        "FAILED" => {
            let code = found["driver_exit_code"].as_i64().and_then(|code| u8::try_from(code).ok());
            ended = Some(code.filter(|code| *code != 0).unwrap_or(1));
            let why = found["message"].as_str().and_then(|message| message.lines().next_back());
            text.extend(why.map(|why| format!(": {why}")));
        }
        _ => {}
    }
    Ok(JobState { text, ended })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn render_passes_job_to_driver_and_rejects_bad_address() {
        let job = Job::named("calc", "/runs/it's".into(), "/opt/levade".into()).unwrap();
        let options = RayOptions { address: "http://h:8265/".into(), python: "python3".into() };
        let (ray, _) = render(&Job { nodes: 2, ..job }, &options).unwrap();
        assert!(
            ray.entrypoint.starts_with(r"python3 '/runs/it'\''s/launch/driver.py' '{"),
            "{}",
            ray.entrypoint
        );
        assert!(ray.entrypoint.contains(r#""nodes":2"#));
        assert!(ray.command().starts_with("curl -X POST http://h:8265/api/jobs/ -d "));
        assert!(
            render(
                &Job::named("x", "/r".into(), "/b".into()).unwrap(),
                &RayOptions { address: "h:8265".into(), python: String::new() }
            )
            .is_err()
        );
    }

    #[test]
    fn parse_state_maps_ray_statuses() {
        let state = |found: Value| parse_state(&found).map(|state| (state.text, state.ended));
        assert_eq!(state(json!({ "status": "RUNNING" })).unwrap(), ("RUNNING".into(), None));
        assert_eq!(state(json!({ "status": "STOPPED" })).unwrap().1, Some(INTERRUPTED));
        let failed = json!({ "status": "FAILED", "message": "a\nit ended", "driver_exit_code": 2 });
        assert_eq!(state(failed).unwrap(), ("FAILED: it ended".into(), Some(2)));
        assert_eq!(
            state(json!({ "status": "FAILED", "driver_exit_code": -9 })).unwrap().1,
            Some(1)
        );
        assert!(state(json!({ "detail": "?" })).is_err());
    }
}
