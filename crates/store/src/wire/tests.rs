use levade_policy::uniform;
use levade_tree::{AttemptId, Kind, Outcome, RunId, SegmentId, VersionRun};
use proptest::prelude::*;

use super::*;
use crate::contract::test_data::{attempt, forest, plan, segment};
use crate::{
    AppliedKlPenalty, Attempt, AttemptEnd, CreditTarget, HighEntropy, PerToken, StepPlan,
    StepReward,
};

/// Converts a record to bytes and back.
fn round_trip<T: Record>(record: &T) -> T {
    decode(&encode(record).unwrap()).unwrap()
}

/// Returns the bits of all numbers of a trajectory, which `==` does not compare for NaN.
fn bits(attempt: &Attempt) -> Vec<Vec<u32>> {
    let segments = attempt.trajectory.segments().iter();
    segments
        .map(|segment| {
            let logprobs = segment.logprobs.iter().map(|logprob| logprob.to_bits());
            logprobs.chain([segment.temperature.to_bits()]).collect()
        })
        .collect()
}

/// Returns the bits of the score, the reward and the first step reward.
fn reward_bits(attempt: &Attempt) -> [Option<u64>; 3] {
    [attempt.score, attempt.reward, Some(attempt.step_rewards[0].reward)]
        .map(|number| number.map(f64::to_bits))
}

/// Returns the bytes of the numbers per token of each sequence.
fn number_bytes(plan: &StepPlan) -> Vec<[Option<Vec<u8>>; 3]> {
    plan.sequences()
        .map(|s| [Some(&s.advantage), Some(&s.weight), s.returns.as_ref()])
        .map(|numbers| numbers.map(|numbers| numbers.map(PerToken::to_bytes)))
        .collect()
}

proptest! {
    #[test]
    fn encoded_attempts_round_trip_bit_for_bit(
        seed: u64,
        score: Option<u64>,
        reward: Option<u64>,
        part: u64,
        text in ".*",
    ) {
        let made = Attempt {
            score: score.map(f64::from_bits),
            reward: reward.map(f64::from_bits),
            step_rewards: vec![StepReward {
                credit_target: CreditTarget::Agent(text.clone()),
                reward: f64::from_bits(part),
            }],
            outcome: Outcome::demonstrated(text),
            trajectory: forest(seed),
            ..attempt(&RunId("run".into()), 1, 2)
        };
        let read = round_trip(&made);
        prop_assert_eq!(bits(&read), bits(&made));
        prop_assert_eq!(reward_bits(&read), reward_bits(&made));
        // The remaining fields are compared as text, because a NaN does not equal itself.
        prop_assert_eq!(format!("{read:?}"), format!("{made:?}"));
    }

    #[test]
    fn encoded_step_plans_round_trip_bit_for_bit(
        numbers: Vec<(u32, u32)>,
        kl: f64,
        thresholds: Vec<f64>,
    ) {
        let floats: Vec<(f32, f32)> =
            numbers.iter().map(|(a, b)| (f32::from_bits(*a), f32::from_bits(*b))).collect();
        let mut made = plan(&RunId("run".into()), &floats);
        made.policies[0].kl =
            Some(AppliedKlPenalty { coefficient: kl, found: -0.0, rollouts: u64::MAX });
        made.policies[1].high_entropy = Some(HighEntropy { tokens: 1, kept: 0, thresholds });
        let read = round_trip(&made);
        prop_assert_eq!(number_bytes(&read), number_bytes(&made));
        prop_assert_eq!(format!("{read:?}"), format!("{made:?}"));
    }

    #[test]
    fn decode_rejects_changed_bytes_without_panic(seed: u64, index: prop::sample::Index, byte: u8) {
        let made = Attempt { trajectory: forest(seed), ..attempt(&RunId("run".into()), 0, 0) };
        let mut bytes = encode(&made).unwrap();
        let index = index.index(bytes.len());
        prop_assert!(decode::<Attempt>(&bytes[..index]).is_err());
        bytes[index] = byte;
        let _ = decode::<Attempt>(&bytes);
        bytes.push(0);
        prop_assert!(decode::<Attempt>(&bytes).is_err());
    }
}

#[test]
fn encoded_segments_keep_every_field() {
    let made = levade_tree::Segment {
        id: SegmentId(7),
        parent: Some(SegmentId(3)),
        after: Some(2),
        logprobs: vec![f32::NAN, -0.0],
        temperature: f32::INFINITY,
        filtered: true,
        versions: vec![VersionRun { version: u64::MAX, len: u32::MAX }],
        agent: "a".into(),
        policy: "p".into(),
        turn: 9,
        ..segment(Kind::Sampled, &[u32::MAX, 0])
    };
    let (id, read) = round_trip(&(AttemptId::from_bytes([7; 16]), vec![made.clone()]));
    assert_eq!(id.bytes(), &[7; 16]);
    assert_eq!(format!("{:?}", read[0]), format!("{made:?}"));
    assert_eq!(read[0].logprobs[0].to_bits(), f32::NAN.to_bits());
}

#[test]
fn encoded_size_is_proportional_to_token_count() {
    let tokens: Vec<u32> =
        (0..10_000).map(|index| (uniform(1, 1, index) * f64::from(u32::MAX)) as u32).collect();
    let [short, long] = [1_000, 10_000]
        .map(|len| encode(&vec![segment(Kind::Sampled, &tokens[..len])]).unwrap().len());
    assert!(long - short < 9_000 * 8 + 64, "{long} {short}");
}

#[test]
fn encoded_nan_reward_differs_from_missing_reward() {
    let made = AttemptEnd { reward: Some(f64::NAN), ..attempt(&RunId("run".into()), 0, 0).end() };
    assert!(round_trip(&made).reward.is_some_and(f64::is_nan));
}
