//! Quantities: a value, separated from the words next to it.
//!
//! All values of the answer and of the expected answer are parsed here. Bounds, units with their
//! powers, directions and names are moved from a value into the corresponding fields of
//! [`NumberDescription`].

use super::expression::{Expr, MathConstant};
use super::lexer::Token;
use super::parser::parse_expression;
use crate::words::{self, NumberDescription};

/// A mathematical value, with the words and units next to it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Quantity {
    pub value: Expr,
    /// Whether the value is written as a percentage.
    pub percent: bool,
    pub about: NumberDescription,
}

impl Quantity {
    /// Creates a quantity from a value that has no words next to it.
    pub fn from_value(value: Expr) -> Self {
        Quantity { value, percent: false, about: NumberDescription::default() }
    }
}

/// Parses tokens as a value with the words next to it. Returns `None` if they are not an
/// expression.
pub(super) fn parse_quantity(tokens: &[Token]) -> Option<Quantity> {
    let mut about = NumberDescription::default();
    let mut kept = extract_bounds(tokens, &mut about);
    // Words at the start and after a percent sign are names.
    let is_name = |word: &str| words::parse_units(word).is_none();
    while let [Token::Text(word), _, ..] = &kept[..]
        && is_name(word)
    {
        about.add_person(word);
        about.add_words(word);
        kept.remove(0);
    }
    let percent = kept.iter().rposition(|token| *token == Token::Sign('%'));
    let percent =
        percent.filter(|at| kept[at + 1..].iter().all(|token| matches!(token, Token::Text(_))));
    if let Some(at) = percent {
        for token in kept.drain(at..) {
            if let Token::Text(word) = token {
                about.add_words(&word);
            }
        }
    }
    let value = strip_modifiers(parse_expression(&kept)?, &mut about);
    Some(Quantity { value, percent: percent.is_some(), about })
}

/// Moves phrases that are bounds, such as "at least", from the tokens to `about`, and returns the
/// remaining tokens.
fn extract_bounds(tokens: &[Token], about: &mut NumberDescription) -> Vec<Token> {
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        let words: Vec<&str> = tokens[at..]
            .iter()
            .take(8)
            .map_while(|token| match token {
                Token::Text(word) => Some(word.as_str()),
                _ => None,
            })
            .collect();
        if let Some(bearing) = words::compass_bearing(&words) {
            about.directions.push(bearing);
            at += 3;
            continue;
        }
        let before_value = matches!(
            tokens.get(at + words.len()),
            Some(Token::Number { .. } | Token::Command(_) | Token::Sign('-'))
        );
        let is_behind = at > 0 && matches!(tokens[at - 1], Token::Number { .. } | Token::Sign('%'));
        let behind = words.first().filter(|_| is_behind && words.len() == 1);
        let behind =
            behind.and_then(|word| words::bound_after_number(word)).map(|bound| (bound, 1));
        match words::parse_bound(&words, before_value).or(behind) {
            Some((bound, taken)) => {
                about.bounds.push(bound);
                at += taken;
            }
            None => {
                kept.push(tokens[at].clone());
                at += 1;
            }
        }
    }
    kept
}

/// Moves words and units from an expression to `about`, and returns the remaining expression. An
/// expression that consists of words only is kept, as are measures in several units.
pub(super) fn strip_modifiers(expression: Expr, about: &mut NumberDescription) -> Expr {
    match expression {
        Expr::Negative(inner) => Expr::Negative(Box::new(strip_modifiers(*inner, about))),
        Expr::Sum(parts) => {
            let mut abouts = vec![NumberDescription::default(); parts.len()];
            let kept: Vec<Expr> = parts
                .iter()
                .zip(&mut abouts)
                .map(|(part, about)| strip_modifiers(part.clone(), about))
                .collect();
            let mut units =
                abouts.iter().map(|about| &about.units).filter(|units| !units.is_empty());
            let first = units.next().cloned();
            let is_mixed = first.as_ref().is_some_and(|first| units.any(|units| units != first));
            for own in abouts {
                own.names.iter().for_each(|name| about.add_words(name));
                about.directions.extend(own.directions);
            }
            if is_mixed {
                return Expr::Sum(parts.into_iter().map(canonicalize_units).collect());
            }
            for (unit, power) in first.unwrap_or_default() {
                about.add_unit(unit, power);
            }
            Expr::Sum(kept)
        }
        Expr::Product(factors) => {
            let factors: Vec<Expr> = factors
                .into_iter()
                .flat_map(|factor| match factor {
                    Expr::Product(inner) => inner,
                    factor => vec![factor],
                })
                .collect();
            let (modifiers, kept): (Vec<&Expr>, Vec<&Expr>) =
                factors.iter().partition(|factor| is_modifier(factor));
            if kept.is_empty() {
                return Expr::Product(factors);
            }
            UnitParser::default().add(&modifiers, 1, about);
            let mut kept: Vec<Expr> =
                kept.into_iter().map(|factor| strip_modifiers(factor.clone(), about)).collect();
            if kept.len() == 1 { kept.remove(0) } else { Expr::Product(kept) }
        }
        other => other,
    }
}

