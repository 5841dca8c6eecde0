//! Words next to numbers: number words, magnitudes, signs, bounds, directions and units.
//!
//! Each word has one of four effects. A magnitude multiplies the number (5 million), a sign word
//! negates it (minus 5), a bound turns it into a different statement (at least 5), and any other
//! word describes it. Descriptions are compared only if both sides have one of the same kind: a
//! unit with a unit, an increase with a decrease, a month with a month. Words are compared in lower
//! case.

use crate::languages;

mod directions;

use self::directions::exclusive_group;
pub(crate) use self::directions::{
    compass_bearing, direction_kind, is_month, month_name, time_zone_or_day,
};
pub(crate) use crate::bounds::{bound_after_number, parse_bound};
pub(crate) use crate::units::{can_follow_in_measure, parse_units, unit_of_letter};

/// Description of a number by the words next to it: bounds, directions, units and names.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NumberDescription {
    /// Bounds of the number: `≥`, `<`, `≠`. A number without the same bounds does not match.
    pub bounds: Vec<&'static str>,
    /// Words for directions and months next to the number, each with its kind.
    pub directions: Vec<(&'static str, &'static str)>,
    /// Known units of the number with their powers, sorted.
    pub units: Vec<(&'static str, i32)>,
    /// All other words next to the number, in lower case.
    pub names: Vec<String>,
    /// First names before the number, in lower case: Alice 5.
    pub people: Vec<String>,
}

/// First names that are common in word problems, separated by spaces. Other words before a number,
/// such as "Total", are only labels.
const FIRST_NAMES: &str = "alice bob carol charlie dave david eve tom john jack jane mary anna \
                           ann anne emma peter paul sam sara sarah james tim ben lisa mike \
                           michael maria julia kate max leo lily lucy mia noah olivia oliver \
    henry george jill joe jim kim laura linda susan nancy robert steve kevin brian alex amy andy \
    betty billy cindy dan diana ella eric frank fred hannah harry helen ivan jason jenny jerry \
    jessica josh karen ken larry luke matt megan molly nick nina pam phil rachel ralph rita rob \
    ron ryan sally scott sophie ted terry tina tony victor walter wendy zoe";

impl NumberDescription {
    /// Returns whether two numbers of equal value can be the same answer, judging by their
    /// descriptions.
    pub fn agrees_with(&self, other: &NumberDescription) -> bool {
        self.bounds == other.bounds
            && self.is_same_direction(other)
            && self.is_same_unit(other)
            && (self.people.is_empty() || other.people.is_empty() || self.people == other.people)
    }

    /// Adds a word before the number to the description, if the word is a first name.
    pub fn add_person(&mut self, word: &str) {
        let lower = word.trim_end_matches(':').to_lowercase();
        if FIRST_NAMES.split(' ').any(|name| name == lower) {
            self.people.push(lower);
            self.people.sort_unstable();
        }
    }

    /// Returns whether the units, directions and names of two numbers are equal.
    pub fn is_written_as(&self, other: &NumberDescription) -> bool {
        let names =
            |of: &NumberDescription| (of.units.clone(), of.directions.clone(), of.names.clone());
        names(self) == names(other)
    }

    fn is_same_direction(&self, other: &NumberDescription) -> bool {
        let of = |about: &NumberDescription, kind| -> Vec<&str> {
            let mut of: Vec<&str> = about
                .directions
                .iter()
                .filter(|(own, _)| *own == kind)
                .map(|(_, word)| *word)
                .collect();
            of.sort_unstable();
            of.dedup();
            of
        };
        self.directions.iter().all(|(kind, _)| {
            let own = of(self, *kind);
            let theirs = of(other, *kind);
            theirs.is_empty() || own == theirs
        })
    }

    fn is_same_unit(&self, other: &NumberDescription) -> bool {
        let a = &self.units;
        let b = &other.units;
        let is =
            |units: &[(&str, i32)], of: &[&str]| matches!(units, [(unit, 1)] if of.contains(unit));
        let is_degree = |units: &[(&str, i32)]| is(units, &["degree"]);
        let is_heat = |units: &[(&str, i32)]| is(units, &["celsius", "fahrenheit"]);
        // An amount of money may omit what it is paid for: $12 for 12 dollars per hour.
        let is_rate = |rate: &[(&str, i32)], amount: &[(&str, i32)]| {
            is(amount, &MONEY)
                && rate.contains(&amount[0])
                && rate.iter().all(|u| u == &amount[0] || u.1 < 0)
        };
        a.is_empty()
            || b.is_empty()
            || a == b
            // 25 C can be a temperature.
            || (is(a, &["coulomb"]) && is_heat(b))
            || (is_heat(a) && is(b, &["coulomb"]))
            || (is_degree(a) && is_heat(b))
            || (is_heat(a) && is_degree(b))
            || is_rate(a, b)
            || is_rate(b, a)
    }

