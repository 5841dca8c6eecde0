//! Words beside numbers in languages other than English.
//!
//! A word makes of a number what its English counterpart in [`words`](crate::words) makes of it: a bound
//! (`mindestens 5`, `不到5`) or a second guess (`4 или 5`) leaves no value, a sign negates, a magnitude
//! multiplies. Languages: German, Spanish, French, Italian, Portuguese, Dutch, Russian, Polish, Turkish,
//! Hindi, Arabic, Chinese, Japanese and Korean.

/// How words before a number change its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It states no value: it is bounded, denied or one of several.
    NoValue,
    /// It is negated.
    Negates,
}

/// Bounds and denials before a number, in scripts that write spaces between words.
const BOUNDS: [&str; 93] = [
    "mindestens",
    "wenigstens",
    "höchstens",
    "maximal",
    "minimal",
    "nicht",
    "kein",
    "keine",
    "mehr als",
    "weniger als",
    "größer als",
    "kleiner als",
    "über",
    "unter",
    "fast",
    "bis zu",
    "bis",
    "al menos",
    "por lo menos",
    "como mínimo",
    "como máximo",
    "a lo sumo",
    "no es",
    "no son",
    "más de",
    "menos de",
    "mayor que",
    "menor que",
    "mayor de",
    "menor de",
    "casi",
    "hasta",
    "au moins",
    "au plus",
    "pas",
    "plus de",
    "moins de",
    "supérieur à",
    "inférieur à",
    "presque",
    "jusqu'à",
    "almeno",
    "al massimo",
    "al più",
    "non",
    "non è",
    "più di",
    "meno di",
    "maggiore di",
    "minore di",
    "quasi",
    "pelo menos",
    "no mínimo",
    "no máximo",
    "não",
    "não é",
    "mais de",
    "maior que",
    "menor do que",
    "quase",
    "até",
    "minstens",
    "hoogstens",
    "niet",
    "geen",
    "meer dan",
    "minder dan",
    "bijna",
    "не",
    "не менее",
    "не более",
    "не меньше",
    "не больше",
    "более",
    "менее",
    "больше",
    "меньше",
    "минимум",
    "максимум",
    "почти",
    "до",
    "co najmniej",
    "co najwyżej",
    "nie",
    "en az",
    "en fazla",
    "değil",
    "कम से कम",
    "अधिक से अधिक",
    "على الأقل",
    "على الأكثر",
    "أكثر من",
    "أقل من",
];

/// The same, and signs of guesses, right before a number in scripts without spaces, and in Korean.
const JOINED_BOUNDS: [&str; 33] = [
    "至少",
    "最少",
    "最多",
    "至多",
    "不是",
    "不足",
    "不到",
    "不超过",
    "不超過",
    "超过",
    "超過",
    "大于",
    "大於",
    "小于",
    "小於",
    "多于",
    "少于",
    "低于",
    "高于",
    "最大",
    "最小",
    "或",
    "或者",
    "或是",
    "还是",
    "少なくとも",
    "多くとも",
    "または",
    "もしくは",
    "최소",
    "최대",
    "적어도",
    "또는",
];

/// Words that join a number to the one before them.
pub(crate) const JOINS: [&str; 12] =
    ["oder", "bis", "o", "u", "a", "ou", "à", "até", "of", "или", "lub", "أو"];

/// Words before the first and before the second number of a range.
const BETWEEN: [&str; 5] = ["zwischen", "entre", "tra", "tussen", "между"];
const AND: [&str; 6] = ["und", "y", "et", "e", "en", "и"];

/// Words for the sign of a negative number.
pub(crate) const SIGNS: [&str; 11] =
    ["moins", "menos", "meno", "минус", "eksi", "负", "負", "零下", "マイナス", "마이너스", "ऋण"];

/// Bounds and denials right behind a number.
const BOUNDS_AFTER: [&str; 34] = [
    "以上",
    "以下",
    "以内",
    "未満",
    "未满",
    "分之",
    "ではない",
    "ではありません",
    "でない",
    "じゃない",
    "이상",
    "이하",
    "미만",
    "초과",
    "이 아니",
    "가 아니",
    "oder mehr",
    "oder weniger",
    "o más",
    "o menos",
    "ou plus",
    "ou moins",
    "ou mais",
    "ou menos",
    "o più",
    "o meno",
    "of meer",
    "of minder",
    "или больше",
    "или более",
    "или меньше",
    "или менее",
    "mil ",
    "mille ",
];

/// Words of magnitude, by their factor.
const MAGNITUDES: [(u64, &[&str]); 9] = [
    (12, &["dutzend", "docena", "docenas", "douzaine", "douzaines", "dúzia", "dúzias", "dozzina", "dozzine"]),
    (100, &["hundert"]),
    (
        1000,
        &[
            "tausend",
            "duizend",
            "mille",
            "mila",
            "milliers",
            "тыс",
            "тысяча",
            "тысячи",
            "тысяч",
            "हजार",
            "हज़ार",
            "ألف",
            "آلاف",
        ],
    ),
    (100_000, &["लाख"]),
    (
        1_000_000,
        &[
            "millionen",
            "mio",
            "millón",
            "millones",
            "milhão",
            "milhões",
            "milione",
            "milioni",
            "miljoen",
            "млн",
            "миллион",
            "миллиона",
            "миллионов",
            "milyon",
            "مليون",
        ],
    ),
    (10_000_000, &["करोड़"]),
    (
        1_000_000_000,
        &[
            "milliard",
            "milliarde",
            "milliarden",
            "mrd",
            "milliards",
            "miliardo",
            "miliardi",
            "miljard",
            "млрд",
            "миллиард",
            "миллиарда",
            "миллиардов",
            "milyar",
            "مليار",
        ],
    ),
    (1_000_000_000_000_000_000, &["trillón", "trillones", "trillionen"]),
    (1_000_000_000_000, &["billionen", "billón", "billones", "трлн", "триллион", "триллионов"]),
];

