//! Units of measurement, by their names and symbols.

/// Known units with their names and symbols in several languages. Names of several letters are in
/// lower case.
const UNITS: [(&str, &[&str]); 87] = [
    (
        "second",
        &[
            "second", "seconds", "sec", "secs", "s", "sekunde", "sekunden", "secondes", "segundo",
            "segundos", "秒", "秒钟",
        ],
    ),
    ("millisecond", &["millisecond", "milliseconds", "ms"]),
    ("minute", &["minute", "minutes", "min", "mins", "minuten", "minuto", "minutos", "分钟"]),
    (
        "hour",
        &[
            "hour",
            "hours",
            "hr",
            "hrs",
            "h",
            "stunde",
            "stunden",
            "heure",
            "heures",
            "hora",
            "horas",
            "小时",
            "个小时",
        ],
    ),
    (
        "day",
        &[
            "day", "days", "tag", "tage", "tagen", "jour", "jours", "día", "días", "dia", "dias",
            "天",
        ],
    ),
    (
        "week",
        &[
            "week", "weeks", "wk", "wks", "woche", "wochen", "semaine", "semaines", "semana",
            "semanas", "周", "星期",
        ],
    ),
    (
        "month",
        &["month", "months", "monat", "monate", "monaten", "mois", "mes", "meses", "月", "个月"],
    ),
    (
        "year",
        &[
            "year", "years", "yr", "yrs", "jahr", "jahre", "jahren", "ans", "années", "año",
            "años", "anos", "年",
        ],
    ),
    ("decade", &["decade", "decades"]),
    ("century", &["century", "centuries"]),
    ("nm", &["nm", "nanometer", "nanometers"]),
    ("mm", &["mm", "millimeter", "millimeters", "millimetre", "millimetres", "毫米"]),
    (
        "cm",
        &[
            "cm",
            "cms",
            "centimeter",
            "centimeters",
            "centimetre",
            "centimetres",
            "zentimeter",
            "centímetros",
            "centimètres",
            "厘米",
        ],
    ),
    ("dm", &["dm", "decimeter", "decimeters"]),
    ("m", &["m", "meter", "meters", "metre", "metres", "metro", "metros", "mètre", "mètres", "米"]),
    (
        "km",
        &[
            "km",
            "kms",
            "kilometer",
            "kilometers",
            "kilometre",
            "kilometres",
            "kilómetros",
            "kilomètres",
            "千米",
            "公里",
        ],
    ),
    ("inch", &["in", "inch", "inches"]),
    ("foot", &["ft", "foot", "feet"]),
    ("yard", &["yd", "yard", "yards"]),
    ("mile", &["mi", "mile", "miles"]),
    ("mg", &["mg", "milligram", "milligrams"]),
    ("g", &["g", "gram", "grams", "gramme", "grammes", "gramm", "gramos", "克"]),
    (
        "kg",
        &[
            "kg",
            "kgs",
            "kilogram",
            "kilograms",
            "kilo",
            "kilos",
            "kilogramm",
            "kilogramos",
            "kilogrammes",
            "千克",
            "公斤",
        ],
    ),
    ("ton", &["ton", "tons", "tonne", "tonnes", "吨"]),
    ("pound", &["lb", "lbs", "pound", "pounds", "£", "gbp"]),
    ("ounce", &["oz", "ounce", "ounces"]),
    ("ml", &["ml", "milliliter", "milliliters", "millilitre", "millilitres", "cc", "毫升"]),
    ("liter", &["l", "L", "liter", "liters", "litre", "litres", "litros", "升"]),
    ("gallon", &["gal", "gallon", "gallons"]),
    ("quart", &["qt", "quart", "quarts"]),
    ("pint", &["pt", "pint", "pints"]),
    ("dollar", &["$", "dollar", "dollars", "usd", "buck", "bucks", "dólar", "dólares", "美元"]),
    ("cent", &["¢", "cent", "cents", "penny", "pennies"]),
    ("pence", &["pence"]),
    ("euro", &["€", "euro", "euros", "eur", "欧元"]),
    ("yen", &["¥", "yen", "日元"]),
    ("rupee", &["₹", "rs", "rupee", "rupees", "inr"]),
    ("degree", &["°", "deg", "degree", "degrees", "度"]),
    ("radian", &["rad", "radian", "radians", "弧度"]),
    ("celsius", &["celsius", "centigrade"]),
    ("fahrenheit", &["fahrenheit"]),
    ("kelvin", &["K", "kelvin", "kelvins"]),
    ("acre", &["acre", "acres"]),
    ("hectare", &["ha", "hectare", "hectares", "公顷"]),
    ("cup", &["cup", "cups"]),
    ("teaspoon", &["tsp", "teaspoon", "teaspoons"]),
    ("tablespoon", &["tbsp", "tablespoon", "tablespoons"]),
    ("dime", &["dime", "dimes"]),
    ("quarter", &["quarters"]),
    ("nickel", &["nickel", "nickels"]),
    ("newton", &["N", "newton", "newtons"]),
    ("joule", &["J", "joule", "joules"]),
    ("watt", &["W", "watt", "watts"]),
    ("volt", &["V", "volt", "volts"]),
    ("coulomb", &["coulomb", "coulombs"]),
    ("atmosphere", &["atm", "atmospheres"]),
    ("bar", &["bar"]),
    ("mmhg", &["mmhg"]),
    ("torr", &["torr"]),
    ("psi", &["psi"]),
    ("knot", &["knot", "knots"]),
    ("fathom", &["fathom", "fathoms"]),
    ("horsepower", &["hp", "horsepower"]),
    ("rpm", &["rpm"]),
    ("decibel", &["db", "decibel", "decibels"]),
    ("lumen", &["lumen", "lumens"]),
    ("stone", &["stone"]),
    ("lightyear", &["lightyear", "lightyears"]),
    ("parsec", &["parsec", "parsecs"]),
    ("fortnight", &["fortnight", "fortnights"]),
    ("semester", &["semester", "semesters"]),
    ("peso", &["peso", "pesos"]),
    ("franc", &["franc", "francs"]),
    ("ruble", &["ruble", "rubles", "рубль", "рубля", "рублей"]),
    ("dirham", &["dirham", "dirhams"]),
    ("shilling", &["shilling", "shillings"]),
    ("bitcoin", &["btc", "bitcoin", "bitcoins"]),
    ("paisa", &["paise", "paisa"]),
    ("元", &["元", "块", "yuan", "rmb"]),
    ("角", &["角"]),
    ("分", &["分"]),
    ("斤", &["斤"]),
    ("两", &["两"]),
    ("里", &["里"]),
    ("亩", &["亩"]),
    ("尺", &["尺"]),
    ("寸", &["寸"]),
];