/// Returns whether an expression consists of units and words only.
fn is_modifier(expression: &Expr) -> bool {
    match expression {
        Expr::Unit(_) | Expr::Constant(MathConstant::Degree) => true,
        Expr::Power(base, _) => is_modifier(base),
        Expr::Product(factors) => factors.iter().all(is_modifier),
        _ => false,
    }
}

/// Replaces each unit of an expression by the unit's canonical name.
fn canonicalize_units(expression: Expr) -> Expr {
    match expression {
        Expr::Unit(word) => match words::parse_units(&word).as_deref() {
            Some([(unit, 1)]) => Expr::Unit((*unit).to_owned()),
            _ => Expr::Unit(word),
        },
        Expr::Product(factors) => {
            Expr::Product(factors.into_iter().map(canonicalize_units).collect())
        }
        Expr::Negative(inner) => Expr::Negative(Box::new(canonicalize_units(*inner))),
        other => other,
    }
}

/// Parser state for the words and units next to a value.
#[derive(Default)]
struct UnitParser {
    /// Power that "square" or "cubic" gives to the next unit. `None` without such a word.
    power: Option<i32>,
    /// Whether the preceding word is "light", after which a year is a unit of length.
    light: bool,
    /// Whether a "per" precedes. The powers of all units after it are negative.
    per: bool,
    /// The last unit and its power. `None` before the first unit.
    last: Option<(&'static str, i32)>,
}

impl UnitParser {
    fn add(&mut self, modifiers: &[&Expr], power: i32, about: &mut NumberDescription) {
        for (at, factor) in modifiers.iter().enumerate() {
            match factor {
                Expr::Unit(word) => self.add_word(word, at + 1 == modifiers.len(), power, about),
                Expr::Constant(MathConstant::Degree) => self.add_unit("degree", power, about),
                Expr::Product(factors) => {
                    self.add(&factors.iter().collect::<Vec<_>>(), power, about)
                }
                Expr::Power(base, exponent) => {
                    let exponent = small_integer_exponent(exponent).unwrap_or(1);
                    self.add(&[base], power.saturating_mul(exponent), about);
                }
                _ => {}
            }
        }
    }

    fn add_word(&mut self, word: &str, is_last: bool, power: i32, about: &mut NumberDescription) {
        let after_degree = self.last == Some(("degree", 1));
        let heat = match word {
            "C" | "c" | "celsius" | "centigrade" => Some("celsius"),
            "F" | "f" | "fahrenheit" => Some("fahrenheit"),
            "K" | "k" | "kelvin" => Some("kelvin"),
            _ => None,
        };
        let bearing = match word {
            "N" => Some("north"),
            "S" => Some("south"),
            "E" => Some("east"),
            "W" => Some("west"),
            _ => None,
        };
        match word {
            _ if after_degree && bearing.is_some() => about.add_words(bearing.unwrap_or_default()),
            // A time of day that was not parsed.
            "am" | "pm" => about.bounds.push("time"),
            "square" | "sq" => self.power = Some(2),
            "cubic" | "cu" => self.power = Some(3),
            "per" | "an" | "each" if is_last => {}
            "per" => self.per = true,
            "light" if !is_last => self.light = true,
            "year" | "years" if self.light => {
                self.light = false;
                self.add_unit("lightyear", power, about);
            }
            "squared" | "cubed" => {
                let more = if word == "squared" { 1 } else { 2 };
                match self.last {
                    Some((unit, power)) => about.add_unit(unit, power * more),
                    None => about.bounds.push("power"),
                }
            }
            // A preposition, unless it is the last word.
            "in" if !is_last => {}
            _ => match (heat, words::parse_units(word)) {
                (Some(heat), _) if after_degree => {
                    about.add_unit("degree", -1);
                    self.add_unit(heat, power, about);
                }
                (_, Some(units)) => {
                    for (unit, own) in units {
                        self.add_unit(unit, own * power, about);
                    }
                }
                _ => match words::unit_of_letter(word) {
                    Some(unit) => self.add_unit(unit, power, about),
                    None => about.add_words(word),
                },
            },
        }
    }

    fn add_unit(&mut self, unit: &'static str, power: i32, about: &mut NumberDescription) {
        let power =
            self.power.take().unwrap_or(1).saturating_mul(power) * if self.per { -1 } else { 1 };
        about.add_unit(unit, power);
        self.last = Some((unit, power));
    }
}

/// Returns the value of an integer exponent below 100, or `None` for any other exponent.
fn small_integer_exponent(expr: &Expr) -> Option<i32> {
    match expr {
        Expr::Number(literal) if literal.is_integer() => {
            literal.digits.parse().ok().filter(|power| *power < 100)
        }
        Expr::Negative(inner) => small_integer_exponent(inner).map(|power| -power),
        _ => None,
    }
}
