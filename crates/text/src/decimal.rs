//! Compares JSON numbers by their exact value.
//!
//! JSON sets no bound on the number of digits, and a client may write the same number in several
//! ways: `4`, `4.0`, `40e-1`. Conversion to f64 would make different numbers equal, so values are
//! compared in decimal.

use serde_json::Number;

/// Returns a canonical text of a JSON number: equal for all spellings of its value, and different
/// for different values. The text is an integer without leading or trailing zeros, and a power of
/// ten. If the exponent exceeds 64 bits, the text is the number as it is written.
pub fn canonical_number(number: &Number) -> String {
    canonical(number.as_str())
}

/// Returns the f64 that Python reads for a JSON number with a point or an exponent. Returns `None`
/// if there is no such f64, or if its shortest decimal, which Python prints, has another value than
/// the number.
pub(crate) fn exact_float(number: &Number) -> Option<f64> {
    let float = number.as_f64().filter(|float| number.is_f64() && float.is_finite())?;
    (canonical(&format!("{float:e}")) == canonical(number.as_str())).then_some(float)
}

fn canonical(written: &str) -> String {
    let (sign, unsigned) = match written.strip_prefix('-') {
        Some(unsigned) => ("-", unsigned),
        None => ("", written),
    };
    let (mantissa, exponent) = unsigned.split_once(['e', 'E']).unwrap_or((unsigned, "0"));
    let (integer, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all = [integer, fraction].concat();
    let digits = all.trim_end_matches('0');
    let dropped = (all.len() - digits.len()) as i64 - fraction.len() as i64;
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return "0".into();
    }
    let power = exponent.parse::<i64>().ok().and_then(|exponent| exponent.checked_add(dropped));
    power.map_or_else(|| written.to_owned(), |power| format!("{sign}{digits}e{power}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(written: &str) -> Number {
        serde_json::from_str(written).unwrap()
    }

    #[test]
    fn canonical_number_is_equal_for_equal_values() {
        for spellings in [
            &["4", "4.0", "40e-1", "0.4e1", "4E+0"][..],
            &["0", "-0", "0.0", "0e5", "-0.000"],
            &["-150", "-1.5e2", "-15e1"],
            &["100000000000000000000", "1e20", "1.0E20"],
            &["123456789012345678901234567890", "123456789012345678901234567890.0"],
            &["1e400", "10e399"],
        ] {
            let values: Vec<String> =
                spellings.iter().map(|written| canonical_number(&number(written))).collect();
            assert!(values.iter().all(|value| *value == values[0]), "{spellings:?}: {values:?}");
        }
    }

    #[test]
    fn canonical_number_separates_different_values() {
        for (one, other) in [
            ("9007199254740993", "9007199254740992"),
            ("9007199254740993.0", "9007199254740992.0"),
            ("18446744073709551616", "18446744073709551617"),
            ("0.1", "0.1000000000000000055511151231257827"),
            ("1e400", "2e400"),
            ("1e-400", "0"),
            ("1e99999999999999999999", "2e99999999999999999999"),
            ("1", "-1"),
            ("10", "1"),
        ] {
            assert_ne!(
                canonical_number(&number(one)),
                canonical_number(&number(other)),
                "{one} {other}"
            );
        }
    }

    #[test]
    fn exact_float_exists_for_decimals_that_python_prints() {
        for (written, float) in
            [("1.50", 1.5), ("1e5", 1e5), ("0.1", 0.1), ("-0.0", -0.0), ("5e-324", 5e-324)]
        {
            assert_eq!(exact_float(&number(written)), Some(float), "{written}");
        }
        for written in
            ["1", "0.1000000000000000055511151231257827", "9007199254740993.0", "1e400", "1e-400"]
        {
            assert_eq!(exact_float(&number(written)), None, "{written}");
        }
    }
}
