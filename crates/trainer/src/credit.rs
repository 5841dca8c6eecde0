//! Assigns each part of a reward to the token that earned it, and decides which attempts are
//! compared.
//!
//! # Credit
//! A part of a reward can be earned before the end of the attempt. It is assigned to the last
//! sampled token before the point at which it was earned:
//! - Earned by a turn, such as a call that could not be parsed: the last token of the turn's
//!   action.
//! - Earned by an observation after a turn: the last token of the action before the observation.
//! - Earned by an agent: the last token of the agent's part of a sequence.
//!
//! The remaining reward, and a part without an action before it, is assigned to the end of every
//! sequence.
//!
//! # Samples
//! If agents are compared within their role, each agent's part of an attempt is a separate sample.
//! Parts of agents that another policy plays, or that are not trained, belong to no sample. An
//! attempt is not a sample of a policy if the policy did not act in it, and another policy acted or
//! was selected for an agent.

use levade_recipe::GroupBy;
use levade_rl::Rollout;
use levade_store::{CreditTarget, StepReward};
use levade_tree::{Kind, Segment, SegmentId, Trajectory, is_seat};

use crate::batch::TrainedSequence;
use crate::signals::SequenceSignals;

/// Position of a trained token: the index of its sequence in the attempt, and the token's index
/// among the trained tokens of that sequence.
type SequencePosition = (usize, usize);

/// The reward of an attempt, divided into the final reward and the rewards that single tokens,
/// seats or agents earned earlier.
pub(crate) struct CreditedReward {
    /// Part of the reward that is earned at the end of the attempt.
    outcome: f64,
    /// Part of `outcome` that is the score of the final answer.
    answer_score: f64,
    /// Rewards that are earned before the end, each with the positions of the tokens to which it is
    /// credited.
    parts: Vec<(f64, Vec<SequencePosition>)>,
    /// Rewards that cannot be credited to a trained token: rewards of seats and, if agents are
    /// compared within their role, of agents without trained tokens.
    unplaced: Vec<(f64, CreditTarget)>,
}

/// One sample for an advantage estimator: a complete attempt, or one agent's part of an attempt.
pub(crate) struct EstimatorSample {
    /// Name of the sample's agent if agents are compared within their role, otherwise `None`.
    pub agent: Option<String>,
    /// Total reward of the sample, including rewards that its tokens earned before the end.
    score: f64,
    /// Indices of the sample's tokens in each of its sequences, with the index of the sequence.
    pub tokens: Vec<(usize, Vec<usize>)>,
}

/// Returns every trained segment with the position of its last token, its turn and its agent.
fn trained_segments(
    sequences: &[TrainedSequence],
) -> impl Iterator<Item = (SegmentId, SequencePosition, u32, &str)> {
    sequences.iter().enumerate().flat_map(|(sequence, trained)| {
        let mut end = 0;
        let mut ends = Vec::new();
        for action in &trained.turns {
            for (segment, tokens) in &action.segments {
                end += tokens;
                ends.push((*segment, (sequence, end - 1), action.turn, action.agent.as_str()));
            }
        }
        ends
    })
}

/// Returns the tokens to which the reward of the credit target `by` is assigned. Returns no tokens
/// if no trained token belongs to the target.
fn credited_positions(
    trajectory: &Trajectory,
    sequences: &[TrainedSequence],
    by: &CreditTarget,
) -> Vec<SequencePosition> {
    match by {
        CreditTarget::Segment(id) => {
            let end_of = |id| {
                trained_segments(sequences)
                    .find(|(segment, ..)| *segment == id)
                    .map(|(_, position, ..)| position)
            };
            let last =
                trajectory.sequence(*id).into_iter().rev().find_map(|part| end_of(part.segment.id));
            last.into_iter().collect()
        }
        CreditTarget::Turn(turn) => {
            let turn_segments = trained_segments(sequences).filter(|(_, _, t, _)| t == turn);
            turn_segments
                .max_by_key(|(segment, ..)| *segment)
                .map(|(_, position, ..)| position)
                .into_iter()
                .collect()
        }
        CreditTarget::Agent(name) => {
            let agent_positions: Vec<SequencePosition> = trained_segments(sequences)
                .filter(|(.., agent)| agent == name)
                .map(|(_, position, ..)| position)
                .collect();
            let last_of =
                |sequence| agent_positions.iter().rev().find(|(p, _)| *p == sequence).copied();
            (0..sequences.len()).filter_map(last_of).collect()
        }
    }
}

