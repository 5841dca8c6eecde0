//! Record of a match: the scorer inputs and metrics of its attempt.

use std::collections::BTreeMap;

use levade_game::{Move, Seat, SeatOutcome};
use levade_tree::Outcome;
use serde_json::{Value, json};

use super::player::SeatPlayer;
use super::running_match::RunningMatch;
use crate::merge_outcome::clamp_finite;

/// Returns three counts for each agent: moves, completions without a legal move, and default moves.
fn count_moves_by_agent(players: &[SeatPlayer]) -> BTreeMap<&str, [f64; 3]> {
    let mut sums: BTreeMap<&str, [f64; 3]> = BTreeMap::new();
    for player in players {
        let [moves, illegal, defaults] = sums.entry(&player.agent).or_default();
        *moves += player.turns.len() as f64;
        *illegal += f64::from(player.illegal);
        *defaults += f64::from(player.defaults);
    }
    sums
}

/// Moves and positions of a match.
pub(super) struct MatchRecord {
    game: String,
    seed: u64,
    seats: Vec<Seat>,
    moves: Vec<Vec<(usize, Move)>>,
    /// Positions of the match: one before each turn, and one after the last turn.
    positions: Vec<Value>,
}

impl MatchRecord {
    /// Creates the record of a match that has started.
    pub fn new(game: &str, seed: u64, seats: Vec<Seat>, running: &RunningMatch) -> Self {
        let positions = vec![running.save()];
        MatchRecord { game: game.to_owned(), seed, seats, moves: Vec::new(), positions }
    }

    /// Adds the moves of one turn, with the position after the turn.
    pub fn add_turn(&mut self, moves: Vec<(usize, Move)>, position: Value) {
        self.moves.push(moves);
        self.positions.push(position);
    }

