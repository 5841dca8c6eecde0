//! Chat templates: Jinja programs that render messages in the format that a model was trained on.
//!
//! # Guarantees
//! - **Same output as transformers**: the text equals that of `apply_chat_template` for the same
//!   template and variables (`conformance/templates.py` compares both), or an error names the
//!   unsupported feature.
//! - **Determinism**: a template prints the same text in every rendering. The current time is
//!   fixed, in UTC.
//! - **Bounded cost**: a rendering is limited to 5 million steps, 10 s, 16 MiB for one text and 512
//!   MiB for all values that it creates.
//!
//! Out of scope: which messages and tools to render, and the tokens of the rendered text; see
//! [`Chat`](crate::Chat).

use std::time::{SystemTime, UNIX_EPOCH};

use levade_policy::catch_panic;
use minijinja::{Environment, Error, ErrorKind};
use serde_json::Map;

use crate::TextError;
use crate::jinja::{self, GUARD, NAME};

/// Chat template of plain ChatML, without a default system message or tools.
pub(crate) const CHATML: &str = "{%- for message in messages -%}\
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}\
    {%- endfor -%}\
    {%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";

/// A compiled chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    /// Whether the template accepts content only as lists of parts, so that texts are converted to
    /// such lists.
    pub(crate) lists: bool,
}

/// Input of a chat template for one rendering.
#[derive(Debug, Clone, Copy)]
pub struct TemplateInput<'a> {
    /// Messages as objects: `role`, `content`, and any other field that the template reads.
    pub messages: &'a [serde_json::Value],
    /// Tools in OpenAI's format. `None` if there are no tools, as in transformers, for which
    /// templates are written.
    pub tools: Option<&'a [serde_json::Value]>,
    /// Whether the rendered text ends with the generation prompt.
    pub add_generation_prompt: bool,
    /// Additional variables, such as `bos_token` or `enable_thinking`.
    pub variables: &'a Map<String, serde_json::Value>,
}

impl ChatTemplate {
    /// Compiles a chat template. It sees the time of this call as the current time. `"chatml"`
    /// selects plain ChatML.
    ///
    /// # Errors
    /// Returns an error if the template does not parse.
    pub fn new(source: &str) -> Result<Self, TextError> {
        let now =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
        Self::at(source, now)
    }

    /// Compiles a chat template that always sees `now`, a Unix timestamp in seconds, as the current
    /// time.
    ///
    /// # Errors
    /// Returns an error if the template does not parse.
    pub fn at(source: &str, now: u64) -> Result<Self, TextError> {
        let source = if source.trim() == "chatml" { CHATML } else { source };
        let environment = jinja::environment(source, now).map_err(to_text_error)?;
        Ok(ChatTemplate { environment, source: source.to_string(), lists: false })
    }

    /// Returns the Jinja source of the chat template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders messages to text with the chat template.
    ///
    /// # Errors
    /// Returns an error if the template raises an error or cannot be rendered.
    pub fn render(&self, rendering: TemplateInput<'_>) -> Result<String, TextError> {
        self.render_guarded(rendering, None)
    }

    /// Renders messages to text, in which the `guard` character must be preserved.
    pub(crate) fn render_guarded(
        &self,
        rendering: TemplateInput<'_>,
        guard: Option<char>,
    ) -> Result<String, TextError> {
        let mut variables = rendering.variables.clone();
        let messages = if self.lists {
            rendering.messages.iter().map(content_as_list).collect()
        } else {
            rendering.messages.into()
        };
        variables.insert("messages".into(), messages);
        variables
            .insert("tools".into(), rendering.tools.map_or(serde_json::Value::Null, Into::into));
        variables.insert("add_generation_prompt".into(), rendering.add_generation_prompt.into());
        // Defined even without documents, as in transformers.
        variables.entry("documents").or_insert(serde_json::Value::Null);
        if let Some(guard) = guard {
            variables.insert(GUARD.into(), guard.to_string().into());
        }
        let template = self.environment.get_template(NAME).map_err(to_text_error)?;
        // The engine should not panic, but the template is untrusted.
        catch_panic(|| template.render(jinja::from_fields(&variables)))
            .map_err(|what| TextError::Template(format!("the template engine panicked: {what:?}")))?
            .map_err(to_text_error)
    }
}

/// Returns a message whose content is converted to a list of parts.
fn content_as_list(message: &serde_json::Value) -> serde_json::Value {
    let mut message = message.clone();
    if let Some(content) = message.get_mut("content").filter(|content| content.is_string()) {
        *content = serde_json::json!([{ "type": "text", "text": content.take() }]);
    }
    message
}

