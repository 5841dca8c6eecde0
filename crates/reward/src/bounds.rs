//! Phrases beside a number that change the value or deny it: at least 5, not 5, the square of 5.

/// Phrases with what they make of the number, the longest of those that begin alike first.
const BOUNDS: &[(&[&str], &str)] = &[
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
    (&["never"], "≠"),
    (&["cannot"], "≠"),
    (&["except"], "≠"),
    (&["between"], "between"),
    (&["almost"], "≈"),
    (&["nearly"], "≈"),
    (&["exceeding"], ">"),
    (&["exceeds"], ">"),
    (&["wrong"], "≠"),
    (&["incorrect"], "≠"),
    (&["invalid"], "≠"),
    (&["impossible"], "≠"),
    (&["divisible", "by"], "divisible"),
    (&["excluded"], "≠"),
    (&["modulo"], "modulo"),
    (&["permille"], "permille"),
    (&["basis", "points"], "permyriad"),
    (&["of", "the", "first"], "first"),
    (&["to", "the", "power"], "power"),
    (&["to", "the", "second", "power"], "power"),
    (&["to", "the", "third", "power"], "power"),
    (&["to", "the", "fourth", "power"], "power"),
    (&["to", "the", "fifth", "power"], "power"),
    // Other languages.
    (&["au", "moins"], "≥"),
    (&["mindestens"], "≥"),
    (&["wenigstens"], "≥"),
    (&["al", "menos"], "≥"),
    (&["por", "lo", "menos"], "≥"),
    (&["pelo", "menos"], "≥"),
    (&["almeno"], "≥"),
    (&["не", "менее"], "≥"),
    (&["не", "меньше"], "≥"),
    (&["минимум"], "≥"),
    (&["au", "plus"], "≤"),
    (&["höchstens"], "≤"),
    (&["como", "máximo"], "≤"),
    (&["a", "lo", "sumo"], "≤"),
    (&["no", "máximo"], "≤"),
    (&["al", "massimo"], "≤"),
    (&["не", "более"], "≤"),
    (&["не", "больше"], "≤"),
    (&["максимум"], "≤"),
    (&["plus", "de"], ">"),
    (&["más", "de"], ">"),
    (&["mais", "de"], ">"),
    (&["mehr", "als"], ">"),
    (&["più", "di"], ">"),
    (&["более"], ">"),
    (&["больше"], ">"),
    (&["moins", "de"], "<"),
    (&["menos", "de"], "<"),
    (&["weniger", "als"], "<"),
    (&["meno", "di"], "<"),
    (&["менее"], "<"),
    (&["меньше"], "<"),
    (&["pas"], "≠"),
    (&["nicht"], "≠"),
    (&["kein"], "≠"),
    (&["keine"], "≠"),
    (&["não"], "≠"),
    (&["nem"], "≠"),
    (&["не"], "≠"),
];

/// Denials in languages that are written without spaces.
const DENIALS: [&str; 11] =
    ["不是", "不等", "不能", "不可", "不为", "并非", "ではな", "ではあり", "じゃな", "아닙니다", "아니"];

/// Bounds in languages that are written without spaces, where they are parts of words; the longest first.
const JOINED: [(&str, &str); 24] = [
    ("不少于", "≥"),
    ("不小于", "≥"),
    ("不低于", "≥"),
    ("至少", "≥"),
    ("最少", "≥"),
    ("少なくとも", "≥"),
    ("以上", "≥"),
    ("不超过", "≤"),
    ("不大于", "≤"),
    ("不高于", "≤"),
    ("至多", "≤"),
    ("最多", "≤"),
    ("以下", "≤"),
    ("以内", "≤"),
    ("超过", ">"),
    ("大于", ">"),
    ("高于", ">"),
    ("不到", "<"),
    ("不足", "<"),
    ("小于", "<"),
    ("少于", "<"),
    ("低于", "<"),
    ("未満", "<"),
    ("未满", "<"),
];

/// Endings of words that make another number of the one they belong to: 5的两倍.
const MULTIPLES: [&str; 4] = ["倍", "一半", "平方", "立方"];