    /// Adds the match to the outcome of its attempt: the scorer input `game`, the rewards of seats
    /// and moves, and the metrics.
    ///
    /// # Errors
    /// Returns a message if the outcomes do not cover every seat once, if a reward is not finite,
    /// or if the record cannot be stored.
    pub fn apply_to_outcome(
        &self,
        players: &[SeatPlayer],
        outcomes: &[SeatOutcome],
        outcome: &mut Outcome,
    ) -> Result<(), String> {
        let game = &self.game;
        let complete = outcomes.len() == players.len()
            && outcomes.iter().enumerate().all(|(index, seat)| seat.seat == index);
        if !complete {
            return Err(format!(
                "the game {game} reports {} outcomes, but must report one outcome per seat, in \
                 order",
                outcomes.len()
            ));
        }
        let mut rewards = Vec::new();
        let mut metrics: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for ((seat, player), result) in self.seats.iter().zip(players).zip(outcomes) {
            rewards.push(json!({"agent": player.name, "value": result.reward}));
            let moves = player.turns.len();
            let missing = result.transitions.iter().find(|(index, _)| *index as usize >= moves);
            if let Some((index, reward)) = missing {
                return Err(format!(
                    "the game {game} reports the reward {reward} for the move {index} of the seat \
                     {}, which made {moves} moves; moves are counted from 0",
                    player.name
                ));
            }
            let transitions = result.transitions.iter().map(|(index, reward)| {
                (player.turns.get(*index as usize).copied().flatten(), *reward)
            });
            for (turn, reward) in player.rewards.iter().copied().chain(transitions) {
                if !reward.is_finite() {
                    return Err(format!(
                        "the game {game} reports the reward {reward} for the seat {}, but rewards \
                         must be finite",
                        player.name
                    ));
                }
                rewards.push(match turn {
                    Some(turn) => json!({"turn": turn, "value": reward}),
                    None => json!({"agent": player.name, "value": reward}),
                });
            }
            let own = [("reward", result.reward)]
                .into_iter()
                .chain(result.parts.iter().map(|(name, value)| (name.as_str(), *value)));
            for (name, value) in own {
                if !value.is_finite() {
                    return Err(format!(
                        "the game {game} reports {value} as {name:?} of the seat {}, but metrics \
                         must be finite",
                        player.name
                    ));
                }
                metrics.entry(format!("game/{}.{name}", player.agent)).or_default().push(value);
                metrics.entry(format!("game/role.{}.{name}", seat.role)).or_default().push(value);
                let seat = seat.index + 1;
                metrics.entry(format!("game/seat.{seat}.{name}")).or_default().push(value);
            }
        }
        for (agent, [moves, illegal, defaults]) in count_moves_by_agent(players) {
            for (name, sum) in [("moves", moves), ("illegal", illegal), ("defaults", defaults)] {
                outcome.tool_metrics.insert(format!("game/{agent}.{name}"), sum);
            }
            let legal = moves - defaults;
            if legal + illegal > 0.0 {
                let fraction = legal / (legal + illegal);
                metrics.insert(format!("game/{agent}.legal"), vec![fraction]);
            }
            let without = f64::from(u8::from(defaults == 0.0));
            metrics.insert(format!("game/{agent}.no_default"), vec![without]);
        }
        for (name, values) in metrics {
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            outcome.tool_metrics.insert(name, clamp_finite(mean));
        }
        let result = |(seat, result): (&Seat, &SeatOutcome)| {
            format!("{} ({}): {}", seat.name, seat.role, result.reward)
        };
        let results: Vec<String> = self.seats.iter().zip(outcomes).map(result).collect();
        outcome.final_text = results.join("\n");
        let seats = self.seats.iter().zip(players).map(|(seat, player)| {
            json!({
                "name": seat.name,
                "role": seat.role,
                "side": seat.side,
                "agent": player.name,
                "illegal": player.illegal,
                "defaults": player.defaults,
            })
        });
        let record = json!({
            "name": game,
            "seed": self.seed,
            "seats": seats.collect::<Vec<_>>(),
            "moves": self.moves,
            "positions": self.positions,
        });
        if let Some(why) = levade_tools::depth_error(&record) {
            return Err(format!("the record of the game {game} cannot be stored: {why}"));
        }
        outcome.scorer_inputs.insert("game".to_owned(), record);
        // The scorer `program` takes these rewards.
        outcome.scorer_inputs.insert("program".to_owned(), json!({"rewards": rewards}));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use levade_policy::{Simulator, SimulatorConfig};

    use super::*;
    use crate::game::options::{GameOptions, GameRules};
    use crate::testing;

    #[test]
    fn reward_of_missing_move_is_rejected() {
        let options = GameOptions::new(
            GameRules::from_built_in_game("kuhn").unwrap(),
            Value::Null,
            "default",
        );
        let simulator = Arc::new(Simulator::new(SimulatorConfig::default()));
        let agent = testing::agent("default", testing::player("p", simulator), Vec::new());
        let start = levade_game::find("kuhn").unwrap().start(&Value::Null, 1).unwrap();
        let player = |seat: &Seat| {
            SeatPlayer::new("default@1".to_owned(), seat, (&agent, &agent.players[0]), &options)
        };
        let players: Vec<SeatPlayer> = start.seats.iter().map(player).collect();
        let record = MatchRecord::new("kuhn", 1, start.seats, &RunningMatch::BuiltIn(start.state));
        let outcomes = |transitions: &[(u32, f64)]| {
            [0, 1].map(|seat| SeatOutcome {
                seat,
                reward: 1.0,
                parts: Vec::new(),
                transitions: transitions.to_vec(),
            })
        };
        record.apply_to_outcome(&players, &outcomes(&[]), &mut Outcome::initial()).unwrap();
        let error =
            record.apply_to_outcome(&players, &outcomes(&[(2, 0.5)]), &mut Outcome::initial());
        let error = error.unwrap_err();
        assert!(error.contains("for the move 2 of the seat default@1"), "{error}");
        assert!(error.contains("made 0 moves"), "{error}");
    }
}