/// Units that can be combined in one measure, from the smallest to the largest.
const PARTS: [&[&str]; 11] = [
    &["second", "minute", "hour", "day", "week", "month", "year", "decade", "century"],
    &["inch", "foot", "yard", "mile"],
    &["mm", "cm", "dm", "m", "km"],
    &["mg", "g", "kg", "ton"],
    &["ounce", "pound", "stone"],
    &["ml", "liter"],
    &["cent", "dollar"],
    &["cent", "euro"],
    &["pence", "pound"],
    &["分", "角", "元"],
    &["second", "minute", "degree"],
];

/// Returns whether unit `small` can follow unit `large` in one measure: 2 hours and 30 minutes.
pub(crate) fn can_follow_in_measure(small: &str, large: &str) -> bool {
    let both = parse_units(small).zip(parse_units(large));
    both.is_some_and(|(small, large)| match (&small[..], &large[..]) {
        ([(small, 1)], [(large, 1)]) => PARTS.iter().any(|units| {
            let at = |unit: &str| units.iter().position(|own| *own == unit);
            at(small).zip(at(large)).is_some_and(|(small, large)| small < large)
        }),
        _ => false,
    })
}

/// Units that take prefixes such as kilo, with symbol and name.
const PREFIXED: [(&str, &str, &str); 15] = [
    ("hertz", "Hz", "hertz"),
    ("pascal", "Pa", "pascal"),
    ("watt", "W", "watt"),
    ("watthour", "Wh", "watthour"),
    ("joule", "J", "joule"),
    ("newton", "N", "newton"),
    ("volt", "V", "volt"),
    ("ampere", "A", "ampere"),
    ("ampere", "amp", "amp"),
    ("electronvolt", "eV", "electronvolt"),
    ("mole", "mol", "mole"),
    ("calorie", "cal", "calorie"),
    ("byte", "B", "byte"),
    ("bit", "bit", "bit"),
    ("ohm", "Ω", "ohm"),
];

