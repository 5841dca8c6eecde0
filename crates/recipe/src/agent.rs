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

/// Kind of an agent: which component makes its attempts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentKind {
    /// The built-in agent loop, which alternates between model calls and tool calls.
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
    /// Returns the name of the kind in recipes.
    pub fn name(self) -> &'static str {
        match self {
            AgentKind::Tools => "tools",
            AgentKind::Program => "program",
            AgentKind::Environment => "environment",
            AgentKind::Game => "game",
            AgentKind::Session => "session",
        }
    }

    /// Returns whether an external policy can play agents of this kind. The built-in loop cannot
    /// use external policies, because it sends tokens.
    pub fn can_be_external(self) -> bool {
        self != AgentKind::Tools
    }

    /// Returns whether agents of this kind call the model over HTTP.
    pub fn calls_over_http(self) -> bool {
        matches!(self, AgentKind::Program | AgentKind::Environment | AgentKind::Session)
    }
}

/// `match`: conditions under which a program's model call that names no agent is attributed to this
/// agent. A call must meet all conditions that are set.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MatchKeys {
    /// Model names, one of which the call must request. They should be names that only this agent
    /// requests. No condition if empty.
    pub model: Vec<String>,
    /// Regular expression that must match somewhere in the call's instructions. No condition if
    /// empty.
    pub system: String,
    /// Names of tools, all of which the call must offer. No condition if empty.
    pub tools: Vec<String>,
    /// Whether the call must offer tools (`true`) or must not (`false`). `None` for no condition.
    pub has_tools: Option<bool>,
}

/// `[agent]` and `[agent.NAME]`: an agent, its policy, tools, prompts and limits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentKeys {
    /// Kind of the agent: what makes its attempts.
    pub kind: AgentKind,
    /// Program that makes the attempts, with its arguments. Only for kind `program`.
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
    /// Conditions under which a program's model call that names no agent is attributed to this
    /// agent.
    #[serde(rename = "match")]
    pub matches: MatchKeys,
    /// Name of the policy that generates the agent's completions. It can be omitted if there is
    /// only one policy. If a list of policies is set, each policy plays the agent in its fraction
    /// of the attempts.
    pub policy: PolicyChoice,
    /// Whether one policy of a list is selected per attempt or per group of attempts.
    pub mixture: MixtureScope,
    /// Whether one policy of a list is selected for each seat of the agent in a game, or for all
    /// its seats together.
    pub mixture_seats: MixtureSeats,
    /// Whether the policy is trained on the agent's completions. If false, or if the policy is not
    /// trained, the agent acts, but its tokens are not training targets.
    pub train: bool,
    /// Sampling parameters of the agent in training.
    pub sampling: SamplingKeys,
    /// System prompt of the agent. No system prompt if empty.
    pub system: String,
    /// Template of the user prompt, in which `{question}` is replaced by the task's question.
    pub prompt: String,
    /// Names of the agent's toolboxes, or kinds of toolboxes that need no options, such as
    /// `calculator`.
    pub tools: Vec<String>,
    /// Descriptions that replace the tools' own descriptions in prompts, by tool name.
    pub tool_descriptions: ToolDescriptions,
    /// Name of the simulated user who responds to the agent's messages. If empty, a message without
    /// a tool call ends the attempt. Only for kind `tools`.
    pub user: String,
    /// Format in which the model writes tool calls.
    pub protocol: ToolProtocol,
    /// How the prompt describes the tools if the chat template does not render them.
    pub tool_prompt: ToolPrompt,
    /// Whether a JSON object that names a tool is a tool call even without the call tags, alone or
    /// in a code fence. Such calls are counted separately.
    pub bare_calls: bool,
    /// What happens to a system message after the first turn if the chat template cannot render it
    /// there.
    pub late_system: LateSystem,
    /// How earlier turns are kept in prompts: as they were recorded, or as the chat template
    /// renders them. If the two versions differ, the rendered version becomes a separate branch.
    pub history: History,
    /// How exactly a program must repeat an assistant message, so that the next call continues from
    /// the message's recorded tokens.
    #[serde(alias = "replies")]
    pub completion_matching: CompletionMatching,
    /// Additional variables of the chat template, such as `enable_thinking = false`.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// Maximum number of completions in an attempt, at least 1.
    pub max_turns: u32,
    /// Maximum number of sampled tokens in an attempt, over all completions, at least 1.
    pub max_tokens: usize,
    /// Timeout for opening, calling or closing a toolbox, in seconds. A toolbox can override it.
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
    /// that exceeds it ends and counts as unfinished.
    pub attempt_seconds: f64,
    /// Maximum number of tokens of the first prompt (instructions and task). If 0, the limit is the
    /// model's context. If 0 and `truncation` shortens prompts, a prompt leaves room for
    /// `max_tokens` in the context.
    #[serde(alias = "prompt_tokens")]
    pub max_prompt_tokens: usize,
    /// How a first prompt that exceeds `max_prompt_tokens` is shortened.
    pub truncation: Truncation,
    /// Maximum number of tokens of any prompt. If 0, a prompt leaves room for a completion in the
    /// model's context.
    pub max_context_tokens: usize,
    /// What happens when a prompt exceeds `max_context_tokens` during the conversation.
    pub context: ContextKeys,
    /// Maximum number of retries of an attempt that failed, or in which no token was sampled.
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
    /// Creates the format in which the agent's conversations are recorded. `chat` renders and
    /// parses their messages.
    pub fn format(&self, chat: Arc<Chat>) -> Arc<Format> {
        let options = Options {
            history: self.history,
            completion_matching: self.completion_matching,
            ..Options::default()
        };
        Arc::new(Format::new(chat, options))
    }

    /// Returns the policy that keeps the agent's prompts within a context of `context` tokens.
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

    /// Returns the maximum number of tokens of the first prompt (instructions and task) in a model
    /// context of `context` tokens.
    pub fn max_opening_tokens(&self, context: usize) -> usize {
        match (self.max_prompt_tokens, self.truncation) {
            (0, Truncation::Reject) => usize::MAX,
            (0, _) => context.saturating_sub(self.max_tokens).max(1),
            (limit, _) => limit,
        }
    }

    /// Returns the turn, token and time limits of the agent's attempts.
    pub fn limits(&self) -> AttemptLimits {
        AttemptLimits {
            max_turns: self.max_turns,
            max_tokens: self.max_tokens,
            completion_timeout: Duration::from_secs_f64(self.completion_seconds),
            attempt_timeout: Duration::from_secs_f64(self.attempt_seconds),
        }
    }
}

/// `[agent.sampling]`: sampling parameters of the agent in training, which override those of the
/// phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingKeys {
    /// Sampling temperature. 0 is greedy sampling. `None` for the temperature of the phase.
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
    /// Returns the sampling parameters for a phase that samples with `params`. Greedy attempts,
    /// which serve as baselines, stay greedy.
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

    /// Returns whether sampling is neither filtered nor greedy, so that the recorded
    /// log-probabilities belong to the distribution from which tokens are sampled.
    pub fn is_plain(&self) -> bool {
        !self.params(SamplingParams::default()).is_filtered() && self.temperature != Some(0.0)
    }
}

/// Placeholder for the task's question in the recipe key `agent.prompt`.
pub const QUESTION: &str = "{question}";
