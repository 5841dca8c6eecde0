//! Keys of agents.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use levade_agent::{ContextPolicy, Limits, Truncation};
use levade_conversation::{Format, History, Options, Replies};
use levade_policy::SamplingParams;
use levade_tasks::Task;
use levade_text::{Chat, LateSystem, Message, Role, ToolPrompt, ToolProtocol};
use serde::{Deserialize, Serialize};

use super::choice::PolicyChoice;
use super::context::ContextKeys;

/// Makers of attempts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentKind {
    /// The built-in loop: a model and its tools take turns.
    #[default]
    Tools,
    /// A program of the user's, which asks the model over HTTP.
    Program,
    /// The environment that the task comes from, which asks the model over HTTP.
    Environment,
}

impl AgentKind {
    /// Name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            AgentKind::Tools => "tools",
            AgentKind::Program => "program",
            AgentKind::Environment => "environment",
        }
    }

    /// Whether the model is asked over HTTP.
    pub fn calls(self) -> bool {
        self != AgentKind::Tools
    }
}

/// `match`: traits of the calls of a program that are this agent's although they do not name it. All that are
/// given must hold.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MatchKeys {
    /// Names of models that only this agent asks for.
    pub model: Vec<String>,
    /// A regular expression that its instructions match, somewhere.
    pub system: String,
    /// Names of tools that it is told of, all of them.
    pub tools: Vec<String>,
    /// Whether it is told of any tool.
    pub has_tools: Option<bool>,
}

/// `[agent]` and `[agent.NAME]`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentKeys {
    /// Who makes the attempts.
    pub kind: AgentKind,
    /// Of a program: the program and its arguments.
    pub command: Vec<String>,
    /// Of a program: the folder that it runs in, that of the recipe where not given.
    pub folder: PathBuf,
    /// Of a program: names of environment variables that it gets, besides the usual ones.
    pub environment: Vec<String>,
    /// Of a program: processes that stay alive and take attempts by the line; 0 where each attempt has a
    /// process of its own.
    pub workers: usize,
    /// Most attempts that a worker has at once.
    pub worker_attempts: usize,
    /// The calls of a program that are this agent's although they do not name it.
    #[serde(rename = "match")]
    pub matches: MatchKeys,
    /// The policy that writes its replies, by name; may be left out where there is one only. Or several, of
    /// which each plays it in its share of the attempts.
    pub policy: PolicyChoice,
    /// Whether its policy learns from what it does. If not, or if the policy is not trained, it acts and is
    /// no target.
    pub train: bool,
    /// How its replies are sampled in training.
    pub sampling: SamplingKeys,
    /// The instructions; none where empty.
    pub system: String,
    /// Words of the user; `{question}` stands for the question.
    pub prompt: String,
    /// Names of its toolboxes, or kinds of such that need no options: `calculator`.
    pub tools: Vec<String>,
    /// How tools are called.
    pub protocol: ToolProtocol,
    /// How tools are described, where the chat template does not do it.
    pub tool_prompt: ToolPrompt,
    /// Whether a JSON object that names a tool, bare or in a fence, is a call also without tags. Such calls
    /// are counted apart.
    pub bare_calls: bool,
    /// What becomes of a system message after the first turn that the chat template does not print there.
    pub late_system: LateSystem,
    /// How earlier turns are kept: as they were recorded, or as the chat template prints them, on a branch of
    /// its own where that differs.
    pub history: History,
    /// How closely a program must repeat a reply for its tokens to be continued.
    pub replies: Replies,
    /// Further variables of the chat template, such as `enable_thinking = false`.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// Most replies of an attempt.
    pub max_turns: u32,
    /// Most sampled tokens of an attempt, over all replies.
    pub max_tokens: usize,
    /// Longest wait for a toolbox to open, answer or close, in seconds, where it has none of its own.
    pub tool_seconds: f64,
    /// Each answer of a tool is held back for a random time of up to so many seconds: to see what slow tools
    /// cost.
    pub tool_delay: f64,
    /// Seconds that it takes at least.
    pub tool_delay_least: f64,
    /// Longest wait for a reply, in seconds.
    pub reply_seconds: f64,
    /// Longest time for the replies and tool calls of an attempt, in seconds. One that takes longer ends
    /// there, and is unfinished.
    pub attempt_seconds: f64,
    /// Most tokens of instructions and task; 0 for the context, or where `truncation` shortens them for as
    /// many as leave room for `max_tokens` in it.
    #[serde(alias = "prompt_tokens")]
    pub max_prompt_tokens: usize,
    /// Way to shorten longer ones.
    pub truncation: Truncation,
    /// Most tokens of a prompt; 0 for as many as leave room for a reply in the model's context.
    pub max_context_tokens: usize,
    /// Way to deal with longer ones as the conversation goes on.
    pub context: ContextKeys,
    /// How often an attempt that broke, or in which not one token was sampled, is made again.
    pub retries: u32,
}

