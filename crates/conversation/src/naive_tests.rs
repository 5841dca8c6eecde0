//! Random conversations, compared with an implementation that keeps a list of everything, compares
//! message by message, and renders the complete past.

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use levade_policy::SamplingParams;
use levade_text::testing::{ALWAYS_THINKS, NUMBERED, header_chat, sampled, thoughtful, tiny_chat};
use levade_text::{Chat, ChatOptions, Message, Role, ToolSpec};
use levade_tree::Trajectory;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::Value;

use crate::testing::{Talk, chat, tool};
use crate::{CallIds, Conversation, Drift, Format, Options, Origin, PreparedPrompt, Request};

/// A recorded conversation up to a completion.
struct RecordedSequence {
    /// Messages, with completions as they were written.
    messages: Vec<Message>,
    /// Completions, with the indices of their messages.
    completions: Vec<(usize, NaiveCompletion)>,
    completion: Vec<u32>,
    /// All tokens of the sequence.
    ids: Vec<u32>,
    prompt: Vec<u32>,
}

#[derive(Clone)]
struct NaiveCompletion {
    reasoning: String,
    shown: Message,
}

/// Returns JSON with sorted keys and with numbers by value.
fn canonical(value: &Value) -> String {
    match value {
        Value::Number(number) => format!("{:e}", number.as_f64().unwrap()),
        Value::Array(items) => format!("{:?}", items.iter().map(canonical).collect::<Vec<_>>()),
        Value::Object(map) => {
            let mut entries: Vec<_> =
                map.iter().map(|(key, value)| (key, canonical(value))).collect();
            entries.sort();
            format!("{entries:?}")
        }
        other => format!("{other:?}"),
    }
}

/// Returns the content of a message, without white space around it.
fn message_key(message: &Message) -> (Role, String, Vec<(String, String)>) {
    (
        message.role,
        message.content.trim().to_owned(),
        message
            .tool_calls
            .iter()
            .map(|call| (call.name.clone(), canonical(&Value::from(call.arguments.clone()))))
            .collect(),
    )
}

/// Returns the ids of a message's calls, each of which belongs to one completion.
fn ids(message: &Message) -> Vec<&str> {
    message.tool_calls.iter().map(|call| call.id.as_str()).filter(|id| !id.is_empty()).collect()
}

/// Returns a message with reasoning and calls parsed out of its text, and the reasoning.
fn parse_message(chat: &Chat, tools: &[ToolSpec], message: &Message) -> (Message, String) {
    let parsed = chat.parse(&message.content, false, tools);
    let unread =
        parsed.calls.iter().filter_map(|call| call.as_ref().err().map(|call| call.raw.clone()));
    let content: Vec<String> = Some(parsed.content.clone())
        .filter(|content| !content.is_empty())
        .into_iter()
        .chain(unread)
        .collect();
    let calls = parsed
        .calls
        .iter()
        .filter_map(|call| call.clone().ok())
        .chain(message.tool_calls.iter().cloned());
    (Message::calls(content.join("\n"), calls.collect()), chat.reasoning(&message.content, false))
}

impl RecordedSequence {
    /// Returns whether messages start with this conversation.
    fn is_repeated_by(&self, chat: &Chat, tools: &[ToolSpec], messages: &[Message]) -> bool {
        self.messages.len() <= messages.len()
            && self.messages.iter().zip(messages).enumerate().all(|(at, (kept, sent))| {
                let Some((_, message)) =
                    self.completions.iter().find(|(position, _)| *position == at)
                else {
                    return message_key(kept) == message_key(sent)
                        && kept.content.as_str() == sent.content.as_str();
                };
                if message_key(kept) == message_key(sent)
                    || message_key(&message.shown) == message_key(sent)
                {
                    return true;
                }
                // Part of the reasoning, or any reasoning if the ids of calls identify the
                // completion.
                let (shown, reasoning) = parse_message(chat, tools, sent);
                message_key(&shown) == message_key(&message.shown)
                    && (message.reasoning.contains(reasoning.trim())
                        || !ids(sent).is_empty() && ids(sent) == ids(&message.shown))
            })
    }
}

