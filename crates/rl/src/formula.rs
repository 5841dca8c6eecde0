//! Formulas of losses as text, for the display of single tokens.

use crate::Loss;
use crate::loss::PolicyLoss;

impl Loss {
    /// Returns the formula of one term's loss, without its weight. Symbols: p is the token's
    /// probability, ρ the ratio to the old policy, A the advantage, x = ln ρ, c the correction, D
    /// the KL estimate, H the entropy, and sg(·) marks a factor without gradient.
    pub fn formula(&self) -> String {
        let mut text = self.policy.formula();
        if self.policy != PolicyLoss::CrossEntropy && !self.trains_values() {
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
            PolicyLoss::Clip { low, high, dual, trust, keep } => {
                let low = 1.0 - low;
                let high = 1.0 + high;
                let mut text = format!("max(−A ρ, −A clip(ρ, {low}, {high}))");
                if let Some(dual) = dual {
                    text += &format!(", at most −{dual} A if A < 0");
                }
                if let Some(keep) = keep {
                    let below = keep.below * low;
                    let above = keep.above * high;
                    let [below, above] = [below, above].map(|part| {
                        if keep.in_value_only {
                            format!("max(−A ρ, −A · {part} / ρ)")
                        } else {
                            format!("−A · {part}")
                        }
                    });
                    text += &format!(", {below} if A < 0 and ρ < {low}");
                    text += &format!(", {above} if A > 0 and ρ > {high}");
                }
                if trust.is_some() {
                    text += ", 0 outside of the trust region";
                }
                text
            }
            PolicyLoss::MiniRl { .. } => "−sg(ρ) A ln p, 0 outside of the trust region".into(),
            PolicyLoss::Cispo { low, high } => {
                format!("−sg(clip(ρ, {}, {})) A ln p", 1.0 - low, 1.0 + high)
            }
            PolicyLoss::Gspo { low, high } => {
                format!("max(−A ρ, −A clip(ρ, {}, {})), ρ of the sequence", 1.0 - low, 1.0 + high)
            }
            PolicyLoss::GeometricMean { low, high } => {
                format!(
                    "−A times the geometric mean of the sequence's ρ, each x clipped at −{low} or \
                     {high}"
                )
            }
            PolicyLoss::SoftGate { positive, negative } => {
                format!("−(4/τ) A sigmoid(τ (ρ − 1)), τ = {positive} if A > 0, else {negative}")
            }
            PolicyLoss::Direct { beta } => format!("−(A ln p − ½ · {beta} · x²)"),
            PolicyLoss::Divergence { cap, .. } => {
                format!("−A sg(min(ρ, {cap})) ln p, 0 if p is too far from the old policy")
            }
            PolicyLoss::KlCov { coefficient, .. } => format!("−A ρ, + {coefficient} |x| if marked"),
            PolicyLoss::ClipCov { low, high, .. } => {
                let low = 1.0 - low;
                let high = 1.0 + high;
                format!("max(−A ρ, −A clip(ρ, {low}, {high})), 0 if marked")
            }
            PolicyLoss::Value { clip: None } => "½ (V − R)²".into(),
            PolicyLoss::Value { clip: Some(clip) } => {
                format!("½ max((V − R)², (V within {clip} of the old V − R)²)")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss::{KeepGradient, TrustRegion};

    fn clip_formula(
        dual: Option<f64>,
        trust: Option<TrustRegion>,
        keep: Option<KeepGradient>,
    ) -> String {
        PolicyLoss::Clip { low: 0.5, high: 1.0, dual, trust, keep }.formula()
    }

    #[test]
    fn clip_formula_contains_all_parts() {
        let clip = "max(−A ρ, −A clip(ρ, 0.5, 2))";
        assert_eq!(clip_formula(None, None, None), clip);
        assert_eq!(clip_formula(Some(3.0), None, None), format!("{clip}, at most −3 A if A < 0"));
        let keep = KeepGradient { below: 0.5, above: 0.25, in_value_only: false };
        assert_eq!(
            clip_formula(None, Some(TrustRegion::default()), Some(keep)),
            format!(
                "{clip}, −A · 0.25 if A < 0 and ρ < 0.5, −A · 0.5 if A > 0 and ρ > 2, \
                 0 outside of the trust region"
            )
        );
        let keep = KeepGradient { in_value_only: true, ..keep };
        let formula = clip_formula(None, None, Some(keep));
        assert!(formula.contains("max(−A ρ, −A · 0.5 / ρ) if A > 0 and ρ > 2"), "{formula}");
    }
}