/// Characters of magnitude that no space parts from the number or from what it counts.
const JOINED_MAGNITUDES: [(char, u64); 9] = [
    ('百', 100),
    ('千', 1000),
    ('万', 10_000),
    ('萬', 10_000),
    ('亿', 100_000_000),
    ('億', 100_000_000),
    ('천', 1000),
    ('만', 10_000),
    ('억', 100_000_000),
];

/// Characters behind 千 that make a unit of it, such as kilogram.
const KILO: &str = "克米瓦卡赫帕焦伏字";

/// Returns what the part of a sentence before a number makes of it.
pub(crate) fn before(sentence: &str) -> Option<Effect> {
    let text = sentence.trim_end().to_lowercase();
    if JOINED_BOUNDS.iter().any(|bound| text.ends_with(bound)) {
        return Some(Effect::NoValue);
    }
    if SIGNS.iter().any(|sign| !sign.starts_with(char::is_lowercase) && text.ends_with(sign)) {
        return Some(Effect::Negates);
    }
    if !sentence.ends_with([' ', '*', '(', '"']) {
        return None;
    }
    let words: Vec<&str> =
        text.split([' ', '*', '(', '"', ':']).map(str::trim).filter(|word| !word.is_empty()).collect();
    let ends_with = |phrase: &&str| {
        let phrase: Vec<&str> = phrase.split(' ').collect();
        words.ends_with(&phrase)
    };
    let (last, rest) = words.split_last()?;
    let is_number = |word: &&str| word.contains(|c: char| c.is_ascii_digit());
    let follows_number = rest.last().is_some_and(is_number);
    let is_range = AND.contains(last) && rest.iter().rev().take(6).any(|word| BETWEEN.contains(word));
    if BOUNDS.iter().any(ends_with) || is_range || (JOINS.contains(last) && follows_number) {
        return Some(Effect::NoValue);
    }
    match SIGNS.contains(last) {
        true if follows_number => Some(Effect::NoValue),
        true => Some(Effect::Negates),
        false => None,
    }
}

/// Returns whether the text behind a number makes another statement of it.
pub(crate) fn is_bounded(after: &str) -> bool {
    let text = format!("{} ", after.trim_start().to_lowercase());
    BOUNDS_AFTER.iter().any(|bound| text.starts_with(bound)) || text.starts_with("mila ")
}

/// Returns the factor of a word of magnitude, in lower case: Millionen, 百万.
pub(crate) fn magnitude(word: &str) -> Option<u64> {
    let named = MAGNITUDES.iter().find(|(_, words)| words.contains(&word)).map(|(factor, _)| *factor);
    let factor = |c| if c == '十' { Some(10) } else { joined_magnitude(c) };
    let product = || word.chars().try_fold(1u64, |product, c| product.checked_mul(factor(c)?));
    named.or_else(|| product().filter(|product| *product > 1))
}

fn joined_magnitude(c: char) -> Option<u64> {
    JOINED_MAGNITUDES.iter().find(|(own, _)| *own == c).map(|(_, factor)| *factor)
}

/// Returns the factor of the character of magnitude that a word starts with: 万 of 万元, but not 千 of 千克.
pub(crate) fn leading_magnitude(word: &str) -> Option<u64> {
    let mut chars = word.chars();
    let first = chars.next()?;
    let is_kilo = first == '千' && chars.next().is_some_and(|next| KILO.contains(next));
    joined_magnitude(first).filter(|_| !is_kilo)
}

#[cfg(test)]
mod tests {
    use crate::Rational;
    use crate::numbers::last;

    #[test]
    fn words_of_other_languages_change_numbers_as_english_ones_do() {
        for (text, value) in [
            ("Die Antwort ist 42", Some("42")),
            ("Es sind mindestens 42", None),
            ("nicht 41, sondern 42", Some("42")),
            ("41 oder 42", None),
            ("zwischen 41 und 42", None),
            ("42 Millionen", Some("42000000")),
            ("al menos 42", None),
            ("menos 42", Some("-42")),
            ("más de 42", None),
            ("42 mil", None),
            ("42 millones de euros", Some("42000000")),
            ("au moins 42", None),
            ("moins 42", Some("-42")),
            ("La réponse est 42", Some("42")),
            ("não é 42", None),
            ("не менее 42", None),
            ("минус 42", Some("-42")),
            ("42 тыс.", Some("42000")),
            ("答案是42。", Some("42")),
            ("至少42", None),
            ("负42", Some("-42")),
            ("42万元", Some("420000")),
            ("42千克", Some("42")),
            ("42以上", None),
            ("42ではない", None),
            ("最小 42", None),
            ("최소 42", None),
            ("42만", Some("420000")),
            ("कम से कम 42", None),
            ("42 लाख", Some("4200000")),
            ("على الأقل 42", None),
        ] {
            let found = last(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(found.value, value.and_then(Rational::parse), "{text}");
        }
    }
}
