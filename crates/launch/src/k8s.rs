//! Kubernetes: an indexed Job and a headless Service, submitted by kubectl.
//!
//! The manifests were checked against the schemas of Kubernetes, but were never run on a cluster.

use std::path::PathBuf;

use levade_run::cluster_learner::torchrun::HEAD;
use levade_run::{Host, unusable};
use serde_json::{Value, json};

use crate::follow::{JobState, SchedulerJob, Watcher, follow, report_status};
use crate::job::Job;
use crate::shell::{quoted, run_command};
use crate::{INTERRUPTED, LaunchOutcome};

/// Options of the Kubernetes launcher.
#[derive(Debug, Clone)]
pub struct K8sOptions {
    /// Container image with levade and the learner's environment. The launcher rejects a job
    /// without an image.
    pub image: Option<String>,

    /// Volume claims that all pods share, as `NAME:DIRECTORY`. The run directory, its model and its
    /// environment must be below these directories.
    pub claims: Vec<String>,

    /// Namespace in which the job is created.
    pub namespace: String,

    /// Memory of each pod, such as `16Gi`.
    pub memory: String,
}

/// Manifests of a job that are ready to be submitted.
pub struct Manifests {
    file: PathBuf,
    name: String,
    namespace: String,
}

/// Renders the manifests of a job. Also returns the path and the text of their file.
///
/// # Errors
/// Returns an error if there is no image, if a claim is malformed, or if no volume contains the run
/// directory.
pub fn render(job: &Job, options: &K8sOptions) -> anyhow::Result<(Manifests, (PathBuf, String))> {
    let K8sOptions { image, claims, namespace, memory } = options;
    let image = image
        .as_ref()
        .ok_or_else(|| unusable("--on k8s requires --image: an image that contains levade"))?;
    let mut volumes = Vec::new();
    let mut mounts = Vec::new();
    let mut holds_run = false;
    for (number, claim) in claims.iter().enumerate() {
        let (of, mount_path) = claim
            .split_once(':')
            .filter(|(of, mount_path)| {
                !of.is_empty() && mount_path.starts_with('/') && !mount_path.contains(':')
            })
            .ok_or_else(|| {
                unusable(format!("--claim {claim:?} must be NAME:DIR, such as runs:/runs"))
            })?;
        let name = format!("volume-{number}");
        volumes.push(json!({ "name": name, "persistentVolumeClaim": { "claimName": of } }));
        mounts.push(json!({ "name": name, "mountPath": mount_path }));
        holds_run |= job.root.starts_with(mount_path);
    }
    if !holds_run {
        return Err(unusable(format!(
            "the run directory {} is not in any of the volumes; mount a claim above it with \
             --claim NAME:DIR",
            job.root.display()
        )));
    }
    // Ranks on the same machine communicate through shared memory.
    volumes.push(json!({ "name": "shared-memory", "emptyDir": { "medium": "Memory" } }));
    mounts.push(json!({ "name": "shared-memory", "mountPath": "/dev/shm" }));
    let mut limits = json!({ "memory": memory });
    if job.gpus > 0 {
        limits["nvidia.com/gpu"] = json!(job.gpus);
    }
    let name = &job.name;
    let labels = json!({ "app.kubernetes.io/name": "levade", "levade/run": name });
    let script =
        format!("exec sh {} \"$JOB_COMPLETION_INDEX\"", quoted(&job.script_path().display()));
    // Kubernetes expands `$(NAME)` and unescapes `$$` to `$`.
    let script = script.replace('$', "$$");
    let container = json!({
        "name": "node",
        "image": image,
        "command": ["sh", "-c", script],
        "env": [{ "name": HEAD, "value": format!("{name}-0.{name}") }],
        "resources": {
            "requests": { "cpu": job.processors.to_string(), "memory": memory },
            "limits": limits,
        },
        "volumeMounts": mounts,
    });
    let of = |version: &str, kind: &str, spec: Value| {
        json!({
            "apiVersion": version,
            "kind": kind,
            "metadata": { "name": name, "namespace": namespace, "labels": labels },
            "spec": spec,
        })
    };
    let of_job = json!({
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "backoffLimit": job.restarts.saturating_mul(job.nodes).min(i32::MAX as u32),
            // Errors that the user has to correct are not retried.
            "podFailurePolicy": { "rules": [{
                "action": "FailJob",
                "onExitCodes": { "containerName": "node", "operator": "In", "values": [2] },
            }] },
            "template": {
                "metadata": { "labels": labels },
                "spec": {
                    "restartPolicy": "Never",
                    // Pods get the names NAME-INDEX.NAME.
                    "subdomain": name,
                    // Time for a checkpoint, in seconds.
                    "terminationGracePeriodSeconds": 120,
                    "containers": [container],
                    "volumes": volumes,
                },
            },
    });
    let of_service = json!({
            "clusterIP": "None",
            // Pods must find each other before they are ready.
            "publishNotReadyAddresses": true,
            "selector": { "levade/run": name },
    });
    let workload = of("batch/v1", "Job", of_job);
    let service = of("v1", "Service", of_service);
    // Every JSON document is a YAML document.
    let text = format!(
        "---\n{}\n---\n{}\n",
        serde_json::to_string_pretty(&service)?,
        serde_json::to_string_pretty(&workload)?
    );
    let file = job.dir.join("job.yaml");
    let manifests =
        Manifests { file: file.clone(), name: name.clone(), namespace: namespace.clone() };
    Ok((manifests, (file, text)))
}

