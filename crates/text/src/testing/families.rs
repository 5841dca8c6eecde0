//! Small chats that call tools in the formats of the common model families.
//!
//! The templates are our own and minimal: they request calls, print them, and print their results.
//! Each includes what makes the templates of its family hard to support.

use levade_model::{GgufTokenizer, TokenType};

use super::tiny_gguf;
use crate::{Chat, ChatOptions, TextError, Tokenizer, TokenizerSource, ToolProtocol};

/// ChatML with tools. Each family replaces DESCRIBE, CALLS (uses the message `m`) and RESULT (of
/// `m`).
const CHATML: &str = r#"
{%- if tools %}
    {{- '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
    {{- 'DESCRIBE<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(called=false) %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if STRICT and not ns.called %}{{ raise_exception('a result without a call') }}{% endif %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>tool\n' }}{% endif %}
        {{- RESULT }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {%- set ns.called = true %}
        {{- '<|im_start|>assistant\n' + (m.content or '') }}CALLS{{- '<|im_end|>\n' }}
    {%- else %}
        {%- set ns.called = false %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"#;

/// Messages with channels. Reasoning is kept only before calls, and a tool result requires a
/// preceding call.
const HARMONY: &str = r#"
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\n\nnamespace functions {\n' }}
    {%- for tool in tools %}{{ 'type ' + tool.function.name + ' = (_: any) => any;\n' }}{% endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set ns = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if '<|channel|>' in m.content %}{{ raise_exception('channels in the content') }}{% endif %}
        {%- if 'tool_calls' in m %}
            {%- if m.content and m.thinking %}{{ raise_exception('either content or thinking') }}{% endif %}
            {%- if m.content or m.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
            {%- endif %}
            {%- set ns.name = m.tool_calls[0].function.name %}
            {{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
            {{- m.tool_calls[0].function.arguments | tojson }}{{- '<|call|>' }}
        {%- else %}
            {%- if loop.last and m.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if ns.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"#;

/// A family: its format, the format's special tokens, and the parts of its template.
struct Family {
    protocol: ToolProtocol,
    tokens: &'static [&'static str],
    describe: &'static str,
    calls: &'static str,
    result: &'static str,
    strict: bool,
}

const FAMILIES: [Family; 8] = [
    Family {
        protocol: ToolProtocol::Hermes,
        tokens: &["<tool_call>", "</tool_call>"],
        describe: r#"Write <tool_call>{"name": …, "arguments": …}</tool_call>"#,
        calls: r#"
            {%- for c in m.tool_calls %}
                {{- '' if loop.first and not m.content else '\n' }}{{- '<tool_call>\n' }}
                {{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
                {{- '}\n</tool_call>' }}
            {%- endfor %}"#,
        result: r"'<tool_response>\n' + m.content + '\n</tool_response>\n'",
        strict: false,
    },
    Family {
        protocol: ToolProtocol::QwenXml,
        tokens: &["<tool_call>", "</tool_call>"],
        describe: "Write <tool_call><function=NAME><parameter=NAME>…",
        calls: r"
            {%- for c in m.tool_calls %}
                {{- ('\n\n' if m.content else '') if loop.first else '\n' }}
                {{- '<tool_call>\n<function=' + c.function.name + '>\n' }}
                {%- for key, value in c.function.arguments.items() %}
                    {{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) }}
                    {{- '\n</parameter>\n' }}
                {%- endfor %}{{- '</function>\n</tool_call>' }}
            {%- endfor %}",
        result: r"'<tool_response>\n' + m.content + '\n</tool_response>\n'",
        strict: false,
    },
    Family {
        protocol: ToolProtocol::Glm,
        tokens: &[
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
        ],
        describe: "Write <tool_call>NAME <arg_key>…",
        calls: r"
            {%- for c in m.tool_calls %}
                {{- '' if loop.first and not m.content else '\n' }}{{- '<tool_call>' + c.function.name + '\n' }}
                {%- for key, value in c.function.arguments.items() %}
                    {{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}
                    {{- (value if value is string else value | tojson) + '</arg_value>\n' }}
                {%- endfor %}{{- '</tool_call>' }}
            {%- endfor %}",
        result: r"'<tool_response>\n' + m.content + '\n</tool_response>\n'",
        strict: false,
    },
    Family {
        protocol: ToolProtocol::Minimax,
        tokens: &["<minimax:tool_call>", "</minimax:tool_call>"],
        describe: "Write <minimax:tool_call>…",
        calls: r#"
            {{- ('\n' if m.content else '') + '<minimax:tool_call>\n' }}
            {%- for c in m.tool_calls %}
                {{- '<invoke name="' + c.function.name + '">\n' }}
                {%- for key, value in c.function.arguments.items() %}
                    {{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) }}
                    {{- '</parameter>\n' }}
                {%- endfor %}{{- '</invoke>\n' }}
            {%- endfor %}{{- '</minimax:tool_call>' }}"#,
        result: "'<response>' + m.content + '</response>'",
        strict: true,
    },
    Family {
        protocol: ToolProtocol::Kimi,
        tokens: &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ],
        describe: "",
        calls: r"
            {{- '<|tool_calls_section_begin|>' }}
            {%- for c in m.tool_calls %}
                {{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
                {{- c.function.arguments | tojson }}{{- '<|tool_call_end|>' }}
            {%- endfor %}{{- '<|tool_calls_section_end|>' }}",
        result: r"'## Return of ' + m.tool_call_id + '\n' + m.content",
        strict: false,
    },
    Family {
        protocol: ToolProtocol::Deepseek,
        tokens: &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ],
        describe: "",
        calls: r"
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for c in m.tool_calls %}
                {{- '' if loop.first else '\n' }}
                {{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' }}
                {{- c.function.arguments + '\n```<｜tool▁call▁end｜>' }}
            {%- endfor %}{{- '<｜tool▁calls▁end｜>' }}",
        result: "m.content",
        strict: false,
    },
    Family {
        protocol: ToolProtocol::Mistral,
        tokens: &["[TOOL_CALLS]"],
        describe: "",
        calls: r#"
            {{- '[TOOL_CALLS][' }}
            {%- for c in m.tool_calls %}
                {%- if c.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}
                {{- '{"name": ' + c.function.name | tojson + ', "arguments": ' + c.function.arguments | tojson }}
                {{- ', "id": "' + c.id + '"}' + ('' if loop.last else ', ') }}
            {%- endfor %}{{- ']' }}"#,
        result: r#"'{"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}'"#,
        strict: true,
    },
    Family {
        protocol: ToolProtocol::Llama,
        tokens: &["<|python_tag|>", "<|eom_id|>"],
        describe: "Use {\"name\": function name, \"parameters\": dictionary of argument names and values}.",
        calls: r#"
            {%- if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
            {{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
            {{- m.tool_calls[0].function.arguments | tojson + '}' }}"#,
        result: "m.content",
        strict: false,
    },
];

/// Creates a chat of the family that calls tools in the format `protocol`; gpt-oss if no family has
/// that format. The vocabulary has one token per byte, and the special tokens of the family's
/// calls.
///
/// # Errors
/// Returns the errors of [`Chat::new`]; none occurs in practice.
pub fn family_chat(protocol: ToolProtocol, options: ChatOptions) -> Result<Chat, TextError> {
    let (tokens, template) = family(protocol);
    let mut source = tiny_gguf();
    for token in tokens {
        source.tokens.push((*token).into());
        source.types.push(TokenType::Control);
    }
    let eos = source.tokens.iter().position(|token| token == "<|return|>");
    let eos = eos.and_then(|at| u32::try_from(at).ok()).or(source.eos);
    let source = TokenizerSource::Gguf(GgufTokenizer { eos, ..source });
    Chat::new(Tokenizer::new(&source)?, Some(&template), options)
}

/// Returns the protocols for which there is a family.
pub fn protocols() -> impl Iterator<Item = ToolProtocol> {
    FAMILIES.iter().map(|family| family.protocol).chain([ToolProtocol::Harmony])
}

/// Returns the special tokens of a family, and its template.
fn family(protocol: ToolProtocol) -> (&'static [&'static str], String) {
    const CHANNELS: [&str; 7] = [
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|call|>",
        "<|return|>",
    ];
    match FAMILIES.iter().find(|family| family.protocol == protocol) {
        None => (&CHANNELS, HARMONY.into()),
        Some(family) => {
            let template = CHATML.replace("DESCRIBE", &family.describe.replace('\'', "\\'"));
            let template = template.replace("CALLS", family.calls).replace("RESULT", family.result);
            (
                family.tokens,
                template.replace("STRICT", if family.strict { "true" } else { "false" }),
            )
        }
    }
}
