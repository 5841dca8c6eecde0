//! Grammars that constrain the output format of a completion.
//!
//! A sampler knows no text. A caller that knows the bytes of the vocabulary (`levade-text`)
//! compiles a [`Grammar`] into a [`Constraint`]. Before every token, the sampler queries the
//! constraint for the tokens that may come next. Stop ids are allowed only when the format is
//! complete. Forbidden tokens are never sampled, so the sampled tokens come from another
//! distribution than their log-probabilities, which are those of the model. Such tokens are not
//! targets.

use serde::{Deserialize, Serialize};

use crate::PolicyError;

/// Output format that a completion must have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// The completion is any JSON object.
    JsonObject,
    /// The completion is JSON that matches a JSON schema. The string contains the schema as JSON.
    JsonSchema(String),
    /// The completion is a text that this regular expression matches completely.
    Regex(String),
    /// The completion is a text of this grammar in the Lark dialect of llguidance. The grammar
    /// refers to special tokens by their names, such as `<|im_end|>`.
    Lark(String),
}

impl Grammar {
    /// Returns the name of the grammar's kind, such as "JSON schema", for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Grammar::JsonObject => "JSON object",
            Grammar::JsonSchema(_) => "JSON schema",
            Grammar::Regex(_) => "regular expression",
            Grammar::Lark(_) => "Lark grammar",
        }
    }
}

/// Compiler of grammars over one vocabulary.
pub trait Grammars: Send + Sync {
    /// Creates the constraint for an empty completion. The compilation can be slow, so it must not
    /// run on a thread that other work waits for, such as a thread of the async runtime.
    ///
    /// # Errors
    /// Returns [`PolicyError::Invalid`] with the reason if the grammar is invalid or too large.
    fn start(&self, grammar: &Grammar) -> Result<Box<dyn Constraint>, PolicyError>;
}

/// Grammar constraint on one completion, in the state after the tokens of the completion so far.
pub trait Constraint: Send {
    /// Returns the tokens that may come next in the completion.
    ///
    /// # Errors
    /// Returns an error if no text of the grammar starts as the completion does, or if the
    /// grammar's state has become too large.
    fn allowed(&mut self) -> Result<AllowedTokens, PolicyError>;

    /// Advances the constraint to the state after `token`, which must be an allowed token. Tokens
    /// that end the completion are not pushed.
    ///
    /// # Errors
    /// Returns the same errors as [`allowed`](Self::allowed).
    fn push(&mut self, token: u32) -> Result<(), PolicyError>;
}

/// Tokens that may come next in a completion.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AllowedTokens {
    /// Tokens that continue the completion.
    pub tokens: TokenSet,
    /// Whether the completion may end here.
    pub may_end: bool,
}

/// A set of token ids, stored as a bitmap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenSet(Vec<u32>);

impl TokenSet {
    /// Creates a set from 32-bit words. The lowest bit of the first word is token 0.
    pub fn from_words(words: Vec<u32>) -> Self {
        TokenSet(words)
    }

    /// Returns whether the set contains `token`.
    pub fn contains(&self, token: u32) -> bool {
        self.0.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Adds `token` to the set.
    pub fn insert(&mut self, token: u32) {
        let at = token as usize / 32;
        if self.0.len() <= at {
            self.0.resize(at + 1, 0);
        }
        self.0[at] |= 1 << (token % 32);
    }

    /// Removes `token` and returns whether the set contained it.
    pub fn remove(&mut self, token: u32) -> bool {
        let was_present = self.contains(token);
        if was_present {
            self.0[token as usize / 32] &= !(1 << (token % 32));
        }
        was_present
    }

    /// Returns whether the set contains a token id less than `end`.
    pub fn has_below(&self, end: usize) -> bool {
        let full_words = &self.0[..self.0.len().min(end / 32)];
        full_words.iter().any(|word| *word != 0)
            || (end / 32 * 32..end).any(|token| self.contains(token as u32))
    }

    /// Sets the `adjusted` logits of tokens outside the set to −∞. If the adjustments have also set
    /// all logits of the set's tokens to −∞, these tokens get their `raw` logits back.
    pub fn restrict(&self, adjusted: &mut [f32], raw: &[f32]) {
        if self.mask(adjusted) {
            return;
        }
        adjusted.copy_from_slice(raw);
        self.mask(adjusted);
    }

    /// Sets the logits of tokens outside the set to −∞. Returns whether any remaining logit exceeds
    /// −∞.
    fn mask(&self, logits: &mut [f32]) -> bool {
        let mut any_left = false;
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
                any_left |= *z > f32::NEG_INFINITY;
            }
        }
        any_left
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
    fn token_set_contains_inserted_tokens_until_removed() {
        let mut set: TokenSet = [3, 31, 32, 70].into_iter().collect();
        assert_eq!(contents(&set), [3, 31, 32, 70]);
        assert!(set.remove(32) && !set.remove(32) && !set.remove(1000));
        assert_eq!(contents(&set), [3, 31, 70]);
        assert_eq!(set, TokenSet::from_words(vec![1 << 3 | 1 << 31, 0, 1 << 6]));
    }

    fn contents(set: &TokenSet) -> Vec<u32> {
        (0..200).filter(|token| set.contains(*token)).collect::<Vec<u32>>()
    }

    #[test]
    fn token_set_masks_logits_outside_the_set() {
        let set: TokenSet = [1, 33, 70].into_iter().collect();
        let raw = [0.5; 40];
        let mut adjusted = [0.25; 40];
        set.restrict(&mut adjusted, &raw);
        let unmasked: Vec<usize> = (0..40).filter(|token| adjusted[*token] == 0.25).collect();
        assert_eq!(unmasked, [1, 33]);
        assert!(adjusted.iter().all(|z| *z == 0.25 || *z == f32::NEG_INFINITY));
        // Adjustments that forbid all allowed tokens are ignored.
        let mut forbidden = [0.25; 40];
        (forbidden[1], forbidden[33]) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        set.restrict(&mut forbidden, &raw);
        assert_eq!([forbidden[1], forbidden[33]], [0.5, 0.5]);
        assert_eq!(forbidden.iter().filter(|z| **z > f32::NEG_INFINITY).count(), 2);
        assert!(set.has_below(2) && set.has_below(40) && !set.has_below(1));
        assert!(!TokenSet::default().has_below(100));
    }

    #[test]
    fn grammar_round_trips_through_json() {
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
