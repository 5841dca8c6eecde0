//! Replaces the weights of a server.
//!
//! The order is fixed:
//!
//! 1. The directory is checked, and the server joins a process group if weights are broadcast.
//! 2. Requests are held back, and the server pauses.
//! 3. The server reads the directory, or receives the weights (*start, send, finish*).
//! 4. The server drops cached prefixes, gets the label of the weights, and resumes.
//! 5. The log-probabilities of a probe are compared with the learner's.
//! 6. Requests are sent again.
//!
//! The probe comes after the resume, since a paused vLLM answers no request. If a broadcast fails,
//! the server reads the directory during the same pause, since a server with half of the new
//! weights must not sample.
//!
//! A label is `levade-VERSION-CHECKSUM`. A server whose label differs has lost its weights and
//! counts as version 0, so the router sends it the newest weights before it serves. Labels are also
//! the cache salt of requests, so no cached prefix outlives its weights.

use std::sync::Arc;
use std::time::Duration;

use levade_policy::{PolicyError, WeightsAt, WeightsRef};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tracing::{info, warn};

use super::dialect::{Facts, LoadSpec, PromptScores, RequestTarget};
use super::options::InFlight;
use super::receive::{JoinedGroup, ReceiveSpec};
use super::weight_dir::{ProbeFile, WeightDir};
use super::{ServerInner, lock};
use crate::push::BroadcastPermit;

/// Shared probe: a prompt and the learner's log-probabilities for it.
type Probe = Arc<ProbeFile>;

/// Weights that a server has loaded completely.
#[derive(Debug, Clone)]
pub(super) struct LoadedWeights {
    pub version: u64,
    /// Label that identifies the weights on the server, made from their version and checksum.
    pub label: String,
    /// Label that the server reported after it had loaded the weights.
    pub mark: String,
    /// Name of the model or of the LoRA adapter in requests.
    pub model: String,
    /// Whether requests may contain seeds.
    pub seeds: bool,
    /// Probe prompt and the learner's log-probabilities for it. `None` if the weights came without
    /// a probe.
    pub probe: Option<Probe>,
}

/// Difference between a server's log-probabilities of a probe prompt and the learner's, in nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ProbeDifference {
    /// Version of the weights that were compared.
    pub version: u64,
    /// Mean absolute difference over the prompt's tokens, in nats.
    pub mean: f32,
    /// Maximum absolute difference over the prompt's tokens, in nats.
    pub max: f32,
}

/// A process group that a server has joined, with the permit to push weights into it.
pub(super) struct GroupMembership<'a> {
    permit: BroadcastPermit<'a>,
    joint: JoinedGroup,
}

/// Prefix of the labels of weights that Levade has loaded.
const LABEL: &str = "levade";
/// Prefix of such labels before the project was renamed to Levade. Servers that still run may have
/// labels with this prefix.
const OLD_LABEL: &str = "dressage";

pub(super) fn format_label(version: u64, sum: u32) -> String {
    format!("{LABEL}-{version}-{sum:08x}")
}

/// Returns the version in a weight label that Levade created, or `None` if the label has another
/// format.
pub(super) fn parse_version(label: &str) -> Option<u64> {
    let rest = label.strip_prefix(LABEL).or_else(|| label.strip_prefix(OLD_LABEL))?;
    let (version, sum) = rest.strip_prefix('-')?.split_once('-')?;
    (sum.len() == 8).then(|| version.parse().ok())?
}

/// Guard that holds requests to a server back while its weights are replaced. Requests continue
/// when the guard is dropped, even after a failure.
struct ClosedGate<'a>(&'a ServerInner);

impl<'a> ClosedGate<'a> {
    fn new(inner: &'a ServerInner) -> Self {
        lock(&inner.paused).since.get_or_insert_with(Instant::now);
        inner.gate.send_modify(|gate| {
            gate.changes += 1;
            gate.is_closed = true;
        });
        ClosedGate(inner)
    }
}

