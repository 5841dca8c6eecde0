//! Assigns each part of a reward to the token that earned it, and decides which attempts are
//! compared.
//!
//! A part of a reward can be earned before the end: by a turn (a call that could not be parsed), by
//! an observation after a turn, or by an agent. Such a part is assigned to the last sampled token
//! before that point. This is the last token of the action, of the action before the observation,
//! or of the agent's part of a sequence. A part without an action before it stays with the outcome,
//! which is assigned to the end of every sequence. If agents are compared within their role, each
//! agent's part of an attempt is a separate sample. An attempt in which another policy played an
//! agent, and in which the policy did not act, is not a sample of that policy.

use levade_recipe::GroupBy;
use levade_rl::Rollout;
use levade_store::{CreditTarget, Earned};
use levade_tree::{SegmentId, Trajectory};

use crate::batch::TrainedSequence;
use crate::signals::Signals;

/// A trained token: the index of its sequence in the attempt, and its index among the trained
/// tokens of that sequence.
type SequencePosition = (usize, usize);

/// The reward of an attempt, divided into parts by the tokens that earned them.
pub(crate) struct Earnings {
    /// Part that is not earned before the end.
    outcome: f64,
    /// Part of `outcome` that is the score of the final answer.
    answer: f64,
    /// Parts that are earned before the end, each with the tokens that it is assigned to.
    parts: Vec<(f64, Vec<SequencePosition>)>,
}

/// One sample for an advantage estimator: an attempt, or one agent's part of an attempt.
pub(crate) struct Sample {
    /// Name of the agent if agents are compared within their role, otherwise `None`.
    pub agent: Option<String>,
    /// Total reward of the sample.
    score: f64,
    /// Indices of the sample's tokens, by sequence.
    pub tokens: Vec<(usize, Vec<usize>)>,
}

/// Returns the last token of every trained segment, with its turn and agent.
fn ends(paths: &[TrainedSequence]) -> impl Iterator<Item = (SegmentId, SequencePosition, u32, &str)> {
    paths.iter().enumerate().flat_map(|(path, trained)| {
        let mut end = 0;
        let mut ends = Vec::new();
        for action in &trained.turns {
            for (segment, tokens) in &action.segments {
                end += tokens;
                ends.push((*segment, (path, end - 1), action.turn, action.agent.as_str()));
            }
        }
        ends
    })
}

/// Returns the tokens to which a reward earned by `by` is assigned.
fn reached(trajectory: &Trajectory, paths: &[TrainedSequence], by: &CreditTarget) -> Vec<SequencePosition> {
    match by {
        CreditTarget::Segment(id) => {
            let end_of = |id| ends(paths).find(|(segment, ..)| *segment == id).map(|(_, place, ..)| place);
            let last = trajectory.path(*id).into_iter().rev().find_map(|part| end_of(part.segment.id));
            last.into_iter().collect()
        }
        CreditTarget::Turn(turn) => {
            let of_turn = ends(paths).filter(|(_, _, t, _)| t == turn);
            of_turn.max_by_key(|(segment, ..)| *segment).map(|(_, place, ..)| place).into_iter().collect()
        }
        CreditTarget::Agent(name) => {
            let of_agent: Vec<SequencePosition> =
                ends(paths).filter(|(.., agent)| agent == name).map(|(_, place, ..)| place).collect();
            let last_of = |path| of_agent.iter().rev().find(|(p, _)| *p == path).copied();
            (0..paths.len()).filter_map(last_of).collect()
        }
    }
}

impl Earnings {
    /// Divides the total `reward` of an attempt. `answer` is the part for its final answer.
    pub fn new(
        trajectory: &Trajectory,
        paths: &[TrainedSequence],
        reward: f64,
        answer: f64,
        step_rewards: &[Earned],
    ) -> Self {
        let mut earnings = Earnings { outcome: reward, answer, parts: Vec::new() };
        for Earned { by, reward } in step_rewards {
            let places = reached(trajectory, paths, by);
            if !places.is_empty() {
                earnings.outcome -= reward;
                earnings.parts.push((*reward, places));
            }
        }
        earnings
    }