    /// Adds a power of a unit to the description. Powers of the same unit are added.
    pub fn add_unit(&mut self, unit: &'static str, power: i32) {
        match self.units.iter_mut().find(|(own, _)| *own == unit) {
            Some((_, own)) => *own = own.saturating_add(power),
            None => self.units.push((unit, power)),
        }
        self.units.retain(|(_, power)| *power != 0);
        self.units.sort_unstable();
    }

    /// Adds words that are neither units nor bounds to the description: directions and names.
    pub fn add_words(&mut self, words: &str) {
        for word in words.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()) {
            let word = word.to_lowercase();
            let short = match word.as_str() {
                "ne" => Some(("compass", "northeast")),
                "nw" => Some(("compass", "northwest")),
                "se" => Some(("compass", "southeast")),
                "sw" => Some(("compass", "southwest")),
                _ => None,
            };
            match short.or_else(|| direction_kind(&word)) {
                Some(direction) => self.directions.push(direction),
                None if FILLERS.contains(&word.as_str()) => {}
                // A number word that was not parsed makes it a different number.
                None if is_number_word_part(&word) => self.bounds.push("number"),
                None => {
                    self.directions.extend(exclusive_group(&word));
                    self.names.push(strip_plural_ending(&word));
                }
            }
        }
        self.directions.sort_unstable();
        self.names.sort_unstable();
        self.names.dedup();
    }
}

const MONEY: [&str; 7] = ["dollar", "cent", "euro", "pound", "yen", "rupee", "pence"];

/// Words next to a number that do not describe the number.
const FILLERS: [&str; 34] = [
    "a",
    "an",
    "the",
    "of",
    "is",
    "are",
    "was",
    "were",
    "be",
    "has",
    "have",
    "had",
    "to",
    "for",
    "with",
    "and",
    "about",
    "approximately",
    "around",
    "roughly",
    "exactly",
    "only",
    "just",
    "therefore",
    "thus",
    "so",
    "that",
    "answer",
    "equal",
    "equals",
    "there",
    "each",
    "total",
    "gets",
];

/// Returns whether a word is part of a number that is written in words.
fn is_number_word_part(word: &str) -> bool {
    let is_sign =
        ["half", "halves", "minus", "negative", "plus", "neg", "mil", "mio", "mrd"].contains(&word);
    is_sign
        || word_to_number(word).is_some()
        || magnitude_factor(word).is_some()
        || multiplier_factor(word).is_some()
}

/// Returns a noun without its plural ending.
fn strip_plural_ending(word: &str) -> String {
    let stem = match word {
        _ if word.ends_with("ies") && word.len() > 4 => {
            return format!("{}y", &word[..word.len() - 3]);
        }
        _ if word.ends_with("ss") || word.len() < 4 => word,
        _ if ["shes", "ches", "xes", "sses"].iter().any(|end| word.ends_with(end)) => {
            &word[..word.len() - 2]
        }
        _ => word.strip_suffix('s').unwrap_or(word),
    };
    stem.to_owned()
}

/// Returns the factor of a magnitude word, such as 10^6 for "million".
pub(crate) fn magnitude_factor(word: &str) -> Option<u64> {
    let word = word.to_lowercase();
    Some(match word.as_str() {
        "tens" => 10,
        "dozen" | "dozens" => 12,
        "hundred" | "hundreds" => 100,
        "gross" => 144,
        "thousand" | "thousands" => 1000,
        "lakh" | "lakhs" | "lac" | "lacs" => 100_000,
        "million" | "millions" | "mn" => 1_000_000,
        "crore" | "crores" => 10_000_000,
        "billion" | "billions" | "bn" => 1_000_000_000,
        "trillion" | "trillions" | "tn" => 1_000_000_000_000,
        "quadrillion" | "quadrillions" => 1_000_000_000_000_000,
        "quintillion" | "quintillions" => 1_000_000_000_000_000_000,
        word => return languages::magnitude_factor(word),
    })
}

/// Fractions that words after a number express, by denominator: 5 per mille, 5 basis points.
const PARTS: [(i64, &str); 12] = [
    (1000, "‰"),
    (1000, "per mille"),
    (1000, "per mil"),
    (1000, "per thousand"),
    (1000, "permille"),
    (1000, "promille"),
    (1000, "pro mille"),
    (1000, "por mil"),
    (1000, "pour mille"),
    (1000, "промилле"),
    (1000, "promil"),
    (10_000, "basis points"),
];

/// Returns the denominator that words at the start of a text express, such as 1000 for ‰ and "per
/// mille", and the length of these words in bytes.
pub(crate) fn fraction_after_number(text: &str) -> Option<(i64, usize)> {
    let ends = |rest: &str| !rest.starts_with(char::is_alphabetic);
    PARTS.iter().find_map(|(bottom, words)| {
        let start = text.get(..words.len())?;
        (start.to_lowercase() == *words && (*words == "‰" || ends(&text[words.len()..])))
            .then_some((*bottom, words.len()))
    })
}

/// Returns the factor of a magnitude letter directly after an amount of money: $5k, $5M, $5B.
pub(crate) fn money_factor(letter: &str) -> Option<u64> {
    Some(match letter {
        "k" | "K" => 1000,
        "m" | "M" => 1_000_000,
        "b" | "B" => 1_000_000_000,
        "t" | "T" => 1_000_000_000_000,
        _ => return magnitude_factor(letter),
    })
}

