//! Interprets words before and after numbers in languages other than English.
//!
//! A word changes a number as its English counterpart in [`words`](crate::words) does. A second
//! guess (`4 или 5`) or a range leaves no value, a sign negates, and a magnitude multiplies. Words
//! for bounds are in [`bounds`](crate::bounds), for all languages.
//!
//! Languages: German, Spanish, French, Italian, Portuguese, Dutch, Russian, Polish, Turkish, Hindi,
//! Arabic, Chinese, Japanese and Korean, with a few words of Vietnamese and Scandinavian languages.

/// Effect of the words before a number on the number's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NumberChange {
    /// The number states no value: it is a bound, is denied, or is one of several.
    NoValue,
    /// The number is negated.
    Negates,
}

/// Words between two numbers of a range or of alternatives, in languages other than English.
pub(crate) const JOINS: [&str; 19] = [
    "oder", "bis", "o", "u", "a", "ou", "à", "até", "of", "или", "lub", "أو", "tot", "veya", "ya",
    "या", "albo", "eller", "do",
];

/// Words between two numbers of a range or of alternatives, in scripts without spaces.
const JOINED_JOINS: [&str; 12] =
    ["或者", "或是", "还是", "或", "至", "到", "または", "もしくは", "から", "또는", "에서", "〜"];

/// Words before the first number of a range (`BETWEEN`) and before the second number (`AND`).
const BETWEEN: [&str; 12] = [
    "between",
    "zwischen",
    "entre",
    "tra",
    "fra",
    "tussen",
    "между",
    "między",
    "from",
    "von",
    "от",
    "либо",
];
const AND: [&str; 11] = ["and", "und", "y", "et", "e", "en", "и", "i", "to", "до", "bis"];

/// Words for minus before a negative number, in languages other than English.
pub(crate) const SIGNS: [&str; 11] =
    ["moins", "menos", "meno", "минус", "eksi", "负", "負", "零下", "マイナス", "마이너스", "ऋण"];

/// Words of magnitude in languages other than English, in lower case, with the factor of each word.
const MAGNITUDES: [(u64, &[&str]); 9] = [
    (
        12,
        &[
            "dutzend",
            "docena",
            "docenas",
            "douzaine",
            "douzaines",
            "dúzia",
            "dúzias",
            "dozzina",
            "dozzine",
            "dozijn",
            "tuzin",
            "tuziny",
            "düzine",
            "дюжина",
            "дюжины",
            "дюжин",
            "दर्जन",
            "打",
            "ダース",
            "다스",
        ],
    ),
    (
        100,
        &[
            "hundert",
            "hunderte",
            "centaine",
            "centaines",
            "ciento",
            "cientos",
            "centena",
            "centenas",
            "centinaia",
            "сотня",
            "сотни",
            "сотен",
        ],
    ),
    (
        1000,
        &[
            "tausend",
            "duizend",
            "mille",
            "mila",
            "milliers",
            "tsd",
            "tys",
            "tysiąc",
            "tysiące",
            "tysięcy",
            "bin",
            "ngàn",
            "nghìn",
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
            "milion",
            "miliony",
            "milionów",
            "mln",
            "triệu",
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
            "miliard",
            "miliardy",
            "miliardów",
            "bilhão",
            "bilhões",
            "tỷ",
            "مليار",
        ],
    ),
    (1_000_000_000_000_000_000, &["trillón", "trillones", "trillionen"]),
    (1_000_000_000_000, &["billionen", "billón", "billones", "трлн", "триллион", "триллионов"]),
];

/// Characters of magnitude that are written between a number and its unit without a space, with the
/// factor of each character.
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

/// Characters that form a unit with a preceding 千, such as 千克 (kilogram).
const KILO: &str = "克米瓦卡赫帕焦伏字";

/// Returns how the words before a number change its value. `sentence` is the text before the number
/// in its sentence. Returns `None` if the text leaves the number unchanged.
pub(crate) fn change_before_number(sentence: &str) -> Option<NumberChange> {
    let text = sentence.trim_end().to_lowercase();
    let joined = JOINED_JOINS.iter().find_map(|join| text.strip_suffix(join));
    if joined.is_some_and(|rest| rest.trim_end().ends_with(|c: char| c.is_ascii_digit())) {
        return Some(NumberChange::NoValue);
    }
    if SIGNS.iter().any(|sign| !sign.starts_with(char::is_lowercase) && text.ends_with(sign)) {
        return Some(NumberChange::Negates);
    }
    if !sentence.ends_with([' ', '*', '(', '"']) {
        return None;
    }
    let words: Vec<&str> = text
        .split([' ', '*', '(', '"', ':'])
        .map(str::trim)
        .filter(|word| !word.is_empty())
        .collect();
    let (last, rest) = words.split_last()?;
    let is_number = |word: &&str| word.contains(|c: char| c.is_ascii_digit());
    let follows_number = rest.last().is_some_and(is_number);
    let is_range =
        AND.contains(last) && rest.iter().rev().take(6).any(|word| BETWEEN.contains(word));
    if is_range || (JOINS.contains(last) && follows_number) {
        return Some(NumberChange::NoValue);
    }
    match SIGNS.contains(last) {
        true if follows_number => Some(NumberChange::NoValue),
        true => Some(NumberChange::Negates),
        false => None,
    }
}