    /// Returns the samples of an attempt. An attempt without trained tokens is a sample of each of
    /// `agents`, which act in other attempts of the group, because the next agent to act is
    /// unknown.
    pub fn samples(&self, paths: &[TrainedSequence], by: GroupBy, agents: &[String]) -> Vec<Sample> {
        if by != GroupBy::Agent {
            let tokens = paths.iter().enumerate().map(|(i, path)| (i, (0..path.tokens()).collect()));
            let score = self.parts.iter().fold(self.outcome, |sum, (reward, _)| sum + reward);
            return vec![Sample { agent: None, score, tokens: tokens.collect() }];
        }
        if paths.is_empty() {
            let of = |agent: &String| Sample {
                agent: Some(agent.clone()),
                score: self.outcome,
                tokens: Vec::new(),
            };
            return agents.iter().map(of).collect();
        }
        let mut samples: Vec<Sample> = Vec::new();
        for (path, trained) in paths.iter().enumerate() {
            let mut start = 0;
            for action in &trained.turns {
                let tokens = start..start + action.tokens();
                start = tokens.end;
                let place = samples.iter().position(|s| s.agent.as_ref() == Some(&action.agent));
                let sample = match place {
                    Some(place) => &mut samples[place],
                    None => {
                        let agent = Some(action.agent.clone());
                        samples.push(Sample { agent, score: self.outcome, tokens: Vec::new() });
                        let last = samples.len() - 1;
                        &mut samples[last]
                    }
                };
                match sample.tokens.last_mut() {
                    Some((last, of_path)) if *last == path => of_path.extend(tokens),
                    _ => sample.tokens.push((path, tokens.collect())),
                }
            }
        }
        for sample in &mut samples {
            let reaches = |place: &SequencePosition| {
                sample.tokens.iter().any(|(path, tokens)| *path == place.0 && tokens.contains(&place.1))
            };
            let mine: Vec<f64> =
                self.parts.iter().filter(|(_, to)| to.iter().any(reaches)).map(|(r, _)| *r).collect();
            sample.score += mine.into_iter().sum::<f64>();
        }
        samples
    }

    /// Converts a sample for the estimators. `more` is added to the rewards of the tokens of each
    /// sequence, and so to the score. `signals` are the models' numbers for each sequence, and
    /// `masked` returns whether an agent's tokens are left out of training.
    pub fn rollout(
        &self,
        sample: &Sample,
        group: u64,
        paths: &[TrainedSequence],
        more: &[Vec<f64>],
        signals: &[Signals],
        masked: impl Fn(&str) -> bool,
    ) -> Rollout {
        let path = |(path, tokens): &(usize, Vec<usize>)| {
            let (path, more, signals) = (*path, &more[*path], &signals[*path]);
            let at = |token: usize| {
                let step_rewards = self.parts.iter().filter(|(_, to)| to.contains(&(path, token)));
                step_rewards.fold(more.get(token).copied().unwrap_or(0.0), |sum, (reward, _)| sum + reward)
            };
            let mut rewards: Vec<f64> = tokens.iter().map(|token| at(*token)).collect();
            if let Some(last) = rewards.last_mut() {
                *last += self.outcome;
            }
            let actions = paths[path].turns.iter();
            let mine =
                || actions.clone().filter(|a| sample.agent.as_ref().is_none_or(|agent| *agent == a.agent));
            let masked =
                mine().flat_map(|action| std::iter::repeat_n(masked(&action.agent), action.tokens()));
            let of_tokens = |numbers: &[f32]| match numbers {
                [] => Vec::new(),
                _ => tokens.iter().map(|token| f64::from(numbers[*token])).collect(),
            };
            // The last token of a truncated sequence is the truncated one.
            let is_last = tokens.last().is_some_and(|token| token + 1 == paths[path].tokens());
            levade_rl::Path {
                turns_before: paths[path].turns_before,
                turns: mine().map(|action| action.tokens()).collect(),
                masked: masked.collect(),
                rewards,
                values: of_tokens(&signals.values),
                cut: signals.cut.filter(|_| is_last).map(f64::from),
                behaviour: of_tokens(&signals.logprobs),
                concentration: of_tokens(&signals.concentrations),
                ..levade_rl::Path::default()
            }
        };
        let added =
            sample.tokens.iter().flat_map(|(path, tokens)| tokens.iter().map(|t| more[*path].get(*t)));
        let score = added.flatten().fold(sample.score, |sum, reward| sum + reward);
        let early = sample.score - self.outcome;
        let rest = self.outcome - self.answer + (score - sample.score);
        let components = vec![self.answer, rest, early];
        let paths = sample.tokens.iter().map(path).collect();
        Rollout { group, score, components, paths, ..Rollout::default() }
    }
}

