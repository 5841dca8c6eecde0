//! Tokens of a formula, in LaTeX or in plain text.

/// A token.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token {
    /// Digits, with a power of ten, and whether a point stands among them.
    Number {
        digits: String,
        scale: i32,
        decimal: bool,
        /// Whether white space stands before.
        spaced: bool,
    },
    /// A variable.
    Letter(String),
    /// Words.
    Text(String),
    /// A command of LaTeX, a function or a constant by its name in LaTeX.
    Command(String),
    /// `+ - * / ^ _ ! % | = < >` and signs of LaTeX in one character.
    Sign(char),
    /// `(`, `[`, or `{` for a brace that is shown.
    Open(char),
    Close(char),
    /// Braces that group.
    GroupOpen,
    GroupClose,
    /// A comma, a semicolon, "and", "or".
    Separator,
    /// `\begin{…}` and `\end{…}`.
    Begin(String),
    End,
    /// `&` and `\\`.
    Cell,
    Row,
}

/// Longest formula that is read, in characters.
pub(super) const LONGEST: usize = 4000;

/// Words that are functions or constants, with their names in LaTeX.
const NAMES: [&str; 36] = [
    "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
    "ln", "log", "exp", "max", "min", "pi", "infty", "alpha", "beta", "gamma", "delta", "theta", "lambda",
    "mu", "phi", "omega", "binom", "frac", "abs", "floor", "ceil", "cup", "lg",
];

/// Units that are written without `\text`.
const UNITS: [&str; 44] = [
    "mm", "cm", "dm", "km", "kg", "mg", "lb", "lbs", "oz", "ft", "in", "mi", "mph", "hr", "hrs", "min",
    "sec", "ms", "ml", "mL", "sq", "cu", "deg", "rad", "Hz", "kHz", "am", "pm", "AM", "PM", "yd", "kJ", "kW",
    "Pa", "kPa", "eV", "mol", "nm", "gal", "pt", "qt", "rpm", "dB", "th",
];

/// Commands that say how something looks.
const LOOKS: [&str; 27] = [
    "left",
    "right",
    "big",
    "Big",
    "bigg",
    "Bigg",
    "bigl",
    "bigr",
    "Bigl",
    "Bigr",
    "displaystyle",
    "textstyle",
    "limits",
    "nolimits",
    "hspace",
    "quad",
    "qquad",
    "thinspace",
    "enspace",
    "space",
    "mathstrut",
    "phantom",
    "middle",
    "bf",
    "rm",
    "it",
    "boldsymbol",
];

/// Commands whose argument is text.
const TEXTS: [&str; 14] = [
    "text",
    "mbox",
    "hbox",
    "textbf",
    "textrm",
    "textit",
    "textsf",
    "mathrm",
    "operatorname",
    "mathbf",
    "mathit",
    "mathsf",
    "textnormal",
    "mathcal",
];

/// Other names of commands.
const SAME: [(&str, &str); 47] = [
    ("varnothing", "emptyset"),
    ("dfrac", "frac"),
    ("tfrac", "frac"),
    ("cfrac", "frac"),
    ("dbinom", "binom"),
    ("tbinom", "binom"),
    ("bar", "overline"),
    ("lvert", "|"),
    ("rvert", "|"),
    ("vert", "|"),
    ("mid", "|"),
    ("cdot", "*"),
    ("times", "*"),
    ("ast", "*"),
    ("div", "/"),
    ("pm", "±"),
    ("mp", "±"),
    ("le", "≤"),
    ("leq", "≤"),
    ("leqslant", "≤"),
    ("ge", "≥"),
    ("geq", "≥"),
    ("geqslant", "≥"),
    ("lt", "<"),
    ("gt", ">"),
    ("ne", "≠"),
    ("neq", "≠"),
    ("equiv", "="),
    ("approx", "≈"),
    ("cup", "∪"),
    ("in", "∈"),
    ("lg", "log"),
    ("circ", "°"),
    ("degree", "°"),
    ("degrees", "°"),
    ("deg", "°"),
    ("percent", "%"),
    ("infin", "infty"),
    ("inf", "infty"),
    ("infinity", "infty"),
    ("oo", "infty"),
    ("to", "→"),
    ("rightarrow", "→"),
    ("asin", "arcsin"),
    ("acos", "arccos"),
    ("atan", "arctan"),
    ("sim", "≈"),
];