impl Manifests {
    /// Returns the shell command that submits the manifests.
    pub fn command(&self) -> String {
        format!("kubectl apply -f {}", quoted(&self.file.display()))
    }

    /// Submits the job to the cluster, and follows it to its end.
    pub async fn run(
        self,
        job: &Job,
        detach: bool,
        watcher: Watcher,
    ) -> anyhow::Result<LaunchOutcome> {
        let file = self.file.display().to_string();
        let host = watcher.host.clone();
        let submitted = KubernetesJob {
            name: self.name,
            namespace: self.namespace,
            file,
            job: job.clone(),
            host,
        };
        if is_over(&submitted.read_description().await?)? {
            report_status::<KubernetesJob>(
                &submitted.host,
                &format!("deleting {} of an earlier launch, which has ended", submitted.name()),
            );
            submitted
                .run_kubectl(&["delete", "--ignore-not-found", "job", &submitted.name])
                .await?;
        }
        run_command(&["kubectl", "apply", "-f", &submitted.file]).await?;
        report_status::<KubernetesJob>(&submitted.host, &submitted.name());
        let ended = follow(&submitted, &job.log(0), detach, watcher).await?;
        if matches!(ended, LaunchOutcome::Code(_)) {
            submitted.request_end().await?;
        }
        Ok(ended)
    }
}

/// Job that was submitted to a Kubernetes cluster.
struct KubernetesJob {
    name: String,
    namespace: String,
    file: String,
    job: Job,
    host: Host,
}

impl KubernetesJob {
    async fn run_kubectl(&self, words: &[&str]) -> anyhow::Result<String> {
        run_command(&[&["kubectl", "-n", &self.namespace], words].concat()).await
    }

    /// Returns the cluster's JSON description of the job. Returns an empty string if the job does
    /// not exist.
    async fn read_description(&self) -> anyhow::Result<String> {
        self.run_kubectl(&["get", "job", &self.name, "--ignore-not-found", "-o", "json"]).await
    }

    /// Saves the logs of the pods, because the cluster deletes them with the job.
    async fn collect_logs(&self) -> anyhow::Result<()> {
        for node in 0..self.job.nodes {
            let pods =
                format!("job-name={},batch.kubernetes.io/job-completion-index={node}", self.name);
            match self.run_kubectl(&["logs", "-l", &pods, "--tail=-1"]).await {
                Ok(logs) if logs.is_empty() => {}
                Ok(logs) => std::fs::write(self.job.log(node), logs)?,
                Err(error) => report_status::<Self>(
                    &self.host,
                    &format!("cannot read the log of machine {node}: {error:#}"),
                ),
            }
        }
        Ok(())
    }
}

impl SchedulerJob for KubernetesJob {
    const LAUNCHER: &'static str = "k8s";

    fn name(&self) -> String {
        format!("job {}", self.name)
    }

    fn watch_command(&self) -> String {
        format!("kubectl -n {} logs -f job/{}", self.namespace, self.name)
    }

    fn end_command(&self) -> String {
        format!("kubectl delete -f {}", quoted(&self.file))
    }

    async fn query_state(&self) -> anyhow::Result<JobState> {
        parse_job(&self.read_description().await?)
    }

    async fn request_end(&self) -> anyhow::Result<()> {
        // The job is deleted even if its logs cannot be saved, for example on a full disk.
        if let Err(error) = self.collect_logs().await {
            report_status::<Self>(
                &self.host,
                &format!("cannot save the output of the job's machines: {error:#}"),
            );
        }
        // The command does not wait for the pods, whose grace period exceeds the timeout for a
        // response.
        let delete = ["delete", "--ignore-not-found", "--wait=false", "-f", &self.file];
        self.run_kubectl(&delete).await.map(drop)
    }
}

/// Returns whether the cluster's description `found` shows a job that has ended or is being
/// deleted. Such a job must be deleted first, because applying its manifest again would start
/// nothing.
fn is_over(found: &str) -> anyhow::Result<bool> {
    if found.trim().is_empty() {
        return Ok(false);
    }
    let job: Value = serde_json::from_str(found)?;
    Ok(!job["metadata"]["deletionTimestamp"].is_null() || parse_job(found)?.ended.is_some())
}

