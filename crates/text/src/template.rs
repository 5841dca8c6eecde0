//! Chat templates: Jinja programs that print messages the way a model was trained on them.
//!
//! Guarantees: what `apply_chat_template` of transformers gives for the same template and variables
//! (`conformance/templates.py` holds the two against each other), or an error that names what is not known
//! here. A template prints the same text however often it is rendered: "now" is one moment, in UTC. None
//! hangs or fills the memory: a rendering has at most 5 million steps, 10 s, 16 MiB for one text and 512 MiB
//! for all that it makes.
//!
//! Not here: which messages and tools to print, and what the printed text means in tokens; see
//! [`Chat`](crate::Chat).

use std::time::{SystemTime, UNIX_EPOCH};

use levade_policy::caught;
use minijinja::{Environment, Error, ErrorKind};
use serde_json::Map;

use crate::TextError;
use crate::jinja::{self, GUARD, NAME};

/// ChatML, with nothing added: no default system message, no tools.
pub(crate) const CHATML: &str = "{%- for message in messages -%}\
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}\
    {%- endfor -%}\
    {%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";

/// A compiled chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    /// Whether it takes lists of parts alone, so that it is given texts as such.
    pub(crate) lists: bool,
}

/// The variables of one rendering.
#[derive(Debug, Clone, Copy)]
pub struct Rendering<'a> {
    /// Messages as objects: `role`, `content` and what else the template reads.
    pub messages: &'a [serde_json::Value],
    /// Tools in OpenAI's shape; `None` where there are none, as the library that templates are written for
    /// does it.
    pub tools: Option<&'a [serde_json::Value]>,
    /// Whether the text should end where a reply begins.
    pub add_generation_prompt: bool,
    /// Further variables, such as `bos_token` or `enable_thinking`.
    pub variables: &'a Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// Compiles a template; `"chatml"` stands for plain ChatML.
    ///
    /// # Errors
    /// Where the template does not parse.
    pub fn new(source: &str) -> Result<Self, TextError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
        Self::at(source, now)
    }

    /// Compiles a template for which it is always the same moment, in seconds since 1970.
    ///
    /// # Errors
    /// Where the template does not parse.
    pub fn at(source: &str, now: u64) -> Result<Self, TextError> {
        let source = if source.trim() == "chatml" { CHATML } else { source };
        let environment = jinja::environment(source, now).map_err(described)?;
        Ok(ChatTemplate { environment, source: source.to_string(), lists: false })
    }

    /// The template as it was given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Prints messages.
    ///
    /// # Errors
    /// What the template raises, or where it fails.
    pub fn render(&self, rendering: Rendering<'_>) -> Result<String, TextError> {
        self.render_guarded(rendering, None)
    }

    /// Prints messages in which `guard` must survive as it is.
    pub(crate) fn render_guarded(
        &self,
        rendering: Rendering<'_>,
        guard: Option<char>,
    ) -> Result<String, TextError> {
        let mut variables = rendering.variables.clone();
        let messages = match self.lists {
            true => rendering.messages.iter().map(listed).collect(),
            false => rendering.messages.into(),
        };
        variables.insert("messages".into(), messages);
        variables.insert("tools".into(), rendering.tools.map_or(serde_json::Value::Null, Into::into));
        variables.insert("add_generation_prompt".into(), rendering.add_generation_prompt.into());
        // Defined, as in transformers, also where there are none.
        variables.entry("documents").or_insert(serde_json::Value::Null);
        if let Some(guard) = guard {
            variables.insert(GUARD.into(), guard.to_string().into());
        }
        let template = self.environment.get_template(NAME).map_err(described)?;
        // The engine should not panic, but the template is a stranger's.
        caught(|| template.render(jinja::from_fields(&variables)))
            .map_err(|what| TextError::Template(format!("the engine stops at {what:?}")))?
            .map_err(described)
    }
}

/// A message whose content is a list.
fn listed(message: &serde_json::Value) -> serde_json::Value {
    let mut message = message.clone();
    if let Some(content) = message.get_mut("content").filter(|content| content.is_string()) {
        *content = serde_json::json!([{ "type": "text", "text": content.take() }]);
    }
    message
}

