//! Prompts as token ids, from clients that render conversations themselves.

use levade_policy::{Completion, SamplingParams};
use levade_tree::{SegmentId, TreeError};

use super::Conversation;
use crate::index::Party;
use crate::tokens::{Position, TokenOwner};

impl Conversation {
    /// Records a prompt of token ids, and the completion that was sampled for it. A prefix of the
    /// prompt that is already recorded, including sampled tokens, is not recorded again. The prompt
    /// continues the longest matching sequence of this agent and policy, or forks at the first
    /// different token. Work grows with the length of the prompt and the number of segments.
    ///
    /// # Errors
    /// Returns an error if the completion's numbers of tokens, log-probabilities and versions
    /// differ.
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
        let owner = TokenOwner { party, agent, policy };
        let (position, at) = self.longest_recorded_prefix(owner, prompt);
        let turn = self.turns;
        self.turns += 1;
        let end =
            self.context_tokens.add(&mut self.trajectory, owner, position, &prompt[at..], turn)?;
        let mut segment = completion.into_segment(end, params, turn);
        (segment.agent, segment.policy) = (agent.to_owned(), policy.to_owned());
        self.trajectory.push(segment)
    }

    /// Returns the end of the longest recorded sequence that `prompt` starts with, and its length
    /// in tokens.
    fn longest_recorded_prefix(
        &self,
        owner: TokenOwner<'_>,
        prompt: &[u32],
    ) -> (Option<Position>, usize) {
        let segments = self.trajectory.segments();
        // For each segment that the prompt reaches: the number of tokens above it, and the number
        // of its own tokens that the prompt repeats.
        let mut repeated: Vec<Option<(usize, usize)>> = Vec::with_capacity(segments.len());
        let mut best = None;
        let mut length = 0;
        for segment in segments {
            let above = match segment.parent {
                None => {
                    (segment.agent == owner.agent && segment.policy == owner.policy).then_some(0)
                }
                Some(parent) => repeated[parent.0 as usize].and_then(|(above, same)| {
                    let full_length = segments[parent.0 as usize].tokens.len();
                    let after = segment.after.map_or(full_length, |after| after as usize);
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

    fn completion(tokens: &[u32]) -> Completion {
        let mut completion = Completion::default();
        completion.extend(tokens, &vec![-0.5; tokens.len()], 0);
        completion
    }

    fn record(conversation: &mut Conversation, prompt: &[u32], tokens: &[u32]) -> SegmentId {
        let params = SamplingParams::default();
        conversation.record_ids(("a", "p"), prompt, completion(tokens), &params).unwrap()
    }

    #[test]
    fn prompt_with_recorded_completion_continues_its_tokens() {
        let mut conversation = Conversation::new();
        let first = record(&mut conversation, &[1, 2, 3], &[4, 5]);
        let second = record(&mut conversation, &[1, 2, 3, 4, 5, 6], &[7]);
        let trajectory = conversation.trajectory();
        assert_eq!(trajectory.sequence_tokens(second), [1, 2, 3, 4, 5, 6, 7]);
        let sampled = trajectory.segments().iter().filter(|segment| segment.kind == Kind::Sampled);
        assert_eq!(sampled.map(|segment| segment.id).collect::<Vec<_>>(), [first, second]);
        let stored: usize = trajectory.segments().iter().map(|segment| segment.tokens.len()).sum();
        assert_eq!(stored, 7);
    }

    #[test]
    fn prompt_forks_at_first_different_token() {
        let mut conversation = Conversation::new();
        record(&mut conversation, &[1, 2, 3], &[4, 5]);
        for (prompt, tokens, want) in [
            // Within a completion, within a prompt, directly after a prompt, and elsewhere.
            (&[1, 2, 3, 4, 9][..], &[8][..], &[1, 2, 3, 4, 9, 8][..]),
            (&[1, 2, 7], &[8], &[1, 2, 7, 8]),
            (&[1, 2, 3], &[6], &[1, 2, 3, 6]),
            (&[1, 2], &[6], &[1, 2, 6]),
            (&[1, 2, 3, 4], &[5, 6], &[1, 2, 3, 4, 5, 6]),
            (&[5], &[1], &[5, 1]),
        ] {
            let segment = record(&mut conversation, prompt, tokens);
            assert_eq!(conversation.trajectory().sequence_tokens(segment), want);
            let last = &conversation.trajectory().segments()[segment.0 as usize];
            assert_eq!((&last.tokens[..], last.kind), (tokens, Kind::Sampled));
        }
    }

    #[test]
    fn agents_do_not_share_tokens() {
        let mut conversation = Conversation::new();
        record(&mut conversation, &[1, 2], &[3]);
        let params = SamplingParams::default();
        let other =
            conversation.record_ids(("b", "p"), &[1, 2], completion(&[3]), &params).unwrap();
        let sequence = conversation.trajectory().sequence(other);
        assert!(sequence.iter().all(|part| part.segment.agent == "b"));
    }
}
