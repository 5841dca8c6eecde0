//! Operations, relations and units that make a number a part of a larger expression.

use super::*;

/// Returns whether a text ends with a relation sign, a root or a logarithm. Arrows and equation
/// tags do not count.
pub(crate) fn ends_with_relation(text: &str) -> bool {
    let ends = [
        "≤",
        "≥",
        "≠",
        "<",
        "±",
        "<=",
        ">=",
        "!=",
        "~~",
        "\\le",
        "\\leq",
        "\\ge",
        "\\geq",
        "\\ne",
        "\\neq",
        "\\lt",
        "\\gt",
        "\\pm",
        "\\sqrt",
        "√",
        "<del>",
        "<s>",
        "<strike>",
        "\\log",
        "\\ln",
        "\\ngeq",
        "\\nleq",
        "\\ngtr",
        "\\nless",
        "\\geqslant",
        "\\leqslant",
        "<>",
        "=/=",
    ];
    let index = text.rsplit_once("\\sqrt[").map(|(_, index)| index);
    let is_root =
        index.is_some_and(|index| index.find(']').is_some_and(|at| at + 1 == index.len()));
    if is_root || ends.iter().any(|end| text.ends_with(end)) {
        return true;
    }
    let Some(before) = text.strip_suffix('>') else { return false };
    let is_tag = before.rfind('<').is_some_and(|at| !before[at..].contains(' '));
    !is_tag && !before.trim_end().is_empty() && !before.ends_with(['-', '=', '>'])
}

/// Returns whether a text ends with an operand and an operator, so that the number after the text
/// is an operand. `negative` is whether this number has a minus sign; the result is then false.
pub(super) fn ends_with_operand(text: &str, negative: bool) -> bool {
    let operators = [
        "+", "-", "−", "—", "..", "...", "…", "~", "〜", "*", "×", "·", "÷", "/", "\\times",
        "\\cdot", "\\div", "^", " x",
    ];
    let Some(prefix) = operators.iter().find_map(|sign| text.strip_suffix(sign)) else {
        return false;
    };
    // Markdown marks before a number are not operators, but the hyphen of a range such as 12-13 is.
    let before = prefix.trim_end_matches(['*', ' ']);
    let is_mark = text.ends_with("**")
        && !before.trim_end_matches('*').ends_with(|c: char| c.is_ascii_digit());
    let before = before.trim_end_matches(['$', '}', ')', '%', ']']);
    let is_variable = |text: &str| {
        let mut back = text.trim_end_matches([' ', '$']).chars().rev();
        back.next().is_some_and(|c| c.is_ascii_lowercase() && c != 'a')
            && !back.next().is_some_and(|c| c.is_alphabetic() || c == '\\' || c == '\'')
    };
    !negative && !is_mark && (before.ends_with(|c: char| c.is_ascii_digit()) || is_variable(prefix))
}