struct Lexer<'t> {
    rest: &'t str,
    tokens: Vec<Token>,
    spaced: bool,
    /// How deep text is within text.
    depth: u32,
    /// Whether a comma before three digits parts thousands, outside of brackets.
    thousands: bool,
    brackets: u32,
}

/// The tokens of a formula, where a comma before three digits parts `thousands` or the items of a list.
/// `None` where it is too long, or has signs that no formula has.
pub(super) fn tokens(text: &str, thousands: bool) -> Option<Vec<Token>> {
    if text.chars().count() > LONGEST {
        return None;
    }
    let mut lexer = Lexer { rest: text, tokens: Vec::new(), spaced: false, depth: 0, thousands, brackets: 0 };
    let is_prose = text.chars().all(|c| c.is_alphabetic() || c.is_whitespace() || c == '.')
        && text.split_whitespace().any(|word| word.chars().count() > 3 && !NAMES.contains(&word));
    if is_prose {
        let words = text.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty());
        return Some(words.map(|word| Token::Text(word.to_owned())).collect());
    }
    lexer.run()?;
    Some(lexer.tokens)
}

impl<'t> Lexer<'t> {
    fn run(&mut self) -> Option<()> {
        while let Some(c) = self.rest.chars().next() {
            let before = self.tokens.len();
            match c {
                '\\' => self.command()?,
                c if c.is_ascii_digit() => self.number(),
                '.' if self.rest[1..].starts_with(|c: char| c.is_ascii_digit()) => self.number(),
                c if c.is_alphabetic() => self.word(),
                c => {
                    self.rest = &self.rest[c.len_utf8()..];
                    self.sign(c)?;
                }
            }
            if self.tokens.len() > before {
                self.spaced = false;
            }
        }
        Some(())
    }

    fn push(&mut self, token: Token) {
        match token {
            Token::Open(_) => self.brackets += 1,
            Token::Close(_) => self.brackets = self.brackets.saturating_sub(1),
            _ => {}
        }
        self.tokens.push(token);
    }

    fn sign(&mut self, c: char) -> Option<()> {
        match c {
            '$' => {}
            c if c.is_whitespace() || c == '~' => self.spaced = true,
            '{' => self.push(Token::GroupOpen),
            '}' => self.push(Token::GroupClose),
            '(' | '[' => self.push(Token::Open(c)),
            ')' | ']' => self.push(Token::Close(c)),
            ',' | ';' => self.push(Token::Separator),
            '&' => self.push(Token::Cell),
            '−' | '–' | '—' => self.push(Token::Sign('-')),
            '·' | '×' | '⋅' => self.push(Token::Sign('*')),
            '÷' | '∕' | '⁄' => self.push(Token::Sign('/')),
            '*' if self.rest.starts_with('*') => {
                self.rest = &self.rest[1..];
                self.push(Token::Sign('^'));
            }
            '√' => self.push(Token::Command("sqrt".into())),
            '∞' => self.push(Token::Command("infty".into())),
            '∅' => self.push(Token::Command("emptyset".into())),
            '<' | '>' if self.rest.starts_with('=') => {
                self.rest = &self.rest[1..];
                self.push(Token::Sign(if c == '<' { '≤' } else { '≥' }));
            }
            '⩽' => self.push(Token::Sign('≤')),
            '⩾' => self.push(Token::Sign('≥')),
            '²' | '³' => {
                self.push(Token::Sign('^'));
                let digits = if c == '²' { "2" } else { "3" };
                self.push(Token::Number { digits: digits.into(), scale: 0, decimal: false, spaced: false });
            }
            '½' | '¼' | '¾' => {
                let (top, bottom) = match c {
                    '½' => ("1", "2"),
                    '¼' => ("1", "4"),
                    _ => ("3", "4"),
                };
                self.push(Token::Command("frac".into()));
                for digits in [top, bottom] {
                    let digits = digits.to_owned();
                    self.push(Token::Number { digits, scale: 0, decimal: false, spaced: false });
                }
            }
            '€' | '£' | '¥' | '₹' => self.push(Token::Text(c.to_string())),
            // A full stop ends a sentence.
            '.' if self.rest.trim().is_empty() => {}
            '+' | '-' | '*' | '/' | '^' | '_' | '!' | '%' | '|' | '=' | '<' | '>' | '±' | '≤' | '≥' | '≠'
            | '≈' | '∪' | '∈' | '°' | ':' | '\'' | '→' => self.push(Token::Sign(c)),
            _ => return None,
        }
        Some(())
    }

