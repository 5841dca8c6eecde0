//! Ray: one job over its HTTP API, an actor on each node.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use dressage_http::{Ask, Bounds, Client, Hosts};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, StatusCode};
use serde_json::{Value, json};

use super::files::Job;
use super::{Ended, Follow, LOOK, Plan};
use crate::failure::{INTERRUPTED, unusable};
use crate::screen::{Style, quoted};
use crate::stop::Requests;

/// Options of `--on ray`
#[derive(clap::Args)]
pub struct Options {
    /// The dashboard of a Ray cluster, for --on ray
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8265")]
    address: String,

    /// The Python that runs the job, as machines of the cluster know it
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    ray_python: String,
}

/// A job of Ray.
pub struct RayJob {
    pub files: Vec<(PathBuf, String)>,
    entrypoint: String,
    address: String,
    name: String,
}

/// The driver: holds a machine for each node, and a keeper's line on each, so that nothing outlives the job.
const DRIVER: &str = r#"import json
import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

JOB = json.loads(sys.argv[1])
RESOURCES = {"CPU": JOB["processors"], **({"GPU": JOB["gpus"]} if JOB["gpus"] else {})}


@ray.remote
class Machine:
    """One machine of the run."""

    def address(self):
        return ray.util.get_node_ip_address()

    def run(self, node, head):
        # The keeper ends its program when this process is gone, and so its line.
        with open(f"{JOB['folder']}/node-{node}.log", "ab") as log:
            keeper = subprocess.Popen(
                [JOB["binary"], "keep"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "DRESSAGE_HEAD": head},
            )
            order = {"command": ["sh", JOB["script"], str(node)], "folder": JOB["root"], "input": None}
            keeper.stdin.write(json.dumps(order).encode() + b"\n")
            keeper.stdin.flush()
            return keeper.wait()


ray.init(address="auto")
group = placement_group([RESOURCES] * JOB["nodes"], strategy="SPREAD")
ray.get(group.ready(), timeout=600)
machines = [
    Machine.options(
        num_cpus=JOB["processors"],
        num_gpus=JOB["gpus"],
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
    ).remote()
    for node in range(JOB["nodes"])
]
head = ray.get(machines[0].address.remote(), timeout=600)
running = [machine.run.remote(node, head) for node, machine in enumerate(machines)]
code = ray.get(running[0])
# The others have been told by the first; where that could not tell, they end with this job.
if code == 0:
    ray.wait(running[1:], num_returns=len(running) - 1, timeout=60) if running[1:] else None
print("exit code", code, flush=True)
sys.exit(code)
"#;

/// Renders the job.
///
/// # Errors
/// When the address is not one.
pub fn plan(job: &Job, options: &Options) -> anyhow::Result<Plan> {
    let address = options.address.trim_end_matches('/').to_owned();
    if !address.starts_with("http://") && !address.starts_with("https://") {
        return Err(unusable(format!("--address {address:?} must begin with http:// or https://")));
    }
    let driver = job.folder.join("ray.py");
    let facts = json!({
        "root": job.root, "folder": job.folder, "script": job.script(), "binary": job.binary, "nodes": job.nodes,
        "processors": job.processors, "gpus": job.gpus,
    });
    let words = [options.ray_python.clone(), driver.display().to_string(), facts.to_string()];
    let entrypoint = words.iter().map(quoted).collect::<Vec<_>>().join(" ");
    let files = vec![(driver, DRIVER.to_owned())];
    Ok(Plan::Ray(RayJob { files, entrypoint, address, name: job.name.clone() }))
}

/// Longest wait for an answer of the cluster.
const LONGEST: Duration = Duration::from_secs(60);

impl RayJob {
    /// The request that submits it, as a command.
    pub fn command(&self) -> String {
        format!("curl -X POST {}/api/jobs/ -d {}", self.address, quoted(&self.order(&self.name)))
    }

    fn order(&self, id: &str) -> Value {
        json!({ "entrypoint": self.entrypoint, "submission_id": id })
    }

