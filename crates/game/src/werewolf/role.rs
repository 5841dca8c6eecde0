//! Roles and sides.

use serde::{Deserialize, Serialize};

/// Role of a player in werewolf.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Role {
    Wolf,
    /// A wolf who may shoot a player when exiled.
    WolfKing,
    Villager,
    Seer,
    Witch,
    /// A player of the good side who may shoot a player when dying, unless poisoned.
    Hunter,
    Guard,
}

/// Side of werewolf, whose players win or lose together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Side {
    Wolves,
    Good,
}

impl Role {
    /// Returns the name of the role. The role's texts have the same key.
    pub fn name(self) -> &'static str {
        match self {
            Role::Wolf => "wolf",
            Role::WolfKing => "wolf_king",
            Role::Villager => "villager",
            Role::Seer => "seer",
            Role::Witch => "witch",
            Role::Hunter => "hunter",
            Role::Guard => "guard",
        }
    }

    pub fn side(self) -> Side {
        match self {
            Role::Wolf | Role::WolfKing => Side::Wolves,
            _ => Side::Good,
        }
    }

    /// Returns whether the role belongs to the good side and has an ability.
    pub fn is_special(self) -> bool {
        self.side() == Side::Good && self != Role::Villager
    }

    /// Returns whether a player with the role may shoot when dying. Death by poison is excluded.
    pub fn can_shoot(self) -> bool {
        matches!(self, Role::Hunter | Role::WolfKing)
    }
}

impl Side {
    pub fn name(self) -> &'static str {
        match self {
            Side::Wolves => "wolves",
            Side::Good => "good",
        }
    }
}
