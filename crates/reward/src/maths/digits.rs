//! Parses thousands separators and repeating digits within numbers.

/// Parses the repeating digits of a decimal, in brackets at the start of a text: the (3) of 0.(3).
/// Returns the digits and the remaining text.
pub(super) fn parse_repeating_digits(text: &str) -> Option<(&str, &str)> {
    let (digits, rest) = text.strip_prefix('(')?.split_once(')')?;
    let is_block = (1..=20).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    is_block.then_some((digits, rest))
}

/// Strips a thousands separator (a comma, a space, an apostrophe) from the start of a text, if
/// exactly three digits follow it. `comma` is whether bare separators count, rather than only LaTeX
/// separators.
pub(super) fn strip_thousands_separator(rest: &str, comma: bool) -> Option<&str> {
    let marks = ["{,}\\!", "{,}", ",\\!", "\\,", "\\!", "\\ "];
    let bare = || rest.strip_prefix([',', ' ', '\'']).filter(|_| comma);
    let after = marks.iter().find_map(|mark| rest.strip_prefix(mark));
    let after = rest.strip_prefix(",\\!").map(str::trim_start).or(after).or_else(bare)?;
    let digits = after.bytes().take_while(u8::is_ascii_digit).count();
    (digits == 3).then_some(after)
}