#[cfg(test)]
mod tests {
    use levade_tree::{Kind, Segment, VersionRun};

    use super::*;
    use crate::batch::{Targets, trained_paths};

    fn sampled(parent: u32, tokens: usize, turn: u32, agent: &str) -> Segment {
        Segment {
            kind: Kind::Sampled,
            logprobs: vec![-1.0; tokens],
            versions: vec![VersionRun { version: 0, len: tokens as u32 }],
            agent: agent.into(),
            ..Segment::given(Some(SegmentId(parent)), vec![1; tokens], turn)
        }
    }

    /// Segments 0 (context), 1 of "a" (2 tokens), 2 (context), 3 of "b" (3), 4 (context), 5 of "a"
    /// (1). Below segment 2 a second branch: 6 of "b" (2).
    fn game() -> Trajectory {
        let mut t = Trajectory::new();
        let given = |parent| Segment::given(Some(SegmentId(parent)), vec![9], 0);
        t.push(Segment::given(None, vec![9], 0)).unwrap();
        t.push(sampled(0, 2, 0, "a")).unwrap();
        t.push(given(1)).unwrap();
        t.push(sampled(2, 3, 1, "b")).unwrap();
        t.push(given(3)).unwrap();
        t.push(sampled(4, 1, 2, "a")).unwrap();
        t.push(sampled(2, 2, 3, "b")).unwrap();
        t
    }

    fn rewards(by: GroupBy, step_rewards: &[(CreditTarget, f64)]) -> Vec<(f64, Vec<Vec<f64>>)> {
        let trajectory = game();
        let paths = trained_paths(&trajectory, Targets::DEFAULT);
        let step_rewards: Vec<Earned> =
            step_rewards.iter().map(|(by, reward)| Earned { by: by.clone(), reward: *reward }).collect();
        let earnings = Earnings::new(&trajectory, &paths, 10.0, 8.0, &step_rewards);
        let (nothing, signals) = (vec![Vec::new(); paths.len()], vec![Signals::default(); paths.len()]);
        let rollout = |sample: &Sample| {
            let rollout = earnings.rollout(sample, 0, &paths, &nothing, &signals, |_| false);
            assert!(rollout.paths.iter().all(|path| path.turns.iter().sum::<usize>() == path.len()));
            assert!((rollout.components.iter().sum::<f64>() - rollout.score).abs() < 1e-12);
            (rollout.score, rollout.paths.into_iter().map(|path| path.rewards).collect())
        };
        earnings.samples(&paths, by, &[]).iter().map(rollout).collect()
    }

