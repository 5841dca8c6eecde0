//! Ratios, and times of day, which are written alike.

use super::expression::Expr;
use super::lexer::Token;
use super::parser::{expression, split};

/// Numbers with colons between.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Ratio {
    /// The numbers; none for a time with a.m. or p.m.
    pub parts: Vec<Expr>,
    /// Seconds since midnight, if it can be a time: all but the first have two digits below 60, or a.m. or
    /// p.m. follows.
    pub clock: Option<u64>,
}

/// Maximum number of numbers in a ratio.
const MAX_PARTS: usize = 20;

/// Returns the ratio or the time that tokens write.
pub(super) fn ratio(tokens: &[Token]) -> Option<Ratio> {
    let noon = match tokens {
        [.., Token::Number { digits, .. }, Token::Text(word)] => match word.to_lowercase().as_str() {
            "am" => Some(false),
            "pm" => Some(true),
            "noon" | "midnight" if digits == "12" || digits == "00" => {
                Some(word.eq_ignore_ascii_case("noon"))
            }
            _ => None,
        },
        _ => None,
    };
    let is_hour = matches!(tokens.last(), Some(Token::Letter(letter)) if letter == "h")
        || matches!(tokens.last(), Some(Token::Text(word)) if ["hours", "hrs", "h"].contains(&word.as_str()));
    let tokens = if noon.is_some() || is_hour { &tokens[..tokens.len() - 1] } else { tokens };
    // Words before a time: at 2:30.
    let words = tokens.iter().take_while(|token| matches!(token, Token::Text(_))).count();
    let tokens = &tokens[words..];
    let parts = split(tokens, |token| *token == Token::Sign(':'));
    let fields: Option<Vec<u64>> = parts
        .iter()
        .map(|part| match part {
            [Token::Number { digits, scale: 0, decimal: false, .. }] if digits.len() <= 2 => {
                digits.parse().ok()
            }
            _ => None,
        })
        .collect();
    let two_digits = |part: &&[Token]| matches!(part, [Token::Number { digits, .. }] if digits.len() == 2);
    let clock = fields.filter(|fields| {
        fields.len() <= 3 && fields[1..].iter().all(|field| *field < 60) && parts[1..].iter().all(two_digits)
    });
    if let Some(is_afternoon) = noon {
        let fields = clock.filter(|fields| (1..=12).contains(&fields[0]))?;
        let seconds = seconds(&fields) % (12 * 3600) + if is_afternoon { 12 * 3600 } else { 0 };
        return Some(Ratio { parts: vec![], clock: Some(seconds) });
    }
    if !(2..=MAX_PARTS).contains(&parts.len()) {
        return None;
    }
    let parts: Option<Vec<Expr>> = parts.into_iter().map(expression).collect();
    Some(Ratio { parts: parts?, clock: clock.map(|fields| seconds(&fields)) })
}

fn seconds(fields: &[u64]) -> u64 {
    fields.iter().zip([3600, 60, 1]).map(|(field, unit)| field * unit).sum()
}
