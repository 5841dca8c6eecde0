//! Translates templates from Jinja2's grammar to one that the engine parses with the same meaning.
//!
//! The engine has no hooks on its operators. Some operators therefore become calls of functions
//! from [`operators`](super::operators). These are the operators with additional meanings in Python
//! (`%` formats text), with another precedence in the engine, and those that could exhaust the
//! memory (`+`, `~`, `*`, slices, nested containers). Macros that read `varargs` and `kwargs`
//! receive them as parameters, and `{% generation %}` becomes a scope. Bodies that can run
//! repeatedly start with a call that counts the text they print. White space is preserved, and thus
//! every line number.

use std::borrow::Cow;
use std::collections::HashMap;

use super::expression::Expression;
use super::lexer::{Tag, TemplatePart, Token, is_name, split_template};
use super::names::{ITER, KEEP, OpenMacros, TICK};

/// Maximum number of branches of one `if` block. The template engine recurses over them without a
/// limit.
const BRANCHES: usize = 500;

/// Template blocks whose body can run repeatedly or is rendered to a separate text.
const BODIES: [&str; 3] = ["for", "macro", "call"];

/// Translates a Jinja template of Python into the dialect of the template engine.
///
/// # Errors
/// Returns an error that names the line if the template does not parse.
pub(crate) fn translate(source: &str) -> Result<String, String> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let parts = split_template(&source)?;
    let (macros, sizes) = find_open_macros_and_sizes(&parts);
    let mut out = String::with_capacity(source.len() * 2);
    let mut branches = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        match part {
            TemplatePart::Text(text) => out.push_str(text),
            TemplatePart::Print(tag) => {
                out.push_str(tag.open);
                out.push_str(&Expression::new(tag, &tag.tokens, &macros).translate_tuple()?);
                out.push_str(tag.tail);
                out.push_str(tag.close);
            }
            TemplatePart::Block(tag) => {
                match (tag.keyword(), branches.last_mut()) {
                    ("if", _) => branches.push(1),
                    ("elif", Some(&mut BRANCHES)) => {
                        return Err(tag.error(format!("an `if` has more than {BRANCHES} branches")));
                    }
                    ("elif", Some(count)) => *count += 1,
                    ("endif", _) => drop(branches.pop()),
                    _ => {}
                }
                out.push_str(tag.open);
                out.push_str(&translate_block(tag, &macros)?);
                out.push_str(tag.tail);
                match sizes.get(&index) {
                    // The two tags are adjacent, so white space around them is trimmed as around
                    // the original tag.
                    Some(size) => out.push_str(&format!("%}}{{% do {TICK}({size}) {}", tag.close)),
                    None => out.push_str(tag.close),
                }
            }
        }
    }
    Ok(out)
}

/// Finds the macros that accept any arguments, and the length in bytes of the text in the body of
/// each block.
fn find_open_macros_and_sizes(parts: &[TemplatePart<'_>]) -> (OpenMacros, HashMap<usize, usize>) {
    let mut macros = OpenMacros::new();
    let mut sizes = HashMap::new();
    // Index of the block, length of its text in bytes, and whether it reads extra arguments.
    let mut open: Vec<(usize, usize, bool)> = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        let tag = match part {
            TemplatePart::Text(text) => {
                open.iter_mut().for_each(|(_, size, _)| *size += text.len());
                continue;
            }
            TemplatePart::Print(tag) | TemplatePart::Block(tag) => tag,
        };
        if tag.tokens.iter().any(|token| token.is("varargs") || token.is("kwargs")) {
            open.iter_mut().for_each(|(_, _, reads)| *reads = true);
        }
        let TemplatePart::Block(tag) = part else { continue };
        let keyword = tag.keyword();
        if BODIES.contains(&keyword) {
            open.push((index, 0, false));
        } else if keyword.strip_prefix("end").is_some_and(|of| BODIES.contains(&of))
            && let Some((start, size, reads)) = open.pop()
        {
            sizes.insert(start, size);
            if let (TemplatePart::Block(start), true, "endmacro") = (&parts[start], reads, keyword)
            {
                let name =
                    start.tokens.get(1).map(|token| token.text.to_string()).unwrap_or_default();
                macros.insert(name, parse_parameter_names(&start.tokens));
            }
        }
    }
    (macros, sizes)
}

