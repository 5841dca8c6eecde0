//! Copies attempts as demonstrations. Sampled completions become targets of imitation, and another
//! system prompt can replace the system prompt that the model saw.
//!
//! A copy is an attempt of its own in the record: the same try, in step 1 of the demonstrations.
//! The original is in step 0, as it was sampled.

use std::collections::BTreeSet;

use levade_store::{Attempt, Store, StoreError};
use levade_tasks::Task;
use levade_tree::{AttemptId, AttemptSlot, Kind, Purpose, RunId, Segment, Trajectory};

use crate::TrainerError;
use crate::agents::Agents;

/// Returns whether the opening of an attempt (the context tokens before the first completion) can
/// be replaced. The attempt must be a single conversation that is never rebuilt, and no branch may
/// start within the opening.
pub(super) fn has_replaceable_opening(trajectory: &Trajectory) -> bool {
    let mut roots = trajectory.segments().iter().filter(|segment| segment.parent.is_none());
    let Some(root) = roots.next().filter(|root| root.kind == Kind::Context) else { return false };
    let branches = |segment: &Segment| segment.parent == Some(root.id) && segment.after.is_some();
    roots.next().is_none() && !trajectory.segments().iter().any(branches)
}

/// Copies attempts as demonstrations. If `agents` is set, the opening of each copy is replaced by
/// the opening that these agents, with their system prompts, would have.
///
/// # Errors
/// Returns an error if an opening cannot be rendered.
pub(super) fn copy_as_demonstrations(
    attempts: Vec<(Attempt, Task)>,
    run: &RunId,
    agents: Option<&Agents>,
) -> Result<Vec<Attempt>, TrainerError> {
    let copy = |(attempt, task): (Attempt, Task)| {
        let slot = AttemptSlot { step: 1, ..attempt.slot };
        let opening = agents.map(|agents| render_opening(&task, agents)).transpose()?;
        let trajectory = to_demonstrated(&attempt.trajectory, opening);
        Ok(Attempt { id: AttemptId::new(run, &slot, attempt.number), slot, trajectory, ..attempt })
    };
    attempts.into_iter().map(copy).collect()
}

/// Returns the recorded attempts among `ids`, together with the other recorded attempts that
/// contain the same tokens: the copy of an original, and the original of a copy.
///
/// # Errors
/// Returns an error if the store cannot be read.
pub async fn with_copies(
    store: &dyn Store,
    ids: &BTreeSet<AttemptId>,
) -> Result<BTreeSet<AttemptId>, StoreError> {
    let mut found = BTreeSet::new();
    for id in ids {
        let Some(Attempt { slot, number, .. }) = store.attempt(id).await? else { continue };
        found.insert(*id);
        if slot.purpose == Purpose::Demonstration {
            let other = AttemptSlot { step: u32::from(slot.step == 0), ..slot };
            let other = AttemptId::new(store.run(), &other, number);
            found.extend(store.attempt(&other).await?.map(|attempt| attempt.id));
        }
    }
    Ok(found)
}

/// Renders the tokens with which an attempt of the task's agent starts.
fn render_opening(task: &Task, agents: &Agents) -> Result<Vec<u32>, TrainerError> {
    let named = agents.agent_for(task)?;
    let messages = named.keys.initial_messages(task);
    let rendered = named.format.chat().prompt(&messages, &named.agent.tools.specs(task));
    rendered.map_err(|source| TrainerError::Demonstration {
        task: task.id.clone(),
        source: source.into(),
    })
}

/// Returns a copy of a trajectory in which the sampled completions are demonstrated completions. If
/// `opening` is set, it replaces the first tokens of the conversation.
fn to_demonstrated(trajectory: &Trajectory, mut opening: Option<Vec<u32>>) -> Trajectory {
    let mut copy = Trajectory::new();
    for segment in trajectory.segments() {
        let mut segment = segment.clone();
        if segment.parent.is_none()
            && let Some(opening) = opening.take()
        {
            segment.tokens = opening;
        }
        if segment.kind == Kind::Sampled {
            let Segment { parent, after, agent, policy, turn, .. } = segment;
            let demonstrated = Segment::demonstrated(parent, segment.tokens, turn);
            segment = Segment { after, agent, policy, ..demonstrated };
        }
        // Segments refer to token positions in earlier segments. The copy of an earlier segment has
        // the same number of tokens, except a replaced opening, within which no branch starts.
        copy.push(segment).expect("a copied segment has the parent of its original");
    }
    copy
}

#[cfg(test)]
mod tests {
    use levade_tree::VersionRun;

    use super::*;

    /// Returns an opening, a sampled completion, and a further context.
    fn conversation_trajectory() -> Trajectory {
        let mut tree = Trajectory::new();
        let root = tree.push(Segment::context(None, vec![1, 2, 3], 0)).unwrap();
        let sampled = Segment {
            kind: Kind::Sampled,
            logprobs: vec![-0.5, -0.25],
            temperature: 0.7,
            filtered: true,
            versions: vec![VersionRun { version: 4, len: 2 }],
            agent: "writer".into(),
            policy: "small".into(),
            ..Segment::context(Some(root), vec![7, 8], 0)
        };
        let sampled = tree.push(sampled).unwrap();
        tree.push(Segment::context(Some(sampled), vec![9], 1)).unwrap();
        tree
    }

    #[test]
    fn imitated_trajectory_has_new_opening_and_demonstrated_completions() {
        let copy = to_demonstrated(&conversation_trajectory(), Some(vec![5]));
        let parts: Vec<_> =
            copy.segments().iter().map(|part| (part.kind, part.tokens.as_slice())).collect();
        let expected: [(Kind, &[u32]); 3] =
            [(Kind::Context, &[5]), (Kind::Demonstrated, &[7, 8]), (Kind::Context, &[9])];
        assert_eq!(parts, expected);
        let completion = &copy.segments()[1];
        assert_eq!((&*completion.agent, &*completion.policy), ("writer", "small"));
        assert!(completion.logprobs.is_empty() && completion.versions.is_empty());
        assert!(!completion.filtered && completion.temperature == 1.0);
        assert_eq!(
            to_demonstrated(&conversation_trajectory(), None).segments()[0].tokens,
            [1, 2, 3]
        );
    }

    #[test]
    fn opening_of_rebuilt_or_branched_conversation_is_not_replaced() {
        assert!(has_replaceable_opening(&conversation_trajectory()));
        let mut rebuilt = conversation_trajectory();
        rebuilt.push(Segment::context(None, vec![1], 1)).unwrap();
        assert!(!has_replaceable_opening(&rebuilt));
        let mut branched = conversation_trajectory();
        let root = branched.segments()[0].id;
        let branch = Segment { after: Some(2), ..Segment::context(Some(root), vec![4], 1) };
        branched.push(branch).unwrap();
        assert!(!has_replaceable_opening(&branched));
        assert!(!has_replaceable_opening(&Trajectory::new()));
    }
}