fn to_text_error(error: Error) -> TextError {
    let what = match error.kind() {
        ErrorKind::OutOfFuel => {
            format!("rendering takes more than {} steps; is there an infinite loop?", jinja::STEPS)
        }
        kind => error.detail().map_or_else(|| kind.to_string(), str::to_string),
    };
    let location =
        error.line().map(|line| format!(" (line {line} of the template)")).unwrap_or_default();
    TextError::Template(format!("{what}{location}"))
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
        let serde_json::Value::Object(variables) = variables else {
            panic!("variables are an object")
        };
        let messages = messages.as_array().unwrap();
        let tool = json!({"type": "function", "function": {"name": "é<&>", "parameters": {"b": [1.0], "a": null}}});
        template.render(TemplateInput {
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
        render_with(source, messages, json!({"bos_token": "<s>", "enable_thinking": false}))
            .unwrap()
    }

    #[test]
    fn template_blocks_leave_no_white_space() {
        let source = "{% for message in messages %}\n    {% if loop.first %}\n        {{- \
                      bos_token }}\n    {% endif %}\n\
                      [{{ message['role'] }}]\n{% endfor %}\n\n";
        // As in Jinja2: the line break after a block is removed, the one after an expression is
        // kept.
        assert_eq!(render(source), "<s>\n[system]\n[user]\n[assistant]\n");
    }

    #[test]
    fn template_supports_python_methods_and_slices() {
        assert_eq!(
            render("{{ messages[0].content.strip() }}|{{ messages[0]['content'] | trim }}"),
            "Be brief.|Be brief."
        );
        assert_eq!(
            render("{% for m in messages[1:] %}{{ m.role.upper() }}{% endfor %}"),
            "USERASSISTANT"
        );
        assert_eq!(render("{% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %}"), "aus");
        let think = "{% set c = messages[2].content %}{% if '</think>' in c %}\
                     {{ c.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n\
                     ') }}/{{ c.split('</think>')[-1].lstrip('\\n') }}{% endif %}";
        assert_eq!(render(think), "hm/Ho");
        assert_eq!(
            render(
                "{{ messages[1].get('name', 'none') }}{{ messages | length - 1 }}{{ \
                 messages[1].content is string }}"
            ),
            "none2True"
        );
        assert_eq!(
            render(
                "{{ none is iterable }} {{ 'a' is iterable }} {{ messages is sequence }} {{ \
                 nothing is defined }}"
            ),
            "False True True False"
        );
        assert_eq!(
            render(
                "{% if messages[2].tool_calls %}{{ messages[2].tool_calls[0].name \
                 }}{% endif %}{% if messages[1].tool_calls %}x{% endif %}"
            ),
            "f"
        );
    }

    #[test]
    fn template_supports_control_flow() {
        let source = "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}\
                      {% continue %}{% endif %}{% if loop.index0 > 1 %}{% break %}{% endif %}{{ \
                      m.role }}{% endfor %}{{ ns.last }}";
        assert_eq!(render(source), "system1");
        assert_eq!(
            render("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}"),
            "abab"
        );
        assert_eq!(
            render(
                "{%- generation -%} a {%- endgeneration %} {% generation %}b{% endgeneration %}"
            ),
            "a b"
        );
        assert_eq!(
            render(
                "{{ enable_thinking is defined and enable_thinking is false }}{{ \
                 add_generation_prompt }}"
            ),
            "TrueTrue"
        );
    }

    #[test]
    fn template_prints_json_and_dates() {
        let one_line = r#"{"type": "function", "function": {"name": "é<&>", "parameters": {"b": [1.0], "a": null}}}"#;
        assert_eq!(render("{{ tools[0] | tojson }}"), one_line);
        assert_eq!(
            render("{{ tools[0].function.parameters | tojson(indent=2) }}"),
            "{\n  \"b\": [\n    1.0\n  ],\n  \"a\": null\n}"
        );
        assert_eq!(
            render(
                "{{ 'é' | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}"
            ),
            "\"\\u00e9\"[1,2]"
        );
        assert_eq!(render("{{ strftime_now('%d %b %Y') }}"), "29 Feb 2000");
    }

    #[test]
    fn template_numbers_print_like_python_or_exactly() {
        let message = r#"{"content": {"a": 12345678901234567890123, "b": 1234567890123456789012345678901234567890,
            "c": [1.10, 1E5, 1e-5, 0.1000000000000000055511151231257827, -0.0], "d": 18446744073709551615, "e": 1e400}}"#;
        let message: serde_json::Value = serde_json::from_str(message).unwrap();
        let print =
            |source: &str| render_with(source, json!([message.clone()]), json!({})).unwrap();
        let [a, b] = ["12345678901234567890123", "1234567890123456789012345678901234567890"];
        let printed = format!(
            "\"a\": {a}, \"b\": {b}, \"c\": [1.1, 100000.0, 1e-05, \
             0.1000000000000000055511151231257827, -0.0], \"d\": 18446744073709551615, \"e\": \
             1e+400"
        );
        assert_eq!(print("{{ messages[0].content | tojson }}"), format!("{{{printed}}}"));
        assert_eq!(
            print("{{ messages[0].content }}"),
            format!("{{{}}}", printed.replace('"', "'"))
        );
        assert_eq!(
            print("{% for k, v in messages[0].content.items() %}{{ v }} {% endfor %}")
                .split(' ')
                .take(2)
                .collect::<Vec<_>>(),
            [a, b]
        );
        assert_eq!(print("{{ messages[0].content.a + 1 }}"), "12345678901234567890124");
        assert_eq!(
            print(
                "{{ 'x' if messages[0].content.b is string else messages[0].content.b | string }}"
            ),
            b
        );
    }

    #[test]
    fn template_errors_name_cause_and_line() {
        assert_eq!(
            render_error("a\n{{ raise_exception('roles must alternate') }}"),
            "chat template: roles must alternate (line 2 of the template)"
        );
        assert!(render_error("{% for x in %}").contains("line 1"));
        assert!(render_error("{{ messages | nosuch }}").contains("nosuch"));
        assert!(render_error("{{ nothing.at.all }}").contains("undefined"));
        assert!(render_error("{{ [] | tojson(indent='x', sort=1) }}").contains("sort"));
        assert!(render_error("{{ [] | tojson(separators=('a',)) }}").contains("two strings"));
        assert!(render_error("{{ strftime_now('%99999d') }}").contains("%99999d"));
    }

    fn render_error(source: &str) -> String {
        render_with(source, json!([]), json!({})).unwrap_err().to_string()
    }

    #[test]
    fn chatml_template_is_built_in() {
        let messages =
            json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]);
        let text = render_with("chatml", messages, json!({})).unwrap();
        assert_eq!(
            text,
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>assistant\n"
        );
    }
}