/// Returns whether the part of the attempt to which `by` refers contains a completion of an agent
/// for whose name `accepts` returns true.
fn is_reward_of(
    trajectory: &Trajectory,
    by: &CreditTarget,
    accepts: impl Fn(&str) -> bool,
) -> bool {
    let acts = |segment: &Segment| segment.kind != Kind::Context && accepts(&segment.agent);
    match by {
        CreditTarget::Agent(name) => {
            trajectory.segments().iter().any(|segment| segment.agent == *name && acts(segment))
        }
        CreditTarget::Turn(turn) => {
            trajectory.segments().iter().any(|segment| segment.turn == *turn && acts(segment))
        }
        CreditTarget::Segment(id) => {
            trajectory.sequence(*id).iter().any(|part| part.segment.id == *id && acts(part.segment))
        }
    }
}

/// Returns whether the credit target `by` is a seat of a game, or a part of the attempt in which a
/// seat acted. A seat can earn a reward without having acted.
fn is_of_seat(trajectory: &Trajectory, by: &CreditTarget) -> bool {
    matches!(by, CreditTarget::Agent(name) if is_seat(name))
        || is_reward_of(trajectory, by, is_seat)
}

/// Returns whether the credit target `by` belongs to an agent that acted but has no trained token
/// in `sequences`.
fn is_of_untrained_agent(
    trajectory: &Trajectory,
    sequences: &[TrainedSequence],
    by: &CreditTarget,
) -> bool {
    let is_trained = |name: &str| trained_segments(sequences).any(|(.., agent)| agent == name);
    is_reward_of(trajectory, by, |name| !is_trained(name))
}

impl CreditedReward {
    /// Divides the total `reward` of an attempt. `answer_score` is the part for the final answer.
    /// `group_by` determines whether agents share the rewards of agents that are not trained here.
    pub fn new(
        trajectory: &Trajectory,
        sequences: &[TrainedSequence],
        (reward, answer_score): (f64, f64),
        step_rewards: &[StepReward],
        group_by: GroupBy,
    ) -> Self {
        let (parts, unplaced) = Default::default();
        let mut credited = CreditedReward { outcome: reward, answer_score, parts, unplaced };
        for StepReward { credit_target: by, reward } in step_rewards {
            let positions = credited_positions(trajectory, sequences, by);
            if !positions.is_empty() {
                credited.outcome -= reward;
                credited.parts.push((*reward, positions));
            } else if is_of_seat(trajectory, by)
                || group_by == GroupBy::Agent && is_of_untrained_agent(trajectory, sequences, by)
            {
                // No other seat or agent earned the reward of one whose tokens are not trained
                // here.
                credited.outcome -= reward;
                credited.unplaced.push((*reward, by.clone()));
            }
        }
        credited
    }

    /// Returns the advantage estimator's samples of an attempt. `agents` are the agents that act in
    /// the attempts of the group.
    ///
    /// An attempt without trained tokens becomes a sample of each of `agents`, because the agent
    /// that would have acted next is unknown. A seat among `agents` that did not act is always a
    /// sample.
    pub fn samples(
        &self,
        sequences: &[TrainedSequence],
        by: GroupBy,
        agents: &[String],
    ) -> Vec<EstimatorSample> {
        if by != GroupBy::Agent {
            let tokens = sequences
                .iter()
                .enumerate()
                .map(|(i, sequence)| (i, (0..sequence.num_tokens()).collect()));
            let score = self.parts.iter().fold(self.outcome, |sum, (reward, _)| sum + reward);
            return vec![EstimatorSample { agent: None, score, tokens: tokens.collect() }];
        }
        if sequences.is_empty() {
            return agents.iter().map(|agent| self.sample_without_tokens(agent)).collect();
        }
        let mut samples: Vec<EstimatorSample> = Vec::new();
        for (sequence, trained) in sequences.iter().enumerate() {
            let mut start = 0;
            for action in &trained.turns {
                let tokens = start..start + action.num_tokens();
                start = tokens.end;
                let index = samples.iter().position(|s| s.agent.as_ref() == Some(&action.agent));
                let sample = match index {
                    Some(index) => &mut samples[index],
                    None => {
                        let agent = Some(action.agent.clone());
                        samples.push(EstimatorSample {
                            agent,
                            score: self.outcome,
                            tokens: Vec::new(),
                        });
                        let last = samples.len() - 1;
                        &mut samples[last]
                    }
                };
                match sample.tokens.last_mut() {
                    Some((last, sequence_tokens)) if *last == sequence => {
                        sequence_tokens.extend(tokens)
                    }
                    _ => sample.tokens.push((sequence, tokens.collect())),
                }
            }
        }
        for sample in &mut samples {
            let reaches = |index: &SequencePosition| {
                sample
                    .tokens
                    .iter()
                    .any(|(sequence, tokens)| *sequence == index.0 && tokens.contains(&index.1))
            };
            let own_parts: Vec<f64> = self
                .parts
                .iter()
                .filter(|(_, to)| to.iter().any(reaches))
                .map(|(r, _)| *r)
                .collect();
            sample.score += own_parts.into_iter().sum::<f64>();
        }
        // A seat that could not act, for example because its player died first, still counts in the
        // mean of its group.
        let silent = |agent: &&String| {
            is_seat(agent) && samples.iter().all(|sample| sample.agent.as_ref() != Some(*agent))
        };
        let silent: Vec<EstimatorSample> =
            agents.iter().filter(silent).map(|agent| self.sample_without_tokens(agent)).collect();
        samples.extend(silent);
        samples
    }

