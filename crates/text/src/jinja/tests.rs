//! Compares templates with the output of transformers, and checks the resource limits.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::{ChatTemplate, TemplateInput, TextError};

fn render(
    source: &str,
    messages: &[Value],
    variables: &Map<String, Value>,
    now: u64,
) -> Result<String, TextError> {
    let rendering = TemplateInput { messages, tools: None, add_generation_prompt: true, variables };
    ChatTemplate::at(source, now)?.render(rendering)
}

fn failure(source: &str) -> String {
    render(source, &[json!({"role": "user", "content": "Hi"})], &Map::new(), 0)
        .unwrap_err()
        .to_string()
}

/// The texts were recorded from transformers by `conformance/templates.py`; null means that it
/// rejects the template.
#[test]
fn templates_match_recorded_transformers_output() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../conformance/templates.json");
    let recorded: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let messages = recorded["messages"].as_array().unwrap();
    let variables = recorded["variables"].as_object().unwrap();
    let now = recorded["now"].as_u64().unwrap();
    let snippets = recorded["snippets"].as_object().unwrap();
    assert!(snippets.len() > 100);
    let mut wrong = Vec::new();
    for (name, snippet) in snippets {
        let printed = render(snippet["template"].as_str().unwrap(), messages, variables, now);
        if printed.as_ref().ok().map(String::as_str) != snippet["text"].as_str() {
            wrong.push(format!("{name}: {printed:?}\n    instead of {}", snippet["text"]));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn template_limits_bound_time_and_memory() {
    let cases = [
        ("{{ 'x' * 10 ** 9 }}".to_string(), "1000000000 bytes"),
        ("{{ [1] * 10 ** 12 }}".to_string(), "bytes"),
        ("{{ range(10 ** 9) | list }}".to_string(), "range"),
        ("{{ 'x'.center(10 ** 9) }}".to_string(), "bytes"),
        ("{{ 'x'.zfill(10 ** 18) }}".to_string(), "bytes"),
        ("{{ '%999999999d' % 1 }}".to_string(), "bytes"),
        ("{{ '%*d' % (10 ** 12, 1) }}".to_string(), "bytes"),
        ("{{ '{:>999999999}'.format(1) }}".to_string(), "bytes"),
        ("{{ 'a\\nb' | indent(10 ** 10) }}".to_string(), "bytes"),
        ("{{ [[1]] | tojson(indent=10 ** 10) }}".to_string(), "bytes"),
        ("{{ 2 ** (10 ** 9) }}".to_string(), "128 bits"),
        (growing_template("'ab'", "ns.a + ns.a"), "bytes"),
        (growing_template("'ab'", "ns.a ~ ns.a"), "bytes"),
        (growing_template("'ab'", "ns.a.replace('a', 'aa').replace('b', 'bb')"), "bytes"),
        (growing_template("'ab'", "'%s%s' % (ns.a, ns.a)"), "bytes"),
        (growing_template("'ab'", "[ns.a, ns.a] | join"), "bytes"),
        (growing_template("[1]", "ns.a + ns.a"), "parts"),
        (growing_template("[1]", "[ns.a, ns.a]"), "parts"),
        (growing_template("[1]", "[ns.a]"), "deeper"),
        (growing_template("[1]", "ns.a | batch(1) | list"), "deeper"),
        (growing_template("{}", "dict(a=ns.a)"), "deeper"),
        (growing_template("1", "ns"), "namespace"),
        (growing_template("1", "[ns]"), "namespace"),
        (
            "{% set ns = namespace(a='ab') %}{% for i in range(99) %}{% set x %}{{ ns.a }}{{ ns.a \
             }}{% endset %}{% set ns.a = x %}{% endfor %}"
                .to_string(),
            "bytes",
        ),
        (
            format!(
                "{{% set x %}}{{% for i in range(99999) %}}{}{{% endfor %}}{{% endset \
                  %}}",
                "x".repeat(99_999)
            ),
            "bytes",
        ),
        (
            "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
                .to_string(),
            "steps",
        ),
        ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}".to_string(), "recursion"),
        ("{% for x in [1] recursive %}{{ loop([x]) }}{% endfor %}".to_string(), "recursion"),
        ("{{ 5 is divisibleby 0 }}".to_string(), "divides by zero"),
        ("{{ (-(2 ** 126) - 2 ** 126) is divisibleby -1 }}".to_string(), "128 bits"),
        ("{{ '%.65535e' % 1.1 }}".to_string(), "65535"),
        ("{{ '{:.65536g}'.format(1.1) }}".to_string(), "65536"),
        ("{{ '%d' % 1e300 }}".to_string(), "128 bits"),
        ("{{ range(99999) | select('in', range(99999) | list) | list }}".to_string(), "10 s"),
        ("{{ ['x' * 10 ** 7, 'x' * 10 ** 7] | sort }}".to_string(), "bytes"),
        ("{{ ['x' * 10 ** 7] * 99999 }}".to_string(), "bytes"),
        (
            "{{ range(99999) | list | tojson(separators=('x' * 10 ** 7, ':')) \
          }}"
            .to_string(),
            "bytes",
        ),
        ("{{ ('x' * 10 ** 7) | list }}".to_string(), "bytes"),
        ("{{ ('a ' * 8000000).split() }}".to_string(), "bytes"),
        ("{% raw %}".repeat(50_000), "no end"),
        (format!("{}{{{{ x() }}}}", "{{ x }}\n".repeat(50_000)), "line 50001"),
        (format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(20_000)), "branches"),
        (format!("{{% set {}a{} = 1 %}}", "(".repeat(20_000), ")".repeat(20_000)), "operators"),
        (format!("{{{{ {}{} }}}}", "[".repeat(400), "]".repeat(400)), "nested"),
    ];
    for (source, expected) in cases {
        let start = std::time::Instant::now();
        let error = failure(&source);
        assert!(error.contains(expected), "{}: {error}", &source[..source.len().min(150)]);
        assert!(start.elapsed() < super::limits::TIME * 2, "{}", &source[..source.len().min(150)]);
    }
}