/// Converts the cluster's description of a job into a state. An empty description means that the
/// job was deleted.
fn parse_job(found: &str) -> anyhow::Result<JobState> {
    if found.trim().is_empty() {
        return Ok(JobState { text: "deleted".into(), ended: Some(INTERRUPTED) });
    }
    let found: Value = serde_json::from_str(found)?;
    let count = |name: &str| found["status"][name].as_u64().unwrap_or(0);
    let text = format!(
        "{} running, {} succeeded, {} failed",
        count("active"),
        count("succeeded"),
        count("failed")
    );
    let conditions = found["status"]["conditions"].as_array();
    let holds = |kind: &str| {
        conditions.into_iter().flatten().find(|c| c["type"] == kind && c["status"] == "True")
    };
    let ended = match (holds("Failed"), holds("Complete")) {
        // The pod failure policy fails a job at once on errors that the user has to correct.
        (Some(failed), _) if failed["reason"] == "PodFailurePolicy" => Some(2),
        (Some(_), _) => Some(1),
        (None, Some(_)) => Some(0),
        (None, None) => None,
    };
    Ok(JobState { text, ended })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn render_requires_image_and_run_volume() {
        let job = Job::named("calc", "/runs/a".into(), "/opt/levade".into()).unwrap();
        let job = Job { nodes: 2, gpus: 8, ..job };
        let options = |image: Option<&str>, claim: &str| K8sOptions {
            image: image.map(str::to_owned),
            claims: vec![claim.into()],
            namespace: "ml".into(),
            memory: "16Gi".into(),
        };
        let why = |options: &K8sOptions| match render(&job, options) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("it is taken"),
        };
        assert!(why(&options(None, "runs:/runs")).contains("requires --image"));
        assert!(why(&options(Some("i"), "runs")).contains("must be NAME:DIR"));
        assert!(
            why(&options(Some("i"), "runs:/other"))
                .contains("/runs/a is not in any of the volumes")
        );
        let (_, (_, text)) = render(&job, &options(Some("i"), "runs:/runs")).unwrap();
        let parts: Vec<Value> = text
            .split("---\n")
            .filter(|part| !part.is_empty())
            .map(|part| serde_json::from_str(part).unwrap())
            .collect();
        assert_eq!(parts[1]["spec"]["completions"], 2);
        assert_eq!(parts[1]["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"][0], 2);
        let container = &parts[1]["spec"]["template"]["spec"]["containers"][0];
        assert_eq!(container["resources"]["limits"]["nvidia.com/gpu"], 8);
        assert_eq!(container["env"][0]["value"], "levade-calc-0.levade-calc");
        assert_eq!(parts[0]["spec"]["clusterIP"], "None");
    }

    #[test]
    fn render_escapes_dollar_signs_in_paths() {
        let job = Job::named("calc", "/runs/$(HOSTNAME)$$".into(), "/opt/levade".into()).unwrap();
        let options = K8sOptions {
            image: Some("i".into()),
            claims: vec!["runs:/runs".into()],
            namespace: "ml".into(),
            memory: "16Gi".into(),
        };
        let (_, (_, text)) = render(&job, &options).unwrap();
        let (_, workload) = text.rsplit_once("---\n").unwrap();
        let workload: Value = serde_json::from_str(workload).unwrap();
        let script =
            workload["spec"]["template"]["spec"]["containers"][0]["command"][2].as_str().unwrap();
        let filled = script.replace("$$", "$");
        assert_eq!(
            filled,
            "exec sh '/runs/$(HOSTNAME)$$/launch/node.sh' \"$JOB_COMPLETION_INDEX\""
        );
        assert!(!script.replace("$$", "").contains('$'), "{script}");
    }

    #[test]
    fn state_of_maps_job_conditions() {
        let runs = parse_state(json!({ "status": { "active": 2, "failed": 1 } }));
        assert_eq!(runs, JobState { text: "2 running, 0 succeeded, 1 failed".into(), ended: None });
        let ended = |kind: &str, status: &str| {
            parse_state(json!({ "status": { "conditions": [{ "type": kind, "status": status }] } }))
                .ended
        };
        assert_eq!(ended("Complete", "True"), Some(0));
        assert_eq!(ended("Failed", "True"), Some(1));
        assert_eq!(ended("Failed", "False"), None);
        let policy = json!({ "type": "Failed", "status": "True", "reason": "PodFailurePolicy" });
        assert_eq!(parse_state(json!({ "status": { "conditions": [policy] } })).ended, Some(2));
        assert_eq!(parse_job("\n").unwrap().ended, Some(INTERRUPTED));
        assert!(parse_job("nonsense").is_err());
    }

    fn parse_state(found: Value) -> JobState {
        parse_job(&found.to_string()).unwrap()
    }

    #[test]
    fn is_over_detects_ended_and_deleted_jobs() {
        for (found, over) in [
            (String::new(), false),
            (json!({ "status": { "active": 1 } }).to_string(), false),
            (job_with_condition("Suspended").to_string(), false),
            (json!({ "metadata": { "deletionTimestamp": "now" } }).to_string(), true),
            (job_with_condition("Complete").to_string(), true),
            (job_with_condition("Failed").to_string(), true),
        ] {
            assert_eq!(is_over(&found).unwrap(), over, "{found}");
        }
    }

    fn job_with_condition(kind: &str) -> Value {
        json!({ "status": { "conditions": [{ "type": kind, "status": "True" }] } })
    }
}
