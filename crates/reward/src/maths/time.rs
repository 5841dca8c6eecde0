//! Parses ratios and times of day, which have the same notation.

use super::expression::Expr;
use super::lexer::Token;
use super::parser::{parse_expression, split_outside_brackets};
use crate::words::{self, NumberDescription};

/// A ratio or a time: numbers separated by colons.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Ratio {
    /// The numbers of the ratio. Empty for a time with a.m. or p.m.
    pub parts: Vec<Expr>,
    /// Seconds since midnight, or `None` if the numbers cannot be a time. In a time, all numbers
    /// but the first have two digits and are below 60, or a.m. or p.m. follows.
    pub clock: Option<u64>,
    /// Names of the compared things: a and b in a : b = 2 : 3. Empty if they have no names.
    pub names: Vec<Expr>,
    /// Whether the ratio is in words, such as 2 to 3. It can then also be a range.
    pub is_in_words: bool,
    /// Description of the time: days, months, time zones and parts of the day next to it.
    pub about: NumberDescription,
}

/// Maximum number of numbers in a ratio. The ratio 2 : 3 has two.
const MAX_PARTS: usize = 20;

/// Parses tokens as a ratio such as 2 : 3, or as a time. Returns `None` for any other tokens.
pub(super) fn parse_ratio(tokens: &[Token]) -> Option<Ratio> {
    let text = |token: &Token| match token {
        Token::Text(word) => word.to_lowercase(),
        _ => String::new(),
    };
    let word = |token: &Token| match token {
        Token::Text(word) | Token::Letter(word) => {
            words::time_zone_or_day(word).or_else(|| words::direction_kind(&word.to_lowercase()))
        }
        _ => None,
    };
    let all = tokens;
    let about = || {
        let mut about = NumberDescription {
            directions: all.iter().filter_map(word).collect(),
            ..NumberDescription::default()
        };
        about
            .directions
            .retain(|(kind, _)| ["day", "month", "zone", "relative day", "daytime"].contains(kind));
        about
    };
    // 9:00 pm EST, 5 pm on Monday
    let is_word = |token: &Token| matches!(token, Token::Text(_) | Token::Letter(_));
    let behind = tokens.iter().rev().take_while(|token| is_word(token)).count();
    let (clock, trailing_words) = tokens.split_at(tokens.len() - behind);
    let is_noon =
        trailing_words.first().is_some_and(|first| ["am", "pm"].contains(&text(first).as_str()));
    let tokens = if is_noon { &tokens[..=clock.len()] } else { tokens };
    let daytime = match tokens {
        [rest @ .., a, b, c] if (text(a).as_str(), text(b).as_str()) == ("in", "the") => {
            let is_afternoon = ["afternoon", "evening"].contains(&text(c).as_str());
            let is_known = is_afternoon || text(c) == "morning";
            let is_clock = rest.contains(&Token::Sign(':'));
            (is_known && is_clock).then_some((rest, is_afternoon))
        }
        _ => None,
    };
    let noon = match tokens {
        _ if daytime.is_some() => daytime.map(|(_, is_afternoon)| is_afternoon),
        [.., Token::Number { digits, .. }, Token::Text(word)] => match word.to_lowercase().as_str()
        {
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
        || matches!(tokens.last(), Some(Token::Text(word)) if ["hours", "hrs", "h", "Uhr"].contains(&word.as_str()));
    let tokens = match daytime {
        Some((rest, _)) => rest,
        None if noon.is_some() || is_hour => &tokens[..tokens.len() - 1],
        None => tokens,
    };
    // Words before a time: at 2:30.
    let words = tokens.iter().take_while(|token| matches!(token, Token::Text(_))).count();
    let tokens = &tokens[words..];
    let is_to = |token: &Token| matches!(token, Token::Text(word) if word == "to");
    let is_in_words = tokens.len() > 2
        && tokens.iter().enumerate().all(|(at, token)| match at % 2 {
            0 => matches!(token, Token::Number { .. }),
            _ => is_to(token),
        });
    let parts = split_outside_brackets(tokens, |token| {
        *token == Token::Sign(':') || (is_in_words && is_to(token))
    });
    let fields: Option<Vec<u64>> = parts
        .iter()
        .map(|part| match part {
            [Token::Number { digits, scale: 0, decimal: false, .. }] if digits.len() <= 2 => {
                digits.parse().ok()
            }
            _ => None,
        })
        .collect();
    let two_digits =
        |part: &&[Token]| matches!(part, [Token::Number { digits, .. }] if digits.len() == 2);
    let clock = fields.filter(|fields| {
        !is_in_words
            && fields.len() <= 3
            && fields[1..].iter().all(|field| *field < 60)
            && parts[1..].iter().all(two_digits)
    });
    if let Some(is_afternoon) = noon {
        let fields = clock.filter(|fields| (1..=12).contains(&fields[0]))?;
        let seconds = seconds_since_midnight(&fields) % (12 * 3600)
            + if is_afternoon { 12 * 3600 } else { 0 };
        return Some(Ratio {
            parts: vec![],
            clock: Some(seconds),
            names: vec![],
            is_in_words: false,
            about: about(),
        });
    }
    if !(2..=MAX_PARTS).contains(&parts.len()) {
        return None;
    }
    let parts: Option<Vec<Expr>> = parts.into_iter().map(parse_expression).collect();
    let clock = clock.map(|fields| seconds_since_midnight(&fields));
    Some(Ratio { parts: parts?, clock, names: vec![], is_in_words, about: about() })
}

fn seconds_since_midnight(fields: &[u64]) -> u64 {
    fields.iter().zip([3600, 60, 1]).map(|(field, unit)| field * unit).sum()
}
