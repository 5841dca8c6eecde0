//! Sessions. A session is the endpoint of one attempt.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use levade_call::{ApiError, Recorder, Recording, Transcript};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::key::Key;
use crate::responses::Memory;
use crate::route::Route;

/// Settings of a session.
#[derive(Clone)]
pub struct SessionOptions {
    /// Name of the task's rollout in URLs.
    pub rollout: String,
    /// Name of the attempt in URLs, unique to this try.
    pub attempt: String,
    /// Agents of the attempt. Must not be empty.
    pub routes: Vec<Route>,
    /// Recorder of the attempt.
    pub recorder: Arc<Recorder>,
    /// Whether the attempt's program can post rewards, with a separate key.
    pub rewards: bool,
}

/// Reward that the program of an attempt posted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reward {
    /// Value of the reward.
    pub value: f64,
    /// Reward dimension. Default: `reward`.
    #[serde(default = "one_dimension")]
    pub name: String,
    /// Agent that earned the reward. `None` means all agents.
    #[serde(default)]
    pub agent: Option<String>,
    /// Index of the call that earned the reward. `None` means the end of the attempt.
    #[serde(default)]
    pub turn: Option<u32>,
}

/// Error if the recipe has no scorer that takes rewards.
pub(crate) const NO_REWARDS: &str = "this recipe accepts no rewards from programs; give it a \
                                     scorer with kind = \"program\" to accept them";

fn one_dimension() -> String {
    "reward".into()
}

/// Endpoint of one attempt.
pub struct Session {
    pub(crate) options: SessionOptions,
    pub(crate) key: Key,
    pub(crate) reward_key: Key,
    state: Mutex<State>,
}

/// Mutable state of a session.
#[derive(Default)]
pub(crate) struct State {
    rewards: Vec<Reward>,
    /// Calls by the hash of their path and body, with the time at which they started, for clients
    /// that repeat a call.
    repeats: HashMap<u128, Vec<(Instant, Arc<Transcript>)>>,
    /// Responses by id, for clients that continue a response.
    pub responses: Memory,
}

/// Time after its start during which a call can be repeated, if a client has received its end.
const REPEAT_TIMEOUT: Duration = Duration::from_secs(120);

impl Session {
    pub(crate) fn new(options: SessionOptions) -> Self {
        Session {
            key: Key::new(&options.attempt),
            reward_key: Key::new(&options.attempt),
            options,
            state: Mutex::default(),
        }
    }

    /// Returns the key for calls of the attempt.
    pub fn key(&self) -> &str {
        self.key.text()
    }

    /// Returns the key for posting rewards of the attempt.
    pub fn reward_key(&self) -> &str {
        self.reward_key.text()
    }

    /// Returns the URL path of the endpoint, without a trailing slash and without `/v1`.
    pub fn path(&self) -> String {
        format!("/rollout/{}/attempt/{}", self.options.rollout, self.options.attempt)
    }

    /// Returns the recorder of the attempt.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.options.recorder
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the transcript of an earlier call with the same body that no client reads now and
    /// whose end no client has received. If there is none and `retries` is true, returns the newest
    /// call with the same body. Failed calls are not returned, so that they are sampled again.
    pub(crate) fn find_repeated(&self, body: u128, retries: bool) -> Option<Arc<Transcript>> {
        let mut state = self.state();
        let now = Instant::now();
        state.repeats.retain(|_, calls| {
            calls.retain(|(at, call)| !call.was_read() || now - *at < REPEAT_TIMEOUT);
            !calls.is_empty()
        });
        let calls = state.repeats.get_mut(&body)?;
        calls.retain(|(_, call)| !call.is_broken());
        let unread = calls.iter().find(|(_, call)| !call.is_being_read() && !call.was_read());
        unread.or_else(|| calls.last().filter(|_| retries)).map(|(_, call)| Arc::clone(call))
    }

    /// Remembers a call for clients that repeat it.
    pub(crate) fn keep(&self, body: u128, call: &Arc<Transcript>) {
        self.state().repeats.entry(body).or_default().push((Instant::now(), Arc::clone(call)));
    }

    /// Validates and adds a reward.
    pub(crate) fn reward(&self, reward: Reward) -> Result<(), ApiError> {
        let recorder = self.recorder();
        recorder.check_open()?;
        if !reward.value.is_finite() {
            return Err(ApiError::field(
                "value",
                format!("value is {}, but must be finite", reward.value),
            ));
        }
        if let Some(agent) = &reward.agent
            && !self.options.routes.iter().any(|route| route.party.answers_as(agent))
        {
            return Err(ApiError::field(
                "agent",
                format!("there is no agent {agent:?} in this attempt"),
            ));
        }
        if let Some(turn) = reward.turn
            && !recorder.has_turn(turn)
        {
            let made = recorder.ended_calls();
            let message =
                format!("the call {turn} has not ended in this attempt; {made} calls have ended");
            return Err(ApiError::field("turn", message));
        }
        self.state().rewards.push(reward);
        Ok(())
    }

    /// Ends the session. Calls in flight are aborted and recorded with the tokens sampled so far;
    /// see [`Recorder::close`]. Returns the recorded calls, and the rewards that the program
    /// posted.
    pub async fn close(&self, timeout: Duration) -> (Recording, Vec<Reward>) {
        let recorded = self.recorder().close(timeout).await;
        (recorded, std::mem::take(&mut self.state().rewards))
    }
}
