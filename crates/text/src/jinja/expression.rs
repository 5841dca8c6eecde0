//! Parses expressions in Jinja2's grammar, and rewrites them as described in
//! [`translate`](super::translate).

use super::containers::METHODS;
use super::lexer::{Tag, Token, is_name};
use super::names::{ATTRIBUTE, KEEP, OpenMacros};

/// Maximum nesting depth of a template expression.
const DEPTH: usize = 100;

/// Translator of a template expression: the remaining tokens of a tag, and the nesting depth.
pub(super) struct Expression<'a> {
    tag: &'a Tag<'a>,
    rest: &'a [Token<'a>],
    macros: &'a OpenMacros,
    depth: usize,
}

type TranslateResult = Result<String, String>;

impl<'a> Expression<'a> {
    pub fn new(tag: &'a Tag<'a>, rest: &'a [Token<'a>], macros: &'a OpenMacros) -> Self {
        Expression { tag, rest, macros, depth: 0 }
    }

    /// Translates all remaining tokens as one expression.
    pub fn translate(mut self) -> TranslateResult {
        let translated = self.parse_expression(true)?;
        self.expect_end()?;
        Ok(translated)
    }

    /// Translates all remaining tokens as one expression, or as several expressions separated by
    /// commas.
    pub fn translate_tuple(mut self) -> TranslateResult {
        let translated = self.parse_tuple(true)?;
        self.expect_end()?;
        Ok(translated)
    }

    /// Checks that no tokens of the tag are left.
    ///
    /// # Errors
    /// Returns an error that names the first remaining token.
    pub fn expect_end(&self) -> Result<(), String> {
        if self.rest.is_empty() { Ok(()) } else { Err(self.unexpected_token_error()) }
    }

    fn unexpected_token_error(&self) -> String {
        match self.rest.first() {
            Some(token) => self.tag.error(format!("unexpected {:?}", token.text)),
            None => self.tag.error(format!("{} ends too early", self.tag.open)),
        }
    }

    fn peek(&self, text: &str) -> bool {
        self.rest.first().is_some_and(|token| token.is(text))
    }

    fn next_token(&mut self) -> Result<&'a Token<'a>, String> {
        let (first, rest) = self.rest.split_first().ok_or_else(|| self.unexpected_token_error())?;
        self.rest = rest;
        Ok(first)
    }

    /// Consumes the next token if its text is `text`.
    pub fn take(&mut self, text: &str) -> Option<String> {
        if self.peek(text) { self.next_token().ok().map(Token::source) } else { None }
    }

    pub fn expect(&mut self, text: &str) -> TranslateResult {
        self.take(text).ok_or_else(|| self.unexpected_token_error())
    }

    /// Consumes the next token if it is a word, and returns the word.
    pub fn next_name(&mut self) -> Option<String> {
        let token = self.rest.first().filter(|token| !token.quoted && is_name(&token.text))?;
        self.rest = &self.rest[1..];
        Some(token.source())
    }

    /// Returns the first of `names` that occurs before the next comma outside of brackets, or
    /// `None` if none occurs.
    pub fn find_name_among(&self, names: &[String]) -> Option<&'a str> {
        let mut depth = 0;
        let here = self.rest.iter().take_while(|token| {
            match token.text.as_ref() {
                _ if token.quoted => {}
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth -= 1,
                _ => {}
            }
            depth > 0 || (depth == 0 && !token.is(","))
        });
        here.filter(|token| !token.quoted)
            .map(|token| token.text.as_ref())
            .find(|text| names.iter().any(|name| name == text))
    }

    fn increase_depth(&mut self) -> Result<(), String> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(self.tag.error(format!("an expression is nested deeper than {DEPTH}")));
        }
        Ok(())
    }

    /// Translates expressions separated by commas as one tuple. A single expression stays
    /// unchanged.
    pub fn parse_tuple(&mut self, conditions: bool) -> TranslateResult {
        let (items, is_tuple) = self.parse_list(conditions)?;
        Ok(if is_tuple { format_call(KEEP, &[&format!("({items})")]) } else { items })
    }

    /// Translates expressions that are separated by commas. Also returns whether there is a comma.
    fn parse_list(&mut self, conditions: bool) -> Result<(String, bool), String> {
        let mut items = self.parse_expression(conditions)?;
        let is_tuple = self.peek(",");
        while let Some(comma) = self.take(",") {
            items.push_str(&comma);
            if self.rest.is_empty()
                || [")", "]", "if", "recursive"].iter().any(|end| self.peek(end))
            {
                break;
            }
            items.push_str(&self.parse_expression(conditions)?);
        }
        Ok((items, is_tuple))
    }

    /// Translates one expression, which can be a conditional expression if `conditions` is set.
    pub fn parse_expression(&mut self, conditions: bool) -> TranslateResult {
        self.increase_depth()?;
        let mut out = self.parse_or()?;
        while conditions && let Some(keyword) = self.take("if") {
            out.push_str(&keyword);
            out.push_str(&self.parse_or()?);
            if let Some(keyword) = self.take("else") {
                out.push_str(&keyword);
                out.push_str(&self.parse_expression(true)?);
            }
        }
        self.depth -= 1;
        Ok(out)
    }

    fn parse_or(&mut self) -> TranslateResult {
        self.parse_joined(&["or"], |this| this.parse_joined(&["and"], Self::parse_not))
    }

    /// Translates operands that are separated by operators. The operators stay unchanged.
    fn parse_joined(
        &mut self,
        operators: &[&str],
        operand: impl Fn(&mut Self) -> TranslateResult,
    ) -> TranslateResult {
        let mut out = operand(self)?;
        while let Some(operator) = operators.iter().find_map(|operator| self.take(operator)) {
            out.push_str(&operator);
            out.push_str(&operand(self)?);
        }
        Ok(out)
    }

    fn parse_not(&mut self) -> TranslateResult {
        match self.take("not") {
            Some(not) => {
                self.increase_depth()?;
                let operand = self.parse_not()?;
                self.depth -= 1;
                Ok(not + &operand)
            }
            None => self.parse_comparison(),
        }
    }

    /// Translates comparisons. Order comparisons become function calls, because Python rejects some
    /// that the template engine accepts.
    fn parse_comparison(&mut self) -> TranslateResult {
        let first = self.parse_sum()?;
        let mut pairs: Vec<String> = Vec::new();
        let mut left = first;
        loop {
            let mut operator = String::new();
            if self.peek("not") && self.rest.get(1).is_some_and(|token| token.is("in")) {
                operator = self.next_token()?.source();
            }
            let known = ["==", "!=", "in", ">", ">=", "<", "<="];
            let Some(found) = known.iter().position(|known| self.peek(known)) else { break };
            operator.push_str(&self.next_token()?.source());
            let right = self.parse_sum()?;
            pairs.push(match found {
                0..=2 => format!("{left}{operator}{right}"),
                _ => format_call(
                    "__levade_order",
                    &[&format!("\"{}\"", operator.trim()), &left, &right],
                ),
            });
            left = right;
        }
        Ok(match pairs.as_slice() {
            [] => left,
            [pair] => pair.clone(),
            _ => format!(" ({})", pairs.join(" and ")),
        })
    }

    fn parse_sum(&mut self) -> TranslateResult {
        let mut left = self.parse_concatenation()?;
        loop {
            if self.take("+").is_some() {
                left = format_call("__levade_add", &[&left, &self.parse_concatenation()?]);
            } else if let Some(minus) = self.take("-") {
                left = format!("{left}{minus}{}", self.parse_concatenation()?);
            } else {
                return Ok(left);
            }
        }
    }

    fn parse_concatenation(&mut self) -> TranslateResult {
        let mut parts = vec![self.parse_product()?];
        while self.take("~").is_some() {
            parts.push(self.parse_product()?);
        }
        if parts.len() > 1 {
            return Ok(format_call("__levade_concat", &parts));
        }
        Ok(parts.remove(0))
    }

    fn parse_product(&mut self) -> TranslateResult {
        let mut left = self.parse_power()?;
        loop {
            if self.take("*").is_some() {
                left = format_call("__levade_mul", &[&left, &self.parse_power()?]);
            } else if self.take("%").is_some() {
                left = format_call("__levade_mod", &[&left, &self.parse_power()?]);
            } else if let Some(operator) = self.take("/").or_else(|| self.take("//")) {
                left = format!("{left}{operator}{}", self.parse_power()?);
            } else {
                return Ok(left);
            }
        }
    }

    fn parse_power(&mut self) -> TranslateResult {
        let mut left = self.parse_unary(true)?;
        while self.take("**").is_some() {
            left = format_call("__levade_pow", &[&left, &self.parse_unary(true)?]);
        }
        Ok(left)
    }

    fn parse_unary(&mut self, filters: bool) -> TranslateResult {
        let mut signed = false;
        let operand = if let Some(minus) = self.take("-") {
            self.increase_depth()?;
            signed = true;
            let operand = self.parse_unary(false)?;
            self.depth -= 1;
            minus + &operand
        } else if self.take("+").is_some() {
            self.increase_depth()?;
            let operand = self.parse_unary(false)?;
            self.depth -= 1;
            operand
        } else {
            let (primary, name) = self.parse_primary()?;
            self.parse_postfix(primary, name)?
        };
        if !filters || !(self.peek("|") || self.peek("is")) {
            return Ok(operand);
        }
        self.parse_filters(if signed { format!("({operand})") } else { operand })
    }

    /// Translates a literal, a name or a bracketed expression. Also returns the name if the
    /// expression is a name.
    fn parse_primary(&mut self) -> Result<(String, Option<&'a str>), String> {
        let token = self.next_token()?;
        let mut name = None;
        let primary = match token.text.as_ref() {
            _ if token.quoted => {
                let mut joined = token.text.to_string();
                while let Some(more) = self.rest.first().filter(|token| token.quoted) {
                    joined.push_str(&more.text);
                    self.rest = &self.rest[1..];
                }
                Token { gap: token.gap, text: joined.into(), quoted: true }.source()
            }
            "(" => {
                let (inner, is_tuple) =
                    if self.peek(")") { Default::default() } else { self.parse_list(true)? };
                let full = format!("{}({inner}{}", token.gap, self.expect(")")?);
                if is_tuple { format_call(KEEP, &[&full]) } else { full }
            }
            "[" => self.parse_items(token, "]", |this| this.parse_expression(true))?,
            "{" => self.parse_items(token, "}", |this| {
                let key = this.parse_expression(true)?;
                let colon = this.expect(":")?;
                Ok(format!("{key}{colon}{}", this.parse_expression(true)?))
            })?,
            text if is_name(text) => {
                name = Some(text);
                token.source()
            }
            text if text.starts_with(|c: char| c.is_ascii_digit()) => token.source(),
            _ => {
                return Err(self
                    .tag
                    .error(format!("expected a value, but found {:?}", token.text)));
            }
        };
        Ok((primary, name))
    }

    fn parse_items(
        &mut self,
        open: &Token<'_>,
        close: &str,
        item: impl Fn(&mut Self) -> TranslateResult,
    ) -> TranslateResult {
        let mut out = open.source();
        while !self.peek(close) {
            out.push_str(&item(self)?);
            match self.take(",") {
                Some(comma) => out.push_str(&comma),
                None => break,
            }
        }
        let is_empty = out.trim_start().len() == 1;
        out.push_str(&self.expect(close)?);
        Ok(if is_empty { out } else { format_call(KEEP, &[&out]) })
    }

    /// Translates the attributes, items, slices and calls after a value.
    fn parse_postfix(&mut self, mut of: String, mut name: Option<&'a str>) -> TranslateResult {
        loop {
            if let Some(dot) = self.take(".") {
                let attribute = self.next_token()?;
                if attribute.quoted
                    || !attribute.text.starts_with(|c: char| c == '_' || c.is_alphanumeric())
                {
                    return Err(self
                        .tag
                        .error(format!("{:?} is not an attribute name", attribute.text)));
                }
                // An attribute that is a number is an item.
                of = match is_name(&attribute.text) {
                    false => format!("{of}[{}]", attribute.source()),
                    true if METHODS.contains(&attribute.text.as_ref()) && !self.peek("(") => {
                        let gaps = [dot.trim_end_matches('.'), attribute.gap].concat();
                        format_call(ATTRIBUTE, &[of, format!("{gaps}\"{}\"", attribute.text)])
                    }
                    true => format!("{of}{dot}{}", attribute.source()),
                };
            } else if let Some(open) = self.take("[") {
                of = self.parse_subscript(of, &open)?;
            } else if let Some(open) = self.take("(") {
                let arguments = self.parse_arguments()?;
                let close = self.expect(")")?;
                of = match name.and_then(|name| self.macros.get(name)) {
                    Some(names) => {
                        let names: String =
                            names.iter().map(|name| format!("\"{name}\", ")).collect();
                        format!("{of}{open}**__levade_bind(({names}),{arguments}){close}")
                    }
                    None => format!("{of}{open}{arguments}{close}"),
                };
            } else {
                return Ok(of);
            }
            name = None;
        }
    }

    fn parse_subscript(&mut self, of: String, open: &str) -> TranslateResult {
        let mut parts = vec![None];
        loop {
            if self.take(":").is_some() {
                parts.push(None);
            } else if self.peek("]") {
                break;
            } else {
                let part = if parts.len() == 1 {
                    self.parse_tuple(true)?
                } else {
                    self.parse_expression(true)?
                };
                if parts.last_mut().is_none_or(|last| last.replace(part).is_some()) {
                    return Err(self.unexpected_token_error());
                }
            }
        }
        let close = self.expect("]")?;
        if let [Some(item)] = parts.as_slice() {
            return Ok(format!("{of}{open}{item}{close}"));
        }
        if !(2..=3).contains(&parts.len()) {
            return Err(self.tag.error("the brackets of an item must contain an index or a slice"));
        }
        parts.resize(3, None);
        Ok(format_call(
            "__levade_slice",
            &[of, bound_source(&parts[0]), bound_source(&parts[1]), bound_source(&parts[2])],
        ))
    }

    /// Translates the arguments of a call, which are between parentheses.
    fn parse_arguments(&mut self) -> TranslateResult {
        let mut out = String::new();
        while !self.peek(")") {
            if let Some(splat) = self.take("**").or_else(|| self.take("*")) {
                out.push_str(&splat);
            } else if self.rest.get(1).is_some_and(|token| token.is("="))
                && let Some(keyword) = self.next_name()
            {
                out.push_str(&keyword);
                out.push_str(&self.expect("=")?);
            }
            out.push_str(&self.parse_expression(true)?);
            match self.take(",") {
                Some(comma) => out.push_str(&comma),
                None => break,
            }
        }
        Ok(out)
    }

    /// Translates the filters and tests after a value.
    fn parse_filters(&mut self, mut of: String) -> TranslateResult {
        loop {
            if let Some(pipe) = self.take("|") {
                let name = self.next_name().ok_or_else(|| self.unexpected_token_error())?;
                of = format!("{of}{pipe}{name}");
                if let Some(open) = self.take("(") {
                    of = format!("{of}{open}{}{}", self.parse_arguments()?, self.expect(")")?);
                }
            } else if let Some(is) = self.take("is") {
                let not = self.take("not").unwrap_or_default();
                let name = self.next_name().ok_or_else(|| self.unexpected_token_error())?;
                of = format!("{of}{is}{not}{name}");
                if let Some(open) = self.take("(") {
                    of = format!("{of}{open}{}{}", self.parse_arguments()?, self.expect(")")?);
                } else if self.starts_argument() {
                    let (primary, name) = self.parse_primary()?;
                    of = format!("{of}({})", self.parse_postfix(primary, name)?.trim_start());
                }
            } else {
                return Ok(of);
            }
        }
    }

    /// Returns whether the next token starts an argument of a test that is not in parentheses.
    fn starts_argument(&self) -> bool {
        self.rest.first().is_some_and(|token| {
            token.quoted
                || ["[", "{"].contains(&token.text.as_ref())
                || token.text.starts_with(|c: char| c.is_ascii_digit())
                || (is_name(&token.text)
                    && !["else", "or", "and", "if", "in", "not", "is", "recursive"]
                        .contains(&token.text.as_ref()))
        })
    }
}

fn bound_source(part: &Option<String>) -> String {
    part.clone().unwrap_or_else(|| "none".into())
}

/// Returns the source text of a call of a built-in function. The leading space separates the call
/// from a preceding word.
fn format_call(function: &str, arguments: &[impl AsRef<str>]) -> String {
    let arguments: Vec<&str> = arguments.iter().map(AsRef::as_ref).collect();
    format!(" {function}({})", arguments.join(","))
}
