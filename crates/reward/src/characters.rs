//! Maps Unicode characters to the spelling that the parsers of numbers and formulas accept.
//!
//! Characters with the same meaning get the same spelling: digits of any script, full-width and
//! mathematical letters (NFKC), runs of superscripts and subscripts (`^{…}`, `_{…}`), fraction
//! characters (`\frac{1}{3}`), minus signs, spaces, and LaTeX symbols. Invisible characters and
//! pictures are removed.

use std::borrow::Cow;

use unicode_normalization::UnicodeNormalization;

/// Superscript digits, signs and letters, each with its plain character.
const RAISED: [(char, char); 22] = [
    ('⁰', '0'),
    ('¹', '1'),
    ('²', '2'),
    ('³', '3'),
    ('⁴', '4'),
    ('⁵', '5'),
    ('⁶', '6'),
    ('⁷', '7'),
    ('⁸', '8'),
    ('⁹', '9'),
    ('⁺', '+'),
    ('⁻', '-'),
    ('⁽', '('),
    ('⁾', ')'),
    ('ⁿ', 'n'),
    ('ⁱ', 'i'),
    ('ˣ', 'x'),
    ('ᵗ', 't'),
    ('ʰ', 'h'),
    ('ˢ', 's'),
    ('ʳ', 'r'),
    ('ᵈ', 'd'),
];

/// The digit zero of each script. The digits from 0 to 9 of a script are consecutive characters.
const ZEROS: [char; 20] = [
    '٠', '۰', '߀', '०', '০', '੦', '૦', '୦', '௦', '౦', '೦', '൦', '๐', '໐', '༠', '၀', '០', '᠐', '᧐',
    '０',
];

/// Characters and the spelling that replaces them, such as `‰` by "permille".
const SPELLED: [(char, &str); 68] = [
    ('‰', " permille "),
    ('−', "-"),
    ('–', "-"),
    ('‐', "-"),
    ('‑', "-"),
    ('‒', "-"),
    ('﹣', "-"),
    ('－', "-"),
    ('⁄', "/"),
    ('∕', "/"),
    ('➗', "/"),
    ('✕', "×"),
    ('✖', "×"),
    ('∗', "*"),
    ('∙', "·"),
    ('⋅', "·"),
    ('•', "·"),
    ('≦', "≤"),
    ('≧', "≥"),
    ('⩽', "≤"),
    ('⩾', "≥"),
    ('≤', "≤"),
    ('≅', "\\cong "),
    ('≃', "≈"),
    ('∼', "\\sim "),
    ('∶', ":"),
    ('∣', "|"),
    ('∛', "\\sqrt[3]"),
    ('∜', "\\sqrt[4]"),
    ('∠', "\\angle "),
    ('△', "\\triangle "),
    ('∑', "\\sum "),
    ('∏', "\\prod "),
    ('∩', "\\cap "),
    ('∖', "\\setminus "),
    ('∧', "\\wedge "),
    ('∨', "\\vee "),
    ('⇒', "\\implies "),
    ('∀', "\\forall "),
    ('∃', "\\exists "),
    ('¬', "\\neg "),
    ('⊆', "\\subseteq "),
    ('⊂', "\\subset "),
    ('⊇', "\\supseteq "),
    ('⊥', "\\perp "),
    ('∥', "\\parallel "),
    ('∴', "\\therefore "),
    ('ℝ', "\\mathbb{R}"),
    ('ℤ', "\\mathbb{Z}"),
    ('ℕ', "\\mathbb{N}"),
    ('ℚ', "\\mathbb{Q}"),
    ('ℂ', "\\mathbb{C}"),
    ('⌊', "\\lfloor "),
    ('⌋', "\\rfloor "),
    ('⌈', "\\lceil "),
    ('⌉', "\\rceil "),
    ('⟨', "\\langle "),
    ('⟩', "\\rangle "),
    ('℃', "°C"),
    ('℉', "°F"),
    ('º', "°"),
    ('˚', "°"),
    ('。', "."),
    ('、', ","),
    ('٫', "."),
    ('٬', ","),
    ('′', "'"),
    ('″', "''"),
];

/// Replaces characters of a text by the spelling that the number parsers accept. An ASCII text is
/// returned unchanged.
pub(crate) fn normalize_characters(text: &str) -> Cow<'_, str> {
    if text.is_ascii() {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    let chars: Vec<char> = text.chars().filter(|c| !is_invisible(*c)).collect();
    let mut at = 0;
    while let Some(&c) = chars.get(at) {
        at += 1;
        let run = |of: &dyn Fn(char) -> Option<char>| -> String {
            chars[at - 1..].iter().map_while(|c| of(*c)).collect()
        };
        let raised = run(&superscript_to_plain);
        let lowered = run(&subscript_to_plain);
        // ¹⁄₃: a fraction of superscript and subscript digits.
        let slash = at - 1 + raised.chars().count();
        let bottom: String = match chars.get(slash) {
            Some('⁄' | '/' | '∕') => {
                chars[slash + 1..].iter().map_while(|c| self::subscript_to_plain(*c)).collect()
            }
            _ => String::new(),
        };
        if !raised.is_empty() && !bottom.is_empty() {
            at = slash + 1 + bottom.chars().count();
            out.push_str(&format!("\\frac{{{raised}}}{{{bottom}}}"));
            continue;
        }
        // Adjacent circled numbers are separate numbers.
        if is_circled(c) && at > 1 && is_circled(chars[at - 2]) {
            out.push_str(", ");
        }
        if !raised.is_empty() {
            at += raised.chars().count() - 1;
            // ³√8: the superscript is the degree of a root.
            match chars.get(at) {
                Some('√') => {
                    at += 1;
                    out.push_str(&format!("\\sqrt[{raised}]"));
                }
                _ => out.push_str(&format!("^{{{raised}}}")),
            }
        } else if !lowered.is_empty() {
            at += lowered.chars().count() - 1;
            out.push_str(&format!("_{{{lowered}}}"));
        } else if let Some((top, bottom)) = fraction_character_parts(c) {
            out.push_str(&format!("\\frac{{{top}}}{{{bottom}}}"));
        } else if is_overlined(chars.get(at)) && c.is_ascii_digit() {
            // A repeating decimal: each of its digits has its own overline.
            out.push_str("\\overline{");
            out.push(c);
            at += 1;
            while chars.get(at).is_some_and(char::is_ascii_digit) && is_overlined(chars.get(at + 1))
            {
                out.push(chars[at]);
                at += 2;
            }
            out.push('}');
        } else if let Some(digit) = to_ascii_digit(c) {
            out.push(digit);
        } else if let Some((_, spelled)) = SPELLED.iter().find(|(own, _)| *own == c) {
            out.push_str(spelled);
        } else if matches!(c, '\u{2009}' | '\u{202f}' | '\u{2006}') {
            // Narrow spaces separate thousands, as in LaTeX.
            out.push_str("\\,");
        } else if c.is_whitespace() && c != '\n' {
            out.push(' ');
        } else if c == '’' && out.ends_with(char::is_alphabetic) {
            out.push('\'');
        } else if !is_picture(c) {
            out.push(c);
        }
    }
    Cow::Owned(out.nfkc().collect())
}

