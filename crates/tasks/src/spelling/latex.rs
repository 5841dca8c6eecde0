//! Replaces LaTeX commands by plain text: `\frac{1}{2}` becomes `1/2`, `90^\circ` becomes `90°`,
//! `\sqrt{2}` becomes `√2`, `2\pi` becomes `2π`. Other commands are kept.

/// Symbols that LaTeX commands print, keyed by the command's name in lower case.
const SIGNS: [(&str, &str); 52] = [
    ("times", "*"),
    ("cdot", "*"),
    ("ast", "*"),
    ("div", "/"),
    ("left", ""),
    ("right", ""),
    ("bigl", ""),
    ("bigr", ""),
    ("displaystyle", ""),
    ("quad", " "),
    ("qquad", " "),
    ("leq", "<="),
    ("geq", ">="),
    ("le", "<="),
    ("ge", ">="),
    ("lt", "<"),
    ("gt", ">"),
    ("ne", "!="),
    ("neq", "!="),
    ("pm", "±"),
    ("approx", "≈"),
    ("infty", "∞"),
    ("circ", "∘"),
    ("degree", "°"),
    ("dots", "..."),
    ("ldots", "..."),
    ("cdots", "..."),
    ("to", "→"),
    ("rightarrow", "→"),
    ("in", "∈"),
    ("cup", "∪"),
    ("cap", "∩"),
    ("angle", "∠"),
    ("triangle", "△"),
    ("dfrac", FRACTION),
    ("tfrac", FRACTION),
    ("cfrac", FRACTION),
    ("pi", "π"),
    ("alpha", "α"),
    ("beta", "β"),
    ("gamma", "γ"),
    ("delta", "δ"),
    ("epsilon", "ε"),
    ("theta", "θ"),
    ("lambda", "λ"),
    ("mu", "μ"),
    ("rho", "ρ"),
    ("sigma", "σ"),
    ("tau", "τ"),
    ("phi", "φ"),
    ("omega", "ω"),
    ("textdegree", "°"),
];
/// Names of LaTeX commands that only change the font of their argument.
const FONTS: [&str; 18] = [
    "text",
    "textbf",
    "textit",
    "textrm",
    "textsf",
    "texttt",
    "textup",
    "emph",
    "underline",
    "mathrm",
    "mathbf",
    "mathit",
    "mathsf",
    "operatorname",
    "mbox",
    "boldsymbol",
    "bm",
    "mathop",
];
const FRACTION: &str = "\\frac";
const ROOT: &str = "\\sqrt";

/// Replaces LaTeX commands in a lower-case text by plain text.
pub(super) fn replace_commands(text: &str) -> String {
    let commands: Vec<char> = replace_plain_commands(text).chars().collect();
    let mut found = replace_fractions_and_roots(&commands).replace("{,}", ",");
    for degrees in ["^{∘}", "^∘", "{}^°", "^{°}", "^°"] {
        found = found.replace(degrees, "°");
    }
    found
}

/// Replaces LaTeX commands without arguments by the symbols that they print, and font commands by
/// their arguments.
fn replace_plain_commands(text: &str) -> String {
    let mut found = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        let (before, command) = rest.split_at(at);
        found.push_str(before);
        let command = &command[1..];
        let end = command.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(command.len());
        let (name, after) = command.split_at(end);
        if name.is_empty() {
            let Some(mark) = command.chars().next() else {
                found.push('\\');
                break;
            };
            match mark {
                '(' | ')' | '[' | ']' | ',' | ';' | '!' => {}
                ' ' | '$' | '%' | '#' | '&' | '_' | '*' => found.push(mark),
                mark => found.extend(['\\', mark]),
            }
            rest = &command[mark.len_utf8()..];
            continue;
        }
        rest = after;
        let argument = || split_braces(after.trim_start()).filter(|_| FONTS.contains(&name));
        if let Some((_, sign)) = SIGNS.iter().find(|(known, _)| *known == name) {
            found.push_str(sign);
        } else if let Some((inside, after)) = argument() {
            found.push_str(&replace_plain_commands(inside));
            rest = after;
        } else {
            found.push('\\');
            found.push_str(name);
        }
    }
    found.push_str(rest);
    found
}