impl Drop for ClosedGate<'_> {
    fn drop(&mut self) {
        {
            let mut paused = lock(&self.0.paused);
            let since = paused.since.take();
            paused.total += since.map(|since| since.elapsed()).unwrap_or_default();
        }
        self.0.gate.send_modify(|gate| (gate.is_closed, gate.is_asleep) = (false, false));
    }
}

impl ServerInner {
    /// Returns whether the server still has the weights `weights` that it has loaded.
    pub async fn still_has(&self, weights: &LoadedWeights) -> Result<bool, PolicyError> {
        let facts = self.query_facts().await?;
        let mark = if self.options.adapters {
            self.query_adapter_label(&weights.label).await?
        } else {
            self.dialect.query_label(&self.http, &facts, self.options.response_timeout).await?
        };
        Ok(mark == weights.mark)
    }

    /// Returns the label `label` of a LoRA adapter if the server lists the adapter, otherwise an
    /// empty string.
    async fn query_adapter_label(&self, label: &str) -> Result<String, PolicyError> {
        let models = self.http.get("/v1/models", self.options.response_timeout).await?;
        let listed =
            models["data"].as_array().into_iter().flatten().any(|model| model["id"] == label);
        Ok(if listed { label.to_owned() } else { String::new() })
    }

    /// Makes the server sample with the weights in a directory.
    ///
    /// # Errors
    /// Returns [`PolicyError::WeightsNotLoaded`] if the files are invalid or the server computes
    /// other log-probabilities than the learner, and an error if the server is unreachable, times
    /// out or rejects the weights. The server has version 0 then.
    pub async fn update_weights(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        let _lock = self.update_lock.lock().await;
        let dir = self.checked_dir(weights).await?;
        self.recheck_sleep().await?;
        let before = self.gate.borrow().weights.clone();
        let is_the_same = match &before {
            Some(before) => self.still_has(before).await?,
            None => self.is_partly_asleep(),
        };
        if !is_the_same {
            // The server was restarted, perhaps with other options.
            *self.facts.lock().await = None;
        }
        let facts = self.query_facts().await?;
        let membership = if self.is_partly_asleep() {
            None
        } else {
            self.join_group(weights.version, &facts).await
        };
        let gate_guard = ClosedGate::new(self);
        self.gate.send_modify(|gate| gate.weights = None);
        let start = Instant::now();
        let loaded = if self.options.adapters {
            self.load_adapter(&dir, weights.version, &facts).await
        } else {
            self.replace_weights(&dir, weights.version, &facts, membership).await
        };
        let loaded = loaded.inspect_err(|error| {
            warn!(
                server = self.http.name, version = weights.version, %error,
                "loading weights failed"
            );
        })?;
        info!(
            server = self.http.name,
            version = weights.version,
            seconds = start.elapsed().as_secs_f64(),
            difference = ?*lock(&self.difference),
            "loaded weights"
        );
        self.gate.send_modify(|gate| gate.weights = Some(Arc::new(loaded)));
        drop(gate_guard);
        let is_replaced = self.options.adapters && self.options.in_flight == InFlight::Recompute;
        if let Some(before) = before.filter(|_| is_replaced) {
            self.dialect
                .drop_adapter(&self.http, &before.label, self.options.response_timeout)
                .await
                .ok();
        }
        Ok(())
    }

