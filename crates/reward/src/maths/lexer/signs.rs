//! Signs whose meaning depends on the tokens around them.

use super::*;

/// Returns whether a text starts with two capital letters in braces, the name of a line segment:
/// {AB}.
pub(super) fn starts_with_segment_name(text: &str) -> bool {
    let inside = text.trim_start().strip_prefix('{').and_then(|text| text.split_once('}'));
    inside.is_some_and(|(points, _)| {
        points.trim().len() == 2 && points.trim().bytes().all(|letter| letter.is_ascii_uppercase())
    })
}

/// Resolves ambiguous signs of a formula. Between numbers and relations, ∧ and ∨ join answers. Next
/// to a number, ∼ and ≅ mean that the number is rounded.
pub(super) fn resolve_ambiguous_signs(tokens: &mut [Token]) {
    let joins = tokens.iter().any(|token| {
        matches!(
            token,
            Token::Number { .. } | Token::Sign('=' | '≈' | '<' | '>' | '≤' | '≥' | '≠' | '∈')
        )
    });
    let is_value =
        |token: Option<&Token>| matches!(token, Some(Token::Number { .. } | Token::Sign('-')));
    for at in 0..tokens.len() {
        match tokens[at] {
            Token::Sign('∧') if joins => tokens[at] = Token::And,
            Token::Sign('∨') if joins => tokens[at] = Token::Or,
            Token::Sign('≅' | '∼')
                if is_value(tokens.get(at + 1))
                    || is_value(at.checked_sub(1).map(|at| &tokens[at])) =>
            {
                tokens[at] = Token::Sign('≈');
            }
            _ => {}
        }
    }
}
