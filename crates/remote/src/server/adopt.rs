//! Replaces the weights of a server.
//!
//! The order is fixed:
//!
//! 1. the folder is checked, and the server joins a process group if weights are broadcast;
//! 2. no further request goes out, and the server pauses;
//! 3. the server reads the folder, or receives the weights (*start, send, finish*);
//! 4. it forgets cached prefixes, gets the label of the weights, and resumes;
//! 5. the log-probabilities of a probe are compared with the learner's;
//! 6. requests go out again.
//!
//! The probe comes after the resume, since a paused vLLM answers no request. If a broadcast fails, the server
//! reads the folder during the same pause, since a server with half of the new weights must not sample.
//!
//! A label is `levade-VERSION-CHECKSUM`. A server whose label differs has lost its weights and counts as
//! version 0, so the router sends it the newest weights before it serves. Labels are also the cache salt of
//! requests, so no cached prefix outlives its weights.

use std::sync::Arc;
use std::time::Duration;

use levade_policy::{PolicyError, WeightsAt, WeightsRef};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tracing::{info, warn};

use super::dialect::{Facts, Loading, Scored, Under};
use super::folder::{Folder, ProbeFile};
use super::options::InFlight;
use super::receive::{Joint, Receiving};
use super::{Inner, lock};
use crate::push::Turn;

/// A prompt and what the learner finds for it, shared.
type Probe = Arc<ProbeFile>;

/// Weights that a server has as a whole.
#[derive(Debug, Clone)]
pub(super) struct Adopted {
    pub version: u64,
    /// The server calls them so: version and checksum, by which they are told from all others.
    pub label: String,
    /// The answer of the server about its label afterwards.
    pub mark: String,
    /// The name of the model or adapter that requests ask for.
    pub model: String,
    /// Whether requests may have seeds.
    pub seeds: bool,
    /// What the learner finds for a prompt.
    pub probe: Option<Probe>,
}

/// How far log-probabilities of a probe were from the learner's, in nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ProbeDifference {
    /// Version of the weights.
    pub version: u64,
    /// Mean of the magnitude over the prompt's tokens.
    pub mean: f32,
    /// The largest.
    pub max: f32,
}

/// A group that a server has joined, and the right to have weights sent into it.
pub(super) struct Joined<'a> {
    turn: Turn<'a>,
    joint: Joint,
}

/// The beginning of labels, by which weights are known as this program's.
const LABEL: &str = "levade";
/// What they began with before the project was called Levade: servers that still run may have such weights.
const EARLIER: &str = "dressage";

pub(super) fn label_of(version: u64, sum: u32) -> String {
    format!("{LABEL}-{version}-{sum:08x}")
}

/// The version in a label of this program's.
pub(super) fn version_of(label: &str) -> Option<u64> {
    let rest = label.strip_prefix(LABEL).or_else(|| label.strip_prefix(EARLIER))?;
    let (version, sum) = rest.strip_prefix('-')?.split_once('-')?;
    (sum.len() == 8).then(|| version.parse().ok())?
}

/// Keeps requests away while weights are replaced, and lets them in again, whatever came of it.
struct Closed<'a>(&'a Inner);

impl<'a> Closed<'a> {
    fn new(inner: &'a Inner) -> Self {
        lock(&inner.paused).since.get_or_insert_with(Instant::now);
        inner.gate.send_modify(|gate| {
            gate.changes += 1;
            gate.is_closed = true;
        });
        Closed(inner)
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        {
            let mut paused = lock(&self.0.paused);
            let since = paused.since.take();
            paused.total += since.map(|since| since.elapsed()).unwrap_or_default();
        }
        self.0.gate.send_modify(|gate| (gate.is_closed, gate.is_asleep) = (false, false));
    }
}

impl Inner {
    /// Whether a server still has weights that it was given.
    pub async fn has(&self, weights: &Adopted) -> Result<bool, PolicyError> {
        let facts = self.facts().await?;
        let mark = match self.options.adapters {
            true => self.adapter_mark(&weights.label).await?,
            false => self.dialect.label(&self.http, &facts, self.options.answer).await?,
        };
        Ok(mark == weights.mark)
    }

    /// The label of an adapter, where the server lists it.
    async fn adapter_mark(&self, label: &str) -> Result<String, PolicyError> {
        let models = self.http.get("/v1/models", self.options.answer).await?;
        let listed = models["data"].as_array().into_iter().flatten().any(|model| model["id"] == label);
        Ok(if listed { label.to_owned() } else { String::new() })
    }

