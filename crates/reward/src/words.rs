//! Words beside numbers: number words, magnitudes, signs, bounds, directions and units.
//!
//! Each word has one of four effects. A magnitude multiplies (5 million), a sign word negates (minus 5), a
//! bound makes another statement of the number (at least 5), and all others say what the number is of. Those
//! are compared only where both sides have one of the same kind: a unit with a unit, an increase with a
//! decrease, a month with a month. Words are compared in lower case.

/// What the words beside a number say.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct About {
    /// Bounds, which a number without them does not meet: `≥`, `<`, `≠`.
    pub bounds: Vec<&'static str>,
    /// Directions and months, each with its kind.
    pub directions: Vec<(&'static str, &'static str)>,
    /// Known units with their powers, sorted.
    pub units: Vec<(&'static str, i32)>,
    /// All other words, in lower case.
    pub names: Vec<String>,
}

impl About {
    /// Returns whether two numbers of equal value can be the same answer.
    pub fn agrees(&self, other: &About) -> bool {
        self.bounds == other.bounds && self.is_same_direction(other) && self.is_same_unit(other)
    }

    fn is_same_direction(&self, other: &About) -> bool {
        let of = |about: &About, kind| -> Vec<&str> {
            let mut of: Vec<&str> =
                about.directions.iter().filter(|(own, _)| *own == kind).map(|(_, word)| *word).collect();
            of.sort_unstable();
            of.dedup();
            of
        };
        self.directions.iter().all(|(kind, _)| {
            let (own, theirs) = (of(self, *kind), of(other, *kind));
            theirs.is_empty() || own == theirs
        })
    }

    fn is_same_unit(&self, other: &About) -> bool {
        let (a, b) = (&self.units, &other.units);
        let is = |units: &[(&str, i32)], of: &[&str]| matches!(units, [(unit, 1)] if of.contains(unit));
        let is_degree = |units: &[(&str, i32)]| is(units, &["degree"]);
        let is_heat = |units: &[(&str, i32)]| is(units, &["celsius", "fahrenheit"]);
        // An amount of money may leave out what it is paid for: $12 for 12 dollars per hour.
        let is_rate = |rate: &[(&str, i32)], amount: &[(&str, i32)]| {
            is(amount, &MONEY) && rate.contains(&amount[0]) && rate.iter().all(|u| u == &amount[0] || u.1 < 0)
        };
        a.is_empty()
            || b.is_empty()
            || a == b
            || (is_degree(a) && is_heat(b))
            || (is_heat(a) && is_degree(b))
            || is_rate(a, b)
            || is_rate(b, a)
    }

    /// Adds a unit to a power; powers of the same unit add up.
    pub fn add_unit(&mut self, unit: &'static str, power: i32) {
        match self.units.iter_mut().find(|(own, _)| *own == unit) {
            Some((_, own)) => *own = own.saturating_add(power),
            None => self.units.push((unit, power)),
        }
        self.units.retain(|(_, power)| *power != 0);
        self.units.sort_unstable();
    }

    /// Adds words that are neither a unit nor a bound: directions and names.
    pub fn add_words(&mut self, words: &str) {
        for word in words.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()) {
            let word = word.to_lowercase();
            match direction(&word) {
                Some(direction) => self.directions.push(direction),
                None if FILLERS.contains(&word.as_str()) => {}
                // A number that was not read makes another one.
                None if is_number(&word) => self.bounds.push("number"),
                None => self.names.push(singular(&word)),
            }
        }
        self.directions.sort_unstable();
        self.names.sort_unstable();
        self.names.dedup();
    }
}

const MONEY: [&str; 7] = ["dollar", "cent", "euro", "pound", "yen", "rupee", "pence"];

/// Words that name nothing.
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

/// Whether a word is part of a number in words.
fn is_number(word: &str) -> bool {
    let is_sign = ["half", "halves", "minus", "negative", "plus", "mil", "mio", "mrd"].contains(&word);
    is_sign || number_word(word).is_some() || magnitude(word).is_some() || multiplier(word).is_some()
}

