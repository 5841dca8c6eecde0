//! Options of the game, and the rules that follow from them.

use serde::{Deserialize, Serialize};

use super::NAME;
use super::role::{Role, Side};
use crate::GameError;

/// Maximum value of `max_days`. Together with [`MAX_DISCUSSION_ROUNDS`], it bounds the record of a
/// match, which contains all positions.
const MAX_DAYS: u32 = 100;
const MAX_DISCUSSION_ROUNDS: u32 = 20;

/// Language of the prompts and announcements in werewolf.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Language {
    #[default]
    #[serde(rename = "en")]
    English,
    #[serde(rename = "zh")]
    Chinese,
}

/// Rule for a vote in which several players have the most votes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TieRule {
    /// No player dies after a tied vote.
    #[default]
    Nobody,
    /// Of the players with the most votes, the player with the lowest seat dies.
    First,
    /// Of the players with the most votes, a player whom the seed selects dies.
    Random,
}

/// Rewards of one side of werewolf.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct SideRewards {
    /// Reward of each player if the side wins.
    pub win: f64,
    /// Reward of each player if the side does not win.
    pub loss: f64,
}

impl Default for SideRewards {
    fn default() -> Self {
        SideRewards { win: 1.0, loss: 0.0 }
    }
}

/// Rewards of both sides of werewolf.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Rewards {
    pub wolves: SideRewards,
    pub good: SideRewards,
}

/// Options of werewolf. An option that is `None` has the default of the variant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Rules {
    /// Number of players: 7, 9 or 12.
    pub players: usize,
    pub language: Language,
    /// Rule for a tied vote by day.
    pub ties: TieRule,
    /// Rule for a tied vote of the wolves.
    pub wolf_ties: TieRule,
    /// Maximum number of rounds in which the wolves discuss in a night.
    pub discussion_rounds: u32,
    /// Maximum number of days. If no side has won by then, both sides have lost.
    pub max_days: u32,
    /// Whether the witch can heal herself. `None` for the default of the variant.
    pub self_heal: Option<bool>,
    /// Whether the seer learns the exact role of a player instead of the side. `None` for the
    /// default of the variant.
    pub seer_learns_role: Option<bool>,
    pub rewards: Rewards,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            players: 7,
            language: Language::default(),
            ties: TieRule::default(),
            wolf_ties: TieRule::default(),
            discussion_rounds: 3,
            max_days: 30,
            self_heal: None,
            seer_learns_role: None,
            rewards: Rewards::default(),
        }
    }
}

impl Rules {
    /// Returns the number of players for each role, in the order in which the instructions list the
    /// roles.
    pub fn role_counts(&self) -> &'static [(Role, usize)] {
        use Role::{Guard, Hunter, Seer, Villager, Witch, Wolf, WolfKing};
        match self.players {
            7 => &[(Wolf, 2), (Villager, 3), (Seer, 1), (Witch, 1)],
            9 => &[(Wolf, 3), (Villager, 3), (Seer, 1), (Witch, 1), (Hunter, 1)],
            12 => &[
                (Wolf, 3),
                (WolfKing, 1),
                (Villager, 4),
                (Seer, 1),
                (Witch, 1),
                (Hunter, 1),
                (Guard, 1),
            ],
            _ => &[],
        }
    }

    /// Returns the roles of all players, before they are shuffled.
    ///
    /// # Errors
    /// Returns [`GameError::Options`] if there is no variant for this number of players, or if a
    /// limit is out of range.
    pub fn roles(&self) -> Result<Vec<Role>, GameError> {
        let error = |message: String| GameError::Options { game: NAME.to_owned(), message };
        if self.role_counts().is_empty() {
            return Err(error(format!("players is {}, but must be 7, 9 or 12", self.players)));
        }
        let ranges = [
            ("max_days", self.max_days, 1, MAX_DAYS),
            ("discussion_rounds", self.discussion_rounds, 0, MAX_DISCUSSION_ROUNDS),
        ];
        for (name, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                let message = format!("{name} is {value}, but must be in {min}..={max}");
                return Err(error(message));
            }
        }
        let repeated = |(role, count): &(Role, usize)| std::iter::repeat_n(*role, *count);
        Ok(self.role_counts().iter().flat_map(repeated).collect())
    }

    /// Returns whether the wolves win when all villagers or all special roles are dead. In other
    /// variants, the wolves win when they are half of the living players.
    pub fn wins_by_group(&self) -> bool {
        self.players == 12
    }

    pub fn heals_self(&self) -> bool {
        self.self_heal.unwrap_or(self.players == 7)
    }

    pub fn seer_learns_role(&self) -> bool {
        self.seer_learns_role.unwrap_or(self.players == 9)
    }

    /// Returns the reward of a side at the end of a match. `winner` is `None` if no side has won.
    pub fn reward(&self, side: Side, winner: Option<Side>) -> f64 {
        let rewards = match side {
            Side::Wolves => self.rewards.wolves,
            Side::Good => self.rewards.good,
        };
        if winner == Some(side) { rewards.win } else { rewards.loss }
    }
}
