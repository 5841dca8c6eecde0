//! Failed tries are repeated with another random stream.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use levade_agent::{AgentLoop, Attempt, AttemptContext};
use levade_store::testing::wait;
use levade_store::{Sqlite, Status, Store};
use levade_trainer::{RunEnd, StartMode, StopFlag, Trainer};
use levade_tree::{Finish, Kind, Outcome, Purpose, Segment, SegmentId, Trajectory, VersionRun};

use crate::common::{parts, recipe, simulator};

/// An agent loop that fails at the first try, samples nothing at the second, and completes the
/// third.
#[derive(Default)]
struct Third {
    /// Random streams of the tries, by attempt slot.
    streams: Mutex<BTreeMap<String, Vec<u64>>>,
}

#[async_trait]
impl AgentLoop for Third {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let slot_name = context.name.split(", try").next().unwrap().to_owned();
        let tries = {
            let mut streams = self.streams.lock().unwrap();
            let of_slot = streams.entry(slot_name).or_default();
            of_slot.push(context.stream);
            of_slot.len()
        };
        let mut trajectory = Trajectory::new();
        trajectory.push(Segment::context(None, vec![1, 2], 0)).unwrap();
        match tries {
            1 => Attempt::failed("tool", "it is away"),
            2 => {
                Attempt::new(trajectory, Outcome { finish: Finish::Deadline, ..Outcome::initial() })
            }
            _ => completed(),
        }
    }
}

/// Returns a completed attempt with one sampled token.
fn completed() -> Attempt {
    let mut trajectory = Trajectory::new();
    trajectory.push(Segment::context(None, vec![1, 2], 0)).unwrap();
    let completion = Segment {
        kind: Kind::Sampled,
        logprobs: vec![-1.0],
        versions: vec![VersionRun { version: 0, len: 1 }],
        ..Segment::context(Some(SegmentId(0)), vec![3], 0)
    };
    trajectory.push(completion).unwrap();
    let outcome = Outcome { turns: 1, sampled_tokens: 1, ..Outcome::demonstrated("3") };
    Attempt::new(trajectory, outcome)
}

/// An agent loop whose first `losses` tries of each slot are lost.
struct Losing {
    losses: usize,
    /// Random streams of the tries, by attempt slot.
    streams: Mutex<BTreeMap<String, Vec<u64>>>,
}

#[async_trait]
impl AgentLoop for Losing {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let slot_name = context.name.split(", try").next().unwrap().to_owned();
        let mut streams = self.streams.lock().unwrap();
        let of_slot = streams.entry(slot_name).or_default();
        of_slot.push(context.stream);
        let made = completed();
        if of_slot.len() > self.losses {
            made
        } else {
            Attempt::lost(made.trajectory, "the lease has expired")
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_tries_are_abandoned_and_repeat_their_stream() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("run");
    let mut parts = parts(&simulator(Duration::ZERO, 0.0), Duration::ZERO);
    let agent = Arc::new(Losing { losses: 3, streams: Mutex::default() });
    parts.agents[0].custom = Some(agent.clone());
    let phase = "phase=[{kind=\"rl\", steps=1, groups=1, group_size=2, learning_rate=0.1}]";
    // A lost try does not count as failed, so that no retry is needed.
    let overrides = ["agent.retries=0", phase, "eval.tasks=0", "eval.unseen_wordings=0"];
    let mut trainer =
        Trainer::new(recipe(&dir, &overrides), parts, StartMode::Fresh).await.unwrap();
    let ended = trainer.run(&mut (), &StopFlag::default()).await.unwrap();
    assert!(matches!(ended, RunEnd::Finished(_)), "{ended:?}");
    drop(trainer);
    for (slot_name, tries) in agent.streams.lock().unwrap().iter() {
        assert_eq!(tries[..], [tries[0]; 4], "{slot_name}");
    }
    let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
    let summaries = wait(store.summaries(Purpose::Train)).unwrap();
    let failures = wait(store.failures(Purpose::Train)).unwrap();
    let mut numbers = HashMap::<Status, Vec<u32>>::new();
    let counted = summaries.iter().map(|summary| summary.id);
    for id in counted.chain(failures.iter().map(|failure| failure.id)) {
        let attempt = wait(store.attempt(&id)).unwrap().unwrap();
        assert_eq!(attempt.trajectory.sampled_tokens(), 1, "lost tokens are recorded");
        numbers.entry(attempt.status).or_default().push(attempt.number);
    }
    numbers.values_mut().for_each(|numbers| numbers.sort_unstable());
    assert_eq!(numbers[&Status::Abandoned], [0, 0, 1, 1, 2, 2]);
    assert_eq!(numbers[&Status::Completed], [3, 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_sample_from_separate_streams() {
    let root = tempfile::tempdir().unwrap();
    for (retries, want) in [(1, 2), (2, 3)] {
        let dir = root.path().join(format!("run-{retries}"));
        let mut parts = parts(&simulator(Duration::ZERO, 0.0), Duration::ZERO);
        let agent = Arc::new(Third::default());
        parts.agents[0].custom = Some(agent.clone());
        let retries = format!("agent.retries={retries}");
        let phase = "phase=[{kind=\"rl\", steps=1, groups=1, group_size=2, learning_rate=0.1}]";
        let overrides = [&retries, phase, "eval.tasks=0", "eval.unseen_wordings=0"];
        let mut trainer =
            Trainer::new(recipe(&dir, &overrides), parts, StartMode::Fresh).await.unwrap();
        let ended = trainer.run(&mut (), &StopFlag::default()).await.unwrap();
        assert!(matches!(ended, RunEnd::Finished(_)), "{ended:?}");
        drop(trainer);
        let streams = agent.streams.lock().unwrap();
        assert_eq!(streams.len(), 2);
        for (slot_name, tries) in streams.iter() {
            assert_eq!(tries.len(), want, "{slot_name}");
            let different: std::collections::BTreeSet<&u64> = tries.iter().collect();
            assert_eq!(different.len(), want, "{slot_name}: {tries:?}");
        }
        let store = wait(Sqlite::open_existing(&dir.join("run.db"))).unwrap();
        for summary in wait(store.summaries(Purpose::Train)).unwrap() {
            let attempt = wait(store.attempt(&summary.id)).unwrap().unwrap();
            if attempt.status != Status::Completed {
                continue;
            }
            assert_eq!(attempt.outcome.sampled_tokens, usize::from(want == 3));
        }
    }
}