    /// Creates the sample of an agent that did not act, from the final reward and the agent's own
    /// earlier rewards.
    fn sample_without_tokens(&self, agent: &str) -> EstimatorSample {
        let is_own = |by: &CreditTarget| matches!(by, CreditTarget::Agent(name) if name == agent);
        let own = self.unplaced.iter().filter(|(_, by)| is_own(by)).map(|(reward, _)| *reward);
        let score = self.outcome + own.sum::<f64>();
        EstimatorSample { agent: Some(agent.to_owned()), score, tokens: Vec::new() }
    }

    /// Converts a sample into the input of the advantage estimators. `extra_rewards` contains
    /// further rewards of each sequence's tokens, which also add to the score. `signals` contains
    /// the values that models computed for each sequence. `masked` returns whether the tokens of an
    /// agent are left out of training.
    pub fn to_rollout(
        &self,
        sample: &EstimatorSample,
        group: u64,
        sequences: &[TrainedSequence],
        extra_rewards: &[Vec<f64>],
        signals: &[SequenceSignals],
        masked: impl Fn(&str) -> bool,
    ) -> Rollout {
        let sequence = |(sequence, tokens): &(usize, Vec<usize>)| {
            let (sequence, extra_rewards, signals) =
                (*sequence, &extra_rewards[*sequence], &signals[*sequence]);
            let at = |token: usize| {
                let step_rewards =
                    self.parts.iter().filter(|(_, to)| to.contains(&(sequence, token)));
                step_rewards
                    .fold(extra_rewards.get(token).copied().unwrap_or(0.0), |sum, (reward, _)| {
                        sum + reward
                    })
            };
            let mut rewards: Vec<f64> = tokens.iter().map(|token| at(*token)).collect();
            if let Some(last) = rewards.last_mut() {
                *last += self.outcome;
            }
            let actions = sequences[sequence].turns.iter();
            let own_actions = || {
                actions
                    .clone()
                    .filter(|a| sample.agent.as_ref().is_none_or(|agent| *agent == a.agent))
            };
            let masked = own_actions()
                .flat_map(|action| std::iter::repeat_n(masked(&action.agent), action.num_tokens()));
            let select = |numbers: &[f32]| match numbers {
                [] => Vec::new(),
                _ => tokens.iter().map(|token| f64::from(numbers[*token])).collect(),
            };
            // The last token of a truncated sequence is the truncated one.
            let is_last =
                tokens.last().is_some_and(|token| token + 1 == sequences[sequence].num_tokens());
            levade_rl::Sequence {
                turns_before: sequences[sequence].turns_before,
                turns: own_actions().map(|action| action.num_tokens()).collect(),
                masked: masked.collect(),
                rewards,
                values: select(&signals.values),
                truncation_value: signals.truncation_value.filter(|_| is_last).map(f64::from),
                behavior: select(&signals.logprobs),
                concentration: select(&signals.concentrations),
                ..levade_rl::Sequence::default()
            }
        };
        let added = sample
            .tokens
            .iter()
            .flat_map(|(sequence, tokens)| tokens.iter().map(|t| extra_rewards[*sequence].get(*t)));
        let score = added.flatten().fold(sample.score, |sum, reward| sum + reward);
        let early = sample.score - self.outcome;
        let rest = self.outcome - self.answer_score + (score - sample.score);
        let components = vec![self.answer_score, rest, early];
        let sequences = sample.tokens.iter().map(sequence).collect();
        Rollout { group, score, components, sequences, ..Rollout::default() }
    }
}

