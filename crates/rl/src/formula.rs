//! Formulas of losses as text, for the display of single tokens.

use crate::Loss;
use crate::loss::PolicyLoss;

impl Loss {
    /// Returns the formula of one term's loss, without its weight. Symbols: p is the token's probability, ρ
    /// the ratio to the old policy, A the advantage, x = ln ρ, c the correction, D the KL estimate, H the
    /// entropy, and sg(·) marks a factor without gradient.
    pub fn formula(&self) -> String {
        let mut text = self.policy.formula();
        if self.policy != PolicyLoss::CrossEntropy && !self.is_of_values() {
            text = format!("c · ({text})");
        }
        if let Some(penalty) = &self.kl {
            text = format!("{text} + {} · D", penalty.coefficient);
        }
        if self.entropy != 0.0 {
            text = format!("{text} − {} · H", self.entropy);
        }
        text
    }
}

impl PolicyLoss {
    fn formula(&self) -> String {
        match *self {
            PolicyLoss::CrossEntropy => "−ln p".into(),
            PolicyLoss::Reinforce => "−A ln p".into(),
            PolicyLoss::ImportanceSampling => "−A ρ".into(),
            PolicyLoss::Clip { low, high, dual, .. } => {
                let clip = format!("max(−A ρ, −A clip(ρ, {}, {}))", 1.0 - low, 1.0 + high);
                dual.map_or(clip.clone(), |dual| format!("{clip}, at most −{dual} A if A < 0"))
            }
            PolicyLoss::MiniRl { .. } => "−sg(ρ) A ln p, 0 outside of the trust region".into(),
            PolicyLoss::Cispo { low, high } => {
                format!("−sg(clip(ρ, {}, {})) A ln p", 1.0 - low, 1.0 + high)
            }
            PolicyLoss::Gspo { low, high } => {
                format!("max(−A ρ, −A clip(ρ, {}, {})), ρ of the sequence", 1.0 - low, 1.0 + high)
            }
            PolicyLoss::GeometricMean { low, high } => {
                format!("−A times the geometric mean of the sequence's ρ, each x clipped at −{low} or {high}")
            }
            PolicyLoss::SoftGate { positive, negative } => {
                format!("−(4/τ) A sigmoid(τ (ρ − 1)), τ = {positive} if A > 0, else {negative}")
            }
            PolicyLoss::Direct { beta } => format!("−(A ln p − ½ · {beta} · x²)"),
            PolicyLoss::Divergence { cap, .. } => {
                format!("−A sg(min(ρ, {cap})) ln p, 0 where p has left the old policy too far")
            }
            PolicyLoss::KlCov { coefficient, .. } => format!("−A ρ, + {coefficient} |x| if marked"),
            PolicyLoss::ClipCov { low, high, .. } => {
                let (low, high) = (1.0 - low, 1.0 + high);
                format!("max(−A ρ, −A clip(ρ, {low}, {high})), 0 if marked")
            }
            PolicyLoss::Value { clip: None } => "½ (V − R)²".into(),
            PolicyLoss::Value { clip: Some(clip) } => {
                format!("½ max((V − R)², (V within {clip} of the old V − R)²)")
            }
        }
    }
}
