//! Splits templates into text and tags, and tags into tokens, like Jinja2's lexer.

use std::borrow::Cow;

/// Maximum number of operators and brackets in one template tag. The template engine recurses over
/// them without a limit.
const OPERATORS: usize = 1000;

/// A part of a Jinja template: text or a tag.
pub(super) enum TemplatePart<'a> {
    /// Template text, comments and raw blocks, which stay unchanged.
    Text(&'a str),
    /// A `{{ … }}` tag, which prints a value.
    Print(Tag<'a>),
    /// A `{% … %}` tag.
    Block(Tag<'a>),
}

/// A template tag, split into tokens.
pub(super) struct Tag<'a> {
    /// Opening delimiter of the tag, `{{` or `{%`, with its white-space sign.
    pub open: &'a str,
    pub tokens: Vec<Token<'a>>,
    /// White space before the closing delimiter.
    pub tail: &'a str,
    /// Closing delimiter of the tag, `}}` or `%}`, with its white-space sign.
    pub close: &'a str,
    pub line: usize,
}

/// A token of a template tag, with the white space before the token.
pub(super) struct Token<'a> {
    pub gap: &'a str,
    /// Text of the token. For a string token, this is its unescaped value.
    pub text: Cow<'a, str>,
    pub quoted: bool,
}

impl Tag<'_> {
    /// Returns the first word of the tag, such as `for` or `set`. Empty if the tag is empty.
    pub fn keyword(&self) -> &str {
        self.tokens.first().map_or("", |token| token.text.as_ref())
    }

    pub fn error(&self, what: impl std::fmt::Display) -> String {
        format!("{what} (line {} of the template)", self.line)
    }
}

impl Token<'_> {
    /// Returns whether the token is the operator or word `text`, and not a string with that value.
    pub fn is(&self, text: &str) -> bool {
        !self.quoted && self.text == text
    }

    /// Returns whether the token can increase the nesting of an expression.
    fn is_operator(&self) -> bool {
        let words = ["and", "or", "not", "in", "is", "if", "else"];
        let text = self.text.as_ref();
        let is_value = text.starts_with(|c: char| c == '_' || c.is_alphanumeric());
        !self.quoted && (words.contains(&text) || !(is_value || [",", ":"].contains(&text)))
    }
}

/// Returns whether the text of a token is a word.
pub(super) fn is_name(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|c| c == '_' || c.is_alphabetic())
        && chars.all(|c| c == '_' || c.is_alphanumeric())
}

/// Splits a Jinja template into text and tags.
pub(super) fn split_template(source: &str) -> Result<Vec<TemplatePart<'_>>, String> {
    let mut parts = Vec::new();
    let mut rest = source;
    let mut line = 1;
    let mut counted = 0;
    loop {
        let start = rest
            .match_indices('{')
            .map(|(at, _)| at)
            .find(|&at| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')));
        let Some(start) = start else {
            parts.push(TemplatePart::Text(rest));
            return Ok(parts);
        };
        let (text, tag) = rest.split_at(start);
        parts.push(TemplatePart::Text(text));
        let at = source.len() - tag.len();
        line += source[counted..at].matches('\n').count();
        counted = at;
        if tag.starts_with("{#") {
            let end = tag
                .find("#}")
                .ok_or_else(|| format!("a comment has no end (line {line} of the template)"))?;
            parts.push(TemplatePart::Text(&tag[..end + 2]));
            rest = &tag[end + 2..];
        } else if let Some(start) = block_tag_length(tag, "raw") {
            let body = &tag[start..];
            let end = body
                .match_indices("{%")
                .find_map(|(at, _)| Some(at + block_tag_length(&body[at..], "endraw")?));
            let end =
                end.ok_or_else(|| format!("a raw block has no end (line {line} of the template)"))?;
            // Jinja2 keeps the line break after the opening tag. The sign `+` makes the engine keep
            // it.
            let (open, close) = tag[..start].split_at(start - 2);
            let sign = if open.ends_with('-') { "" } else { "+" };
            parts.extend([open, sign, close, &body[..end]].map(TemplatePart::Text));
            rest = &body[end..];
        } else {
            let is_print = tag.starts_with("{{");
            let (tag, after) = read_tag(tag, line)?;
            parts.push(if is_print { TemplatePart::Print(tag) } else { TemplatePart::Block(tag) });
            rest = after;
        }
    }
}

/// Returns the length in bytes of the tag at the start of `source`, if the tag contains only
/// `word`.
fn block_tag_length(source: &str, word: &str) -> Option<usize> {
    let inner = source.strip_prefix("{%")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start();
    let after = inner.strip_prefix(word)?.trim_start();
    let after = after.strip_prefix(['-', '+']).unwrap_or(after).strip_prefix("%}")?;
    Some(source.len() - after.len())
}