/// A change that a client makes to a history.
#[derive(Debug, Clone)]
enum Edit {
    Keep,
    Truncate(Index),
    Change(Index, &'static str),
    Drop(Index),
    Insert(Index),
}

/// A way in which a client rewrites a message.
#[derive(Debug, Clone, Copy)]
enum Style {
    Same,
    Trimmed,
    Dumped,
    NoIds,
    Tagged,
}

#[derive(Debug, Clone)]
struct Step {
    history: Index,
    edit: Edit,
    styles: Vec<Style>,
    new: Vec<(bool, &'static str)>,
    completion: &'static str,
    written: bool,
    is_abandoned: bool,
    other_tools: bool,
}

const TEXTS: [&str; 5] = ["1+1?", "And then?", " 2\n", "<think> is what?", "é"];
const COMPLETIONS: [&str; 9] = [
    "two",
    "two ",
    "Noted.",
    "<think>hm</think>two",
    "<think>\nso\n</think>\n\ntwo",
    "so</think>two",
    "See: <tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 2, \"a\": 1.50}}\n</tool_call>",
    "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 4.0}}</tool_call>",
    "a <tool_call>{oops</tool_call>",
];

fn step() -> impl Strategy<Value = Step> {
    let edit = prop_oneof![
        5 => Just(Edit::Keep),
        1 => any::<Index>().prop_map(Edit::Truncate),
        1 => (any::<Index>(), prop::sample::select(&TEXTS[..])).prop_map(|(at, text)| Edit::Change(at, text)),
        1 => any::<Index>().prop_map(Edit::Drop),
        1 => any::<Index>().prop_map(Edit::Insert),
    ];
    let style = prop_oneof![
        4 => Just(Style::Same), 1 => Just(Style::Trimmed), 1 => Just(Style::Dumped), 1 => Just(Style::NoIds),
        1 => Just(Style::Tagged),
    ];
    let new = proptest::collection::vec((any::<bool>(), prop::sample::select(&TEXTS[..])), 1..3);
    let flags = (any::<bool>(), proptest::bool::weighted(0.1), proptest::bool::weighted(0.1));
    (
        any::<Index>(),
        edit,
        proptest::collection::vec(style, 1..5),
        new,
        prop::sample::select(&COMPLETIONS[..]),
        flags,
    )
        .prop_map(
            |(history, edit, styles, new, completion, (written, is_abandoned, other_tools))| Step {
                history,
                edit,
                styles,
                new,
                completion,
                written,
                is_abandoned,
                other_tools,
            },
        )
}

impl Edit {
    fn apply(&self, messages: &mut Vec<Message>) {
        if messages.is_empty() {
            return;
        }
        match self {
            Edit::Keep => {}
            Edit::Truncate(at) => messages.truncate(at.index(messages.len()) + 1),
            Edit::Change(at, text) => {
                let at = at.index(messages.len());
                messages[at].content = (*text).into();
            }
            Edit::Drop(at) => drop(messages.remove(at.index(messages.len()))),
            Edit::Insert(at) => {
                messages.insert(at.index(messages.len()), Message::assistant("Noted."))
            }
        }
    }
}

impl Style {
    fn apply(self, message: &mut Message, reasoning: Option<&str>) {
        match self {
            Style::Same => {}
            Style::Trimmed => message.content = message.content.trim().into(),
            Style::Dumped => {
                for call in &mut message.tool_calls {
                    let mut entries: Vec<_> =
                        std::mem::take(&mut *call.arguments).into_iter().collect();
                    entries.reverse();
                    let shorter = |value: Value| match value.as_f64() {
                        Some(number) if number.fract() == 0.0 => Value::from(number as i64),
                        _ => value,
                    };
                    *call.arguments =
                        entries.into_iter().map(|(key, value)| (key, shorter(value))).collect();
                }
            }
            Style::NoIds => message.tool_calls.iter_mut().for_each(|call| call.id.clear()),
            Style::Tagged => {
                if let Some(reasoning) = reasoning.filter(|reasoning| !reasoning.is_empty()) {
                    message.content =
                        format!("<think>{reasoning}</think>{}", message.content.as_str()).into();
                }
            }
        }
    }
}

/// The messages of a client. Completions have their reasoning as the client received it.
type History = Vec<(Message, Option<String>)>;

struct Simulation {
    talk: Talk,
    tools: Vec<ToolSpec>,
    /// All recorded sequences, and whether they had the other tools.
    recorded: Vec<(bool, RecordedSequence)>,
    histories: Vec<History>,
}

impl Simulation {
    fn new(format_index: usize, with_tools: bool) -> Self {
        let mut talk = Talk::with(Arc::clone(&FORMATS[format_index]));
        talk.tools = if with_tools { vec![tool("add")] } else { vec![] };
        Simulation {
            tools: talk.tools.clone(),
            talk,
            recorded: Vec::new(),
            histories: vec![Vec::new()],
        }
    }