impl Default for AgentKeys {
    fn default() -> Self {
        AgentKeys {
            kind: AgentKind::Tools,
            command: Vec::new(),
            folder: PathBuf::new(),
            environment: Vec::new(),
            workers: 0,
            worker_attempts: 1,
            matches: MatchKeys::default(),
            policy: PolicyChoice::default(),
            train: true,
            sampling: SamplingKeys::default(),
            system: String::new(),
            prompt: QUESTION.into(),
            tools: Vec::new(),
            protocol: ToolProtocol::default(),
            tool_prompt: ToolPrompt::default(),
            bare_calls: false,
            late_system: LateSystem::default(),
            history: History::default(),
            replies: Replies::default(),
            variables: serde_json::Map::new(),
            max_turns: 4,
            max_tokens: 256,
            tool_seconds: 10.0,
            tool_delay: 0.0,
            tool_delay_least: 0.0,
            reply_seconds: 600.0,
            attempt_seconds: 3600.0,
            max_prompt_tokens: 0,
            truncation: Truncation::Refuse,
            max_context_tokens: 0,
            context: ContextKeys::default(),
            retries: 0,
        }
    }
}

impl AgentKeys {
    /// Returns the format in which conversations with this chat are written.
    pub fn format(&self, chat: Arc<Chat>) -> Arc<Format> {
        let options = Options { history: self.history, replies: self.replies, ..Options::default() };
        Arc::new(Format::new(chat, options))
    }

    /// How its prompts are kept within a context of so many tokens.
    pub fn context_policy(&self, context: usize) -> ContextPolicy {
        self.context.policy(self.max_context_tokens, self.max_tokens, context)
    }

    /// The conversation that a task opens. Instructions of its own take the place of these.
    pub fn opening(&self, task: &Task) -> Vec<Message> {
        let asked = |question: &str| self.prompt.replace(QUESTION, question);
        let mut messages = task.messages.clone();
        match messages.last_mut() {
            None => messages.push(Message::user(asked(&task.question))),
            Some(last) if last.role == Role::User => last.content = asked(&last.content).into(),
            Some(_) => {}
        }
        if !self.system.is_empty() && !messages.iter().any(|message| message.role.instructs()) {
            messages.insert(0, Message::system(self.system.as_str()));
        }
        messages
    }

    /// Returns the maximum number of tokens of instructions and task, with a context of so many tokens.
    pub fn prompt_limit(&self, context: usize) -> usize {
        match (self.max_prompt_tokens, self.truncation) {
            (0, Truncation::Refuse) => usize::MAX,
            (0, _) => context.saturating_sub(self.max_tokens).max(1),
            (most, _) => most,
        }
    }

    /// Returns the limits of an attempt of this agent.
    pub fn limits(&self) -> Limits {
        Limits {
            turns: self.max_turns,
            tokens: self.max_tokens,
            reply: Duration::from_secs_f64(self.reply_seconds),
            attempt: Duration::from_secs_f64(self.attempt_seconds),
        }
    }
}

/// `[agent.sampling]`: how replies are sampled in training, where that is not as the phase says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingKeys {
    /// The sampling temperature; that of the phase where not given. 0 takes the most likely token.
    pub temperature: Option<f32>,
    /// Only the most likely tokens are sampled, until their probability reaches this; 1 leaves all.
    pub top_p: f32,
    /// Only so many of the most likely tokens are sampled; 0 leaves all.
    pub top_k: usize,
    /// Only tokens at least this likely relative to the most likely one are sampled; 0 leaves all.
    pub min_p: f32,
}

impl Default for SamplingKeys {
    fn default() -> Self {
        SamplingKeys { temperature: None, top_p: 1.0, top_k: 0, min_p: 0.0 }
    }
}

impl SamplingKeys {
    /// How replies are sampled in a phase that says `params`. Greedy attempts that others are compared with
    /// stay greedy.
    pub fn params(&self, params: SamplingParams) -> SamplingParams {
        if params.temperature == 0.0 {
            return params;
        }
        let SamplingKeys { temperature, top_p, top_k, min_p } = *self;
        SamplingParams {
            temperature: temperature.unwrap_or(params.temperature),
            top_p,
            top_k,
            min_p,
            ..params
        }
    }

    /// Whether the log-probabilities of what is sampled are those of the distribution that it comes from.
    pub fn is_plain(&self) -> bool {
        !self.params(SamplingParams::default()).is_filtered() && self.temperature != Some(0.0)
    }
}

/// Placeholder of the question in `agent.prompt`.
pub const QUESTION: &str = "{question}";