/// Prefixes of units, such as kilo, with their symbols.
const PREFIXES: [(&str, &[&str]); 9] = [
    ("", &[""]),
    ("tera", &["T"]),
    ("giga", &["G"]),
    ("mega", &["M"]),
    ("kilo", &["k", "K"]),
    ("hecto", &["h"]),
    ("milli", &["m"]),
    ("micro", &["µ", "μ"]),
    ("nano", &["n"]),
];

/// Returns the factors of a unit with its prefix: kHz is kilo · hertz. Symbols are case-sensitive,
/// and names are not. Returns `None` for any other word.
fn parse_prefixed_unit(word: &str) -> Option<Vec<(&'static str, i32)>> {
    let lower = word.to_lowercase();
    for (unit, sign, name) in PREFIXED {
        let by_name =
            lower.strip_suffix(name).or_else(|| lower.strip_suffix('s')?.strip_suffix(name));
        let by_sign = word.strip_suffix(sign);
        let prefix = PREFIXES.iter().find(|(prefix, signs)| {
            by_name == Some(*prefix) || by_sign.is_some_and(|own| signs.contains(&own))
        });
        if let Some((prefix, _)) = prefix {
            return Some(
                [(*prefix, 1), (unit, 1)].into_iter().filter(|(of, _)| !of.is_empty()).collect(),
            );
        }
    }
    None
}

/// Returns the unit that a letter denotes only directly after a number: 5 A, 5 C.
pub(crate) fn unit_of_letter(word: &str) -> Option<&'static str> {
    match word {
        "A" => Some("ampere"),
        "C" => Some("coulomb"),
        _ => None,
    }
}

/// Returns the known units that a word denotes, with their powers, or `None` if the word is not a
/// unit.
pub(crate) fn parse_units(word: &str) -> Option<Vec<(&'static str, i32)>> {
    match word {
        "mph" | "MPH" => return Some(vec![("mile", 1), ("hour", -1)]),
        "AU" => return Some(vec![("astronomical unit", 1)]),
        "kph" | "kmh" | "kmph" => return Some(vec![("km", 1), ("hour", -1)]),
        _ => {}
    }
    for (prefix, power) in [("平方", 2), ("立方", 3)] {
        if let Some(unit) = word.strip_prefix(prefix) {
            return parse_units(unit)
                .map(|units| units.into_iter().map(|(unit, own)| (unit, own * power)).collect());
        }
    }
    let sign = word;
    let lower = word.to_lowercase();
    let word = if word.chars().count() == 1 { word } else { lower.as_str() };
    match UNITS.iter().find(|(_, names)| names.contains(&word)) {
        Some((unit, _)) => Some(vec![(*unit, 1)]),
        None => parse_prefixed_unit(sign).filter(|_| sign.chars().nth(1).is_some()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_match_names_and_symbols() {
        for (word, want) in [
            ("Centimetres", vec!["cm"]),
            ("N", vec!["newton"]),
            ("n", vec![]),
            ("apples", vec![]),
            ("$", vec!["dollar"]),
            ("kHz", vec!["kilo", "hertz"]),
            ("kilohertz", vec!["kilo", "hertz"]),
            ("MW", vec!["mega", "watt"]),
            ("mW", vec!["milli", "watt"]),
            ("Pa", vec!["pascal"]),
            ("gigabytes", vec!["giga", "byte"]),
        ] {
            let found: Vec<&str> =
                parse_units(word).unwrap_or_default().into_iter().map(|(unit, _)| unit).collect();
            assert_eq!(found, want, "{word}");
        }
    }

    #[test]
    fn only_smaller_unit_follows_in_measure() {
        for (small, large, want) in
            [("minutes", "hr", true), ("hours", "minutes", false), ("cents", "dollars", true)]
        {
            assert_eq!(can_follow_in_measure(small, large), want, "{small} {large}");
        }
    }
}