#[cfg(test)]
mod tests {
    use levade_tree::VersionRun;

    use super::*;
    use crate::batch::{Targets, trained_sequences};

    fn sampled_segment(parent: u32, tokens: usize, turn: u32, agent: &str) -> Segment {
        Segment {
            kind: Kind::Sampled,
            logprobs: vec![-1.0; tokens],
            versions: vec![VersionRun { version: 0, len: tokens as u32 }],
            agent: agent.into(),
            ..Segment::context(Some(SegmentId(parent)), vec![1; tokens], turn)
        }
    }

    /// Segments 0 (context), 1 of "a" (2 tokens), 2 (context), 3 of "b" (3), 4 (context), 5 of "a"
    /// (1). Below segment 2 a second branch: 6 of "b" (2).
    fn game_trajectory() -> Trajectory {
        let mut t = Trajectory::new();
        let given = |parent| Segment::context(Some(SegmentId(parent)), vec![9], 0);
        t.push(Segment::context(None, vec![9], 0)).unwrap();
        t.push(sampled_segment(0, 2, 0, "a")).unwrap();
        t.push(given(1)).unwrap();
        t.push(sampled_segment(2, 3, 1, "b")).unwrap();
        t.push(given(3)).unwrap();
        t.push(sampled_segment(4, 1, 2, "a")).unwrap();
        t.push(sampled_segment(2, 2, 3, "b")).unwrap();
        t
    }

    fn credited_rewards(
        by: GroupBy,
        step_rewards: &[(CreditTarget, f64)],
    ) -> Vec<(f64, Vec<Vec<f64>>)> {
        let trajectory = game_trajectory();
        let sequences = trained_sequences(&trajectory, Targets::DEFAULT);
        let step_rewards: Vec<StepReward> = step_rewards
            .iter()
            .map(|(by, reward)| StepReward { credit_target: by.clone(), reward: *reward })
            .collect();
        let credited = CreditedReward::new(&trajectory, &sequences, (10.0, 8.0), &step_rewards, by);
        let nothing = vec![Vec::new(); sequences.len()];
        let signals = vec![SequenceSignals::default(); sequences.len()];
        let rollout = |sample: &EstimatorSample| {
            let rollout = credited.to_rollout(sample, 0, &sequences, &nothing, &signals, |_| false);
            assert!(
                rollout.sequences.iter().all(|path| path.turns.iter().sum::<usize>() == path.len())
            );
            assert!((rollout.components.iter().sum::<f64>() - rollout.score).abs() < 1e-12);
            (
                rollout.score,
                rollout.sequences.into_iter().map(|sequence| sequence.rewards).collect(),
            )
        };
        credited.samples(&sequences, by, &[]).iter().map(rollout).collect()
    }

    #[test]
    fn early_reward_is_credited_to_preceding_action() {
        let both =
            |first: [f64; 6], second: [f64; 2]| vec![(10.0, vec![first.to_vec(), second.to_vec()])];
        let segment = |id| CreditTarget::Segment(SegmentId(id));
        assert_eq!(
            credited_rewards(GroupBy::Task, &[]),
            both([0.0, 0.0, 0.0, 0.0, 0.0, 10.0], [0.0, 10.0])
        );
        for (by, want) in [
            (segment(1), both([0.0, 1.0, 0.0, 0.0, 0.0, 9.0], [0.0, 9.0])),
            // An observation shared by both sequences is credited to the action before it.
            (segment(2), both([0.0, 1.0, 0.0, 0.0, 0.0, 9.0], [0.0, 9.0])),
            (segment(4), both([0.0, 0.0, 0.0, 0.0, 1.0, 9.0], [0.0, 9.0])),
            (CreditTarget::Turn(3), both([0.0, 0.0, 0.0, 0.0, 0.0, 9.0], [0.0, 10.0])),
            (CreditTarget::Agent("b".into()), both([0.0, 0.0, 0.0, 0.0, 1.0, 9.0], [0.0, 10.0])),
            // No action precedes the prompt, and no agent is named "c".
            (segment(0), both([0.0, 0.0, 0.0, 0.0, 0.0, 10.0], [0.0, 10.0])),
            (CreditTarget::Agent("c".into()), both([0.0, 0.0, 0.0, 0.0, 0.0, 10.0], [0.0, 10.0])),
        ] {
            assert_eq!(credited_rewards(GroupBy::Task, &[(by.clone(), 1.0)]), want, "{by:?}");
        }
    }