    fn command(&mut self) -> Option<()> {
        let after = &self.rest[1..];
        let Some(first) = after.chars().next() else {
            self.rest = after;
            return Some(());
        };
        if !first.is_ascii_alphabetic() {
            self.rest = &after[first.len_utf8()..];
            match first {
                '{' => self.push(Token::Open('{')),
                '}' => self.push(Token::Close('}')),
                '%' => self.push(Token::Sign('%')),
                '|' => self.push(Token::Sign('|')),
                '\\' => {
                    // `\\[4pt]` says how far apart rows are.
                    if let Some((_, rest)) = self.rest.strip_prefix('[').and_then(|rest| rest.split_once(']'))
                    {
                        self.rest = rest;
                    }
                    self.push(Token::Row);
                }
                '_' | '&' | '#' => {}
                _ => self.spaced = true,
            }
            return Some(());
        }
        let end = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let (name, rest) = after.split_at(end);
        self.rest = rest;
        if LOOKS.contains(&name) {
            self.spaced = true;
            // `\left.` stands for no bracket.
            if matches!(name, "left" | "right") {
                self.rest = self.rest.trim_start();
                self.rest = self.rest.strip_prefix('.').unwrap_or(self.rest);
            }
            return Some(());
        }
        if TEXTS.contains(&name) {
            let inside = self.argument().unwrap_or_default();
            return self.text(inside);
        }
        match name {
            "begin" => {
                let name = self.argument()?;
                if name.starts_with("array") {
                    self.argument();
                }
                self.push(Token::Begin(name.trim_end_matches('*').to_owned()));
            }
            "end" => {
                self.argument()?;
                self.push(Token::End);
            }
            "lbrace" => self.push(Token::Open('{')),
            "rbrace" => self.push(Token::Close('}')),
            "lfloor" => self.push(Token::Open('⌊')),
            "rfloor" => self.push(Token::Close('⌊')),
            "lceil" => self.push(Token::Open('⌈')),
            "rceil" => self.push(Token::Close('⌈')),
            "langle" => self.push(Token::Open('⟨')),
            "rangle" => self.push(Token::Close('⟨')),
            "mathbb" => {
                let letter = self.argument()?;
                self.push(Token::Letter(format!("\\mathbb{{{letter}}}")));
            }
            name => self.named(name),
        }
        // Arguments of one digit: `\frac12`.
        let arguments = match self.tokens.last() {
            Some(Token::Command(name)) if name == "frac" || name == "binom" => 2,
            Some(Token::Command(name)) if name == "sqrt" => 1,
            _ => 0,
        };
        for _ in 0..arguments {
            self.rest = self.rest.trim_start();
            let Some(digit) = self.rest.chars().next().filter(char::is_ascii_digit) else { break };
            self.rest = &self.rest[1..];
            let digits = digit.to_string();
            self.push(Token::Number { digits, scale: 0, decimal: false, spaced: false });
        }
        Some(())
    }

    fn named(&mut self, name: &str) {
        let name = SAME.iter().find(|(from, _)| *from == name).map_or(name, |(_, to)| to);
        let mut chars = name.chars();
        match (chars.next(), chars.next()) {
            (Some(sign), None) => self.push(Token::Sign(sign)),
            _ => self.push(Token::Command(name.to_owned())),
        }
    }

