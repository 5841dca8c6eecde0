//! Given tokens in a trajectory, each stretch stored once.
//!
//! Guarantees: below one place, two given segments never begin with one token, so that all prompts share what
//! they begin with, and a prompt that is given again is no new segment. Work grows with the tokens that are
//! given, never with what is there.

use std::collections::HashMap;

use levade_tree::{Segment, SegmentId, Trajectory, TreeError};

/// A place in a trajectory: after so many tokens of a segment, at least one, save where the segment has none.
pub(crate) type Place = (SegmentId, u32);

/// Whose tokens they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owner<'a> {
    /// A number for agent and policy: two of them share no root.
    pub party: u32,
    pub agent: &'a str,
    pub policy: &'a str,
}

/// The given segments of a trajectory, by where they begin.
#[derive(Debug, Default)]
pub(crate) struct Given {
    /// By the place above, or the party at a root, and the first token.
    below: HashMap<(Result<Place, u32>, u32), SegmentId>,
    /// Segments of one token, given again, of prompts that end within another segment; by that end.
    ends: HashMap<Place, SegmentId>,
}

impl Given {
    /// Gives `tokens` below a place. Returns the segment that they end with, if there is one.
    ///
    /// # Errors
    /// Errors are those of [`Trajectory::push`].
    pub(crate) fn give(
        &mut self,
        trajectory: &mut Trajectory,
        owner: Owner<'_>,
        place: Option<Place>,
        tokens: &[u32],
        turn: u32,
    ) -> Result<Option<SegmentId>, TreeError> {
        let (mut place, mut at) = (place, 0);
        while let Some(first) = tokens.get(at)
            && let Some(&next) = self.below.get(&(place.ok_or(owner.party), *first))
        {
            let same = shared(&trajectory.segments()[next.0 as usize].tokens, &tokens[at..]);
            place = Some((next, same as u32));
            at += same;
        }
        self.rest(trajectory, owner, place, &tokens[at..], turn)
    }

    /// Gives `tokens` in the place of the path to `leaf`, of which what both begin with is kept. Returns the
    /// segment that they end with, if there is one. Work grows with the length of the path.
    ///
    /// # Errors
    /// Errors are those of [`Trajectory::push`].
    pub(crate) fn branch(
        &mut self,
        trajectory: &mut Trajectory,
        owner: Owner<'_>,
        leaf: SegmentId,
        tokens: &[u32],
        turn: u32,
    ) -> Result<Option<SegmentId>, TreeError> {
        let (mut place, mut at) = (None, 0);
        for part in trajectory.path(leaf) {
            let same = shared(part.tokens(), &tokens[at..]);
            if same > 0 {
                place = Some((part.segment.id, same as u32));
                at += same;
            }
            if same < part.len {
                break;
            }
        }
        self.give(trajectory, owner, place, &tokens[at..], turn)
    }

    /// Gives what is not there yet.
    fn rest(
        &mut self,
        trajectory: &mut Trajectory,
        owner: Owner<'_>,
        place: Option<Place>,
        tokens: &[u32],
        turn: u32,
    ) -> Result<Option<SegmentId>, TreeError> {
        if !tokens.is_empty() {
            let given = Self::push(trajectory, owner, place, tokens.to_vec(), turn)?;
            self.below.insert((place.ok_or(owner.party), tokens[0]), given);
            return Ok(Some(given));
        }
        let Some((segment, after)) = place else { return Ok(None) };
        let Some(last) = Self::again(trajectory, place) else { return Ok(Some(segment)) };
        if let Some(&end) = self.ends.get(&(segment, after)) {
            return Ok(Some(end));
        }
        // A path ends with a segment, so the last token of one that ends within another is given once more.
        let above = match &trajectory.segments()[segment.0 as usize] {
            _ if after > 1 => Some((segment, after - 1)),
            Segment { parent: Some(parent), after, .. } => {
                let whole = trajectory.segments()[parent.0 as usize].tokens.len() as u32;
                Some((*parent, after.unwrap_or(whole)))
            }
            _ => None,
        };
        let end = Self::push(trajectory, owner, above, vec![last], turn)?;
        self.ends.insert((segment, after), end);
        Ok(Some(end))
    }

    /// The token before a place that lies within a segment.
    fn again(trajectory: &Trajectory, place: Option<Place>) -> Option<u32> {
        let (segment, after) = place?;
        let tokens = &trajectory.segments()[segment.0 as usize].tokens;
        ((after as usize) < tokens.len()).then(|| tokens[after as usize - 1])
    }

    fn push(
        trajectory: &mut Trajectory,
        owner: Owner<'_>,
        place: Option<Place>,
        tokens: Vec<u32>,
        turn: u32,
    ) -> Result<SegmentId, TreeError> {
        let whole = |segment: SegmentId| trajectory.segments()[segment.0 as usize].tokens.len() as u32;
        trajectory.push(Segment {
            after: place.filter(|&(segment, after)| after < whole(segment)).map(|(_, after)| after),
            agent: owner.agent.to_owned(),
            policy: owner.policy.to_owned(),
            ..Segment::given(place.map(|(segment, _)| segment), tokens, turn)
        })
    }
}

/// How many tokens two stretches begin with alike.
fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
#[path = "tokens_tests.rs"]
mod tests;
