//! Cost of early and late turns in a long conversation, and the size of the stored data.
//!
//! `cargo run --release -p levade-conversation --example cost [TURNS] [TOKENS]` runs TURNS turns
//! (100) up to a sequence length of TOKENS (128k), with a vocabulary of bytes. Each turn sends the
//! complete history, as a client does, then a fork of it, and records both completions. Results are
//! medians over turns.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use levade_conversation::{CallIds, Conversation, Format, Options, Request};
use levade_policy::{Completion, SamplingParams};
use levade_text::testing::tiny_chat;
use levade_text::{Message, ToolSpec};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>());
    let turns = arguments.next().transpose()?.unwrap_or(100).max(20);
    let tokens = arguments.next().transpose()?.unwrap_or(128 * 1024);
    // Half of a turn's tokens are sampled, half are context.
    let half = (tokens / turns / 2).saturating_sub(40).max(16);

    let options = Options { call_ids: CallIds::Unique, ..Options::default() };
    let chat = Arc::new(tiny_chat()?);
    let started = Instant::now();
    let format = Arc::new(Format::new(chat, options));
    let abridges = format.can_abridge();
    println!(
        "probe of the template  {:>9.1?}, an abridged history is sufficient: {abridges}",
        started.elapsed()
    );

    let tools = [ToolSpec {
        name: "look_up".into(),
        description: "Looks something up.".into(),
        parameters: serde_json::json!({ "type": "object", "properties": { "q": { "type": "string" } } }),
    }];
    let mut conversation = Conversation::new();
    let mut messages = vec![Message::system("Look things up."), Message::user("What is known?")];
    let before = resident_kib();
    let mut prepare = Vec::new();
    let mut record = Vec::new();
    let mut sent = 0;
    let mut fork = 0;
    for turn in 0..turns {
        let mut request_completion = |conversation: &mut Conversation,
                                      messages: &[Message],
                                      text: String| {
            let request =
                Request { agent: "", policy: "", format: &format, messages, tools: &tools };
            let started = Instant::now();
            let prepared = conversation.prepare(&request)?;
            let prepared_in = started.elapsed();
            sent += prepared.prompt.len();
            let mut ids = format.chat().tokenizer().encode(&text);
            ids.extend(format.chat().stop_ids().first());
            let mut completion = Completion::default();
            completion.extend(&ids, &vec![-0.5; ids.len()], 0);
            let started = Instant::now();
            let recorded = conversation.record(prepared, completion, &SamplingParams::default())?;
            Ok::<_, Box<dyn Error>>((recorded, prepared_in, started.elapsed()))
        };
        let call = format!("{turn} {}", "x".repeat(half));
        let call = format!(
            "<tool_call>\n{{\"name\": \"look_up\", \"arguments\": {{\"q\": \"{call}\"}}}}\n</tool_call>"
        );
        let (recorded, prepared_in, recorded_in) =
            request_completion(&mut conversation, &messages, call)?;
        prepare.push(prepared_in);
        record.push(recorded_in);
        // A different newest message, and its completion.
        let mut fork_messages = messages.clone();
        if let Some(last) = fork_messages.last_mut() {
            last.content = format!("{} Or so?", last.content.as_str()).into();
        }
        request_completion(&mut conversation, &fork_messages, "No.".into())?;
        fork += 1;
        messages.push(recorded.message());
        let id = recorded.message().tool_calls.first().map(|call| call.id.clone());
        messages.push(Message {
            tool_call_id: id,
            ..Message::tool(format!("{turn} {}", "y".repeat(half)))
        });
    }
    let after = resident_kib();
    let trajectory = conversation.trajectory();
    let stored: usize = trajectory.segments().iter().map(|segment| segment.tokens.len()).sum();
    let max_depth = trajectory
        .leaves()
        .iter()
        .map(|&leaf| trajectory.sequence_tokens(leaf).len())
        .max()
        .unwrap_or(0);
    let text: usize =
        messages.iter().map(|message| serde_json::to_string(message).map_or(0, |m| m.len())).sum();
    println!(
        "{turns} turns, {fork} forks  longest sequence {max_depth} tokens, {text} bytes of messages"
    );
    println!("prompts in total       {sent} tokens");
    println!("stored in total        {stored} tokens, {} segments", trajectory.segments().len());
    println!(
        "memory                 {} KiB, {:.0} bytes per stored token",
        after - before,
        (after - before) as f64 * 1024.0 / stored as f64
    );
    for (name, times) in [("prepare", &prepare), ("record", &record)] {
        let early = median(&times[1..6]);
        let late = median(&times[turns - 5..]);
        let ratio = late.as_secs_f64() / early.as_secs_f64();
        println!("{name:<22} turns 2 to 6 {early:.1?}, last five {late:.1?}, ratio {ratio:.2}");
    }
    let started = Instant::now();
    let drift = conversation.finish();
    println!("finish                 {:.1?}, drift at {} turns", started.elapsed(), drift.len());
    Ok(())
}

fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    times[times.len() / 2]
}

/// Resident memory of this process in KiB, if the system reports it.
fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}