/// Returns the factor of a word before a number, such as 2 for the "twice" of "twice 5".
pub(crate) fn multiplier_factor(word: &str) -> Option<u64> {
    Some(match word.to_lowercase().as_str() {
        "twice" | "double" => 2,
        "thrice" | "triple" => 3,
        "quadruple" => 4,
        _ => return None,
    })
}

/// Returns the value of an English number word below 100.
pub(crate) fn word_to_number(word: &str) -> Option<u64> {
    const ONES: [&str; 20] = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ];
    const TENS: [&str; 8] =
        ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
    let word = word.to_lowercase();
    let index_in = |list: &[&str]| list.iter().position(|own| *own == word).map(|at| at as u64);
    index_in(&ONES).or_else(|| index_in(&TENS).map(|at| 10 * (at + 2)))
}

/// Returns the denominator of a word for a fraction, such as 2 for "half" and 3 for "thirds".
pub(crate) fn denominator_of_word(word: &str) -> Option<u64> {
    const PARTS: [&str; 9] =
        ["half", "third", "quarter", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"];
    let word = word.to_lowercase();
    let one = word.strip_suffix('s').unwrap_or(&word);
    Some(match one {
        "halve" => 2,
        "fourth" => 4,
        "twelfth" => 12,
        "twentieth" => 20,
        "hundredth" => 100,
        "thousandth" => 1000,
        "millionth" => 1_000_000,
        "billionth" => 1_000_000_000,
        _ => PARTS.iter().position(|own| *own == one)? as u64 + 2,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description(
        bounds: &[&'static str],
        words: &str,
        units: &[(&'static str, i32)],
    ) -> NumberDescription {
        let mut about =
            NumberDescription { bounds: bounds.to_vec(), ..NumberDescription::default() };
        about.add_words(words);
        units.iter().for_each(|(unit, power)| about.add_unit(unit, *power));
        about
    }

    #[test]
    fn number_descriptions_agree_unless_kinds_conflict() {
        let hour = [("dollar", 1), ("hour", -1)];
        for (a, b, want) in [
            (description(&[], "red apples", &[]), description(&[], "pears", &[]), true),
            (description(&["≥"], "", &[]), description(&[], "", &[]), false),
            // A number in words that was not parsed makes it a different number.
            (description(&[], "five", &[]), description(&[], "", &[]), false),
            (description(&[], "dozen", &[]), description(&[], "", &[]), false),
            (description(&[], "profit", &[]), description(&[], "", &[]), true),
            (description(&[], "profit", &[]), description(&[], "loss", &[]), false),
            (description(&[], "profit", &[]), description(&[], "increase", &[]), true),
            (description(&[], "January", &[]), description(&[], "Jan", &[]), true),
            (description(&[], "January", &[]), description(&[], "March", &[]), false),
            (description(&[], "", &[("cm", 1)]), description(&[], "", &[("m", 1)]), false),
            (description(&[], "", &[("cm", 2)]), description(&[], "", &[("cm", 1)]), false),
            (description(&[], "", &[("cm", 2)]), description(&[], "", &[]), true),
            (description(&[], "", &hour), description(&[], "", &[("dollar", 1)]), true),
            (description(&[], "", &hour), description(&[], "", &[("cent", 1)]), false),
            (
                description(&[], "", &[("mile", 1), ("hour", -1)]),
                description(&[], "", &[("mile", 1)]),
                false,
            ),
            (description(&[], "", &[("degree", 1)]), description(&[], "", &[("celsius", 1)]), true),
            (description(&[], "", &[("degree", 1)]), description(&[], "", &[("radian", 1)]), false),
        ] {
            assert_eq!((a.agrees_with(&b), b.agrees_with(&a)), (want, want), "{a:?} {b:?}");
        }
    }

    #[test]
    fn names_match_in_singular_and_plural() {
        let is_same =
            |a: &str, b: &str| description(&[], a, &[]).is_written_as(&description(&[], b, &[]));
        for (one, several) in
            [("apple", "apples"), ("glass", "glasses"), ("box", "boxes"), ("city", "cities")]
        {
            assert!(is_same(one, several), "{one} {several}");
        }
        assert!(!is_same("gas", "ga") && !is_same("apple", "pear"));
    }

    #[test]
    fn number_words_have_values() {
        for (word, want) in
            [("Millionen", Some(1_000_000)), ("百万", Some(1_000_000)), ("eggs", None)]
        {
            assert_eq!(magnitude_factor(word), want, "{word}");
        }
        assert_eq!(
            (
                denominator_of_word("halves"),
                denominator_of_word("thirds"),
                denominator_of_word("fifty")
            ),
            (Some(2), Some(3), None)
        );
        assert_eq!(
            (word_to_number("Ninety"), word_to_number("twelve"), word_to_number("a")),
            (Some(90), Some(12), None)
        );
    }
}