/// Returns a noun without the ending of its plural.
fn singular(word: &str) -> String {
    let stem = match word {
        _ if word.ends_with("ies") && word.len() > 4 => return format!("{}y", &word[..word.len() - 3]),
        _ if word.ends_with("ss") || word.len() < 4 => word,
        _ if ["shes", "ches", "xes", "sses"].iter().any(|end| word.ends_with(end)) => &word[..word.len() - 2],
        _ => word.strip_suffix('s').unwrap_or(word),
    };
    stem.to_owned()
}

/// Returns the factor of a word of magnitude.
pub(crate) fn magnitude(word: &str) -> Option<u64> {
    let word = word.to_lowercase();
    Some(match word.as_str() {
        "dozen" | "dozens" => 12,
        "hundred" | "hundreds" => 100,
        "thousand" | "thousands" => 1000,
        "万" | "萬" => 10_000,
        "lakh" | "lakhs" | "lac" | "lacs" => 100_000,
        "million" | "millions" | "mn" => 1_000_000,
        "crore" | "crores" => 10_000_000,
        "亿" | "億" => 100_000_000,
        "billion" | "billions" | "bn" | "milliard" => 1_000_000_000,
        "trillion" | "trillions" | "tn" => 1_000_000_000_000,
        "quadrillion" | "quadrillions" => 1_000_000_000_000_000,
        "quintillion" | "quintillions" => 1_000_000_000_000_000_000,
        _ => return None,
    })
}

/// Returns the factor of a letter right behind an amount of money: $5k, $5M, $5B.
pub(crate) fn suffix(letter: &str) -> Option<u64> {
    Some(match letter {
        "k" | "K" => 1000,
        "m" | "M" => 1_000_000,
        "b" | "B" => 1_000_000_000,
        "t" | "T" => 1_000_000_000_000,
        _ => return magnitude(letter),
    })
}

/// Returns the factor of a word before a number: twice 5.
pub(crate) fn multiplier(word: &str) -> Option<u64> {
    Some(match word.to_lowercase().as_str() {
        "twice" | "double" => 2,
        "thrice" | "triple" => 3,
        "quadruple" => 4,
        _ => return None,
    })
}

/// Returns the value of a number word below 100.
pub(crate) fn number_word(word: &str) -> Option<u64> {
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
    const TENS: [&str; 8] = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
    let word = word.to_lowercase();
    let place = |of: &[&str]| of.iter().position(|own| *own == word).map(|at| at as u64);
    place(&ONES).or_else(|| place(&TENS).map(|at| 10 * (at + 2)))
}

/// Returns the denominator of a word for a part: half, thirds, tenth.
pub(crate) fn denominator(word: &str) -> Option<u64> {
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
        _ => PARTS.iter().position(|own| *own == one)? as u64 + 2,
    })
}

/// Phrases that make another statement of a number, longest first.
const BOUNDS: [(&[&str], &str); 65] = [
    (&["greater", "than", "or", "equal", "to"], "≥"),
    (&["less", "than", "or", "equal", "to"], "≤"),
    (&["no", "more", "than"], "≤"),
    (&["not", "more", "than"], "≤"),
    (&["no", "greater", "than"], "≤"),
    (&["no", "less", "than"], "≥"),
    (&["not", "less", "than"], "≥"),
    (&["no", "fewer", "than"], "≥"),
    (&["at", "the", "least"], "≥"),
    (&["at", "the", "most"], "≤"),
    (&["as", "many", "as"], "≤"),
    (&["as", "much", "as"], "≤"),
    (&["or", "more"], "≥"),
    (&["or", "greater"], "≥"),
    (&["or", "higher"], "≥"),
    (&["or", "above"], "≥"),
    (&["or", "over"], "≥"),
    (&["or", "less"], "≤"),
    (&["or", "fewer"], "≤"),
    (&["or", "lower"], "≤"),
    (&["or", "below"], "≤"),
    (&["or", "under"], "≤"),
    (&["at", "a", "minimum"], "≥"),
    (&["at", "a", "maximum"], "≤"),
    (&["at", "minimum"], "≥"),
    (&["at", "maximum"], "≤"),
    (&["neither"], "≠"),
    (&["nor"], "≠"),
    (&["but"], "≠"),
    (&["without"], "≠"),
    (&["excluding"], "≠"),
    (&["factorial"], "factorial"),
    (&["inverse"], "inverse"),
    (&["doubled"], "doubled"),
    (&["tripled"], "tripled"),
    (&["halved"], "halved"),
    (&["at", "least"], "≥"),
    (&["at", "most"], "≤"),
    (&["up", "to"], "≤"),
    (&["maximum", "of"], "≤"),
    (&["minimum", "of"], "≥"),
    (&["more", "than"], ">"),
    (&["greater", "than"], ">"),
    (&["larger", "than"], ">"),
    (&["bigger", "than"], ">"),
    (&["higher", "than"], ">"),
    (&["less", "than"], "<"),
    (&["fewer", "than"], "<"),
    (&["smaller", "than"], "<"),
    (&["lower", "than"], "<"),
    (&["other", "than"], "≠"),
    (&["different", "from"], "≠"),
    (&["rather", "than"], "≠"),
    (&["instead", "of"], "≠"),
    (&["close", "to"], "≈"),
    (&["not"], "≠"),
    (&["isn't"], "≠"),
    (&["never"], "≠"),
    (&["cannot"], "≠"),
    (&["except"], "≠"),
    (&["between"], "between"),
    (&["almost"], "≈"),
    (&["nearly"], "≈"),
    (&["exceeding"], ">"),
    (&["exceeds"], ">"),
];

