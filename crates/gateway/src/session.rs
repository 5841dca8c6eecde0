//! Sessions: the endpoint of one attempt, and all that was said through it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use levade_conversation::{Conversation, Counts, Origin};
use levade_policy::{CallStreams, FinishReason};
use levade_tree::Trajectory;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};

use crate::external::{ExternalCall, Histories};
use crate::fault::{Fault, Kind};
use crate::key::Key;
use crate::probes::Probes;
use crate::responses::Memory;
use crate::route::Route;
use crate::transcript::Transcript;

/// How an attempt may be served.
#[derive(Clone)]
pub struct SessionOptions {
    /// Name of the task's rollout in URLs.
    pub rollout: String,
    /// Name of the attempt in URLs, unique to this try.
    pub attempt: String,
    /// Seed of the run.
    pub seed: u64,
    /// The attempt's own stream of random numbers.
    pub stream: u64,
    /// Its agents; at least one.
    pub routes: Vec<Route>,
    /// Where its calls end.
    pub limits: SessionLimits,
    /// Whether programs may post rewards, with the attempt's key of that purpose.
    pub rewards: bool,
}

/// Bounds of an attempt's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionLimits {
    /// Most calls.
    pub calls: u32,
    /// Most sampled tokens over all calls.
    pub tokens: usize,
    /// Longest wait for one reply.
    pub reply: Duration,
}

/// A reward that the program of an attempt gave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reward {
    /// The number.
    pub value: f64,
    /// The dimension that it is of.
    #[serde(default = "one_dimension")]
    pub name: String,
    /// The agent that earned it; all where it is absent.
    #[serde(default)]
    pub agent: Option<String>,
    /// The call that earned it, counted from 0; the end of the attempt where it is absent.
    #[serde(default)]
    pub turn: Option<u32>,
}

fn one_dimension() -> String {
    "reward".into()
}

/// A call that was made in a session.
#[derive(Debug, Clone, PartialEq)]
pub struct Called {
    /// Agent that asked.
    pub agent: String,
    /// Model that answered.
    pub model: String,
    /// Whether the model is behind an API of others.
    pub external: bool,
    /// Whether a context policy asked, for a summary.
    pub summary: bool,
    /// Whether it was a probe, whose reply is not trained.
    pub probe: bool,
    /// How the prompt came about; `None` for prompts in ids, and for models of others.
    pub origin: Option<Origin>,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of the reply.
    pub tokens: usize,
    /// Why it ended.
    pub finish: FinishReason,
    /// Fault that ended it.
    pub fault: Option<String>,
    /// Number of its model call within the conversation, where it was recorded.
    pub turn: Option<u32>,
    /// Content of the reply, as the client was told it.
    pub content: String,
    /// Number of calls in the reply.
    pub calls: usize,
}

/// All that is left of a session.
#[derive(Debug, Default)]
pub struct Recorded {
    /// Every token.
    pub trajectory: Trajectory,
    /// Places where the template prints the past otherwise than it was recorded.
    pub drift: Vec<levade_tree::Drift>,
    /// Prompts by how they came about.
    pub counts: Counts,
    /// The calls, in the order of their ends.
    pub calls: Vec<Called>,
    /// Calls that policies of others answered, in messages.
    pub external: Vec<ExternalCall>,
    /// Rewards that the program posted.
    pub rewards: Vec<Reward>,
    /// How often the recipe decided a parameter that a client had asked otherwise for.
    pub overridden: BTreeMap<String, u32>,
    /// Calls that were refused, by kind.
    pub refused: BTreeMap<String, u32>,
}

/// The endpoint of one attempt.
pub struct Session {
    pub(crate) options: SessionOptions,
    pub(crate) key: Key,
    pub(crate) reward_key: Key,
    state: Mutex<State>,
    closed: AtomicBool,
    /// Told when the session closes.
    closing: Notify,
    /// Calls under way.
    running: watch::Sender<usize>,
}

/// Changing parts of a session.
pub(crate) struct State {
    pub conversation: Conversation,
    pub streams: CallStreams,
    pub left_calls: u32,
    pub left_tokens: usize,
    /// Newest version of each policy that has answered: no later call is answered by an older one.
    pub versions: HashMap<String, u64>,
    pub recorded: Recorded,
    /// Calls by their bodies, for clients that ask again.
    repeats: HashMap<u128, Vec<(Instant, Arc<Transcript>)>>,
    /// Histories of calls that policies of others answered.
    pub histories: Histories,
    /// Replies by id, for clients that continue one by its name.
    pub responses: Memory,
    /// Calls that may be probes.
    pub probes: Probes,
}

/// How long a finished call can be asked for again.
const REPEAT: Duration = Duration::from_secs(120);

impl Session {
    pub(crate) fn new(options: SessionOptions) -> Self {
        let state = State {
            conversation: Conversation::new(),
            streams: CallStreams::new(options.stream),
            left_calls: options.limits.calls,
            left_tokens: options.limits.tokens,
            versions: HashMap::new(),
            recorded: Recorded::default(),
            repeats: HashMap::new(),
            histories: Histories::default(),
            responses: Memory::default(),
            probes: Probes::default(),
        };
        Session {
            key: Key::new(&options.attempt),
            reward_key: Key::new(&options.attempt),
            options,
            state: Mutex::new(state),
            closed: AtomicBool::new(false),
            closing: Notify::new(),
            running: watch::Sender::new(0),
        }
    }

    /// The key that calls of the attempt bear.
    pub fn key(&self) -> &str {
        self.key.text()
    }

    /// The key that rewards of the attempt bear.
    pub fn reward_key(&self) -> &str {
        self.reward_key.text()
    }