    /// Returns the directory of the weights after checking it.
    ///
    /// # Errors
    /// Returns [`PolicyError::WeightsNotLoaded`] if the files are invalid or the weights are not in
    /// a directory.
    pub async fn checked_dir(&self, weights: &WeightsRef) -> Result<WeightDir, PolicyError> {
        let manifest = match &weights.at {
            WeightsAt::Manifest(manifest) => manifest.clone(),
            WeightsAt::Memory => {
                return Err(PolicyError::WeightsNotLoaded(format!(
                    "{} loads weights from directories, but these weights were published in the \
                     learner's memory",
                    self.http.name
                )));
            }
            WeightsAt::Collective { group } => {
                return Err(PolicyError::WeightsNotLoaded(format!(
                    "{} loads weights from directories, and it has not joined the group {group:?}",
                    self.http.name
                )));
            }
        };
        let vocabulary = self.options.vocabulary;
        let adapters = self.options.adapters;
        let checks = self.options.checks.clone();
        let checked =
            tokio::task::spawn_blocking(move || checks.check(&manifest, vocabulary, adapters));
        checked.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    /// Makes the server join a process group for the weights of version `version`, while it still
    /// samples from older weights. Returns `None` if the server must load the weights from their
    /// directory.
    pub async fn join_group(&self, version: u64, facts: &Facts) -> Option<GroupMembership<'_>> {
        let push = self.options.push.as_ref().filter(|_| !self.options.adapters && facts.labels)?;
        let permit = push.acquire_permit(version).await?;
        let dialect = &self.dialect;
        let within = self.options.response_timeout;
        let joint = async {
            let ranks = dialect.count_receivers(&self.http, within).await?;
            let rendezvous = dialect.rendezvous(permit.backend());
            let seconds = self.options.update_timeout.as_secs_f64();
            let (opening, opened) =
                permit.open_push_group(rendezvous, ranks, self.http.host(), seconds).await?;
            let joint = JoinedGroup { opening, opened };
            dialect.join_group(&self.http, &joint, within).await?;
            Ok::<_, PolicyError>(joint)
        };
        match joint.await {
            Ok(joint) => Some(GroupMembership { permit, joint }),
            Err(error) => {
                permit.count_push(false);
                warn!(
                    server = self.http.name, version, %error,
                    "weights cannot be sent and are read from their directory"
                );
                None
            }
        }
    }

    /// Loads weights into a paused server: over the process group if `membership` is set. Without a
    /// process group, or if the push fails, the server reads the weights from the directory.
    pub async fn load_into_paused(
        &self,
        dir: &WeightDir,
        load: &LoadSpec<'_>,
        membership: Option<GroupMembership<'_>>,
    ) -> Result<(), PolicyError> {
        if let Some(GroupMembership { permit, joint }) = membership {
            let LoadSpec { label, keeps, within, .. } = *load;
            let answer = self.options.response_timeout;
            let push =
                ReceiveSpec { joint: &joint, label, keeps, within, response_timeout: answer };
            let sending = Box::pin(permit.send_weights(&joint.opening.group));
            let sent = self.dialect.receive(&self.http, &push, sending).await;
            permit.count_push(sent.is_ok());
            self.dialect.leave_group(&self.http, &joint, answer).await.ok();
            match sent {
                Ok(sent) => {
                    info!(server = self.http.name, label, sent.bytes, sent.seconds, "sent weights");
                    return Ok(());
                }
                // The server may have some of the weights, so it reads all of them before it
                // resumes.
                Err(error) => {
                    warn!(
                        server = self.http.name, label, %error,
                        "sending weights failed; they are read from their directory"
                    );
                }
            }
        }
        self.dialect.load_weights(&self.http, &dir.path, load).await
    }

    /// Pauses the server, loads the complete weights of the version `version`, and resumes the
    /// server.
    async fn replace_weights(
        &self,
        dir: &WeightDir,
        version: u64,
        facts: &Facts,
        membership: Option<GroupMembership<'_>>,
    ) -> Result<LoadedWeights, PolicyError> {
        let answer = self.options.response_timeout;
        let in_flight = self.options.in_flight;
        let label = format_label(version, dir.sum);
        if self.is_partly_asleep() {
            self.wake_with(dir, facts, &label).await?;
        } else {
            self.dialect.pause(&self.http, in_flight, answer).await?;
            let keeps = in_flight == InFlight::Keep;
            let load =
                LoadSpec { facts, label: &label, keeps, within: self.options.update_timeout };
            let read = self.load_into_paused(dir, &load, membership).await;
            if read.is_err() && keeps {
                // Frozen requests must not continue with partly replaced weights.
                self.dialect.pause(&self.http, InFlight::Recompute, answer).await.ok();
            }
            // A server left paused hangs forever, with all its clients.
            let resumed = self.dialect.resume(&self.http, answer).await;
            read?;
            resumed?;
        }
        let mark = self.dialect.query_label(&self.http, facts, answer).await?;
        if facts.labels && mark != label {
            return Err(PolicyError::WeightsNotLoaded(format!(
                "{} reports weights {mark:?} after {label:?} were loaded; check whether another \
                 client loads weights into the server",
                self.http.name
            )));
        }
        let model = facts.model.clone();
        let probe = dir.probe.clone().map(Arc::new);
        self.verify_probe(LoadedWeights { version, label, mark, model, seeds: facts.seeds, probe })
            .await
    }