    /// Returns all valid prompts.
    fn naive(&self, other_tools: bool, messages: &[Message], tools: &[ToolSpec]) -> Vec<Vec<u32>> {
        let chat = self.talk.format.chat();
        let repeated = self.recorded.iter().filter(|(other, recorded)| {
            *other == other_tools && recorded.is_repeated_by(chat, tools, messages)
        });
        let repeated: Vec<&RecordedSequence> = repeated.map(|(_, recorded)| recorded).collect();
        let max_length = repeated.iter().map(|recorded| recorded.messages.len()).max();
        let Some(max_length) = max_length else {
            return vec![chat.prompt(messages, tools).unwrap()];
        };
        let longest_recordings =
            repeated.into_iter().filter(|recorded| recorded.messages.len() == max_length);
        longest_recordings
            .map(|recorded| {
                let past = &recorded.messages[..max_length - 1];
                let between = chat
                    .continuation(past, &recorded.completion, &messages[max_length..], tools)
                    .unwrap();
                [recorded.ids.clone(), between].concat()
            })
            .collect()
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        let history = step.history.get(&self.histories).clone();
        let mut messages: Vec<Message> = Vec::new();
        for ((message, reasoning), style) in history.iter().zip(step.styles.iter().cycle()) {
            let mut message = message.clone();
            style.apply(&mut message, reasoning.as_deref());
            messages.push(message);
        }
        step.edit.apply(&mut messages);
        for (tool, text) in &step.new {
            messages.push(if *tool { Message::tool(*text) } else { Message::user(*text) });
        }
        let tools = if step.other_tools { vec![tool("sub")] } else { self.tools.clone() };
        self.talk.tools.clone_from(&tools);
        let prepared = self.talk.prepare(&messages);
        let naive = self.naive(step.other_tools, &messages, &tools);
        let texts: Vec<String> = naive.iter().map(|ids| self.talk.text(ids)).collect();
        prop_assert!(
            naive.contains(&prepared.prompt),
            "{} is none of {texts:#?}",
            self.talk.text(&prepared.prompt)
        );
        if step.is_abandoned {
            return Ok(());
        }
        self.record(step, prepared, &messages, tools)?;
        Ok(())
    }

    fn record(
        &mut self,
        step: &Step,
        prepared: PreparedPrompt,
        messages: &[Message],
        tools: Vec<ToolSpec>,
    ) -> Result<(), TestCaseError> {
        let chat = self.talk.format.chat().clone();
        let before = self.talk.conversation.trajectory().clone();
        let prompt = prepared.prompt.clone();
        let repeated = prepared.repeated;
        let completion = sampled(&chat, step.completion);
        let kept = self.talk.record(prepared, step.completion);
        let trajectory = self.talk.conversation.trajectory();
        let ids = [prompt.clone(), completion.clone()].concat();
        prop_assert_eq!(trajectory.sequence_tokens(kept.segment), ids.clone());
        prop_assert_eq!(&trajectory.segments()[..before.segments().len()], before.segments());
        // A prompt can equal the tokens of a completion without continuing it: if a client adds
        // reasoning that the template does not render, its message is another one.
        let prefix = &prompt[..];
        let from = self.recorded.iter().find(|(_, recorded)| {
            recorded.messages.len() == repeated.up_to_completion
                && prefix.starts_with(&recorded.ids)
        });
        let common_length = from.map_or(0, |(_, recorded)| recorded.ids.len());
        prop_assert!(
            num_stored_tokens(trajectory)
                <= num_stored_tokens(&before) + ids.len() - common_length + 1
        );

        // Repeated messages are as recorded; the remaining ones are as sent.
        let (mut full_run, mut completions) = match from {
            Some((_, recorded)) => (recorded.messages.clone(), recorded.completions.clone()),
            None => (Vec::new(), Vec::new()),
        };
        full_run.extend(messages[repeated.up_to_completion..].iter().cloned());
        full_run.push(kept.raw_message());
        let naive_completion =
            NaiveCompletion { reasoning: kept.reasoning.clone(), shown: kept.message() };
        completions.push((full_run.len() - 1, naive_completion));
        let other = tools != self.tools;
        self.recorded.push((
            other,
            RecordedSequence { messages: full_run, completions, completion, ids, prompt },
        ));

        let mut history: History = messages.iter().map(|message| (message.clone(), None)).collect();
        let message = if step.written { kept.raw_message() } else { kept.message() };
        history.push((message, Some(kept.reasoning).filter(|_| !step.written)));
        self.histories.push(history);
        Ok(())
    }