    /// The argument in braces that follows.
    fn argument(&mut self) -> Option<&'t str> {
        let rest = self.rest.trim_start().strip_prefix('{')?;
        let mut depth = 1;
        for (at, c) in rest.char_indices() {
            depth += match c {
                '{' => 1,
                '}' => -1,
                _ => 0,
            };
            if depth == 0 {
                self.rest = &rest[at + 1..];
                return Some(&rest[..at]);
            }
        }
        None
    }

    /// Text of LaTeX. Without words it is a formula.
    fn text(&mut self, inside: &'t str) -> Option<()> {
        if self.depth == 8 {
            return None;
        }
        self.depth += 1;
        let rest = std::mem::replace(&mut self.rest, inside);
        let start = self.tokens.len();
        let plain = inside.trim();
        let done = if !plain.is_empty() && plain.chars().all(|c| c.is_alphabetic() || c == ' ') {
            self.rest = "";
            for word in plain.split(' ').filter(|word| !word.is_empty()) {
                self.spell(word, true);
            }
            Some(())
        } else {
            self.run()
        };
        // A sign that no formula has makes all of it words.
        if done.is_none() {
            self.tokens.truncate(start);
            self.push(Token::Text(plain.to_owned()));
        }
        self.depth -= 1;
        self.rest = rest;
        Some(())
    }

    fn word(&mut self) {
        let end = self.rest.find(|c: char| !c.is_alphabetic()).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        // The sign of multiplication, as those without one write powers of ten.
        let after_number = matches!(self.tokens.last(), Some(Token::Number { .. }));
        if after_number && matches!(word, "x" | "X") && rest.trim_start().starts_with("10^") {
            self.push(Token::Sign('*'));
            return;
        }
        self.spell(word, self.depth > 0);
    }

    fn spell(&mut self, word: &str, is_text: bool) {
        let after_number = matches!(
            self.tokens.last(),
            Some(
                Token::Number { .. }
                    | Token::Close(_)
                    | Token::GroupClose
                    | Token::Text(_)
                    | Token::Sign('°')
            )
        );
        let after_degree = matches!(self.tokens.last(), Some(Token::Sign('°')))
            || self.tokens.ends_with(&[Token::Sign('°'), Token::GroupClose]);
        let one = word.chars().nth(1).is_none();
        match word {
            "or" | "and" => self.push(Token::Separator),
            "π" => self.push(Token::Command("pi".into())),
            "percent" | "degrees" | "degree" | "infinity" | "inf" | "oo" => self.named(word),
            "i" | "e" if is_text => self.push(Token::Letter(word.into())),
            "C" | "F" | "K" if after_degree => self.push(Token::Text(word.into())),
            "m" | "g" | "s" | "h" | "l" if is_text => self.push(Token::Text(word.into())),
            "A" | "C" | "J" | "K" | "L" | "N" | "V" | "W" if is_text && after_number => {
                self.push(Token::Text(word.into()));
            }
            _ if one => self.push(Token::Letter(word.into())),
            _ if NAMES.contains(&word) && !(is_text && after_number) => self.named(word),
            _ if is_text || word.chars().count() > 3 || !word.is_ascii() => {
                self.push(Token::Text(word.into()))
            }
            _ if after_number && UNITS.contains(&word) => self.push(Token::Text(word.into())),
            "yes" | "no" | "Yes" | "No" | "YES" | "NO" => self.push(Token::Text(word.into())),
            _ => word.chars().for_each(|c| self.push(Token::Letter(c.to_string()))),
        }
    }

    /// Digits with separators of thousands, decimals and an exponent.
    fn number(&mut self) {
        let spaced = self.spaced;
        let mut digits = self.run_of_digits();
        if !digits.is_empty() && digits.len() <= 3 {
            let thousands = self.thousands && self.brackets == 0;
            while let Some(rest) = after_separator(self.rest, thousands) {
                self.rest = rest;
                digits.push_str(&self.run_of_digits());
            }
        }
        let (mut decimal, mut scale) = (false, 0);
        if let Some(rest) = self.rest.strip_prefix('.')
            && (rest.starts_with(|c: char| c.is_ascii_digit())
                || (!rest.trim_start().is_empty() && rest.trim_start().starts_with("\\overline")))
        {
            self.rest = rest;
            let decimals = self.run_of_digits();
            (decimal, scale) = (true, -(decimals.len() as i32));
            digits.push_str(&decimals);
        }
        if let Some(after) = self.rest.strip_prefix(['e', 'E']) {
            let unsigned = after.strip_prefix(['-', '+']).unwrap_or(after);
            let end = unsigned.find(|c: char| !c.is_ascii_digit()).unwrap_or(unsigned.len());
            let exponent = after[..after.len() - unsigned.len() + end].trim_start_matches('+').parse::<i32>();
            if let Some(exponent) = exponent.ok().filter(|exponent| end > 0 && exponent.abs() < 10_000) {
                self.rest = &unsigned[end..];
                scale += exponent;
                decimal = true;
            }
        }
        self.push(Token::Number { digits, scale, decimal, spaced });
    }

    fn run_of_digits(&mut self) -> String {
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(end);
        self.rest = rest;
        digits.to_owned()
    }
}

/// Text that follows a separator of thousands, if one and three digits follow.
fn after_separator(rest: &str, comma: bool) -> Option<&str> {
    let marks = ["{,}\\!", "{,}", ",\\!", "\\,", "\\!", "\\ "];
    let bare = || rest.strip_prefix(',').filter(|_| comma);
    let after = marks.iter().find_map(|mark| rest.strip_prefix(mark)).or_else(bare)?;
    let digits = after.bytes().take_while(u8::is_ascii_digit).count();
    (digits == 3).then_some(after)
}
