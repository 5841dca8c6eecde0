//! Sessions. A session is the endpoint of one attempt.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use levade_call::{ApiError, Recorder, Recording, Transcript};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::key::AttemptKey;
use crate::responses::ResponseMemory;
use crate::route::Route;

/// Settings of the session of an attempt.
#[derive(Clone)]
pub struct SessionOptions {
    /// Name of the task in URLs, as in `/rollout/NAME`.
    pub rollout: String,
    /// Name of the attempt in URLs, unique to this try.
    pub attempt: String,
    /// Agents of the attempt, with the rules that assign calls to them. Must not be empty.
    pub routes: Vec<Route>,
    /// Recorder of the attempt.
    pub recorder: Arc<Recorder>,
    /// Whether the attempt's program can post rewards, with a separate API key.
    pub rewards: bool,
}

/// Reward that the program of an attempt posted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reward {
    /// Value of the reward.
    pub value: f64,
    /// Name of the reward dimension. Default: `reward`.
    #[serde(default = "default_dimension")]
    pub name: String,
    /// Agent that earned the reward. `None` means all agents.
    #[serde(default)]
    pub agent: Option<String>,
    /// Index of the call that earned the reward. `None` means the end of the attempt.
    #[serde(default)]
    pub turn: Option<u32>,
}

/// Error message if a program posts a reward but the recipe has no scorer that takes rewards.
pub(crate) const NO_REWARDS: &str = "this recipe accepts no rewards from programs; give it a \
                                     scorer with kind = \"program\" to accept them";

fn default_dimension() -> String {
    "reward".into()
}

/// Endpoint of one attempt: its API keys, its recorder, and the rewards posted to it.
pub struct Session {
    pub(crate) options: SessionOptions,
    pub(crate) key: AttemptKey,
    pub(crate) reward_key: AttemptKey,
    state: Mutex<SessionState>,
}

/// Mutable state of a session.
#[derive(Default)]
pub(crate) struct SessionState {
    rewards: Vec<Reward>,
    /// Calls by the hash of their path and body, with their start times. A client that repeats a
    /// call receives the events of the first call.
    repeats: HashMap<u128, Vec<(Instant, Arc<Transcript>)>>,
    /// Stored responses by id, so that later calls can continue them.
    pub responses: ResponseMemory,
}

/// Time after a call's start during which a client that repeats the call gets its response again.
/// Until a client has received the end of the response, this time is unlimited.
const REPEAT_TIMEOUT: Duration = Duration::from_secs(120);

impl Session {
    pub(crate) fn new(options: SessionOptions) -> Self {
        Session {
            key: AttemptKey::new(&options.attempt),
            reward_key: AttemptKey::new(&options.attempt),
            options,
            state: Mutex::default(),
        }
    }

    /// Returns the API key for calls of the attempt.
    pub fn key(&self) -> &str {
        self.key.text()
    }

    /// Returns the API key for posting rewards of the attempt.
    pub fn reward_key(&self) -> &str {
        self.reward_key.text()
    }

    /// Returns the URL path of the attempt's endpoint, without a trailing slash and without `/v1`.
    pub fn path(&self) -> String {
        format!("/rollout/{}/attempt/{}", self.options.rollout, self.options.attempt)
    }

    /// Returns the recorder of the attempt.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.options.recorder
    }

    pub(crate) fn lock_state(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the transcript of an earlier call with the same body that no client reads now and
    /// whose end no client has received. If there is no such call and `retries` is true, returns
    /// the newest call with the same body. Failed calls are ignored, so that a repeated call is
    /// sampled again.
    pub(crate) fn find_repeated(&self, body: u128, retries: bool) -> Option<Arc<Transcript>> {
        let mut state = self.lock_state();
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

    /// Stores a call, so that a client that repeats the call receives the same events.
    pub(crate) fn remember_call(&self, body: u128, call: &Arc<Transcript>) {
        self.lock_state().repeats.entry(body).or_default().push((Instant::now(), Arc::clone(call)));
    }

    /// Validates a posted reward and adds it to the session.
    pub(crate) fn add_reward(&self, reward: Reward) -> Result<(), ApiError> {
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
        self.lock_state().rewards.push(reward);
        Ok(())
    }

    /// Ends the session. Calls in flight are aborted and recorded with the tokens sampled so far;
    /// see [`Recorder::close`]. Returns the recorded calls, and the rewards that the program
    /// posted.
    pub async fn close(&self, timeout: Duration) -> (Recording, Vec<Reward>) {
        let recorded = self.recorder().close(timeout).await;
        (recorded, std::mem::take(&mut self.lock_state().rewards))
    }
}
