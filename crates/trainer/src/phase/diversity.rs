//! Measures how much the attempts of a group differ in what they do: their sequences of tool calls,
//! or of moves in a game.
//!
//! A group whose attempts all do the same is often uninformative, even if their texts differ.

use std::collections::{BTreeMap, BTreeSet};

use levade_store::Attempt;
use levade_traces::{AgentCalls, Chats, tool_calls};
use levade_tree::agent_of;
use serde_json::Value;

use crate::metrics::Metrics;

/// Name of the diversity metric over all agents. The metric of a single agent is named
/// `diversity/calls/AGENT`.
const NAME: &str = "diversity/calls";

/// Adds metrics of how much the attempts of a group differ in their tool calls or game moves: over
/// all agents and, if several agents make calls, for each agent. Attempts without a reward do not
/// count.
pub(super) fn add_diversity_metrics(groups: &[&[Attempt]], chats: &Chats, metrics: &mut Metrics) {
    let calls_of = |attempt: &Attempt| {
        let moves = attempt.outcome.scorer_inputs.get("game").and_then(parse_game_moves);
        moves.unwrap_or_else(|| tool_calls(attempt, chats))
    };
    let rewarded = |group: &&[Attempt]| -> Vec<AgentCalls> {
        group.iter().filter(|attempt| attempt.reward.is_some()).map(calls_of).collect()
    };
    add_group_metrics(&groups.iter().map(rewarded).collect::<Vec<_>>(), metrics);
}

/// Returns the moves of each seat from the record of a game, without spoken statements. Returns
/// `None` if `record` is not the record of a game.
fn parse_game_moves(record: &Value) -> Option<AgentCalls> {
    let seats = record["seats"].as_array()?.iter();
    let seats: Vec<&str> = seats.map(|seat| seat["agent"].as_str()).collect::<Option<_>>()?;
    let mut calls: AgentCalls = seats.iter().map(|seat| ((*seat).to_owned(), vec![])).collect();
    for turn in record["moves"].as_array()? {
        for played in turn.as_array()? {
            let seat = seats.get(played[0].as_u64()? as usize)?;
            calls.get_mut(*seat)?.push(("move".to_owned(), played[1]["move"].to_string()));
        }
    }
    Some(calls)
}

/// Adds the diversity metrics of groups of attempts. Each attempt is given as the calls of its
/// agents.
fn add_group_metrics(groups: &[Vec<AgentCalls>], metrics: &mut Metrics) {
    // An agent that did not act and one that acted without a call do the same.
    let all = |attempt: &AgentCalls| -> AgentCalls {
        let mut calls = attempt.clone();
        calls.retain(|_, calls| !calls.is_empty());
        calls
    };
    let of_group = |group: &Vec<AgentCalls>| distinct_fraction(group.iter().map(all));
    add_mean(NAME.to_owned(), groups.iter().filter_map(of_group), metrics);

    let calling = groups.iter().flatten().flatten().filter(|(_, calls)| !calls.is_empty());
    let calling: BTreeSet<&str> = calling.map(|(name, _)| agent_of(name)).collect();
    if calling.len() < 2 {
        return;
    }
    // Each seat of an agent is compared with itself.
    let mut fractions: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for group in groups {
        let names: BTreeSet<&String> = group.iter().flat_map(BTreeMap::keys).collect();
        for name in names.into_iter().filter(|name| calling.contains(agent_of(name))) {
            // An attempt in which the agent did not act is not compared.
            let sequences = group.iter().filter_map(|attempt| attempt.get(name));
            fractions.entry(agent_of(name)).or_default().extend(distinct_fraction(sequences));
        }
    }
    for (agent, fractions) in fractions {
        add_mean(format!("{NAME}/{agent}"), fractions, metrics);
    }
}

/// Returns the fraction of attempts after the first one whose sequence differs from the sequences
/// of all earlier attempts. It is 0 if all sequences are equal, and 1 if all are distinct. Returns
/// `None` for fewer than two attempts.
fn distinct_fraction<T: Ord>(sequences: impl Iterator<Item = T>) -> Option<f64> {
    let sequences: Vec<T> = sequences.collect();
    let distinct: BTreeSet<&T> = sequences.iter().collect();
    let all = sequences.len();
    (all > 1).then(|| (distinct.len() - 1) as f64 / (all - 1) as f64)
}