    /// Has the server draw from weights in a folder.
    ///
    /// # Errors
    /// [`PolicyError::NotAdopted`] when the folder is not whole, or the server finds other numbers for it
    /// than the learner; when the server is gone, late or refuses. It has version 0 then.
    pub async fn adopt(&self, weights: &WeightsRef) -> Result<(), PolicyError> {
        let _alone = self.adopting.lock().await;
        let folder = self.folder(weights).await?;
        self.look_again().await?;
        let before = self.gate.borrow().weights.clone();
        let is_the_same = match &before {
            Some(before) => self.has(before).await?,
            None => self.sleeps(),
        };
        if !is_the_same {
            // It was started again, perhaps in another way.
            *self.facts.lock().await = None;
        }
        let facts = self.facts().await?;
        let joined = if self.sleeps() { None } else { self.joined(weights.version, &facts).await };
        let closed = Closed::new(self);
        self.gate.send_modify(|gate| gate.weights = None);
        let begun = Instant::now();
        let given = match self.options.adapters {
            true => self.give_adapter(&folder, weights.version, &facts).await,
            false => self.give(&folder, weights.version, &facts, joined).await,
        };
        let given = given.inspect_err(|error| {
            warn!(server = self.http.name, version = weights.version, %error, "weights were not adopted");
        })?;
        info!(
            server = self.http.name,
            version = weights.version,
            seconds = begun.elapsed().as_secs_f64(),
            difference = ?*lock(&self.difference),
            "weights were adopted"
        );
        self.gate.send_modify(|gate| gate.weights = Some(Arc::new(given)));
        drop(closed);
        let is_replaced = self.options.adapters && self.options.in_flight == InFlight::Recompute;
        if let Some(before) = before.filter(|_| is_replaced) {
            self.dialect.drop_adapter(&self.http, &before.label, self.options.answer).await.ok();
        }
        Ok(())
    }

    /// The folder of weights, once it is found to be whole.
    ///
    /// # Errors
    /// [`PolicyError::NotAdopted`] when it is not, or weights are not in one.
    pub async fn folder(&self, weights: &WeightsRef) -> Result<Folder, PolicyError> {
        let manifest = match &weights.at {
            WeightsAt::Manifest(manifest) => manifest.clone(),
            WeightsAt::Memory => {
                return Err(PolicyError::NotAdopted(format!(
                    "{} takes weights from folders, and these were published in the learner's memory",
                    self.http.name
                )));
            }
            WeightsAt::Collective { group } => {
                return Err(PolicyError::NotAdopted(format!(
                    "{} takes weights from folders, and has not joined the group {group:?}",
                    self.http.name
                )));
            }
        };
        let (vocabulary, adapters) = (self.options.vocabulary, self.options.adapters);
        let checks = self.options.checks.clone();
        let checked = tokio::task::spawn_blocking(move || checks.check(&manifest, vocabulary, adapters));
        checked.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    /// Has a server join a group over which it can be sent a version of the weights, while it still draws
    /// with older ones. `None` where they are to be had from their folder alone.
    pub async fn joined(&self, version: u64, facts: &Facts) -> Option<Joined<'_>> {
        let push = self.options.push.as_ref().filter(|_| !self.options.adapters && facts.labels)?;
        let turn = push.turn(version).await?;
        let (dialect, within) = (&self.dialect, self.options.answer);
        let joint = async {
            let ranks = dialect.receivers(&self.http, within).await?;
            let (rendezvous, seconds) =
                (dialect.rendezvous(turn.backend()), self.options.adopt.as_secs_f64());
            let (opening, opened) = turn.open(rendezvous, ranks, self.http.host(), seconds).await?;
            let joint = Joint { opening, opened };
            dialect.join(&self.http, &joint, within).await?;
            Ok::<_, PolicyError>(joint)
        };
        match joint.await {
            Ok(joint) => Some(Joined { turn, joint }),
            Err(error) => {
                turn.ends(false);
                warn!(server = self.http.name, version, %error, "weights cannot be sent, and are read from their folder");
                None
            }
        }
    }

    /// Has a server that stands still take weights: those that are sent, or else those in the folder.
    pub async fn take(
        &self,
        folder: &Folder,
        load: &Loading<'_>,
        joined: Option<Joined<'_>>,
    ) -> Result<(), PolicyError> {
        if let Some(Joined { turn, joint }) = joined {
            let Loading { label, keeps, within, .. } = *load;
            let answer = self.options.answer;
            let push = Receiving { joint: &joint, label, keeps, within, answer };
            let sending = Box::pin(turn.send(&joint.opening.group));
            let sent = self.dialect.receive(&self.http, &push, sending).await;
            turn.ends(sent.is_ok());
            self.dialect.leave(&self.http, &joint, answer).await.ok();
            match sent {
                Ok(sent) => {
                    info!(server = self.http.name, label, sent.bytes, sent.seconds, "weights were sent");
                    return Ok(());
                }
                // It may have some of them, and reads all anew before it goes on.
                Err(error) => {
                    warn!(server = self.http.name, label, %error, "weights were not sent, and are read from their folder");
                }
            }
        }
        self.dialect.read(&self.http, &folder.path, load).await
    }