/// Splits a text that starts with `{` into the content of the braces and the text after them.
/// Returns `None` if the braces are not closed.
fn split_braces(text: &str) -> Option<(&str, &str)> {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ if depth == 0 => return None,
            _ => {}
        }
        if depth == 0 {
            return (c == '}').then(|| (&text[1..at], &text[at + 1..]));
        }
    }
    None
}

/// Replaces LaTeX fractions and roots by plain text.
fn replace_fractions_and_roots(chars: &[char]) -> String {
    let mut found = String::with_capacity(chars.len());
    let mut at = 0;
    while at < chars.len() {
        let made = match (find_command_end(chars, at, FRACTION), find_command_end(chars, at, ROOT))
        {
            (Some(arguments), _) => replace_fraction(chars, arguments),
            (None, Some(arguments)) => replace_root(chars, arguments),
            (None, None) => None,
        };
        let Some((written, end)) = made else {
            found.push(chars[at]);
            at += 1;
            continue;
        };
        // Adjacent digits and letters must not become part of the fraction or root.
        let is_power = found.ends_with('^') || chars.get(end) == Some(&'^');
        if is_alphanumeric(found.chars().last()) && is_alphanumeric(written.chars().next()) {
            found.push(' ');
        }
        found.push_str(&parenthesize(&written, !is_power));
        if is_alphanumeric(chars.get(end).copied()) && is_alphanumeric(written.chars().last()) {
            found.push(' ');
        }
        at = end;
    }
    found
}

fn is_alphanumeric(c: Option<char>) -> bool {
    c.is_some_and(char::is_alphanumeric)
}

/// Returns the index after the LaTeX command `command`, where its arguments start, if the command
/// is at index `at`. Returns `None` otherwise.
fn find_command_end(chars: &[char], at: usize, command: &str) -> Option<usize> {
    if chars[at] != '\\' {
        return None;
    }
    let end = at + command.chars().count();
    let is_command = command.chars().eq(chars.get(at..end)?.iter().copied());
    is_command.then_some(end)
}

fn replace_fraction(chars: &[char], arguments: usize) -> Option<(String, usize)> {
    let (above, end) = read_argument(chars, arguments)?;
    let (below, end) = read_argument(chars, end)?;
    let is_simple = above.chars().all(char::is_alphanumeric);
    Some((
        format!("{}/{}", parenthesize(&above, is_simple), parenthesize(&below, is_factor(&below))),
        end,
    ))
}

fn replace_root(chars: &[char], arguments: usize) -> Option<(String, usize)> {
    let (radicand, end) = read_argument(chars, arguments)?;
    Some((format!("√{}", parenthesize(&radicand, is_factor(&radicand))), end))
}

/// Returns whether a text is a single number or a single letter, which needs no parentheses as a
/// factor.
fn is_factor(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_digit()) || text.chars().count() == 1
}

fn parenthesize(text: &str, is_simple: bool) -> String {
    if is_simple { text.to_owned() } else { format!("({text})") }
}

/// Returns the argument of a LaTeX command at index `at`, and the index after it. The argument is
/// the content of braces, or one character.
fn read_argument(chars: &[char], mut at: usize) -> Option<(String, usize)> {
    while chars.get(at)?.is_whitespace() {
        at += 1;
    }
    if chars[at] != '{' {
        return chars[at].is_alphanumeric().then(|| (chars[at].to_string(), at + 1));
    }
    let mut depth = 0;
    let end = chars[at..].iter().position(|c| {
        depth += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        depth == 0
    })?;
    let inside = replace_fractions_and_roots(&chars[at + 1..at + end]);
    let inside = inside.trim();
    (!inside.is_empty()).then(|| (inside.to_owned(), at + end + 1))
}
