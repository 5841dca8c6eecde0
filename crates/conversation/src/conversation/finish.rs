//! End of a conversation: finds drift that shows only if the template renders complete sequences.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use levade_tree::Trajectory;

use super::Conversation;
use crate::drift::Drift;
use crate::format::History;
use crate::index::{Index, NodeId};

/// Drift of the complete prompts that were rendered, by the prompt's node. `None` means no drift.
type KnownDrift = HashMap<NodeId, Option<Drift>>;

impl Conversation {
    /// Renders complete sequences once more at the end of a conversation, to find drift that was
    /// not near the newest completion. If there is any, turns are counted exactly, from the first
    /// turn whose complete prompt drifts. Takes as long as the template needs for a few complete
    /// conversations. The work for forks is limited to a few times the work for the longest
    /// sequence; the longest forks are checked first.
    pub fn finish(&mut self) -> Vec<levade_tree::Drift> {
        let ends = last_prompts(&self.index);
        let depths = ends.iter().map(|&id| self.index.node(id).depth);
        let count = affordable_count(depths, self.index.nodes().count());
        let mut known = KnownDrift::new();
        for &end in &ends[..count] {
            self.count_exact_drift(end, &mut known);
        }
        self.drift()
    }

    /// Records the exact turns at which one sequence has drifted, found by rendering complete
    /// prompts.
    fn count_exact_drift(&mut self, end: NodeId, known: &mut KnownDrift) {
        let index = &self.index;
        let trajectory = &self.trajectory;
        let format = &index.roots[index.node(end).root].format;
        if format.options().history == History::Template || !format.can_abridge() {
            // Every turn has rendered the complete conversation already.
            return;
        }
        // The first prompt of a sequence continues no completion, so it is exactly what the
        // template renders.
        let requested = |id: NodeId| index.node(id).prompt.as_ref();
        let mut prompts: Vec<NodeId> =
            index.ancestors(end).filter(|&id| requested(id).is_some()).collect();
        prompts.reverse();
        if prompts.iter().any(|&id| requested(id).is_some_and(|requested| requested.is_truncated)) {
            return;
        }
        let seen = prompts
            .iter()
            .position(|&id| requested(id).is_some_and(|requested| requested.drift.is_some()));
        let mut drifts = |id: NodeId| {
            known.entry(id).or_insert_with(|| full_drift(index, trajectory, id)).is_some()
        };
        // All prompts from `first` on have drifted. Drift persists, so rendering the last prompt is
        // sufficient.
        let mut first = seen.filter(|&seen| drifts(prompts[seen])).unwrap_or(prompts.len());
        if first > 1 && drifts(prompts[first - 1]) {
            first = prompts[..first].partition_point(|&id| !drifts(id));
        }
        let mut last: Option<Drift> = None;
        for (at, &id) in prompts.iter().enumerate() {
            let Some(requested) = self.index.node_mut(id).prompt.as_mut() else { continue };
            if at < first {
                requested.drift = None;
                continue;
            }
            last = known.get(&id).cloned().flatten().or(last);
            if requested.drift.is_none() {
                requested.drift = last.as_ref().map(|drift| drift.to_record(requested.turn, false));
            }
        }
    }
}

/// Returns the node of the last prompt of each sequence. The longest sequences are first, and among
/// equally long sequences the latest.
fn last_prompts(index: &Index) -> Vec<NodeId> {
    let mut above: BTreeSet<NodeId> = BTreeSet::new();
    let mut ends = Vec::new();
    // Nodes come after their parents, so all nodes below a node are visited before it.
    for (id, node) in index.nodes().rev() {
        let is_above = above.contains(&id);
        if node.prompt.is_some() && !is_above {
            ends.push(id);
        }
        if node.prompt.is_some() || is_above {
            above.extend(node.parent);
        }
    }
    ends.sort_by_key(|&id| Reverse(index.node(id).depth));
    ends
}

/// Returns the number of sequences that are checked for drift. `depths` has the number of messages
/// of each sequence, in descending order; `messages` is the number of all messages. The cost of a
/// check is proportional to the length. The budget is four times the cost of the longest sequence
/// plus the cost of all messages, so that forks with little in common are all checked.
fn affordable_count(depths: impl Iterator<Item = usize>, messages: usize) -> usize {
    const BUDGET_FACTOR: usize = 4;
    let mut depths = depths.peekable();
    let budget = BUDGET_FACTOR * depths.peek().copied().unwrap_or(0) + messages;
    let spent = depths.scan(0, |spent, depth| {
        *spent += depth;
        Some(*spent)
    });
    spent.take_while(|&spent| spent <= budget).count()
}

/// Renders the complete conversation up to a prompt, and returns its drift, or `None` if there is
/// none.
fn full_drift(index: &Index, trajectory: &Trajectory, node: NodeId) -> Option<Drift> {
    let root = &index.roots[index.node(node).root];
    let end = index.node(node).prompt.as_ref()?.end?;
    let messages = crate::format::to_messages(&index.messages(node));
    let drift =
        Drift::find(root.format.chat(), &trajectory.sequence_tokens(end), &messages, &root.tools);
    drift.map(|drift| Drift { prompt: None, ..drift })
}

#[cfg(test)]
#[path = "finish_tests.rs"]
mod tests;