    /// Loads a LoRA adapter in addition to those that the server has loaded, without a pause.
    async fn load_adapter(
        &self,
        dir: &WeightDir,
        version: u64,
        facts: &Facts,
    ) -> Result<LoadedWeights, PolicyError> {
        let label = format_label(version, dir.sum);
        let load =
            LoadSpec { facts, label: &label, keeps: true, within: self.options.update_timeout };
        if self.query_adapter_label(&label).await? != label {
            self.dialect.load_adapter(&self.http, &dir.path, &load).await?;
        }
        let mark = label.clone();
        let model = label.clone();
        let probe = dir.probe.clone().map(Arc::new);
        self.verify_probe(LoadedWeights { version, label, mark, model, seeds: facts.seeds, probe })
            .await
    }

    /// Compares the server's log-probabilities of the probe prompt with the learner's. Returns the
    /// weights if the difference is within the tolerance.
    async fn verify_probe(&self, loaded: LoadedWeights) -> Result<LoadedWeights, PolicyError> {
        let Some(probe) = loaded.probe.clone() else { return Ok(loaded) };
        let (found, _) = self.score_prompt(&probe.tokens, 0, &loaded).await?;
        let differences: Vec<f32> =
            found.iter().zip(&probe.logprobs).map(|(a, b)| (a - b).abs()).collect();
        let mean = differences.iter().sum::<f32>() / differences.len().max(1) as f32;
        let max = differences.iter().copied().fold(0.0, f32::max);
        *lock(&self.difference) = Some(ProbeDifference { version: loaded.version, mean, max });
        let max_difference = self.options.tolerance;
        if max > max_difference || mean > max_difference / 4.0 || !mean.is_finite() {
            return Err(PolicyError::WeightsNotLoaded(format!(
                "{} computes different log-probabilities than the learner for weights {}: the \
                 mean difference is {mean:.3} nats and the maximum {max:.3}, more than the \
                 tolerance {max_difference} allows; the server has a different model, was started \
                 with a lower precision (--dtype), or computes differently",
                self.http.name, loaded.label
            )));
        }
        Ok(loaded)
    }

    /// Returns the server's log-probabilities of a prompt, with `top` alternatives per position.
    pub async fn score_prompt(
        &self,
        prompt: &[u32],
        top: usize,
        weights: &LoadedWeights,
    ) -> Result<PromptScores, PolicyError> {
        let target = RequestTarget { model: &weights.model, label: &weights.label, seed: None };
        let body = self.dialect.score_body(prompt, top, &target);
        let answer =
            self.http.post(self.dialect.sampling_route(), &body, self.silence_timeout()).await?;
        self.dialect.parse_scores(&answer, prompt, top).map_err(|why| self.http.stopped_error(&why))
    }

    /// Returns the timeout for responses of the server that require a forward pass.
    fn silence_timeout(&self) -> Duration {
        self.options.silence.max(self.options.response_timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_version_inverts_label_and_rejects_foreign_labels() {
        assert_eq!(parse_version(&format_label(7, 0xab)), Some(7));
        assert_eq!(parse_version("dressage-7-000000ab"), Some(7));
        for other in
            ["default", "42", "levade-7", "levade-7-ab", "levade-x-000000ab", "1-levade-00000000"]
        {
            assert_eq!(parse_version(other), None, "{other}");
        }
    }
}