/// Words that bound a number right behind them alone.
const BOUNDS_BEFORE: [(&str, &str); 9] = [
    ("over", ">"),
    ("above", ">"),
    ("beyond", ">"),
    ("under", "<"),
    ("below", "<"),
    ("within", "≤"),
    ("no", "≠"),
    ("versus", "≠"),
    ("vs", "≠"),
];

/// Nouns whose "of" makes another number: the square of 5.
const FUNCTIONS: [&str; 18] = [
    "multiple",
    "multiples",
    "factor",
    "factors",
    "divisor",
    "divisors",
    "power",
    "powers",
    "square",
    "squares",
    "cube",
    "cubes",
    "root",
    "roots",
    "reciprocal",
    "inverse",
    "opposite",
    "negation",
];

/// Returns the bound that words start with, and how many words it takes. `before` is whether a number follows
/// the words.
pub(crate) fn bound(words: &[&str], before: bool) -> Option<(&'static str, usize)> {
    let starts = |phrase: &[&str]| {
        words.len() >= phrase.len()
            && words.iter().zip(phrase).all(|(word, own)| word.eq_ignore_ascii_case(own))
    };
    if let Some((phrase, bound)) = BOUNDS.iter().find(|(phrase, _)| starts(phrase)) {
        return Some((bound, phrase.len()));
    }
    if let [noun, of, ..] = words
        && of.eq_ignore_ascii_case("of")
        && let Some(noun) = FUNCTIONS.iter().find(|own| noun.eq_ignore_ascii_case(own))
    {
        return Some((noun, 2));
    }
    let [word] = words else { return None };
    let (_, bound) = BOUNDS_BEFORE.iter().find(|(own, _)| before && word.eq_ignore_ascii_case(own))?;
    Some((bound, 1))
}

/// Kinds of words of which a number has at most one, and which exclude each other.
const DIRECTIONS: [(&str, &str, &[&str]); 22] = [
    (
        "change",
        "up",
        &[
            "increase",
            "increased",
            "increases",
            "increasing",
            "rise",
            "rises",
            "rose",
            "growth",
            "gain",
            "gained",
            "gains",
            "profit",
            "profits",
            "surplus",
            "up",
            "higher",
            "raise",
            "raised",
            "markup",
            "more",
            "appreciation",
        ],
    ),
    (
        "change",
        "down",
        &[
            "decrease",
            "decreased",
            "decreases",
            "decreasing",
            "drop",
            "drops",
            "dropped",
            "decline",
            "declined",
            "reduction",
            "reduced",
            "fall",
            "falls",
            "fell",
            "loss",
            "losses",
            "lost",
            "deficit",
            "down",
            "lower",
            "discount",
            "less",
            "fewer",
            "depreciation",
            "shortfall",
        ],
    ),
    ("latitude", "north", &["north", "northern", "northward"]),
    ("latitude", "south", &["south", "southern", "southward"]),
    ("longitude", "east", &["east", "eastern", "eastward"]),
    ("longitude", "west", &["west", "western", "westward"]),
    ("height", "above", &["above", "over", "ahead"]),
    ("height", "below", &["below", "under", "underneath", "beneath", "behind"]),
    ("order", "before", &["before", "ago", "earlier", "early"]),
    ("order", "after", &["after", "later", "late"]),
    ("age", "older", &["older"]),
    ("age", "younger", &["younger"]),
    ("speed", "faster", &["faster"]),
    ("speed", "slower", &["slower"]),
    ("extreme", "least", &["minimum", "smallest", "least", "lowest", "shortest", "min"]),
    ("extreme", "most", &["maximum", "largest", "greatest", "most", "highest", "longest", "max"]),
    ("turn", "clockwise", &["clockwise"]),
    ("turn", "counterclockwise", &["counterclockwise", "anticlockwise"]),
    ("account", "credit", &["credit", "deposit"]),
    ("account", "debit", &["debit", "withdrawal", "debt", "owed", "owes"]),
    ("era", "bc", &["bc", "bce"]),
    ("era", "ad", &["ad", "ce"]),
];