/// Adds the mean of `values` as the metric `name`. Adds nothing if there are no values.
fn add_mean(name: String, values: impl IntoIterator<Item = f64>, metrics: &mut Metrics) {
    let values: Vec<f64> = values.into_iter().collect();
    if !values.is_empty() {
        metrics.add(name, values.iter().sum::<f64>() / values.len() as f64);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const AGENTS: [&str; 4] = ["default", "helper", "wolf@1", "wolf@2"];

    /// Returns the calls of an attempt, given the index of each agent, and the arguments with which
    /// the agent calls a tool.
    fn agent_calls(attempt: &[(usize, Vec<u8>)]) -> AgentCalls {
        let call = |argument: &u8| ("tool".to_owned(), argument.to_string());
        let of_agent = |(agent, arguments): &(usize, Vec<u8>)| {
            (AGENTS[*agent].to_owned(), arguments.iter().map(call).collect())
        };
        attempt.iter().map(of_agent).collect()
    }

    /// Computes the metric of an agent, or of all agents, from its definition: for every attempt
    /// after the first one, compares it with each earlier one.
    fn naive_diversity(groups: &[Vec<AgentCalls>], agent: Option<&str>) -> Option<f64> {
        let seats: Vec<&str> = match agent {
            None => vec!["all"],
            Some(agent) => AGENTS.into_iter().filter(|name| agent_of(name) == agent).collect(),
        };
        let mut fractions = Vec::new();
        for (group, seat) in groups.iter().flat_map(|group| seats.iter().map(move |s| (group, s))) {
            let texts: Vec<String> = match agent {
                None => {
                    let made = |attempt: &AgentCalls| {
                        let calls = attempt.iter().filter(|(_, calls)| !calls.is_empty());
                        format!("{:?}", calls.collect::<Vec<_>>())
                    };
                    group.iter().map(made).collect()
                }
                Some(_) => {
                    let made = |attempt: &AgentCalls| Some(format!("{:?}", attempt.get(*seat)?));
                    group.iter().filter_map(made).collect()
                }
            };
            if texts.len() < 2 {
                continue;
            }
            let is_new = |i: &usize| (0..*i).all(|j| texts[j] != texts[*i]);
            let new = (1..texts.len()).filter(is_new).count();
            fractions.push(new as f64 / (texts.len() - 1) as f64);
        }
        let sum: f64 = fractions.iter().sum();
        (!fractions.is_empty()).then(|| sum / fractions.len() as f64)
    }

    proptest! {
        #[test]
        fn diversity_matches_naive_computation(
            groups in prop::collection::vec(
                prop::collection::vec(
                    prop::collection::vec((0usize..4, prop::collection::vec(0u8..2, 0..3)), 0..4),
                    0..6,
                ),
                0..4,
            )
        ) {
            let groups: Vec<Vec<AgentCalls>> =
                groups.iter().map(|group| group.iter().map(|a| agent_calls(a)).collect()).collect();
            let mut metrics = Metrics::default();
            add_group_metrics(&groups, &mut metrics);
            let is_close = |name: &str, wanted: Option<f64>| match (metrics.get(name), wanted) {
                (Some(found), Some(wanted)) => (found - wanted).abs() < 1e-12,
                (found, wanted) => found == wanted,
            };
            prop_assert!(is_close(NAME, naive_diversity(&groups, None)), "{:?}", metrics);
            let has_calls = |agent: &str| {
                groups.iter().flatten().flatten().any(|(name, calls)| {
                    agent_of(name) == agent && !calls.is_empty()
                })
            };
            let calling: Vec<&str> =
                ["default", "helper", "wolf"].into_iter().filter(|a| has_calls(a)).collect();
            for agent in ["default", "helper", "wolf"] {
                let is_reported = calling.len() > 1 && calling.contains(&agent);
                let wanted = if is_reported { naive_diversity(&groups, Some(agent)) } else { None };
                let name = format!("{NAME}/{agent}");
                prop_assert!(is_close(&name, wanted), "{} {:?}", name, metrics);
            }
        }
    }

    #[test]
    fn diversity_is_0_for_equal_and_1_for_distinct_sequences() {
        let of = |sequences: &[&[u8]]| {
            let group = sequences.iter().map(|arguments| agent_calls(&[(0, arguments.to_vec())]));
            let group: Vec<AgentCalls> = group.collect();
            let mut metrics = Metrics::default();
            add_group_metrics(&[group], &mut metrics);
            assert!(metrics.iter().count() <= 1, "one agent needs no metric of its own");
            metrics.get(NAME)
        };
        assert_eq!(of(&[&[1, 2], &[1, 2], &[1, 2]]), Some(0.0));
        assert_eq!(of(&[&[1, 2], &[2, 1], &[]]), Some(1.0));
        assert_eq!(of(&[&[1, 2], &[1, 2], &[1]]), Some(0.5));
        assert_eq!(of(&[&[], &[]]), Some(0.0));
        assert_eq!(of(&[&[1]]), None);
    }

    #[test]
    fn moves_are_read_by_seat_without_statements() {
        let record = json!({
            "seats": [{"name": "Ann", "agent": "wolf@1"}, {"name": "Ben", "agent": "good@2"}],
            "moves": [[[0, {"say": "Hello.", "move": "Ben"}], [1, {"move": 4}]], [[1, {}]]],
            "positions": [{}, {}, {}],
        });
        let call = |value: &str| ("move".to_owned(), value.to_owned());
        let expected = [
            ("good@2".to_owned(), vec![call("4"), call("null")]),
            ("wolf@1".to_owned(), vec![call("\"Ben\"")]),
        ];
        assert_eq!(parse_game_moves(&record), Some(AgentCalls::from(expected)));
        assert_eq!(parse_game_moves(&json!({"rows": 3})), None);
        assert_eq!(parse_game_moves(&json!({"seats": [], "moves": [[[7, {}]]]})), None);
    }
}
