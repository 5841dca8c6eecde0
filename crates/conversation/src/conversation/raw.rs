//! Prompts in token ids, of clients that write conversations down themselves.

use levade_policy::{Completion, SamplingParams};
use levade_tree::{SegmentId, TreeError};

use super::Conversation;
use crate::index::Party;
use crate::tokens::{Owner, Place};

impl Conversation {
    /// Records a prompt of ids, and the reply that was sampled for it. As much of the prompt as is recorded
    /// already, sampled tokens included, is not recorded again: the longest path of this agent and policy
    /// that it begins with goes on, or forks where the two part. Work grows with the length of the prompt and
    /// the number of segments.
    ///
    /// # Errors
    /// When the numbers of tokens, log-probabilities and versions of the reply differ.
    pub fn record_ids(
        &mut self,
        (agent, policy): (&str, &str),
        prompt: &[u32],
        completion: Completion,
        params: &SamplingParams,
    ) -> Result<SegmentId, TreeError> {
        self.check(&completion)?;
        let count = self.parties.len() as Party;
        let party = *self.parties.entry((agent.to_owned(), policy.to_owned())).or_insert(count);
        let owner = Owner { party, agent, policy };
        let (place, at) = self.longest(owner, prompt);
        let turn = self.turns;
        self.turns += 1;
        let end = self.given.give(&mut self.trajectory, owner, place, &prompt[at..], turn)?;
        let mut segment = completion.into_segment(end, params, turn);
        (segment.agent, segment.policy) = (agent.to_owned(), policy.to_owned());
        self.trajectory.push(segment)
    }

    /// The longest path that `prompt` begins with, and its length.
    fn longest(&self, owner: Owner<'_>, prompt: &[u32]) -> (Option<Place>, usize) {
        let segments = self.trajectory.segments();
        // For each segment that the prompt reaches: how many tokens lie above it, and how many of its own the
        // prompt repeats.
        let mut repeated: Vec<Option<(usize, usize)>> = Vec::with_capacity(segments.len());
        let (mut best, mut length) = (None, 0);
        for segment in segments {
            let above = match segment.parent {
                None => (segment.agent == owner.agent && segment.policy == owner.policy).then_some(0),
                Some(parent) => repeated[parent.0 as usize].and_then(|(above, same)| {
                    let whole = segments[parent.0 as usize].tokens.len();
                    let after = segment.after.map_or(whole, |after| after as usize);
                    (same >= after).then_some(above + after)
                }),
            };
            let found = above.map(|above| {
                let rest = segment.tokens.iter().zip(&prompt[above..]);
                (above, rest.take_while(|(a, b)| a == b).count())
            });
            if let Some((above, same)) = found
                && above + same > length
            {
                (best, length) = (Some((segment.id, same as u32)), above + same);
            }
            repeated.push(found);
        }
        (best, length)
    }
}

#[cfg(test)]
mod tests {
    use levade_tree::Kind;

    use super::*;

    fn reply(tokens: &[u32]) -> Completion {
        let mut completion = Completion::default();
        completion.extend(tokens, &vec![-0.5; tokens.len()], 0);
        completion
    }

    fn record(conversation: &mut Conversation, prompt: &[u32], tokens: &[u32]) -> SegmentId {
        let params = SamplingParams::default();
        conversation.record_ids(("a", "p"), prompt, reply(tokens), &params).unwrap()
    }

    #[test]
    fn a_prompt_that_repeats_a_reply_continues_its_very_tokens() {
        let mut conversation = Conversation::new();
        let first = record(&mut conversation, &[1, 2, 3], &[4, 5]);
        let second = record(&mut conversation, &[1, 2, 3, 4, 5, 6], &[7]);
        let trajectory = conversation.trajectory();
        assert_eq!(trajectory.path_tokens(second), [1, 2, 3, 4, 5, 6, 7]);
        let sampled = trajectory.segments().iter().filter(|segment| segment.kind == Kind::Sampled);
        assert_eq!(sampled.map(|segment| segment.id).collect::<Vec<_>>(), [first, second]);
        let stored: usize = trajectory.segments().iter().map(|segment| segment.tokens.len()).sum();
        assert_eq!(stored, 7);
    }

    #[test]
    fn a_prompt_that_leaves_a_path_forks_where_they_part() {
        let mut conversation = Conversation::new();
        record(&mut conversation, &[1, 2, 3], &[4, 5]);
        for (prompt, tokens, want) in [
            // In the middle of a reply, in the middle of a prompt, right after a prompt, elsewhere.
            (&[1, 2, 3, 4, 9][..], &[8][..], &[1, 2, 3, 4, 9, 8][..]),
            (&[1, 2, 7], &[8], &[1, 2, 7, 8]),
            (&[1, 2, 3], &[6], &[1, 2, 3, 6]),
            (&[1, 2], &[6], &[1, 2, 6]),
            (&[1, 2, 3, 4], &[5, 6], &[1, 2, 3, 4, 5, 6]),
            (&[5], &[1], &[5, 1]),
        ] {
            let segment = record(&mut conversation, prompt, tokens);
            assert_eq!(conversation.trajectory().path_tokens(segment), want);
            let last = &conversation.trajectory().segments()[segment.0 as usize];
            assert_eq!((&last.tokens[..], last.kind), (tokens, Kind::Sampled));
        }
    }

    #[test]
    fn agents_share_no_tokens() {
        let mut conversation = Conversation::new();
        record(&mut conversation, &[1, 2], &[3]);
        let params = SamplingParams::default();
        let other = conversation.record_ids(("b", "p"), &[1, 2], reply(&[3]), &params).unwrap();
        let path = conversation.trajectory().path(other);
        assert!(path.iter().all(|part| part.segment.agent == "b"));
    }
}