    /// The path of the endpoint, without a slash at its end and without `/v1`.
    pub fn path(&self) -> String {
        format!("/rollout/{}/attempt/{}", self.options.rollout, self.options.attempt)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits one more call of the model; one that is not `counted` is bounded by no limit.
    pub(crate) fn admit(self: &Arc<Self>, counted: bool) -> Result<Running, Fault> {
        let mut state = self.state();
        if self.closed.load(Ordering::Acquire) {
            return Err(self.gone());
        }
        if !counted {
            self.running.send_modify(|running| *running += 1);
            return Ok(Running(Arc::clone(self)));
        }
        if state.left_calls == 0 {
            let most = self.options.limits.calls;
            return Err(Fault::new(
                Kind::Limit,
                format!("this attempt has made its {most} calls (agent.max_turns)"),
            ));
        }
        if state.left_tokens == 0 {
            let most = self.options.limits.tokens;
            let message = format!("this attempt has sampled its {most} tokens (agent.max_tokens)");
            return Err(Fault::new(Kind::Limit, message));
        }
        state.left_calls -= 1;
        self.running.send_modify(|running| *running += 1);
        Ok(Running(Arc::clone(self)))
    }

    pub(crate) fn gone(&self) -> Fault {
        Fault::new(
            Kind::Gone,
            format!("the attempt {} is over; its key is no longer good", self.options.attempt),
        )
    }

    /// Whether it takes no more calls.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits until the session closes.
    pub(crate) async fn closed(&self) {
        let closing = self.closing.notified();
        tokio::pin!(closing);
        closing.as_mut().enable();
        if !self.is_closed() {
            closing.await;
        }
    }

    /// Counts a call that was refused.
    pub(crate) fn refused(&self, fault: &Fault) {
        let mut state = self.state();
        *state.recorded.refused.entry(fault.kind.name().to_owned()).or_default() += 1;
    }

    /// A call with this very body that was made before and whose end nobody was told, or that `retries` says
    /// is repeated. One that broke is made again.
    pub(crate) fn repeated(&self, body: u128, retries: bool) -> Option<Arc<Transcript>> {
        let mut state = self.state();
        let now = Instant::now();
        state.repeats.retain(|_, calls| {
            calls.retain(|(at, call)| !call.was_read() || now - *at < REPEAT);
            !calls.is_empty()
        });
        let calls = state.repeats.get_mut(&body)?;
        calls.retain(|(_, call)| !call.is_broken());
        let untold = calls.iter().find(|(_, call)| !call.is_being_read() && !call.was_read());
        let retried = || calls.last().filter(|_| retries);
        untold.or_else(retried).map(|(_, call)| Arc::clone(call))
    }

    /// Keeps a call for clients that ask again.
    pub(crate) fn keep(&self, body: u128, call: &Arc<Transcript>) {
        self.state().repeats.entry(body).or_default().push((Instant::now(), Arc::clone(call)));
    }

    /// Notes a reward.
    pub(crate) fn reward(&self, reward: Reward) -> Result<(), Fault> {
        if self.is_closed() {
            return Err(self.gone());
        }
        if !reward.value.is_finite() {
            return Err(Fault::field("value", format!("value is {}; rewards are finite", reward.value)));
        }
        if let Some(agent) = &reward.agent
            && self.options.routes.iter().all(|route| route.agent != *agent)
        {
            return Err(Fault::field("agent", format!("there is no agent {agent:?} in this attempt")));
        }
        let mut state = self.state();
        if let Some(turn) = reward.turn
            && state.recorded.calls.iter().all(|call| call.turn != Some(turn))
        {
            let made = state.recorded.calls.len();
            return Err(Fault::field(
                "turn",
                format!("no call {turn} has ended in this attempt; {made} calls have"),
            ));
        }
        state.recorded.rewards.push(reward);
        Ok(())
    }

    /// Ends the session: no call is admitted any more, those under way are ended and recorded as far as they
    /// came. Waits for them for at most `patience`. Comparing the conversation with what its template prints
    /// takes time, so that is done away from async workers.
    pub async fn close(self: &Arc<Self>, patience: Duration) -> Recorded {
        {
            // Under the lock, so that no call is admitted after.
            let _state = self.state();
            self.closed.store(true, Ordering::Release);
        }
        self.closing.notify_waiters();
        let mut running = self.running.subscribe();
        let ended = tokio::time::timeout(patience, running.wait_for(|running| *running == 0)).await.is_ok();
        let left = if ended { 0 } else { *self.running.borrow() };
        let session = Arc::clone(self);
        let finished = tokio::task::spawn_blocking(move || {
            let mut state = session.state();
            let mut conversation = std::mem::take(&mut state.conversation);
            let mut recorded = std::mem::take(&mut state.recorded);
            let probes = std::mem::take(&mut state.probes);
            drop(state);
            recorded.drift = conversation.finish();
            recorded.counts = conversation.counts().clone();
            recorded.trajectory = conversation.into_trajectory();
            let probes = probes.set_apart(&mut recorded.trajectory);
            for call in &mut recorded.calls {
                call.probe = call.turn.is_some_and(|turn| probes.contains(&turn));
            }
            recorded
        });
        let mut recorded = finished.await.unwrap_or_default();
        if left > 0 {
            let note = format!("{left} calls did not end within {patience:?} and are not recorded");
            tracing::warn!(attempt = self.options.attempt, note);
        }
        recorded.calls.shrink_to_fit();
        recorded
    }
}

/// A call under way in a session.
pub(crate) struct Running(Arc<Session>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.send_modify(|running| *running -= 1);
    }
}