const MONTHS: [(&str, &str); 12] = [
    ("january", "jan"),
    ("february", "feb"),
    ("march", "mar"),
    ("april", "apr"),
    ("may", "may"),
    ("june", "jun"),
    ("july", "jul"),
    ("august", "aug"),
    ("september", "sep"),
    ("october", "oct"),
    ("november", "nov"),
    ("december", "dec"),
];

const DAYS: [&str; 7] = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"];

/// Returns the kind and the meaning of a word that says in which direction, month or day a number counts.
pub(crate) fn direction(word: &str) -> Option<(&'static str, &'static str)> {
    let month = |(long, short): &&(&str, &str)| {
        *long == word || *short == word || (word == "sept" && *short == "sep")
    };
    if let Some((long, _)) = MONTHS.iter().find(month) {
        return Some(("month", long));
    }
    if let Some(day) = DAYS.iter().find(|day| **day == word) {
        return Some(("day", day));
    }
    let (kind, meaning, _) = DIRECTIONS.iter().find(|(_, _, words)| words.contains(&word))?;
    Some((kind, meaning))
}

/// Known units by their names and signs, which are in lower case but for single letters.
const UNITS: [(&str, &[&str]); 48] = [
    ("second", &["second", "seconds", "sec", "secs", "s"]),
    ("millisecond", &["millisecond", "milliseconds", "ms"]),
    ("minute", &["minute", "minutes", "min", "mins"]),
    ("hour", &["hour", "hours", "hr", "hrs", "h"]),
    ("day", &["day", "days"]),
    ("week", &["week", "weeks", "wk", "wks"]),
    ("month", &["month", "months"]),
    ("year", &["year", "years", "yr", "yrs"]),
    ("decade", &["decade", "decades"]),
    ("century", &["century", "centuries"]),
    ("nm", &["nm", "nanometer", "nanometers"]),
    ("mm", &["mm", "millimeter", "millimeters", "millimetre", "millimetres"]),
    ("cm", &["cm", "cms", "centimeter", "centimeters", "centimetre", "centimetres"]),
    ("dm", &["dm", "decimeter", "decimeters"]),
    ("m", &["m", "meter", "meters", "metre", "metres"]),
    ("km", &["km", "kms", "kilometer", "kilometers", "kilometre", "kilometres"]),
    ("inch", &["in", "inch", "inches"]),
    ("foot", &["ft", "foot", "feet"]),
    ("yard", &["yd", "yard", "yards"]),
    ("mile", &["mi", "mile", "miles"]),
    ("mg", &["mg", "milligram", "milligrams"]),
    ("g", &["g", "gram", "grams", "gramme", "grammes"]),
    ("kg", &["kg", "kgs", "kilogram", "kilograms", "kilo", "kilos"]),
    ("ton", &["ton", "tons", "tonne", "tonnes"]),
    ("pound", &["lb", "lbs", "pound", "pounds", "£", "gbp"]),
    ("ounce", &["oz", "ounce", "ounces"]),
    ("ml", &["ml", "milliliter", "milliliters", "millilitre", "millilitres", "cc"]),
    ("liter", &["l", "L", "liter", "liters", "litre", "litres"]),
    ("gallon", &["gal", "gallon", "gallons"]),
    ("quart", &["qt", "quart", "quarts"]),
    ("pint", &["pt", "pint", "pints"]),
    ("dollar", &["$", "dollar", "dollars", "usd", "buck", "bucks"]),
    ("cent", &["¢", "cent", "cents", "penny", "pennies"]),
    ("pence", &["pence"]),
    ("euro", &["€", "euro", "euros", "eur"]),
    ("yen", &["¥", "yen"]),
    ("rupee", &["₹", "rs", "rupee", "rupees", "inr"]),
    ("degree", &["°", "deg", "degree", "degrees"]),
    ("radian", &["rad", "radian", "radians"]),
    ("celsius", &["celsius", "centigrade"]),
    ("fahrenheit", &["fahrenheit"]),
    ("kelvin", &["kelvin", "kelvins"]),
    ("acre", &["acre", "acres"]),
    ("hectare", &["ha", "hectare", "hectares"]),
    ("newton", &["N", "newton", "newtons"]),
    ("joule", &["J", "joule", "joules"]),
    ("watt", &["W", "watt", "watts"]),
    ("volt", &["V", "volt", "volts"]),
];