fn superscript_to_plain(c: char) -> Option<char> {
    RAISED.iter().find(|(own, _)| *own == c).map(|(_, plain)| *plain)
}

fn subscript_to_plain(c: char) -> Option<char> {
    match c {
        '₀'..='₉' => char::from_digit(c as u32 - '₀' as u32, 10),
        'ₙ' => Some('n'),
        'ₖ' => Some('k'),
        'ᵢ' => Some('i'),
        'ⱼ' => Some('j'),
        'ₘ' => Some('m'),
        'ₓ' => Some('x'),
        '₊' => Some('+'),
        '₋' => Some('-'),
        _ => None,
    }
}

/// Returns the numerator and the denominator of a fraction character such as `½`, or `None` for any
/// other character.
fn fraction_character_parts(c: char) -> Option<(String, String)> {
    if !matches!(c, '¼'..='¾' | '⅐'..='⅞' | '↉') {
        return None;
    }
    let parts: String = [c].into_iter().nfkc().collect();
    parts.split_once('⁄').map(|(top, bottom)| (top.to_owned(), bottom.to_owned()))
}

fn to_ascii_digit(c: char) -> Option<char> {
    let value = |zero: &char| (c as u32).checked_sub(*zero as u32).filter(|value| *value < 10);
    ZEROS.iter().find_map(value).and_then(|value| char::from_digit(value, 10))
}

fn is_circled(c: char) -> bool {
    matches!(c, '①'..='⑳')
}

fn is_overlined(mark: Option<&char>) -> bool {
    matches!(mark, Some('\u{305}' | '\u{304}'))
}

fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{e0000}'..='\u{e0fff}')
}

/// Returns whether a character is a quotation mark, a check mark or a picture. Crosses are
/// excluded, because they negate.
fn is_picture(c: char) -> bool {
    matches!(c, '“' | '”' | '„' | '‟' | '‘' | '’' | '‚' | '«' | '»' | '‹' | '›' | '「' | '」')
        || matches!(
            c,
            '✓' | '✔'
                | '✅'
                | '☑'
                | '★'
                | '☆'
                | '⭐'
                | '■'
                | '□'
                | '◼'
                | '◻'
                | '▪'
                | '●'
                | '✨'
                | '➡'
        )
        || (matches!(c, '\u{1f300}'..='\u{1faff}') && !matches!(c, '\u{1f6ab}' | '\u{1f44e}'))
}

/// Returns whether a character is only decoration: a star, a check mark or an emoji. Signs that
/// negate (❌, 👎) or doubt are excluded.
pub(crate) fn is_decoration(c: char) -> bool {
    let is_emoji =
        matches!(c, '\u{1f300}'..='\u{1faff}') && !matches!(c, '👎' | '🚫' | '🛑' | '🤔');
    is_emoji || matches!(c, '✅' | '✔' | '☑' | '✓' | '⭐' | '★' | '☆' | '✨' | '\u{fe0f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equivalent_characters_are_unified() {
        for (text, want) in [
            ("x + 1", "x + 1"),
            ("x³ − 2⁻¹⁰", "x^{3} - 2^{-10}"),
            ("⅓ and 3⅞", "\\frac{1}{3} and 3\\frac{7}{8}"),
            ("¹⁄₃ of 2", "\\frac{1}{3} of 2"),
            ("① or ②③", "1 or 2, 3"),
            ("１２，٣٤、५", "12,34,5"),
            ("𝟏𝟐𝑥", "12x"),
            ("³√8 + ∛27", "\\sqrt[3]8 + \\sqrt[3]27"),
            ("101₂ x₁₂", "101_{2} x_{12}"),
            ("“5”\u{200b} ✅", "5 "),
            ("Bob’s ‘5’", "Bob's 5"),
            ("1\u{202f}234 ≦ 25 ℃", "1\\,234 ≤ 25 °C"),
            ("0.1\u{305}6\u{305}", "0.\\overline{16}"),
            ("x≦2 5ᵗʰ", "x≤2 5^{th}"),
            ("4 ✗", "4 ✗"),
        ] {
            assert_eq!(normalize_characters(text), want, "{text}");
        }
    }
}
