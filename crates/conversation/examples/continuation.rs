//! Comparison of continuations with complete renders, for `conformance/continuation.py`. Reads one
//! conversation per line as JSON, and writes one line of JSON for each. The input has `template`;
//! `special`, its special tokens; `steps`, a list of `say`, a message, or `reply`, a message that
//! the model samples; and `tools`.
//!
//! The model has one token per byte. Each completion is sampled as the template's model would write
//! it, and the client sends the complete history back, without reasoning. The output has, for each
//! prompt after a completion: `fork`, the reason of a fork, if any; `equal`, whether the prompt is
//! what the template renders for the complete history, with reasoning and calls in separate fields
//! or as the model wrote them; and `drift`, the drift that was counted: the recorded text, and the
//! text rendered instead. The output has `error` if the template rejects the conversation or is not
//! a chat template.

use std::error::Error;
use std::io::{BufRead, Write, stdin, stdout};
use std::sync::Arc;

use levade_conversation::{CallIds, Conversation, Format, Options, Origin, Request};
use levade_model::{TokenType, TokenizerSource};
use levade_policy::{Completion, SamplingParams};
use levade_text::testing::tiny_gguf;
use levade_text::{Chat, ChatOptions, Message, Tokenizer, ToolSpec};
use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestLine {
    template: String,
    special: Vec<String>,
    bos: String,
    eos: String,
    steps: Vec<CaseStep>,
    tools: Vec<ToolSpec>,
    variables: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum CaseStep {
    #[serde(rename = "say")]
    Message(Message),
    #[serde(rename = "reply")]
    Completion(Message),
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = stdout().lock();
    for line in stdin().lock().lines() {
        let case: RequestLine = serde_json::from_str(&line?)?;
        let response = talk(&case).unwrap_or_else(|error| json!({ "error": error.to_string() }));
        writeln!(out, "{response}")?;
    }
    Ok(())
}

/// Returns a chat over bytes with these special tokens.
fn chat(case: &RequestLine) -> Result<Chat, Box<dyn Error>> {
    let mut source = tiny_gguf();
    for token in case.special.iter().chain([&case.bos, &case.eos]) {
        if !source.tokens.contains(token) {
            source.tokens.push(token.clone());
            source.types.push(TokenType::Control);
        }
    }
    let id =
        |text: &String| source.tokens.iter().position(|token| token == text).map(|at| at as u32);
    (source.bos, source.eos) = (id(&case.bos), id(&case.eos));
    let options = ChatOptions { variables: case.variables.clone(), ..ChatOptions::default() };
    Ok(Chat::new(Tokenizer::new(&TokenizerSource::Gguf(source))?, Some(&case.template), options)?)
}

fn talk(case: &RequestLine) -> Result<Value, Box<dyn Error>> {
    let chat = Arc::new(chat(case)?);
    let options = Options { call_ids: CallIds::Unique, ..Options::default() };
    let format = Arc::new(Format::new(Arc::clone(&chat), options));
    let text = |ids: &[u32]| chat.tokenizer().decode_with_special(ids);
    let mut conversation = Conversation::new();
    // As the client sends them, with the reasoning of completions, and with completions as their
    // model wrote them.
    let mut sent = Vec::<Message>::new();
    let mut full_messages = Vec::new();
    let mut written = Vec::new();
    let mut turns = Vec::new();
    let mut completions = 0;
    for step in &case.steps {
        let step_message = match step {
            CaseStep::Message(message) => {
                let mut message = message.clone();
                if let Some(id) = &mut message.tool_call_id {
                    // The result of the latest call without one.
                    let results = sent
                        .iter()
                        .rev()
                        .take_while(|step_message| step_message.tool_call_id.is_some())
                        .count();
                    let calls =
                        sent.iter().rev().find(|step_message| !step_message.tool_calls.is_empty());
                    *id = calls
                        .and_then(|step_message| step_message.tool_calls.get(results))
                        .map_or(id.clone(), |call| call.id.clone());
                }
                full_messages.push(message.clone());
                written.push(message.clone());
                sent.push(message);
                continue;
            }
            CaseStep::Completion(message) => message,
        };
        let request =
            Request { agent: "", policy: "", format: &format, messages: &sent, tools: &case.tools };
        let prepared = conversation.prepare(&request)?;
        let equal = [&full_messages, &written].into_iter().any(|messages| {
            chat.prompt(messages, &case.tools).is_ok_and(|ids| text(&ids) == text(&prepared.prompt))
        });
        let fork = match prepared.origin {
            Origin::Forked(fork) => Some(format!("{:?}", fork.reason)),
            Origin::Started | Origin::Continued => None,
        };
        let opened = chat.opened_reasoning(&sent, &case.tools)?;
        let sampled_tokens = chat.assistant(step_message, opened)?;
        let mut completion = Completion::default();
        completion.extend(&sampled_tokens, &vec![-0.5; sampled_tokens.len()], 0);
        let recorded = conversation.record(prepared, completion, &SamplingParams::default())?;
        let message = recorded.message();
        if message.tool_calls.len() != step_message.tool_calls.len() {
            return Err(format!(
                "the tool calls of a completion cannot be parsed: {:?}",
                recorded.text
            )
            .into());
        }
        let reasoning = Some(recorded.reasoning.clone()).filter(|reasoning| !reasoning.is_empty());
        full_messages.push(Message { reasoning_content: reasoning, ..message.clone() });
        written.push(recorded.raw_message());
        sent.push(message);
        turns.push((completions > 0, fork, equal));
        completions += 1;
    }
    let drifts = conversation.finish();
    let turns = turns.into_iter().zip(0u32..).filter(|((later, ..), _)| *later);
    let turn_results: Vec<Value> = turns
        .map(|((_, fork, equal), turn)| {
            let drift = drifts.iter().find(|drift| drift.turn == turn);
            json!({ "fork": fork, "equal": equal, "drift": drift.map(|drift| [&drift.recorded, &drift.printed]) })
        })
        .collect();
    Ok(turn_results.into())
}