    /// Returns the prompts of the turns at which the template renders the complete conversation
    /// differently.
    fn drifting_prompts(&self, other_tools: &[ToolSpec]) -> BTreeSet<Vec<u32>> {
        let chat = self.talk.format.chat();
        self.recorded
            .iter()
            .filter(|(other, recorded)| {
                let tools = if *other { other_tools } else { &self.tools };
                let messages = &recorded.messages[..recorded.messages.len() - 1];
                Drift::find(chat, &recorded.prompt, messages, tools).is_some()
            })
            .map(|(_, recorded)| recorded.prompt.clone())
            .collect()
    }
}

fn num_stored_tokens(trajectory: &Trajectory) -> usize {
    trajectory.segments().iter().map(|s| s.tokens.len()).sum::<usize>()
}

/// Formats of all kinds. Each is probed once.
static FORMATS: LazyLock<[Arc<Format>; 6]> = LazyLock::new(|| {
    let options = Options { call_ids: CallIds::Unique, ..Options::default() };
    [
        tiny_chat().unwrap(),
        thoughtful(true).unwrap(),
        thoughtful(false).unwrap(),
        chat(ALWAYS_THINKS, ChatOptions::default()),
        header_chat().unwrap(),
        chat(NUMBERED, ChatOptions::default()),
    ]
    .map(|chat| Arc::new(Format::new(Arc::new(chat), options)))
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn prompts_match_naive_implementation(
        which in 0usize..6, steps in proptest::collection::vec(step(), 1..9), with_tools in any::<bool>(),
    ) {
        let mut world = Simulation::new(which, with_tools);
        for step in &steps {
            world.step(step)?;
        }
        // If there are few forks, `finish` checks all of them.
        let lengths = || world.recorded.iter().map(|(_, recorded)| recorded.messages.len());
        if lengths().sum::<usize>() <= 4 * lengths().max().unwrap_or(0) {
            let found: BTreeSet<Vec<u32>> = world.talk.conversation.finish().iter()
                .map(|drift| world.recorded[drift.turn as usize].1.prompt.clone()).collect();
            prop_assert_eq!(found, world.drifting_prompts(&[tool("sub")]));
        }
    }

    /// If a template keeps the past, a conversation continued turn by turn equals the template's
    /// rendering of the complete conversation.
    #[test]
    fn turns_match_complete_rendering(
        turns in proptest::collection::vec((prop::sample::select(&TEXTS[..]), prop::sample::select(&COMPLETIONS[..])), 1..7),
        written in any::<bool>(),
    ) {
        let mut talk = Talk::with(Arc::clone(&FORMATS[0]));
        let (mut messages, mut raw) = (Vec::new(), Vec::new());
        for (question, answer) in turns {
            messages.push(Message::user(question));
            raw.push(Message::user(question));
            let (prepared, recorded) = talk.prepare_and_record(&messages, answer);
            prop_assert_eq!(&prepared.prompt, &talk.format.chat().prompt(&raw, &[]).unwrap());
            prop_assert!(matches!(prepared.origin, Origin::Started | Origin::Continued));
            messages.push(if written { recorded.raw_message() } else { recorded.message() });
            raw.push(recorded.raw_message());
        }
        prop_assert_eq!(talk.conversation.finish(), vec![]);
        prop_assert_eq!(talk.conversation.trajectory().leaves().len(), 1);
    }
}

#[test]
fn parallel_calls_are_recorded_in_any_order() {
    fn assert_send_sync<T: Send + Sync + 'static>() {}
    assert_send_sync::<Conversation>();
    assert_send_sync::<PreparedPrompt>();
    let mut talk = Talk::new(tiny_chat().unwrap(), Options::default());
    let first = [Message::user("1+1?")];
    let (_, recorded_completion) = talk.prepare_and_record(&first, "two");
    let requested: Vec<Vec<Message>> = (0..20)
        .map(|n| {
            [
                first.to_vec(),
                vec![recorded_completion.message(), Message::user(format!("And {}?", n % 7))],
            ]
            .concat()
        })
        .collect();
    let prepared: Vec<PreparedPrompt> =
        requested.iter().map(|messages| talk.prepare(messages)).collect();
    let matched = talk.conversation.match_request(&Request {
        agent: "",
        policy: "",
        format: &talk.format,
        messages: &requested[0],
        tools: &[],
    });
    // Another thread can render the prompt.
    let elsewhere = std::thread::spawn(move || matched.render()).join().unwrap().unwrap();
    assert_eq!(elsewhere.prompt, prepared[0].prompt);
    let params = SamplingParams::default();
    for prepared in prepared.into_iter().rev() {
        let prompt = prepared.prompt.clone();
        let tokens = sampled(talk.format.chat(), "ok");
        let recorded_completion = talk
            .conversation
            .record(prepared, crate::testing::completion(tokens), &params)
            .unwrap();
        assert!(
            talk.conversation
                .trajectory()
                .sequence_tokens(recorded_completion.segment)
                .starts_with(&prompt)
        );
    }
    // Seven different questions, each stored once below their common prefix.
    let context =
        talk.conversation.trajectory().segments().iter().filter(|s| s.logprobs.is_empty()).count();
    assert_eq!(context, 1 + 7);
}