fn growing_template(start: &str, step: &str) -> String {
    format!(
        "{{% set ns = namespace(a={start}) %}}{{% for i in range(99999) %}}{{% set ns.a = \
             {step} %}}{{% endfor %}}{{{{ ns.a | length }}}}"
    )
}

/// The engine recurses over operators. Tests run on a stack of 2 MiB, like the workers of the
/// server.
#[test]
fn longest_expressions_fit_on_stack() {
    for (max_depth, step) in [
        (1000, " and 1"),
        (1000, " or 0"),
        (1000, " - 1"),
        (1000, " / 1"),
        (1000, " == 1"),
        (1000, " in []"),
        (1000, " if 1"),
        (1000, " | string"),
        (1000, " is number"),
        (1000, ".b"),
        (500, "[0]"),
    ] {
        let chain =
            |count: usize| format!("{{% if 0 %}}{{{{ 1{} }}}}{{% endif %}}", step.repeat(count));
        let max_depth = if step == " in []" { max_depth / 3 } else { max_depth };
        assert_eq!(render(&chain(max_depth), &[], &Map::new(), 0).unwrap(), "", "{step}");
        assert!(failure(&chain(20_000)).contains("operators"), "{step}");
    }
    let branches = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(499));
    assert_eq!(render(&branches, &[], &Map::new(), 0).unwrap(), "");
}

#[test]
fn long_word_wraps_in_linear_time() {
    assert_eq!(
        render("{{ ('a' * 2000000) | wordwrap(1) | length }}", &[], &Map::new(), 0).unwrap(),
        "3999999"
    );
    let many = "{{ ('x' * 9000000).strip('a' * 9000000 + 'x') }}";
    assert_eq!(render(many, &[], &Map::new(), 0).unwrap(), "");
}

#[test]
fn unsupported_python_features_are_rejected() {
    assert!(
        failure("{% macro f(a, b=a) %}{{ b }}{% endmacro %}{{ f(5) }}")
            .contains("reads the parameter a")
    );
    assert!(failure("{% autoescape true %}{{ '<' }}{% endautoescape %}").contains("autoescape"));
    assert!(failure(r"{{ '\N{BULLET}' }}").contains("\\N"));
    assert!(failure("{% set f = messages[0].items %}{{ f() }}").contains(".items()"));
    assert!(failure("{{ '%.3d' % 5 }}").contains("precision"));
}

#[test]
fn template_errors_name_line_and_argument() {
    assert_eq!(
        failure("a\n{{ 'x' % 1 }}"),
        "chat template: \"x\" does not print all of its values (line 2 of the template)"
    );
    assert!(failure("\n\n{{ 'abc'.nosuch() }}").contains("nosuch"));
    assert!(failure("{{ 'abc'.replace('a') }}").contains("replace: new is missing"));
    assert!(failure("{{ 'abc'.split(1) }}").contains("split: sep is number (1)"));
    assert!(failure("{{ 'abc'.strip(cars='a') }}").contains("cars"));
    assert!(failure("{{ messages.append(1) }}").contains("append"));
    assert!(failure("{{ [] | tojson(indent=1.5) }}").contains("1.5"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Whatever the tags contain, rendering ends without a panic.
    #[test]
    fn random_expressions_never_panic(
        parts in proptest::collection::vec(
            prop::sample::select(vec![
                "messages", "'a%s'", "[1, 'b']", "{'k': 2}", "(", ")", "[", "]", "+", "%", "*", "~", "|", "is", "not", "in",
                ".", ",", ":", "1", "-2", "1.5", "upper", "join", "tojson", "split()", "if", "else", "none", "**", "//", "==",
                "x", "loop", "'\\n'", "for", "=", "and", "range(3)", "list", "format", "length",
            ]),
            0..12,
        ),
    ) {
        let source = format!("{{% set y = 1 %}}{{% for x in messages %}}{{{{ {} }}}}{{% endfor \
                              %}}", parts.join(" "));
        let _ = render(&source, &[json!({"role": "user", "content": "Hi"})], &Map::new(), 0);
    }

    /// Floats print with the fewest digits that read back as the same value, in the notation of
    /// Python's `repr`.
    #[test]
    fn float_output_is_shortest_in_python_notation(bits in any::<u64>()) {
        let value = f64::from_bits(bits);
        prop_assume!(value.is_finite());
        let variables = Map::from_iter([("v".to_string(), json!(value))]);
        let printed = render("{{ v }}", &[], &variables, 0).unwrap();
        prop_assert_eq!(printed.parse::<f64>().unwrap().to_bits(), value.to_bits());
        let digits = |text: &str| {
            let mantissa = text.split('e').next().unwrap().replace(['-', '.'], "");
            mantissa.trim_matches('0').len()
        };
        prop_assert_eq!(digits(&printed), digits(&format!("{value:e}")));
        let plain = value == 0.0 || (1e-4..1e16).contains(&value.abs());
        prop_assert_eq!(printed.contains('e'), !plain);
        prop_assert!(!plain || printed.contains('.'));
    }
}