    /// Two seats of one agent stay apart, and the rewards of seats without trained tokens reach no
    /// other seat.
    #[test]
    fn seats_keep_their_own_rewards() {
        let mut t = Trajectory::new();
        t.push(Segment::context(None, vec![9], 0)).unwrap();
        t.push(sampled_segment(0, 2, 0, "wolf@1")).unwrap();
        t.push(Segment::context(None, vec![8], 1)).unwrap();
        t.push(sampled_segment(2, 3, 1, "wolf@2")).unwrap();
        t.push(Segment::context(None, vec![7], 2)).unwrap();
        let opponent = Segment { policy: "frozen".into(), ..sampled_segment(4, 1, 2, "good@3") };
        t.push(opponent).unwrap();
        let sequences = trained_sequences(&t, Targets::DEFAULT);
        let seat = |name: &str, reward| StepReward {
            credit_target: CreditTarget::Agent(name.into()),
            reward,
        };
        let penalty = StepReward { credit_target: CreditTarget::Turn(2), reward: -0.5 };
        let step_rewards = [
            seat("wolf@1", 1.0),
            seat("wolf@2", 2.0),
            seat("good@3", -4.0),
            seat("wolf@4", 8.0),
            penalty,
        ];
        let total = step_rewards.iter().map(|step| step.reward).sum();
        let credited =
            CreditedReward::new(&t, &sequences, (total, 0.0), &step_rewards, GroupBy::Agent);
        let agents = ["wolf@1", "wolf@2", "wolf@4"].map(String::from);
        let samples = credited.samples(&sequences, GroupBy::Agent, &agents);
        let found: Vec<(Option<&str>, f64, usize)> = samples
            .iter()
            .map(|sample| (sample.agent.as_deref(), sample.score, sample.tokens.len()))
            .collect();
        // The third wolf did not act, but belongs to the mean of its seat.
        let want = [(Some("wolf@1"), 1.0, 1), (Some("wolf@2"), 2.0, 1), (Some("wolf@4"), 8.0, 0)];
        assert_eq!(found, want);
        let silent = CreditedReward::new(&t, &[], (total, 0.0), &step_rewards, GroupBy::Agent);
        let samples = silent.samples(&[], GroupBy::Agent, &agents);
        let scores: Vec<f64> = samples.iter().map(|sample| sample.score).collect();
        assert_eq!(scores, [1.0, 2.0, 8.0]);
    }

    /// The part of an agent that another policy plays reaches other agents only if agents are not
    /// compared within their role. The part of an agent that did not act belongs to all.
    #[test]
    fn agents_keep_their_own_rewards_across_policies() {
        let mut t = Trajectory::new();
        t.push(Segment::context(None, vec![9], 0)).unwrap();
        t.push(sampled_segment(0, 2, 0, "write")).unwrap();
        t.push(Segment::context(None, vec![8], 1)).unwrap();
        let rewrite = Segment { policy: "rewriter".into(), ..sampled_segment(2, 3, 1, "rewrite") };
        t.push(rewrite).unwrap();
        let sequences = trained_sequences(&t, Targets::DEFAULT);
        let part = |credit_target, reward| StepReward { credit_target, reward };
        let step_rewards = [
            part(CreditTarget::Agent("write".into()), 1.0),
            part(CreditTarget::Agent("rewrite".into()), 2.0),
            part(CreditTarget::Turn(1), 4.0),
            part(CreditTarget::Agent("check".into()), 8.0),
        ];
        let score = |by| {
            let credited = CreditedReward::new(&t, &sequences, (31.0, 16.0), &step_rewards, by);
            let [sample] = &credited.samples(&sequences, by, &[])[..] else { panic!() };
            sample.score
        };
        assert_eq!((score(GroupBy::Task), score(GroupBy::Agent)), (31.0, 25.0));
    }