fn described(error: Error) -> TextError {
    let what = match error.kind() {
        ErrorKind::OutOfFuel => {
            format!("it takes more than {} steps to render; does a loop never end?", jinja::STEPS)
        }
        kind => error.detail().map_or_else(|| kind.to_string(), str::to_string),
    };
    let place = error.line().map(|line| format!(" (line {line} of the template)")).unwrap_or_default();
    TextError::Template(format!("{what}{place}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render_with(
        source: &str,
        messages: serde_json::Value,
        variables: serde_json::Value,
    ) -> Result<String, TextError> {
        let template = ChatTemplate::at(source, 951_782_400)?;
        let serde_json::Value::Object(variables) = variables else { panic!("variables are an object") };
        let messages = messages.as_array().unwrap();
        let tool =
            json!({"type": "function", "function": {"name": "é<&>", "parameters": {"b": [1.0], "a": null}}});
        template.render(Rendering {
            messages,
            tools: Some(&[tool]),
            add_generation_prompt: true,
            variables: &variables,
        })
    }

    fn render(source: &str) -> String {
        let messages = json!([
            {"role": "system", "content": " Be brief. "},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHo", "tool_calls": [{"name": "f"}]},
        ]);
        render_with(source, messages, json!({"bos_token": "<s>", "enable_thinking": false})).unwrap()
    }

    #[test]
    fn blocks_leave_no_white_space() {
        let source = "{% for message in messages %}\n    {% if loop.first %}\n        {{- bos_token }}\n    {% endif %}\n\
                      [{{ message['role'] }}]\n{% endfor %}\n\n";
        // As Jinja2 prints it: the line break after a block goes, the one after an expression stays.
        assert_eq!(render(source), "<s>\n[system]\n[user]\n[assistant]\n");
    }

    #[test]
    fn pythons_methods_and_slices() {
        assert_eq!(
            render("{{ messages[0].content.strip() }}|{{ messages[0]['content'] | trim }}"),
            "Be brief.|Be brief."
        );
        assert_eq!(render("{% for m in messages[1:] %}{{ m.role.upper() }}{% endfor %}"), "USERASSISTANT");
        assert_eq!(render("{% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %}"), "aus");
        let think = "{% set c = messages[2].content %}{% if '</think>' in c %}\
                     {{ c.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}/{{ c.split('</think>')[-1].lstrip('\\n') }}\
                     {% endif %}";
        assert_eq!(render(think), "hm/Ho");
        assert_eq!(
            render(
                "{{ messages[1].get('name', 'none') }}{{ messages | length - 1 }}{{ messages[1].content is string }}"
            ),
            "none2True"
        );
        assert_eq!(
            render(
                "{{ none is iterable }} {{ 'a' is iterable }} {{ messages is sequence }} {{ nothing is defined }}"
            ),
            "False True True False"
        );
        assert_eq!(
            render(
                "{% if messages[2].tool_calls %}{{ messages[2].tool_calls[0].name }}{% endif %}{% if messages[1].tool_calls %}x{% endif %}"
            ),
            "f"
        );
    }

    #[test]
    fn control_flow() {
        let source = "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}\
                      {% continue %}{% endif %}{% if loop.index0 > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}{{ ns.last }}";
        assert_eq!(render(source), "system1");
        assert_eq!(render("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}"), "abab");
        assert_eq!(
            render("{%- generation -%} a {%- endgeneration %} {% generation %}b{% endgeneration %}"),
            "a b"
        );
        assert_eq!(
            render(
                "{{ enable_thinking is defined and enable_thinking is false }}{{ add_generation_prompt }}"
            ),
            "TrueTrue"
        );
    }

    #[test]
    fn json_and_dates() {
        let one_line =
            r#"{"type": "function", "function": {"name": "é<&>", "parameters": {"b": [1.0], "a": null}}}"#;
        assert_eq!(render("{{ tools[0] | tojson }}"), one_line);
        assert_eq!(
            render("{{ tools[0].function.parameters | tojson(indent=2) }}"),
            "{\n  \"b\": [\n    1.0\n  ],\n  \"a\": null\n}"
        );
        assert_eq!(
            render("{{ 'é' | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}"),
            "\"\\u00e9\"[1,2]"
        );
        assert_eq!(render("{{ strftime_now('%d %b %Y') }}"), "29 Feb 2000");
    }

    #[test]
    fn numbers_print_as_python_reads_them_or_with_all_digits() {
        let message = r#"{"content": {"a": 12345678901234567890123, "b": 1234567890123456789012345678901234567890,
            "c": [1.10, 1E5, 1e-5, 0.1000000000000000055511151231257827, -0.0], "d": 18446744073709551615, "e": 1e400}}"#;
        let message: serde_json::Value = serde_json::from_str(message).unwrap();
        let print = |source: &str| render_with(source, json!([message.clone()]), json!({})).unwrap();
        let [a, b] = ["12345678901234567890123", "1234567890123456789012345678901234567890"];
        let printed = format!(
            "\"a\": {a}, \"b\": {b}, \"c\": [1.1, 100000.0, 1e-05, 0.1000000000000000055511151231257827, -0.0], \"d\": 18446744073709551615, \"e\": 1e+400"
        );
        assert_eq!(print("{{ messages[0].content | tojson }}"), format!("{{{printed}}}"));
        assert_eq!(print("{{ messages[0].content }}"), format!("{{{}}}", printed.replace('"', "'")));
        assert_eq!(
            print("{% for k, v in messages[0].content.items() %}{{ v }} {% endfor %}")
                .split(' ')
                .take(2)
                .collect::<Vec<_>>(),
            [a, b]
        );
        assert_eq!(print("{{ messages[0].content.a + 1 }}"), "12345678901234567890124");
        assert_eq!(
            print("{{ 'x' if messages[0].content.b is string else messages[0].content.b | string }}"),
            b
        );
    }

    #[test]
    fn failures_say_what_and_where() {
        let fail = |source: &str| render_with(source, json!([]), json!({})).unwrap_err().to_string();
        assert_eq!(
            fail("a\n{{ raise_exception('roles must alternate') }}"),
            "chat template: roles must alternate (line 2 of the template)"
        );
        assert!(fail("{% for x in %}").contains("line 1"));
        assert!(fail("{{ messages | nosuch }}").contains("nosuch"));
        assert!(fail("{{ nothing.at.all }}").contains("undefined"));
        assert!(fail("{{ [] | tojson(indent='x', sort=1) }}").contains("sort"));
        assert!(fail("{{ [] | tojson(separators=('a',)) }}").contains("two strings"));
        assert!(fail("{{ strftime_now('%99999d') }}").contains("%99999d"));
    }

    #[test]
    fn chatml_is_built_in() {
        let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]);
        let text = render_with("chatml", messages, json!({})).unwrap();
        assert_eq!(
            text,
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>assistant\n"
        );
    }
}