/// Returns whether a text ends with the name of a function, such as `log`, so that the number after
/// the text is its argument.
pub(super) fn ends_with_function(text: &str) -> bool {
    let name = text.rsplit(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or_default();
    ["log", "ln", "lg", "exp", "sin", "cos", "tan", "cot", "sqrt", "arcsin", "arccos", "arctan"]
        .contains(&name)
}

/// Returns whether a text ends with the left side of an equation that is not solved for its only
/// unknown: `2x =`, `x/2 =`, `-x =`. Returns false if the left side is only an unknown: `x =`, `x_1
/// =`, `f(2) =`.
pub(super) fn ends_with_unsolved_side(text: &str) -> bool {
    let Some(prefix) = text.strip_suffix('=') else { return false };
    let prefix = prefix
        .rsplit(['=', ',', ';', ':', '?', '!', '\n', '⇒', '→', '>', '$'])
        .next()
        .unwrap_or_default();
    let is_word = |token: &&str| {
        token.as_bytes().windows(2).any(|pair| pair.iter().all(u8::is_ascii_alphabetic))
            || token.contains('(')
    };
    // Exponents and subscripts in braces belong to the unknown before them.
    let prefix = strip_braced_groups(prefix);
    let terms: Vec<&str> =
        prefix.split_whitespace().rev().take_while(|token| !is_word(token)).collect();
    let terms: Vec<char> = terms.into_iter().rev().collect::<Vec<_>>().join(" ").chars().collect();
    let at =
        |index: Option<usize>| index.and_then(|index| terms.get(index)).copied().unwrap_or(' ');
    let mut unknowns = Vec::new();
    let mut is_changed = false;
    for (index, &c) in terms.iter().enumerate() {
        let before = at(index.checked_sub(1));
        let next = at(Some(index + 1));
        // In `3 x 4`, `3x4` and "8 parts x 2", the x is a multiplication sign.
        let is_spaced =
            before == ' ' && next == ' ' && "0123456789.$(".contains(at(Some(index + 2)));
        let is_sign = c == 'x' && (is_spaced || before.is_ascii_digit() && next.is_ascii_digit());
        if "xyzn".contains(c) && !is_sign && !unknowns.contains(&c) {
            unknowns.push(c);
        }
        // Digits of subscripts belong to a name.
        is_changed |=
            (c.is_ascii_digit() && !matches!(before, '_' | '{')) || matches!(c, '-' | '^' | '/');
    }
    unknowns.len() == 1 && is_changed
}

/// Removes braces and the text inside them.
fn strip_braced_groups(text: &str) -> String {
    let mut depth = 0usize;
    let is_outside = |c: &char| {
        depth += usize::from(*c == '{');
        let outside = depth == 0;
        depth = depth.saturating_sub(usize::from(*c == '}'));
        outside
    };
    text.chars().filter(is_outside).collect()
}

/// Returns whether a text after a number starts with a factor of the number, or with the `+` of a
/// bound (`5+`).
pub(crate) fn starts_factor(text: &str) -> bool {
    let symbols = ["π", "√", "\\pi", "\\sqrt"];
    let mut chars = text.chars();
    let is_letter = chars.next().is_some_and(|c| "xyznieabcfoqruvw".contains(c));
    // Examples: `42 x`, `42\,n`, `42 ab`, `42C2`.
    let spaced = text.trim_start_matches([' ', '~', '\\', ',', ';', '$']);
    let word: String = spaced.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    let is_variable = ["x", "y", "z", "n", "q", "ab", "bc", "ac", "xy", "yz", "xz", "pq"]
        .contains(&word.as_str())
        && !spaced[word.len()..].trim_start().starts_with(char::is_alphanumeric)
        && !text[..text.len() - spaced.len()].replace("\\,", "").contains([',', ';']);
    let mut joined = text.chars();
    let is_choice = joined.next().is_some_and(|c| "CPRr".contains(c))
        && joined.next().is_some_and(|c| c.is_ascii_digit());
    text.starts_with('+')
        || is_variable
        || is_choice
        || symbols.iter().any(|sign| text.trim_start().starts_with(sign))
        || (is_letter && !chars.next().is_some_and(|c| c.is_alphanumeric() || c == '_'))
}

/// Returns the denominator of a fraction in words, such as 100 for "hundredths". Only words that
/// end in `ths` count, because "seconds" is a unit of time.
pub(super) fn denominator_in_words(word: &str) -> Option<i64> {
    let bottom = words::denominator_of_word(word).filter(|_| word.ends_with("ths"))?;
    i64::try_from(bottom).ok()
}

/// Returns whether a text after a number starts with the suffix of an ordinal number and a noun:
/// the "nd term" of "the 42nd term".
pub(super) fn starts_with_ordinal_suffix(text: &str) -> bool {
    ["st", "nd", "rd", "th"].iter().any(|ending| {
        // Without a word after it, "The 42nd" can be a day of the month.
        text.strip_prefix(ending)
            .and_then(|rest| rest.strip_prefix(' '))
            .is_some_and(|rest| rest.starts_with(char::is_alphabetic))
    })
}

/// Returns whether a text starts with an arithmetic operator and a number or variable.
pub(crate) fn starts_operation(text: &str) -> bool {
    let text = text.trim_start_matches([' ', '$', ')']);
    let signs = [
        "..",
        "…",
        "~",
        "—",
        "through ",
        "mod ",
        "modulo ",
        "choose ",
        "+",
        "*",
        "×",
        "·",
        "÷",
        "/",
        "-",
        "−",
        "\\times",
        "\\cdot",
        "\\div",
        "times ",
        "fois ",
        "mal ",
        "veces ",
        "vezes ",
        "volte ",
        "point ",
        "plus ",
        "minus ",
        "divided by ",
        "to ",
        "or ",
        "x ",
    ];
    let Some(rest) = signs.iter().find_map(|sign| text.strip_prefix(sign)) else { return false };
    let rest = rest.trim_start_matches([' ', '$', '(', '.']);
    let mut chars = rest.chars();
    let is_variable =
        chars.next().is_some_and(|c| c.is_ascii_lowercase() && !matches!(c, 'a' | 'i'))
            && !chars.next().is_some_and(|c| c.is_alphanumeric() || c == '.' || c == ')')
            && !text.starts_with(['~', '—', '…']);
    is_variable || rest.starts_with(|c: char| c.is_ascii_digit())
}

/// Returns whether a text starts with a relation sign, such as the `<` of `5 < x`.
pub(crate) fn starts_relation(text: &str) -> bool {
    let text = text.trim_start_matches([' ', '$']);
    let signs =
        ["≤", "≥", "≠", "<=", ">=", "!=", "< ", "> ", "\\le", "\\ge", "\\ne", "\\lt", "\\gt"];
    signs.iter().any(|sign| text.starts_with(sign)) && !text.starts_with("\\left")
}

/// Replaces LaTeX commands around words, spacing commands, `$`, `~` and braces by spaces.
pub(crate) fn without_latex(text: &str) -> String {
    let marks = [
        "\\text{",
        "\\textbf{",
        "\\textrm{",
        "\\mathrm{",
        "\\mbox{",
        "\\,",
        "\\ ",
        "\\;",
        "\\!",
        "~",
        "$",
        "{",
        "}",
    ];
    marks.iter().fold(text.to_owned(), |text, mark| text.replace(mark, " "))
}

/// Adds the units at the start of a text to the description `about` of a number: `cm^2`, `square
/// miles per hour`, `m/s`.
pub(super) fn add_leading_units(text: &str, about: &mut NumberDescription) {
    let mut rest = text.trim_start();
    let mut sign = 1;
    let mut square = 1;
    for _ in 0..4 {
        let word: String = rest.chars().take_while(|c| c.is_alphabetic() || *c == '°').collect();
        let word = if word.starts_with('°') { "°".to_owned() } else { word };
        if word.is_empty() {
            return;
        }
        rest = &rest[word.len()..];
        match word.as_str() {
            "square" | "sq" => square = 2,
            "cubic" | "cu" => square = 3,
            "per" => sign = -1,
            "in" if rest.trim_start().starts_with(char::is_alphabetic) => return,
            _ => {
                let heat = about.units == [("degree", 1)];
                let heat = match word.as_str() {
                    "C" | "Celsius" | "celsius" if heat => Some("celsius"),
                    "F" | "Fahrenheit" | "fahrenheit" if heat => Some("fahrenheit"),
                    _ => None,
                };
                let units = match heat {
                    Some(heat) => {
                        about.add_unit("degree", -1);
                        vec![(heat, 1)]
                    }
                    None => match words::parse_units(&word) {
                        Some(units) => units,
                        None => match words::unit_of_letter(&word)
                            .filter(|_| !rest.trim_start().starts_with(char::is_alphabetic))
                        {
                            Some(unit) => vec![(unit, 1)],
                            None => return,
                        },
                    },
                };
                let mut power = square;
                if let Some(raised) = rest.trim_start().strip_prefix('^') {
                    let raised = raised.trim_start();
                    let digits: String =
                        raised.chars().take_while(char::is_ascii_digit).take(2).collect();
                    power = digits.parse().unwrap_or(1);
                    rest = &raised[digits.len()..];
                }
                units.into_iter().for_each(|(unit, own)| about.add_unit(unit, own * sign * power));
                square = 1;
            }
        }
        rest = rest.trim_start();
        if let Some(per) = rest.strip_prefix('/') {
            (sign, rest) = (-1, per.trim_start());
        }
    }
}