    #[test]
    fn agents_become_separate_samples() {
        let found = credited_rewards(
            GroupBy::Agent,
            &[(CreditTarget::Turn(1), 1.0), (CreditTarget::Agent("a".into()), -2.0)],
        );
        let a = (9.0, vec![vec![0.0, 0.0, 9.0]]);
        let b = (12.0, vec![vec![0.0, 0.0, 12.0], vec![0.0, 11.0]]);
        assert_eq!(found, [a, b]);
    }

    /// The models' numbers stay with their tokens. The value of the state in which a sequence was
    /// truncated belongs to the sample with its last token.
    #[test]
    fn rollout_preserves_signals_of_each_token() {
        let trajectory = game_trajectory();
        let sequences = trained_sequences(&trajectory, Targets::DEFAULT);
        let signals: Vec<SequenceSignals> = [6, 2]
            .map(|tokens| SequenceSignals {
                values: (0..tokens).map(|i| i as f32).collect(),
                logprobs: (0..tokens).map(|i| -(i as f32)).collect(),
                concentrations: (0..tokens).map(|i| i as f32 / 8.0).collect(),
                truncation_value: Some(0.5),
                ..SequenceSignals::default()
            })
            .into();
        let credited =
            CreditedReward::new(&trajectory, &sequences, (1.0, 1.0), &[], GroupBy::Agent);
        let nothing = vec![Vec::new(); sequences.len()];
        let of = |sample: &EstimatorSample| {
            credited.to_rollout(sample, 0, &sequences, &nothing, &signals, |agent| agent == "a")
        };
        let samples = credited.samples(&sequences, GroupBy::Agent, &[]);
        let found: Vec<_> = samples.iter().flat_map(|sample| of(sample).sequences).collect();
        // Agent "a" has tokens 0, 1 and 5 of the first sequence. Agent "b" has the remaining ones
        // and the second sequence, which it starts after one turn.
        let want: [(&[f64], Option<f64>, usize, bool); 3] = [
            (&[0.0, 1.0, 5.0], Some(0.5), 0, true),
            (&[2.0, 3.0, 4.0], None, 0, false),
            (&[0.0, 1.0], Some(0.5), 1, false),
        ];
        assert_eq!(found.len(), want.len());
        for (sequence, (tokens, truncation_value, turns_before, masked)) in found.iter().zip(want) {
            assert_eq!(sequence.values, tokens);
            assert_eq!(sequence.behavior, tokens.iter().map(|i| -i).collect::<Vec<_>>());
            assert_eq!(sequence.concentration, tokens.iter().map(|i| i / 8.0).collect::<Vec<_>>());
            assert_eq!(
                (sequence.truncation_value, sequence.turns_before),
                (truncation_value, turns_before)
            );
            assert_eq!(sequence.masked, vec![masked; tokens.len()]);
        }
    }

    /// KL penalties on tokens belong neither to the answer nor to early rewards.
    #[test]
    fn token_penalties_count_in_outcome_remainder() {
        let trajectory = game_trajectory();
        let sequences = trained_sequences(&trajectory, Targets::DEFAULT);
        let step_rewards = [StepReward { credit_target: CreditTarget::Turn(1), reward: 1.0 }];
        let by = GroupBy::Task;
        let credited = CreditedReward::new(&trajectory, &sequences, (10.0, 8.0), &step_rewards, by);
        let charges = [vec![-0.5; 6], vec![-0.25; 2]];
        let [sample] = &credited.samples(&sequences, GroupBy::Task, &[])[..] else { panic!() };
        let signals = [SequenceSignals::default(), SequenceSignals::default()];
        let found = credited.to_rollout(sample, 0, &sequences, &charges, &signals, |_| false);
        // The reward is 10, of which 8 are for the answer and 1 was earned early. The penalties
        // subtract 3.5.
        assert_eq!((found.score, &found.components[..]), (6.5, &[8.0, 1.0 - 3.5, 1.0][..]));
        assert_eq!(found.sequences[0].rewards, [-0.5, -0.5, -0.5, -0.5, 0.5, 8.5]);
        assert_eq!(found.sequences[1].rewards, [-0.25, 8.75]);
    }
}
