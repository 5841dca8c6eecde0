//! Grammars that constrain the output format of a completion.
//!
//! A sampler knows no text. A caller that knows the bytes of the vocabulary (`levade-text`) compiles a
//! [`Grammar`] into a [`Constraint`]. Before every token, the sampler queries the constraint for the tokens
//! that may come next; stop ids are allowed only where the format is complete. Forbidden tokens are never
//! sampled, so the sampled tokens come from another distribution than their log-probabilities, which are
//! those of the model. Such tokens are not targets.

use serde::{Deserialize, Serialize};

use crate::PolicyError;

/// A form that a reply is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that keeps to a schema, which is given as JSON.
    JsonSchema(String),
    /// A text that all of a regular expression matches.
    Regex(String),
    /// A text of a grammar in the Lark dialect of llguidance. Special tokens stand in it by their names:
    /// `<|im_end|>`.
    Lark(String),
}

impl Grammar {
    /// The name of its kind.
    pub fn kind(&self) -> &'static str {
        match self {
            Grammar::JsonObject => "JSON object",
            Grammar::JsonSchema(_) => "JSON schema",
            Grammar::Regex(_) => "regular expression",
            Grammar::Lark(_) => "Lark grammar",
        }
    }
}

/// Grammars over one vocabulary.
pub trait Grammars: Send + Sync {
    /// A constraint for a reply that has not begun. This can take a while: no thread on which others wait is
    /// to call it.
    ///
    /// # Errors
    /// [`PolicyError::Invalid`] with the reason, where the grammar is wrong or too large.
    fn start(&self, grammar: &Grammar) -> Result<Box<dyn Constraint>, PolicyError>;
}

/// What holds one reply to its grammar.
pub trait Constraint: Send {
    /// Tokens that may come next.
    ///
    /// # Errors
    /// When no text of the grammar begins as the reply does, or the grammar has become too large to follow.
    fn allowed(&mut self) -> Result<Allowed, PolicyError>;

    /// Goes on to the state after `token`, which is one of those that were allowed. Tokens that end the reply
    /// are not pushed.
    ///
    /// # Errors
    /// As [`allowed`](Self::allowed).
    fn push(&mut self, token: u32) -> Result<(), PolicyError>;
}

/// Tokens that may come next in a reply.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Allowed {
    /// Those that go on with it.
    pub tokens: TokenSet,
    /// Whether it may end here.
    pub may_end: bool,
}

/// A set of tokens, a bit for each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenSet(Vec<u32>);

impl TokenSet {
    /// The set of words of 32 bits, the lowest bit of the first being token 0.
    pub fn of_words(words: Vec<u32>) -> Self {
        TokenSet(words)
    }

    /// Whether `token` is in it.
    pub fn contains(&self, token: u32) -> bool {
        self.0.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Adds `token`.
    pub fn insert(&mut self, token: u32) {
        let at = token as usize / 32;
        if self.0.len() <= at {
            self.0.resize(at + 1, 0);
        }
        self.0[at] |= 1 << (token % 32);
    }

    /// Takes `token` out; says whether it was there.
    pub fn remove(&mut self, token: u32) -> bool {
        let was_there = self.contains(token);
        if was_there {
            self.0[token as usize / 32] &= !(1 << (token % 32));
        }
        was_there
    }

    /// Whether it has a token below `end`.
    pub fn has_below(&self, end: usize) -> bool {
        let whole = &self.0[..self.0.len().min(end / 32)];
        whole.iter().any(|word| *word != 0) || (end / 32 * 32..end).any(|token| self.contains(token as u32))
    }

    /// Makes the `adjusted` logits of tokens that are not in it −∞. Where adjustments leave none of those
    /// that are, these have their `raw` logits again.
    pub fn restrict(&self, adjusted: &mut [f32], raw: &[f32]) {
        if self.mask(adjusted) {
            return;
        }
        adjusted.copy_from_slice(raw);
        self.mask(adjusted);
    }

    /// Keeps logits of tokens in it and makes all others −∞; says whether one is left above that.
    fn mask(&self, logits: &mut [f32]) -> bool {
        let mut is_one_left = false;
        for (index, logits) in logits.chunks_mut(32).enumerate() {
            let word = self.0.get(index).copied().unwrap_or(0);
            if word == 0 {
                logits.fill(f32::NEG_INFINITY);
                continue;
            }
            for (bit, z) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *z = f32::NEG_INFINITY;
                }
                is_one_left |= *z > f32::NEG_INFINITY;
            }
        }
        is_one_left
    }
}

impl FromIterator<u32> for TokenSet {
    fn from_iter<I: IntoIterator<Item = u32>>(tokens: I) -> Self {
        let mut set = TokenSet::default();
        tokens.into_iter().for_each(|token| set.insert(token));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_hold_what_was_put_in() {
        let mut set: TokenSet = [3, 31, 32, 70].into_iter().collect();
        let held = |set: &TokenSet| (0..200).filter(|token| set.contains(*token)).collect::<Vec<u32>>();
        assert_eq!(held(&set), [3, 31, 32, 70]);
        assert!(set.remove(32) && !set.remove(32) && !set.remove(1000));
        assert_eq!(held(&set), [3, 31, 70]);
        assert_eq!(set, TokenSet::of_words(vec![1 << 3 | 1 << 31, 0, 1 << 6]));
    }

    #[test]
    fn logits_of_what_is_not_allowed_go() {
        let set: TokenSet = [1, 33, 70].into_iter().collect();
        let (raw, mut adjusted) = ([0.5; 40], [0.25; 40]);
        set.restrict(&mut adjusted, &raw);
        let left: Vec<usize> = (0..40).filter(|token| adjusted[*token] == 0.25).collect();
        assert_eq!(left, [1, 33]);
        assert!(adjusted.iter().all(|z| *z == 0.25 || *z == f32::NEG_INFINITY));
        // Adjustments that forbid what alone is allowed are left out.
        let mut forbidden = [0.25; 40];
        (forbidden[1], forbidden[33]) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        set.restrict(&mut forbidden, &raw);
        assert_eq!([forbidden[1], forbidden[33]], [0.5, 0.5]);
        assert_eq!(forbidden.iter().filter(|z| **z > f32::NEG_INFINITY).count(), 2);
        assert!(set.has_below(2) && set.has_below(40) && !set.has_below(1));
        assert!(!TokenSet::default().has_below(100));
    }

    #[test]
    fn grammars_survive_json() {
        for (grammar, json) in [
            (Grammar::JsonObject, r#""json_object""#),
            (Grammar::JsonSchema("{}".into()), r#"{"json_schema":"{}"}"#),
            (Grammar::Regex("a+".into()), r#"{"regex":"a+"}"#),
            (Grammar::Lark("start: \"a\"".into()), r#"{"lark":"start: \"a\""}"#),
        ] {
            assert_eq!(serde_json::to_string(&grammar).unwrap(), json);
            assert_eq!(serde_json::from_str::<Grammar>(json).unwrap(), grammar);
        }
    }
}
