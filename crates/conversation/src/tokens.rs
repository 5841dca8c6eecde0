//! Context tokens in a trajectory, with each shared prefix stored once.
//!
//! # Guarantees
//! - **Shared prefixes.** Two context segments that start at the same position never start with the
//!   same token. All prompts therefore share the tokens that they start with, and a repeated prompt
//!   adds no segment.
//! - **Cost.** Work grows with the tokens of the prompt, not with the size of the trajectory.

use std::collections::HashMap;

use levade_tree::{Segment, SegmentId, Trajectory, TreeError};

/// A position in a trajectory: a segment, and the number of the segment's tokens before the
/// position. The number is at least 1 unless the segment is empty.
pub(crate) type Position = (SegmentId, u32);

/// Agent and policy to which tokens belong.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenOwner<'a> {
    /// Number of the pair of agent and policy. Different pairs share no root.
    pub party: u32,
    pub agent: &'a str,
    pub policy: &'a str,
}

/// Index of a trajectory's context segments by their start.
#[derive(Debug, Default)]
pub(crate) struct ContextTokens {
    /// Context segments, by the position that they follow (or the party at a root) and their first
    /// token.
    below: HashMap<(Result<Position, u32>, u32), SegmentId>,
    /// Segments of one token that repeat the last token of a prompt which ends within another
    /// segment, by the position of this end.
    ends: HashMap<Position, SegmentId>,
}

impl ContextTokens {
    /// Adds `tokens` as context after `position`. Returns the segment at whose end the added tokens
    /// end, or `None` if there are no tokens and no position.
    ///
    /// # Errors
    /// Returns the errors of [`Trajectory::push`].
    pub(crate) fn add(
        &mut self,
        trajectory: &mut Trajectory,
        owner: TokenOwner<'_>,
        position: Option<Position>,
        tokens: &[u32],
        turn: u32,
    ) -> Result<Option<SegmentId>, TreeError> {
        let mut position = position;
        let mut at = 0;
        while let Some(first) = tokens.get(at)
            && let Some(&next) = self.below.get(&(position.ok_or(owner.party), *first))
        {
            let same =
                common_prefix_length(&trajectory.segments()[next.0 as usize].tokens, &tokens[at..]);
            position = Some((next, same as u32));
            at += same;
        }
        self.add_rest(trajectory, owner, position, &tokens[at..], turn)
    }

    /// Adds `tokens` as a sequence from the root, which shares its common prefix with the sequence
    /// that ends at `leaf`. Returns the segment at whose end the added sequence ends, or `None` if
    /// it has no tokens. Work grows with the length of the sequence to `leaf`.
    ///
    /// # Errors
    /// Returns the errors of [`Trajectory::push`].
    pub(crate) fn branch(
        &mut self,
        trajectory: &mut Trajectory,
        owner: TokenOwner<'_>,
        leaf: SegmentId,
        tokens: &[u32],
        turn: u32,
    ) -> Result<Option<SegmentId>, TreeError> {
        let mut position = None;
        let mut at = 0;
        for part in trajectory.sequence(leaf) {
            let same = common_prefix_length(part.tokens(), &tokens[at..]);
            if same > 0 {
                position = Some((part.segment.id, same as u32));
                at += same;
            }
            if same < part.len {
                break;
            }
        }
        self.add(trajectory, owner, position, &tokens[at..], turn)
    }

    /// Adds the end of a sequence, whose tokens are not stored yet, after `position`. Returns the
    /// segment at whose end the sequence ends.
    fn add_rest(
        &mut self,
        trajectory: &mut Trajectory,
        owner: TokenOwner<'_>,
        position: Option<Position>,
        tokens: &[u32],
        turn: u32,
    ) -> Result<Option<SegmentId>, TreeError> {
        if !tokens.is_empty() {
            let context_segment = Self::push(trajectory, owner, position, tokens.to_vec(), turn)?;
            self.below.insert((position.ok_or(owner.party), tokens[0]), context_segment);
            return Ok(Some(context_segment));
        }
        let Some((segment, after)) = position else { return Ok(None) };
        let Some(last) = Self::token_before(trajectory, position) else { return Ok(Some(segment)) };
        if let Some(&end) = self.ends.get(&(segment, after)) {
            return Ok(Some(end));
        }
        // A sequence must end at the end of a segment. If the prompt ends within a segment, its
        // last token is repeated in a segment of its own.
        let above = match &trajectory.segments()[segment.0 as usize] {
            _ if after > 1 => Some((segment, after - 1)),
            Segment { parent: Some(parent), after, .. } => {
                let full_length = trajectory.segments()[parent.0 as usize].tokens.len() as u32;
                Some((*parent, after.unwrap_or(full_length)))
            }
            _ => None,
        };
        let end = Self::push(trajectory, owner, above, vec![last], turn)?;
        self.ends.insert((segment, after), end);
        Ok(Some(end))
    }

    /// Returns the token before `position` if `position` is within a segment, or `None` if it is at
    /// a segment's end.
    fn token_before(trajectory: &Trajectory, position: Option<Position>) -> Option<u32> {
        let (segment, after) = position?;
        let tokens = &trajectory.segments()[segment.0 as usize].tokens;
        ((after as usize) < tokens.len()).then(|| tokens[after as usize - 1])
    }

    fn push(
        trajectory: &mut Trajectory,
        owner: TokenOwner<'_>,
        position: Option<Position>,
        tokens: Vec<u32>,
        turn: u32,
    ) -> Result<SegmentId, TreeError> {
        trajectory.push(Segment {
            after: position
                .filter(|&(segment, after)| {
                    after < (trajectory.segments()[segment.0 as usize].tokens.len() as u32)
                })
                .map(|(_, after)| after),
            agent: owner.agent.to_owned(),
            policy: owner.policy.to_owned(),
            ..Segment::context(position.map(|(segment, _)| segment), tokens, turn)
        })
    }
}

fn common_prefix_length(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
#[path = "tokens_tests.rs"]
mod tests;