    async fn ask(&self, client: &Client, method: Method, path: &str, body: &Value) -> anyhow::Result<Value> {
        let url = format!("{}/api/jobs/{path}", self.address);
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        let body = if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) };
        let ask = Ask { method, url: url.clone(), headers, body };
        let bounds = Bounds { deadline: LONGEST, bytes: 64 << 20, redirects: 2 };
        let reply = client.ask(ask, bounds).await?;
        if reply.status != StatusCode::OK {
            anyhow::bail!("{url} answers {}: {}", reply.status, reply.text().trim());
        }
        Ok(serde_json::from_slice(&reply.body)?)
    }

    /// Submits the job and follows it.
    pub async fn run(self, job: &Job, detach: bool) -> anyhow::Result<Ended> {
        let client = Client::new(Hosts::default(), None)?;
        // A job that is launched again is another one to Ray.
        let seconds = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        let id = format!("{}-{seconds}", self.name);
        let order = self.order(&id);
        self.ask(&client, Method::POST, "", &order).await.map_err(|error| {
            unusable(format!("the Ray cluster at {} takes no job: {error}; see --address", self.address))
        })?;
        let dim = |text| Style::stderr().dim(text);
        eprintln!("{} job {id}", dim("ray   "));
        let end = format!("curl -X POST {}/api/jobs/{id}/stop", self.address);
        if detach {
            let watch =
                format!("curl {}/api/jobs/{id}; tail -f {}", self.address, quoted(&job.log(0).display()));
            return Ok(Ended::Detached { watch, end });
        }
        let mut stop = Requests::listen()?;
        let (mut shown, mut last) = (Follow::new(&job.log(0)), String::new());
        loop {
            tokio::select! {
                _ = stop.next() => {
                    eprintln!("{} ends job {id}", dim("ray   "));
                    self.ask(&client, Method::POST, &format!("{id}/stop"), &Value::Null).await?;
                    return Ok(Ended::Code(INTERRUPTED));
                }
                () = tokio::time::sleep(LOOK) => {}
            }
            shown.show();
            let found = self.ask(&client, Method::GET, &id, &Value::Null).await?;
            let status = found["status"].as_str().unwrap_or_default().to_owned();
            if status != last {
                eprintln!("{} {status}", dim("ray   "));
                last.clone_from(&status);
            }
            let code = match status.as_str() {
                "SUCCEEDED" => 0,
                "STOPPED" => INTERRUPTED,
                "FAILED" => {
                    found["driver_exit_code"].as_i64().and_then(|code| code.try_into().ok()).unwrap_or(1)
                }
                _ => continue,
            };
            shown.show();
            let logs = self.ask(&client, Method::GET, &format!("{id}/logs"), &Value::Null).await?;
            let driver = job.folder.join("ray.log");
            std::fs::write(&driver, logs["logs"].as_str().unwrap_or_default())?;
            if code != 0 {
                let why =
                    found["message"].as_str().unwrap_or_default().lines().next_back().unwrap_or_default();
                eprintln!("{} {why} (driver: {})", dim("ray   "), driver.display());
            }
            return Ok(Ended::Code(code));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_told_of_the_job() {
        let job = Job::new("calc", "/runs/it's".into(), "/opt/dressage".into()).unwrap();
        let options = Options { address: "http://h:8265/".into(), ray_python: "python3".into() };
        let Plan::Ray(ray) = plan(&Job { nodes: 2, ..job }, &options).unwrap() else { panic!() };
        assert!(
            ray.entrypoint.starts_with(r"python3 '/runs/it'\''s/launch/ray.py' '{"),
            "{}",
            ray.entrypoint
        );
        assert!(ray.entrypoint.contains(r#""nodes":2"#));
        assert!(ray.command().starts_with("curl -X POST http://h:8265/api/jobs/ -d "));
        assert!(
            plan(
                &Job::new("x", "/r".into(), "/b".into()).unwrap(),
                &Options { address: "h:8265".into(), ray_python: String::new() }
            )
            .is_err()
        );
    }
}