    #[test]
    fn early_reward_is_credited_to_preceding_action() {
        let both = |first: [f64; 6], second: [f64; 2]| vec![(10.0, vec![first.to_vec(), second.to_vec()])];
        let segment = |id| CreditTarget::Segment(SegmentId(id));
        assert_eq!(rewards(GroupBy::Task, &[]), both([0.0, 0.0, 0.0, 0.0, 0.0, 10.0], [0.0, 10.0]));
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
            assert_eq!(rewards(GroupBy::Task, &[(by.clone(), 1.0)]), want, "{by:?}");
        }
    }

    #[test]
    fn agents_become_separate_samples() {
        let found =
            rewards(GroupBy::Agent, &[(CreditTarget::Turn(1), 1.0), (CreditTarget::Agent("a".into()), -2.0)]);
        let a = (9.0, vec![vec![0.0, 0.0, 9.0]]);
        let b = (12.0, vec![vec![0.0, 0.0, 12.0], vec![0.0, 11.0]]);
        assert_eq!(found, [a, b]);
    }

    /// The models' numbers stay with their tokens. The value of the state in which a sequence was
    /// truncated belongs to the sample with its last token.
    #[test]
    fn rollout_preserves_signals_of_each_token() {
        let trajectory = game();
        let paths = trained_paths(&trajectory, Targets::DEFAULT);
        let signals: Vec<Signals> = [6, 2]
            .map(|tokens| Signals {
                values: (0..tokens).map(|i| i as f32).collect(),
                logprobs: (0..tokens).map(|i| -(i as f32)).collect(),
                concentrations: (0..tokens).map(|i| i as f32 / 8.0).collect(),
                cut: Some(0.5),
                ..Signals::default()
            })
            .into();
        let earnings = Earnings::new(&trajectory, &paths, 1.0, 1.0, &[]);
        let nothing = vec![Vec::new(); paths.len()];
        let of =
            |sample: &Sample| earnings.rollout(sample, 0, &paths, &nothing, &signals, |agent| agent == "a");
        let samples = earnings.samples(&paths, GroupBy::Agent, &[]);
        let found: Vec<_> = samples.iter().flat_map(|sample| of(sample).paths).collect();
        // Agent "a" has tokens 0, 1 and 5 of the first sequence. Agent "b" has the remaining ones
        // and the second sequence, which it starts after one turn.
        let want: [(&[f64], Option<f64>, usize, bool); 3] = [
            (&[0.0, 1.0, 5.0], Some(0.5), 0, true),
            (&[2.0, 3.0, 4.0], None, 0, false),
            (&[0.0, 1.0], Some(0.5), 1, false),
        ];
        assert_eq!(found.len(), want.len());
        for (path, (tokens, cut, turns_before, masked)) in found.iter().zip(want) {
            assert_eq!(path.values, tokens);
            assert_eq!(path.behaviour, tokens.iter().map(|i| -i).collect::<Vec<_>>());
            assert_eq!(path.concentration, tokens.iter().map(|i| i / 8.0).collect::<Vec<_>>());
            assert_eq!((path.cut, path.turns_before), (cut, turns_before));
            assert_eq!(path.masked, vec![masked; tokens.len()]);
        }
    }

    /// KL penalties on tokens belong neither to the answer nor to early rewards.
    #[test]
    fn token_penalties_count_in_outcome_remainder() {
        let trajectory = game();
        let paths = trained_paths(&trajectory, Targets::DEFAULT);
        let step_rewards = [Earned { by: CreditTarget::Turn(1), reward: 1.0 }];
        let earnings = Earnings::new(&trajectory, &paths, 10.0, 8.0, &step_rewards);
        let charges = [vec![-0.5; 6], vec![-0.25; 2]];
        let [sample] = &earnings.samples(&paths, GroupBy::Task, &[])[..] else { panic!() };
        let signals = [Signals::default(), Signals::default()];
        let found = earnings.rollout(sample, 0, &paths, &charges, &signals, |_| false);
        // The reward is 10, of which 8 are for the answer and 1 was earned early. The penalties
        // subtract 3.5.
        assert_eq!((found.score, &found.components[..]), (6.5, &[8.0, 1.0 - 3.5, 1.0][..]));
        assert_eq!(found.paths[0].rewards, [-0.5, -0.5, -0.5, -0.5, 0.5, 8.5]);
        assert_eq!(found.paths[1].rewards, [-0.25, 8.75]);
    }
}