/// Words that are bounds only right before a number: over 5.
const BOUNDS_BEFORE: [(&str, &str); 24] = [
    ("über", ">"),
    ("unter", "<"),
    ("fast", "≈"),
    ("presque", "≈"),
    ("casi", "≈"),
    ("quasi", "≈"),
    ("quase", "≈"),
    ("почти", "≈"),
    ("bis", "≤"),
    ("hasta", "≤"),
    ("até", "≤"),
    ("over", ">"),
    ("above", ">"),
    ("beyond", ">"),
    ("under", "<"),
    ("below", "<"),
    ("within", "≤"),
    ("until", "≤"),
    ("till", "≤"),
    ("before", "<"),
    ("no", "≠"),
    ("non", "≠"),
    ("versus", "≠"),
    ("vs", "≠"),
];

/// Words that are bounds right behind a number: 5 minimum.
const BOUNDS_BEHIND: [(&str, &str); 6] =
    [("under", "<"), ("minimum", "≥"), ("maximum", "≤"), ("plus", "≥"), ("upwards", "≥"), ("tops", "≤")];

/// Returns the bound that a word right behind a number is.
pub(crate) fn bound_behind(word: &str) -> Option<&'static str> {
    let word = word.to_lowercase();
    BOUNDS_BEHIND.iter().find(|(own, _)| *own == word).map(|(_, bound)| *bound)
}

/// Nouns whose "of" makes another number: the square of 5.
const FUNCTIONS: [&str; 26] = [
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
    "logarithm",
    "log",
    "exponential",
    "sine",
    "cosine",
    "tangent",
    "complement",
    "supplement",
];

/// Returns the bound that words start with, and how many words it takes. `before` is whether a number follows
/// the words.
pub(crate) fn bound(words: &[&str], before: bool) -> Option<(&'static str, usize)> {
    let starts = |phrase: &[&str]| {
        words.len() >= phrase.len() && words.iter().zip(phrase).all(|(word, own)| word.to_lowercase() == *own)
    };
    if let Some((phrase, bound)) = BOUNDS.iter().find(|(phrase, _)| starts(phrase)) {
        return Some((bound, phrase.len()));
    }
    // Can't, won't, doesn't. Without spaces the words before a denial are part of it: 答案不是.
    if words.first().is_some_and(|word| ["n't", "n’t"].iter().any(|denial| word.ends_with(denial))) {
        return Some(("≠", 1));
    }
    if words.first().is_some_and(|word| DENIALS.iter().any(|denial| word.contains(denial))) {
        return Some(("≠", 1));
    }
    let is_multiple = |word: &str| {
        MULTIPLES.iter().any(|end| word.strip_suffix(end).is_some_and(|rest| rest.starts_with('的')))
            || ["平方", "立方", "非"].contains(&word)
    };
    if let Some(word) = words.first() {
        if let Some((_, bound)) = JOINED.iter().find(|(part, _)| word.contains(part)) {
            return Some((bound, 1));
        }
        if is_multiple(word) {
            return Some(("multiple", 1));
        }
    }
    // The 5th prime is another number.
    if let [ordinal, noun, ..] = words
        && ["st", "nd", "rd", "th"].contains(ordinal)
        && ["prime", "power", "root", "term", "multiple", "square", "cube"].contains(noun)
    {
        return Some(("ordinal", 2));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_found_in_several_languages() {
        for (words, before, want) in [
            (&["at", "least"][..], true, Some(("≥", 2))),
            (&["Höchstens"][..], true, Some(("≤", 1))),
            (&["не", "менее"][..], true, Some(("≥", 2))),
            (&["答案不是"][..], true, Some(("≠", 1))),
            (&["can’t"][..], true, Some(("≠", 1))),
            (&["no"][..], true, Some(("≠", 1))),
            (&["no"][..], false, None),
            (&["wrong"][..], false, Some(("≠", 1))),
            (&["apples"][..], true, None),
        ] {
            assert_eq!(bound(words, before), want, "{words:?}");
        }
    }
}