/// Returns the known units of a word, each with its power.
pub(crate) fn units(word: &str) -> Option<Vec<(&'static str, i32)>> {
    match word {
        "mph" | "MPH" => return Some(vec![("mile", 1), ("hour", -1)]),
        "kph" | "kmh" | "kmph" => return Some(vec![("km", 1), ("hour", -1)]),
        _ => {}
    }
    let lower = word.to_lowercase();
    let word = if word.chars().count() == 1 { word } else { lower.as_str() };
    let (unit, _) = UNITS.iter().find(|(_, names)| names.contains(&word))?;
    Some(vec![(*unit, 1)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(bounds: &[&'static str], words: &str, units: &[(&'static str, i32)]) -> About {
        let mut about = About { bounds: bounds.to_vec(), ..About::default() };
        about.add_words(words);
        units.iter().for_each(|(unit, power)| about.add_unit(unit, *power));
        about
    }

    #[test]
    fn about_agrees_unless_kinds_conflict() {
        let hour = [("dollar", 1), ("hour", -1)];
        for (a, b, want) in [
            (about(&[], "red apples", &[]), about(&[], "pears", &[]), true),
            (about(&["≥"], "", &[]), about(&[], "", &[]), false),
            (about(&[], "profit", &[]), about(&[], "", &[]), true),
            (about(&[], "profit", &[]), about(&[], "loss", &[]), false),
            (about(&[], "profit", &[]), about(&[], "increase", &[]), true),
            (about(&[], "January", &[]), about(&[], "Jan", &[]), true),
            (about(&[], "January", &[]), about(&[], "March", &[]), false),
            (about(&[], "", &[("cm", 1)]), about(&[], "", &[("m", 1)]), false),
            (about(&[], "", &[("cm", 2)]), about(&[], "", &[("cm", 1)]), false),
            (about(&[], "", &[("cm", 2)]), about(&[], "", &[]), true),
            (about(&[], "", &hour), about(&[], "", &[("dollar", 1)]), true),
            (about(&[], "", &hour), about(&[], "", &[("cent", 1)]), false),
            (about(&[], "", &[("mile", 1), ("hour", -1)]), about(&[], "", &[("mile", 1)]), false),
            (about(&[], "", &[("degree", 1)]), about(&[], "", &[("celsius", 1)]), true),
            (about(&[], "", &[("degree", 1)]), about(&[], "", &[("radian", 1)]), false),
        ] {
            assert_eq!((a.agrees(&b), b.agrees(&a)), (want, want), "{a:?} {b:?}");
        }
    }

    #[test]
    fn units_are_found_by_name_and_sign() {
        for (word, want) in [
            ("Centimetres", Some("cm")),
            ("N", Some("newton")),
            ("n", None),
            ("apples", None),
            ("$", Some("dollar")),
        ] {
            assert_eq!(units(word).map(|units| units[0].0), want, "{word}");
        }
        assert_eq!(
            (denominator("halves"), denominator("thirds"), denominator("fifty")),
            (Some(2), Some(3), None)
        );
        assert_eq!(
            (number_word("Ninety"), number_word("twelve"), number_word("a")),
            (Some(90), Some(12), None)
        );
    }
}