    /// Has a server take whole weights while it stands still, and go on.
    async fn give(
        &self,
        folder: &Folder,
        version: u64,
        facts: &Facts,
        joined: Option<Joined<'_>>,
    ) -> Result<Adopted, PolicyError> {
        let (answer, in_flight) = (self.options.answer, self.options.in_flight);
        let label = label_of(version, folder.sum);
        if self.sleeps() {
            self.wake_with(folder, facts, &label).await?;
        } else {
            self.dialect.pause(&self.http, in_flight, answer).await?;
            let keeps = in_flight == InFlight::Keep;
            let load = Loading { facts, label: &label, keeps, within: self.options.adopt };
            let read = self.take(folder, &load, joined).await;
            if read.is_err() && keeps {
                // Replies that stand still must not go on over weights of which some are new.
                self.dialect.pause(&self.http, InFlight::Recompute, answer).await.ok();
            }
            // One that is left standing still hangs for ever, with whoever asks it.
            let resumed = self.dialect.resume(&self.http, answer).await;
            read?;
            resumed?;
        }
        let mark = self.dialect.label(&self.http, facts, answer).await?;
        if facts.labels && mark != label {
            return Err(PolicyError::NotAdopted(format!(
                "{} calls its weights {mark:?} after it was given {label:?}; does somebody else give it weights?",
                self.http.name
            )));
        }
        let (model, probe) = (facts.model.clone(), folder.probe.clone().map(Arc::new));
        self.confirmed(Adopted { version, label, mark, model, seeds: facts.seeds, probe }).await
    }

    /// Has a server load an adapter beside others. It need not stand still for that.
    async fn give_adapter(
        &self,
        folder: &Folder,
        version: u64,
        facts: &Facts,
    ) -> Result<Adopted, PolicyError> {
        let label = label_of(version, folder.sum);
        let load = Loading { facts, label: &label, keeps: true, within: self.options.adopt };
        if self.adapter_mark(&label).await? != label {
            self.dialect.load_adapter(&self.http, &folder.path, &load).await?;
        }
        let (mark, model, probe) = (label.clone(), label.clone(), folder.probe.clone().map(Arc::new));
        self.confirmed(Adopted { version, label, mark, model, seeds: facts.seeds, probe }).await
    }

    /// Compares the log-probabilities of the probe with the learner's.
    async fn confirmed(&self, adopted: Adopted) -> Result<Adopted, PolicyError> {
        let Some(probe) = adopted.probe.clone() else { return Ok(adopted) };
        let (found, _) = self.score(&probe.tokens, 0, &adopted).await?;
        let apart = |(a, b): (&f32, &f32)| (a - b).abs();
        let apart: Vec<f32> = found.iter().zip(&probe.logprobs).map(apart).collect();
        let mean = apart.iter().sum::<f32>() / apart.len().max(1) as f32;
        let max = apart.iter().copied().fold(0.0, f32::max);
        *lock(&self.difference) = Some(ProbeDifference { version: adopted.version, mean, max });
        let most = self.options.tolerance;
        if max > most || mean > most / 4.0 || !mean.is_finite() {
            return Err(PolicyError::NotAdopted(format!(
                "{} finds other log-probabilities than the learner for weights {}: {mean:.3} nats apart in the mean, {max:.3} \
                 at most, more than the tolerance {most} allows; it has another model, was started with a lower precision \
                 (--dtype), or computes otherwise",
                self.http.name, adopted.label
            )));
        }
        Ok(adopted)
    }

    /// Log-probabilities of a prompt.
    pub async fn score(&self, prompt: &[u32], top: usize, under: &Adopted) -> Result<Scored, PolicyError> {
        let asked = Under { model: &under.model, label: &under.label, seed: None };
        let body = self.dialect.score(prompt, top, &asked);
        let answer = self.http.post(self.dialect.route(), &body, self.patience()).await?;
        self.dialect.scored(&answer, prompt, top).map_err(|why| self.http.gone(&why))
    }

    /// How long an answer may take that is computed.
    fn patience(&self) -> Duration {
        self.options.silence.max(self.options.answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_holds_its_version_and_others_none() {
        assert_eq!(version_of(&label_of(7, 0xab)), Some(7));
        assert_eq!(version_of("dressage-7-000000ab"), Some(7));
        for other in ["default", "42", "levade-7", "levade-7-ab", "levade-x-000000ab", "1-levade-00000000"] {
            assert_eq!(version_of(other), None, "{other}");
        }
    }
}