/// Returns whether the text after a number joins another number to the first, as in `5 oder 6` and
/// `5到6`.
pub(crate) fn starts_with_joined_number(after: &str) -> bool {
    let text = after.trim_start().to_lowercase();
    let starts_number =
        |rest: &str| rest.trim_start_matches([' ', '$']).starts_with(|c: char| c.is_ascii_digit());
    let joined =
        JOINED_JOINS.iter().find_map(|join| text.strip_prefix(join)).is_some_and(starts_number);
    joined
        || text.split_once(' ').is_some_and(|(word, rest)| {
            word != "of"
                && (JOINS.contains(&word) || ["till", "until", "through", "thru"].contains(&word))
                && starts_number(rest)
        })
}

/// Returns the factor of a word of magnitude in lower case, such as 10^6 for `millionen` and `百万`.
pub(crate) fn magnitude_factor(word: &str) -> Option<u64> {
    let named =
        MAGNITUDES.iter().find(|(_, words)| words.contains(&word)).map(|(factor, _)| *factor);
    let factor = |c| if c == '十' { Some(10) } else { magnitude_character_factor(c) };
    let product = || word.chars().try_fold(1u64, |product, c| product.checked_mul(factor(c)?));
    named.or_else(|| product().filter(|product| *product > 1))
}

fn magnitude_character_factor(c: char) -> Option<u64> {
    JOINED_MAGNITUDES.iter().find(|(own, _)| *own == c).map(|(_, factor)| *factor)
}

/// Returns the factor of the magnitude character at the start of a word: 10^4 for 万 in 万元. 千 in 千克
/// (kilogram) is part of a unit and has no factor.
pub(crate) fn leading_magnitude_factor(word: &str) -> Option<u64> {
    let mut chars = word.chars();
    let first = chars.next()?;
    let is_kilo = first == '千' && chars.next().is_some_and(|next| KILO.contains(next));
    magnitude_character_factor(first).filter(|_| !is_kilo)
}

/// Converts a number in Chinese words to digits: 十二 to 12, 三分之一 to 1/3, 三点五 to 3.5, 负五 to -5.
/// Returns `None` if the text is not such a number.
pub(crate) fn chinese_number_to_digits(text: &str) -> Option<String> {
    if let Some(rest) = text.strip_prefix(['负', '負']) {
        return chinese_number_to_digits(rest)
            .filter(|number| !number.starts_with('-'))
            .map(|number| format!("-{number}"));
    }
    if text == "一半" {
        return Some("1/2".into());
    }
    if let Some((bottom, top)) = text.split_once("分之") {
        // 18分之1 mixes digits and words.
        let integer = |text: &str| text.parse().ok().or_else(|| parse_chinese_integer(text));
        let bottom = if bottom == "百" { 100 } else { integer(bottom)? };
        return Some(format!("{}/{bottom}", integer(top)?));
    }
    if let Some((integer, decimals)) = text.split_once(['点', '點']) {
        let digits: Option<String> = decimals
            .chars()
            .map(|c| chinese_digit_value(c).map(|digit| digit.to_string()))
            .collect();
        let digits = digits.filter(|digits| !digits.is_empty())?;
        return Some(format!("{}.{digits}", parse_chinese_integer(integer)?));
    }
    parse_chinese_integer(text).map(|value| value.to_string())
}

fn chinese_digit_value(c: char) -> Option<u64> {
    const DIGITS: &str = "零一二三四五六七八九";
    match c {
        '〇' => Some(0),
        '两' | '兩' => Some(2),
        c => DIGITS.chars().position(|own| own == c).map(|at| at as u64),
    }
}

/// Parses an integer that is written in Chinese words. Returns `None` for any other text.
fn parse_chinese_integer(text: &str) -> Option<u64> {
    let mut total = 0u64;
    let mut group = 0u64;
    let mut digit = None::<u64>;
    for c in text.chars() {
        if let Some(value) = chinese_digit_value(c) {
            // Adjacent digits, such as 一二, are not a number in words. A preceding zero is allowed.
            if digit.is_some_and(|before| before != 0) {
                return None;
            }
            digit = Some(value);
            continue;
        }
        match if c == '十' { 10 } else { magnitude_character_factor(c)? } {
            large @ 10_000.. => {
                let own = group.checked_add(digit.take().unwrap_or(0))?;
                total = total.checked_add(own)?.checked_mul(large)?;
                group = 0;
            }
            small => group = group.checked_add(digit.take().unwrap_or(1).checked_mul(small)?)?,
        }
    }
    (!text.is_empty()).then(|| total.checked_add(group)?.checked_add(digit.unwrap_or(0))).flatten()
}

#[cfg(test)]
mod tests {
    use crate::Rational;
    use crate::numbers::last_number;

    #[test]
    fn chinese_number_converts_words_to_digits() {
        for (text, want) in [
            ("五", Some("5")),
            ("十二", Some("12")),
            ("五十", Some("50")),
            ("一百零五", Some("105")),
            ("三万", Some("30000")),
            ("三分之一", Some("1/3")),
            ("百分之二十五", Some("25/100")),
            ("三点五", Some("3.5")),
            ("负三", Some("-3")),
            ("一二", None),
            ("苹果", None),
            ("", None),
        ] {
            assert_eq!(super::chinese_number_to_digits(text).as_deref(), want, "{text}");
        }
    }

    #[test]
    fn foreign_words_change_numbers_as_english_ones() {
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
            let found = last_number(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(found.value, value.and_then(Rational::parse), "{text}");
        }
    }
}
