//! Values of `[reward]`.

use dressage_reward::ScorerKind;

use super::RecipeError;
use super::check::Checker;
use super::reward::{RewardKeys, ScorerKeys, Unscored};

impl Checker<'_> {
    /// Numbers that are, scorers with sound settings, names of their own.
    pub(super) fn reward(&self, reward: &RewardKeys) -> Result<(), RecipeError> {
        let shaping = [
            ("malformed_call", reward.malformed_call),
            ("failed_call", reward.failed_call),
            ("unfinished", reward.unfinished),
            ("broken", reward.broken.unwrap_or(0.0)),
        ];
        for (name, value) in shaping {
            self.check(value.is_finite(), format!("reward.{name}"), value, "finite")?;
        }
        self.seconds("reward.outage_seconds", reward.outage_seconds)?;
        self.unscored("reward.unscored", Some(reward.unscored))?;
        self.scorer("reward.scorer", &reward.scorer)?;
        for (i, scorer) in reward.scorers.iter().enumerate() {
            let key = |name: &str| format!("reward.scorers.{i}.{name}");
            let ScorerKeys { name, weight, weights, unscored, scorer: kind, .. } = scorer;
            let is_name = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
            let taken = reward.scorers[..i].iter().any(|earlier| earlier.name == *name);
            self.check(
                !name.is_empty() && name.chars().all(is_name) && !taken,
                key("name"),
                format!("{name:?}"),
                "a name that no other scorer has, of letters, digits, `_` and `-`",
            )?;
            self.check(weight.is_finite(), key("weight"), weight, "finite")?;
            for (part, weight) in weights {
                self.check(weight.is_finite(), key(&format!("weights.{part}")), weight, "finite")?;
            }
            self.unscored(&key("unscored"), *unscored)?;
            self.scorer(&format!("reward.scorers.{i}"), kind)?;
        }
        Ok(())
    }

    fn unscored(&self, key: &str, unscored: Option<Unscored>) -> Result<(), RecipeError> {
        let Some(Unscored::Value(value)) = unscored else { return Ok(()) };
        self.check(value.is_finite(), key, value, "finite")
    }

    fn scorer(&self, key: &str, kind: &ScorerKind) -> Result<(), RecipeError> {
        let Err(error) = kind.check() else { return Ok(()) };
        self.check(false, key, format!("not usable ({error})"), "a scorer with sound settings")
    }
}
