//! A tiny real tokenizer and chat, created in memory, for tests in this crate and in other crates.
//!
//! The vocabulary has one token per byte, whose id is the byte, and three special tokens. Texts
//! need many tokens, but the encoding is exact: any text encodes to its UTF-8 bytes and decodes to
//! itself.

mod families;

pub use families::{family_chat, protocols};
use levade_model::{GgufTokenizer, TokenType};

use crate::{Chat, ChatOptions, TextError, Tokenizer, TokenizerSource, alphabet};

/// `<|endoftext|>`: ends a text.
pub const END_OF_TEXT: u32 = 256;
/// `<|im_start|>`: starts a turn.
pub const IM_START: u32 = 257;
/// `<|im_end|>`: ends a turn.
pub const IM_END: u32 = 258;
/// Number of tokens of the tiny tokenizer.
pub const VOCABULARY: usize = 259;

/// Template that keeps reasoning only after the last question. The last turn gets empty reasoning
/// if it has none. With `enable_thinking = false`, empty reasoning ends the prompt.
pub const THOUGHTFUL: &str = r#"
{%- if tools %}{{- '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
    {{- 'Use <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(asked=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set said, thought = message.content, '' %}
        {%- if '</think>' in said %}
            {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set said = said.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.asked and (loop.last or thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- said + '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"#;

/// Template that opens all reasoning itself, except after a tool result, and drops all past
/// reasoning.
pub const ALWAYS_THINKS: &str = r#"
{%- for message in messages %}
    {%- set said = message.content %}
    {%- if message.role == 'assistant' %}{% set said = said.split('</think>')[-1] %}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' + said + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if messages[-1].role != 'tool' %}{{- '<think>\n' }}{% endif %}{% endif %}"#;

/// Template that numbers turns, prints their count, trims contents, and ends a last assistant turn
/// with `<|endoftext|>`.
pub const NUMBERED: &str = "{% for m in messages %}
    {{- '<|im_start|>' + m.role }} {{ loop.index }} of {{ messages | length }}
{{ m.content | trim }}
    {%- if loop.last and m.role == 'assistant' %}{{ '<|endoftext|>' }}{% else %}{{ '<|im_end|>' \
    }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }} {{ messages | length + 1 }}
{% endif %}";

/// Template that rejects empty assistant messages, and those with reasoning or call tags.
pub const STRICT: &str = "{% for m in messages %}
    {%- if m.role == 'assistant' and (not m.content or '<th' in m.content or '<tool' in m.content) %}
        {{- raise_exception('a reply that is not liked') }}
    {%- endif %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Template that raises an exception for each system message except the first.
pub const FIRST_SYSTEM_ONLY: &str = "{% for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at \
    the beginning.') }}{% endif %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Template like [`FIRST_SYSTEM_ONLY`] that also raises an exception unless user and assistant
/// turns alternate.
pub const STRICT_TURNS: &str = "{% set ns = namespace(last='assistant') %}{% for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('one system message') \
    }}{% endif %}
    {%- if m.role != 'system' %}{% if m.role == ns.last %}{{ raise_exception('roles must \
    alternate') }}{% endif %}
        {%- set ns.last = m.role %}{% endif %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Template with headers between special tokens, trimmed contents and a start token. It has no tool
/// role.
pub const HEADERS: &str = r#"{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"#;

/// Returns the metadata of the tiny tokenizer, as in a GGUF file.
pub fn tiny_gguf() -> GgufTokenizer {
    let bytes = (0..=255).map(|byte| alphabet::byte_to_char(byte).to_string());
    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from);
    GgufTokenizer {
        model: "gpt2".into(),
        pre: "gpt-2".into(),
        tokens: bytes.chain(specials).collect(),
        types: [vec![TokenType::Normal; 256], vec![TokenType::Control; 3]].concat(),
        eos: Some(END_OF_TEXT),
        ..GgufTokenizer::default()
    }
}

/// Creates the tiny tokenizer.
///
/// # Errors
/// Returns the errors of [`Tokenizer::new`]; none occurs in practice.
pub fn tiny_tokenizer() -> Result<Tokenizer, TextError> {
    Tokenizer::new(&TokenizerSource::Gguf(tiny_gguf()))
}

/// Creates a chat from the tiny tokenizer with plain ChatML and the Hermes protocol.
///
/// # Errors
/// Returns the errors of [`Chat::new`]; none occurs in practice.
pub fn tiny_chat() -> Result<Chat, TextError> {
    Chat::new(tiny_tokenizer()?, Some("chatml"), ChatOptions::default())
}

/// Creates a chat from the tiny tokenizer with header tokens and [`HEADERS`], a template without a
/// tool role.
///
/// # Errors
/// Returns the errors of [`Chat::new`]; none occurs in practice.
pub fn header_chat() -> Result<Chat, TextError> {
    let mut source = tiny_gguf();
    for special in ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"] {
        source.tokens.push(special.into());
        source.types.push(TokenType::Control);
    }
    let source = TokenizerSource::Gguf(GgufTokenizer { bos: Some(259), ..source });
    Chat::new(Tokenizer::new(&source)?, Some(HEADERS), ChatOptions::default())
}

/// Creates a chat from the tiny tokenizer with [`THOUGHTFUL`]. `thinks` sets `enable_thinking`.
///
/// # Errors
/// Returns the errors of [`Chat::new`]; none occurs in practice.
pub fn thoughtful(thinks: bool) -> Result<Chat, TextError> {
    let variables = [("enable_thinking".to_owned(), thinks.into())].into_iter().collect();
    Chat::new(
        tiny_tokenizer()?,
        Some(THOUGHTFUL),
        ChatOptions { variables, ..ChatOptions::default() },
    )
}

/// Returns the tokens of a completion as it would be sampled, including the token that ends it.
pub fn sampled(chat: &Chat, text: &str) -> Vec<u32> {
    let mut ids = chat.tokenizer().encode(text);
    ids.extend(chat.stop_ids().first());
    ids
}