/// Parses the template tag at the start of `source`. Also returns the text after the tag.
fn read_tag(source: &str, line: usize) -> Result<(Tag<'_>, &str), String> {
    let signed = source[2..].starts_with(['-', '+']);
    let (open, mut rest) = source.split_at(if signed { 3 } else { 2 });
    let end = if source.starts_with("{{") { "}}" } else { "%}" };
    let mut tag = Tag { open, tokens: Vec::new(), tail: "", close: "", line };
    let mut brackets: Vec<char> = Vec::new();
    let mut operators = 0;
    loop {
        let body = rest.trim_start();
        let gap = &rest[..rest.len() - body.len()];
        let unsigned = body.strip_prefix(['-', '+']).unwrap_or(body);
        if brackets.is_empty()
            && let Some(after) = unsigned.strip_prefix(end)
        {
            tag.tail = gap;
            tag.close = &body[..body.len() - after.len()];
            return Ok((tag, after));
        }
        let Some(first) = body.chars().next() else {
            return Err(tag.error(format!("{open} has no {end}")));
        };
        let after_dot = tag.tokens.last().is_some_and(|token| token.is("."));
        let (text, length) = match first {
            '\'' | '"' => {
                let length = string_length(body).ok_or_else(|| tag.error("a string has no end"))?;
                (unescape(&body[1..length - 1]).map_err(|what| tag.error(what))?.into(), length)
            }
            '0'..='9' => parse_number(body, after_dot).map_err(|what| tag.error(what))?,
            c if c == '_' || c.is_alphabetic() => {
                let length =
                    body.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(body.len());
                (Cow::Borrowed(&body[..length]), length)
            }
            _ => {
                let operators = ["//", "**", "==", "!=", ">=", "<="];
                let length =
                    if operators.iter().any(|operator| body.starts_with(operator)) { 2 } else { 1 };
                if length == 1 && !"+-/*%~[](){}><=.:|,".contains(first) {
                    return Err(tag.error(format!("{first:?} is not allowed in a tag")));
                }
                match first {
                    '(' => brackets.push(')'),
                    '[' => brackets.push(']'),
                    '{' => brackets.push('}'),
                    ')' | ']' | '}' if brackets.pop() != Some(first) => {
                        return Err(tag.error(format!("{first:?} has no opening bracket")));
                    }
                    _ => {}
                }
                (Cow::Borrowed(&body[..length]), length)
            }
        };
        let token = Token { gap, text, quoted: matches!(first, '\'' | '"') };
        operators += usize::from(token.is_operator());
        if operators > OPERATORS {
            return Err(tag.error(format!("a tag has more than {OPERATORS} operators")));
        }
        tag.tokens.push(token);
        rest = &body[length..];
    }
}

/// Returns the length in bytes of the string literal at the start of `source`, including its
/// quotes.
fn string_length(source: &str) -> Option<usize> {
    let quote = source.chars().next()?;
    let mut escaped = false;
    for (at, c) in source.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Parses the number at the start of `source`. Returns the number in the template engine's
/// notation, and its original length in bytes. After a dot, digits are an index.
fn parse_number(source: &str, after_dot: bool) -> Result<(Cow<'_, str>, usize), String> {
    let radix = match source.as_bytes().get(..2) {
        Some(b"0x" | b"0X") => Some(16),
        Some(b"0o" | b"0O") => Some(8),
        Some(b"0b" | b"0B") => Some(2),
        _ => None,
    };
    if let Some(radix) = radix.filter(|_| !after_dot) {
        let length =
            source[2..].find(|c: char| c != '_' && !c.is_digit(radix)).unwrap_or(source.len() - 2)
                + 2;
        let value = i128::from_str_radix(&source[2..length].replace('_', ""), radix);
        let value =
            value.map_err(|_| format!("{} is not a number of 128 bits", &source[..length]))?;
        return Ok((value.to_string().into(), length));
    }
    let mut length = digits_length(source);
    if !after_dot {
        if source[length..].starts_with('.')
            && source[length + 1..].starts_with(|c: char| c.is_ascii_digit())
        {
            length += 1 + digits_length(&source[length + 1..]);
        }
        let exponent = source[length..].strip_prefix(['e', 'E']).unwrap_or_default();
        let unsigned = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
        if unsigned.starts_with(|c: char| c.is_ascii_digit()) {
            length += 1 + exponent.len() - unsigned.len() + digits_length(unsigned);
        }
    }
    let text = source[..length].replace('_', "");
    if text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<i128>().is_err() {
        return Err(format!("{text} is not a number of 128 bits"));
    }
    Ok((text.into(), length))
}

fn digits_length(text: &str) -> usize {
    text.find(|c: char| c != '_' && !c.is_ascii_digit()).unwrap_or(text.len())
}

/// Resolves Python's escape sequences in the body of a string literal.
fn unescape(body: &str) -> Result<String, String> {
    let mut out = String::with_capacity(body.len());
    let mut rest = body;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let Some(c) = rest.chars().next() else { break };
        rest = &rest[c.len_utf8()..];
        let digits = match c {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            '0'..='7' => {
                let length = rest.chars().take(2).take_while(|c| c.is_digit(8)).count();
                let code = u32::from_str_radix(&format!("{c}{}", &rest[..length]), 8).unwrap_or(0);
                out.extend(char::from_u32(code));
                rest = &rest[length..];
                continue;
            }
            other => {
                match other {
                    '\n' => {}
                    '\\' | '\'' | '"' => out.push(other),
                    'a' => out.push('\u{7}'),
                    'b' => out.push('\u{8}'),
                    'f' => out.push('\u{C}'),
                    'n' => out.push('\n'),
                    'r' => out.push('\r'),
                    't' => out.push('\t'),
                    'v' => out.push('\u{B}'),
                    'N' => return Err("\\N is not supported; write the character itself".into()),
                    other => out.extend(['\\', other]),
                }
                continue;
            }
        };
        let code = rest
            .get(..digits)
            .and_then(|code| u32::from_str_radix(code, 16).ok())
            .and_then(char::from_u32);
        out.push(
            code.ok_or_else(|| format!("\\{c} is not followed by {digits} digits of a character"))?,
        );
        rest = &rest[digits..];
    }
    out.push_str(rest);
    Ok(out)
}
