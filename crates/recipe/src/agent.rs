//! Keys of agents: `[agent]` and `[agent.NAME]`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use levade_agent::{AttemptLimits, ContextPolicy, MixtureScope, MixtureSeats, Truncation};
use levade_conversation::{CompletionMatching, Format, History, Options};
use levade_policy::SamplingParams;
use levade_tasks::Task;
use levade_text::{Chat, LateSystem, Message, Role, ToolPrompt, ToolProtocol};
use levade_tools::ToolDescriptions;
use serde::{Deserialize, Serialize};

use super::choice::PolicyChoice;
use super::context::ContextKeys;

/// Kind of agent: what makes the attempts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentKind {
    /// The built-in loop, which alternates between the model and its tools.
    #[default]
    Tools,
    /// A program of the user that calls the model over HTTP.
    Program,
    /// The environment that supplies the task. It calls the model over HTTP.
    Environment,
    /// The game of `[game]`, whose seats agents play.
    Game,
    /// An agent that runs elsewhere and starts attempts as sessions of the gateway, over HTTP.
    Session,
}

impl AgentKind {
    /// Returns the name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            AgentKind::Tools => "tools",
            AgentKind::Program => "program",
            AgentKind::Environment => "environment",
            AgentKind::Game => "game",
            AgentKind::Session => "session",
        }
    }

    /// Returns whether external policies can play the agent. The built-in loop sends tokens.
    pub fn can_be_external(self) -> bool {
        self != AgentKind::Tools
    }

    /// Returns whether the agent calls the model over HTTP.
    pub fn calls_over_http(self) -> bool {
        matches!(self, AgentKind::Program | AgentKind::Environment | AgentKind::Session)
    }
}

/// `match`: conditions by which an unnamed call of a program is assigned to this agent. All
/// conditions that are set must hold.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MatchKeys {
    /// Model names that only this agent requests.
    pub model: Vec<String>,
    /// Regular expression that matches anywhere in the agent's instructions.
    pub system: String,
    /// Names of tools that the call must offer, all of them.
    pub tools: Vec<String>,
    /// Whether the call offers any tools.
    pub has_tools: Option<bool>,
}

/// `[agent]` and `[agent.NAME]`: an agent, its policy, tools, prompts and limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentKeys {
    /// What makes the attempts.
    pub kind: AgentKind,
    /// Program and its arguments. Only for kind `program`.
    pub command: Vec<String>,
    /// Working directory of the program; by default the directory of the recipe. Only for kind
    /// `program`.
    pub folder: PathBuf,
    /// Names of environment variables that are passed to the program in addition to the usual ones.
    /// Only for kind `program`.
    pub environment: Vec<String>,
    /// Number of long-running processes that read attempts line by line; 0 starts one process per
    /// attempt. Only for kind `program`.
    pub workers: usize,
    /// Maximum number of concurrent attempts of a worker, at least 1.
    pub worker_attempts: usize,
    /// Conditions by which an unnamed call of a program is assigned to this agent.
    #[serde(rename = "match")]
    pub matches: MatchKeys,
    /// Name of the policy that generates the agent's completions. It can be left out if there is
    /// only one policy. With a list of policies, each is used in its fraction of the attempts.
    pub policy: PolicyChoice,
    /// Whether a policy of a list is selected for each attempt or for each group of attempts.
    pub mixture: MixtureScope,
    /// Whether a policy of a list is selected for each seat of the agent in a game, or for all of
    /// them together.
    pub mixture_seats: MixtureSeats,
    /// Whether the policy is trained on what this agent does. If not, or if the policy is not
    /// trained, the agent acts, but its tokens are not training targets.
    pub train: bool,
    /// Sampling parameters in training.
    pub sampling: SamplingKeys,
    /// System prompt; none if empty.
    pub system: String,
    /// User prompt; `{question}` is replaced by the question.
    pub prompt: String,
    /// Names of the agent's toolboxes, or kinds of toolboxes that need no options, such as
    /// `calculator`.
    pub tools: Vec<String>,
    /// Descriptions that the model reads in place of those of the toolboxes, by the tool's name.
    pub tool_descriptions: ToolDescriptions,
    /// Name of the simulated user who answers the agent's replies. Empty if a reply without a tool
    /// call ends the attempt. Only for kind `tools`.
    pub user: String,
    /// Format of tool calls.
    pub protocol: ToolProtocol,
    /// Description of tools in the prompt if the chat template does not render tools.
    pub tool_prompt: ToolPrompt,
    /// Whether a JSON object that names a tool, bare or in a code fence, is a call even without
    /// tags. Such calls are counted separately.
    pub bare_calls: bool,
    /// Treatment of a system message after the first turn that the chat template does not render
    /// there.
    pub late_system: LateSystem,
    /// How earlier turns are kept: as they were recorded, or as the chat template renders them. If
    /// the two differ, the rendered version is a branch of its own.
    pub history: History,
    /// How exactly a program must repeat an assistant message for the message's tokens to be
    /// continued.
    #[serde(alias = "replies")]
    pub completion_matching: CompletionMatching,
    /// Additional variables of the chat template, such as `enable_thinking = false`.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// Maximum number of completions in an attempt, at least 1.
    pub max_turns: u32,
    /// Maximum number of sampled tokens in an attempt, over all completions, at least 1.
    pub max_tokens: usize,
    /// Timeout for opening, calling or closing a toolbox, in seconds. A toolbox can set its own.
    pub tool_seconds: f64,
    /// Upper bound of a random delay of each tool result, in seconds. It simulates slow tools. 0
    /// disables the delay.
    pub tool_delay: f64,
    /// Lower bound of the random delay of each tool result, in seconds, in 0..=`tool_delay`.
    #[serde(alias = "tool_delay_least")]
    pub min_tool_delay: f64,
    /// Timeout for a completion, in seconds.
    #[serde(alias = "reply_seconds")]
    pub completion_seconds: f64,
    /// Maximum total time for the completions and tool calls of an attempt, in seconds. An attempt
    /// that takes longer ends there and counts as unfinished.
    pub attempt_seconds: f64,
    /// Maximum number of tokens of instructions and task. With 0, the limit is the context; if
    /// `truncation` shortens prompts, 0 leaves room for `max_tokens` in the context.
    #[serde(alias = "prompt_tokens")]
    pub max_prompt_tokens: usize,
    /// How a prompt that exceeds `max_prompt_tokens` is shortened.
    pub truncation: Truncation,
    /// Maximum number of tokens of a prompt; 0 leaves room for a completion in the model's context.
    pub max_context_tokens: usize,
    /// What happens when a prompt exceeds `max_context_tokens` during the conversation.
    pub context: ContextKeys,
    /// Maximum number of retries of an attempt that broke, or in which no token was sampled.
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
            mixture: MixtureScope::default(),
            mixture_seats: MixtureSeats::default(),
            train: true,
            sampling: SamplingKeys::default(),
            system: String::new(),
            prompt: QUESTION.into(),
            tools: Vec::new(),
            tool_descriptions: ToolDescriptions::new(),
            user: String::new(),
            protocol: ToolProtocol::default(),
            tool_prompt: ToolPrompt::default(),
            bare_calls: false,
            late_system: LateSystem::default(),
            history: History::default(),
            completion_matching: CompletionMatching::default(),
            variables: serde_json::Map::new(),
            max_turns: 4,
            max_tokens: 256,
            tool_seconds: 10.0,
            tool_delay: 0.0,
            min_tool_delay: 0.0,
            completion_seconds: 600.0,
            attempt_seconds: 3600.0,
            max_prompt_tokens: 0,
            truncation: Truncation::Reject,
            max_context_tokens: 0,
            context: ContextKeys::default(),
            retries: 0,
        }
    }
}