/// Returns the names of a macro's parameters: the words after its opening parenthesis and after
/// each comma between parameters.
fn parse_parameter_names(tokens: &[Token<'_>]) -> Vec<String> {
    let mut names = Vec::new();
    let mut depth = 0;
    for pair in tokens.windows(2) {
        match pair[0].text.as_ref() {
            "(" | "[" | "{" if !pair[0].quoted => depth += 1,
            ")" | "]" | "}" if !pair[0].quoted => depth -= 1,
            _ => {}
        }
        if depth == 1 && (pair[0].is("(") || pair[0].is(",")) && is_name(&pair[1].text) {
            names.push(pair[1].text.to_string());
        }
    }
    names
}

/// Translates the contents of a block tag, such as `{% if … %}`.
fn translate_block(tag: &Tag<'_>, macros: &OpenMacros) -> Result<String, String> {
    let tokens = tag.tokens.as_slice();
    let [first, rest @ ..] = tokens else { return Err(tag.error("a tag is empty")) };
    let head = first.source();
    let expression = |tokens| Expression::new(tag, tokens, macros);
    Ok(match first.text.as_ref() {
        "if" | "elif" => format!("{head}{}", expression(rest).translate_tuple()?),
        "for" => {
            let Some(of) = top_level_position(rest, "in") else {
                return Err(tag.error("a `for` tag has no `in`"));
            };
            let (targets, after) = rest.split_at(of + 1);
            let mut after = expression(after);
            let values = format!(" {ITER}({})", after.parse_tuple(false)?);
            let condition = match after.take("if") {
                Some(keyword) => format!("{keyword}{}", after.parse_expression(true)?),
                None => String::new(),
            };
            let recursive = after.take("recursive").unwrap_or_default();
            after.expect_end()?;
            format!("{head}{}{values}{condition}{recursive}", join_tokens(targets))
        }
        "set" => {
            let Some(equals) = top_level_position(rest, "=") else {
                return Ok(join_tokens(tokens));
            };
            let (targets, after) = rest.split_at(equals);
            let value = expression(&after[1..]).translate_tuple()?;
            let value = match targets {
                [_, dot, _] if dot.is(".") => format!("{KEEP}({value})"),
                _ => value,
            };
            format!("{head}{} = {value}", join_tokens(targets))
        }
        "with" => {
            let mut rest = expression(rest);
            let mut out = head;
            while let Some(name) = rest.next_name() {
                let equals = rest.expect("=")?;
                out.push_str(&format!("{name}{equals}{}", rest.parse_expression(true)?));
                out.push_str(&rest.take(",").unwrap_or_default());
            }
            rest.expect_end()?;
            out
        }
        "macro" => {
            let [name, open, ..] = rest else { return Err(tag.error("a macro has no parameters")) };
            if !open.is("(") {
                return Err(tag.error("a macro has no parameters"));
            }
            let mut rest = expression(&rest[2..]);
            let mut out = format!("{head}{}{}", name.source(), open.source());
            let mut before: Vec<String> = Vec::new();
            while let Some(parameter) = rest.next_name() {
                out.push_str(&parameter);
                before.push(parameter.trim().to_string());
                if let Some(equals) = rest.take("=") {
                    // The engine evaluates defaults before any parameter has its value.
                    if let Some(read) = rest.find_name_among(&before) {
                        return Err(tag.error(format!(
                            "the default of {} reads the parameter {read}",
                            parameter.trim()
                        )));
                    }
                    out.push_str(&format!("{equals}{}", rest.parse_expression(true)?));
                }
                out.push_str(&rest.take(",").unwrap_or_default());
            }
            if let Some(names) = macros.get(name.text.as_ref()) {
                let comma =
                    if names.is_empty() || out.trim_end().ends_with(',') { "" } else { ", " };
                out.push_str(&format!("{comma}varargs=(), kwargs={{}}"));
            }
            out.push_str(&rest.expect(")")?);
            rest.expect_end()?;
            out
        }
        "call" => {
            let parameters = match rest.first() {
                Some(token) if token.is("(") => {
                    top_level_position(rest, ")").map_or(0, |end| end + 1)
                }
                _ => 0,
            };
            let (parameters, call) = rest.split_at(parameters);
            format!("{head}{}{}", join_tokens(parameters), expression(call).translate()?)
        }
        // A scope, as in transformers: a name that is set inside is not visible outside.
        "generation" => head.replace("generation", "with"),
        "endgeneration" => head.replace("endgeneration", "endwith"),
        "autoescape" if !matches!(rest, [only] if only.is("false") || only.is("False")) => {
            return Err(
                tag.error("the tag \"autoescape\" is supported only with false; use the filter e")
            );
        }
        "do" => {
            return Err(tag.error("the tag \"do\" is not supported, as in transformers"));
        }
        _ => join_tokens(tokens),
    })
}

/// Returns the position of the token `wanted` outside of all brackets, or `None` if there is none.
fn top_level_position(rest: &[Token<'_>], wanted: &str) -> Option<usize> {
    let mut depth = 0;
    rest.iter().position(|token| {
        match token.text.as_ref() {
            _ if token.quoted => {}
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        depth == 0 && token.is(wanted)
    })
}

fn join_tokens(tokens: &[Token<'_>]) -> String {
    tokens.iter().map(|token| token.source()).collect::<String>()
}

impl Token<'_> {
    /// Returns the token in the template engine's notation, with the white space that preceded it.
    pub(super) fn source(&self) -> String {
        if !self.quoted {
            return format!("{}{}", self.gap, self.text);
        }
        let text: Cow<'_, str> = if self.text.contains(['\\', '"']) {
            self.text.replace('\\', "\\\\").replace('"', "\\\"").into()
        } else {
            self.text.as_ref().into()
        };
        format!("{}\"{text}\"", self.gap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn translate_replaces_operators_with_calls() {
        let cases = [
            ("{{ a }}", "{{ a }}"),
            ("{{- a.b['c'] | f(1) -}}", "{{- a.b[\"c\"] | f(1) -}}"),
            ("{{ a + b ~ c }}", "{{ __levade_add( a, __levade_concat( b, c)) }}"),
            ("{{ 'x' '\\x41' % (1, 2) }}", "{{ __levade_mod( \"xA\", __levade_keep( (1, 2))) }}"),
            ("{{ a[ 1:] }}", "{{ __levade_slice( a, 1,none,none) }}"),
            ("{{ -3 | abs }}", "{{( -3) | abs }}"),
            (
                "{% if a is in ['x'] and not b %}",
                "{% if a is in(__levade_keep( [\"x\"])) and not b %}",
            ),
            ("{{ 1 < a == b }}", "{{ ( __levade_order(\"<\", 1, a) and  a == b) }}"),
            ("{% set n.a = 1 %}", "{% set n.a = __levade_keep( 1) %}"),
            ("{%- generation -%}x{% endgeneration %}", "{%- with -%}x{% endwith %}"),
            (
                "{# {{ #}{% raw %}{{ a + b }}{% endraw %}",
                "{# {{ #}{% raw +%}{{ a + b }}{% endraw %}",
            ),
            ("{{ {'a': '}}'} }}", "{{ __levade_keep( {\"a\": \"}}\"}) }}"),
        ];
        for (source, expected) in cases {
            assert_eq!(translate(source).unwrap(), expected, "{source}");
        }
    }

    #[test]
    fn translate_counts_text_of_bodies() {
        assert_eq!(
            translate("{% for a in b -%}\nxyz{% endfor %}").unwrap(),
            "{% for a in __levade_iter( b) %}{% do __levade_tick(4) -%}\nxyz{% endfor %}"
        );
        let open = "{% macro m(a, b=(1, 2)) %}{{ varargs }}{% endmacro %}{{ m(1, *c) }}";
        let expected = "{% macro m(a, b= __levade_keep((1, 2)), varargs=(), kwargs={}) %}{% do __levade_tick(0) %}\
                        {{ varargs }}{% endmacro %}{{ m(**__levade_bind((\"a\", \"b\", ),1, *c)) \
                        }}";
        assert_eq!(translate(open).unwrap(), expected);
    }

    #[test]
    fn translate_errors_name_line() {
        let cases = [
            ("a\n{{ b", "line 2"),
            ("{{ a b }}", "\"b\""),
            ("{% for x %}", "line 1"),
            ("\n\n{{ (a }}", "line 3"),
            ("{{ 'a }}", "line 1"),
            ("{{ a ? b }}", "?"),
            ("{% do f() %}", "do"),
        ];
        for (source, expected) in cases {
            let error = translate(source).unwrap_err();
            assert!(error.contains(expected), "{source}: {error}");
        }
        let deep = format!("{{{{ {}1{} }}}}", "(".repeat(500), ")".repeat(500));
        assert!(translate(&deep).unwrap_err().contains("nested"));
        assert!(
            translate(&format!("{{{{ {}1 }}}}", "-".repeat(500))).unwrap_err().contains("nested")
        );
    }
}