impl AgentKeys {
    /// Returns the format in which the agent's conversations over `chat` are recorded.
    pub fn format(&self, chat: Arc<Chat>) -> Arc<Format> {
        let options = Options {
            history: self.history,
            completion_matching: self.completion_matching,
            ..Options::default()
        };
        Arc::new(Format::new(chat, options))
    }

    /// Returns the policy that keeps prompts within a context of `context` tokens.
    pub fn context_policy(&self, context: usize) -> ContextPolicy {
        self.context.policy(self.max_context_tokens, self.max_tokens, context)
    }

    /// Returns the messages with which a conversation about `task` starts. If the task has
    /// instructions, they replace the agent's instructions.
    pub fn initial_messages(&self, task: &Task) -> Vec<Message> {
        let fill_prompt = |question: &str| self.prompt.replace(QUESTION, question);
        let mut messages = task.messages.clone();
        match messages.last_mut() {
            None => messages.push(Message::user(fill_prompt(&task.question))),
            Some(last) if last.role == Role::User => {
                last.content = fill_prompt(&last.content).into()
            }
            Some(_) => {}
        }
        if let Some(experience) = &task.experience {
            match messages.last_mut().filter(|last| last.role == Role::User) {
                Some(last) => {
                    last.content = format!("{}\n\n{experience}", last.content.as_str()).into();
                }
                None => messages.push(Message::user(experience.as_str())),
            }
        }
        if !self.system.is_empty() && !messages.iter().any(|message| message.role.instructs()) {
            messages.insert(0, Message::system(self.system.as_str()));
        }
        messages
    }

    /// Returns the maximum number of tokens of instructions and task in a context of `context`
    /// tokens.
    pub fn prompt_limit(&self, context: usize) -> usize {
        match (self.max_prompt_tokens, self.truncation) {
            (0, Truncation::Reject) => usize::MAX,
            (0, _) => context.saturating_sub(self.max_tokens).max(1),
            (limit, _) => limit,
        }
    }

    /// Returns the limits of an attempt of this agent.
    pub fn limits(&self) -> AttemptLimits {
        AttemptLimits {
            max_turns: self.max_turns,
            max_tokens: self.max_tokens,
            completion_timeout: Duration::from_secs_f64(self.completion_seconds),
            attempt_timeout: Duration::from_secs_f64(self.attempt_seconds),
        }
    }
}

/// `[agent.sampling]`: sampling parameters in training that differ from those of the phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingKeys {
    /// Sampling temperature; by default that of the phase. 0 takes the most likely token.
    pub temperature: Option<f32>,
    /// Nucleus sampling: samples from the most likely tokens whose probabilities add up to this
    /// value, in 0..=1 but not 0; 1 keeps all tokens.
    pub top_p: f32,
    /// Number of most likely tokens to sample from; 0 keeps all tokens.
    pub top_k: usize,
    /// Minimum probability of a token relative to the most likely token, in 0..=1; 0 keeps all
    /// tokens.
    pub min_p: f32,
}

impl Default for SamplingKeys {
    fn default() -> Self {
        SamplingKeys { temperature: None, top_p: 1.0, top_k: 0, min_p: 0.0 }
    }
}

impl SamplingKeys {
    /// Returns the sampling parameters in a phase with `params`. Greedy attempts, which serve as
    /// baselines, stay greedy.
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

    /// Returns whether the recorded log-probabilities are those of the distribution from which the
    /// tokens are sampled.
    pub fn is_plain(&self) -> bool {
        !self.params(SamplingParams::default()).is_filtered() && self.temperature != Some(0.0)
    }
}

/// Placeholder for the question in `agent.prompt`.
pub const QUESTION: &str = "{question}";
