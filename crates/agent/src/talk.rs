//! Talks: a user and the tool loop take turns, with the tools live.

use std::sync::Arc;
use std::time::Duration;

use levade_call::{Cast, ErrorKind};
use levade_policy::SamplingParams;
use levade_text::Message;
use levade_tree::{CallCounts, Finish, Outcome};

use crate::Agent;
use crate::tool_loop::{Broken, LoopObserver, ToolLoop, add_opening};
use levade_tasks::Task;
use levade_tools::{OpenTools, ToolContext, ToolError};

/// Talk of a user with an agent. Tools stay open until the talk is closed.
pub struct Talk {
    agent: Agent,
    params: SamplingParams,
    seed: u64,
    cast: Cast,
    tools: OpenTools,
    /// Messages since the last reset.
    history: Vec<Message>,
}

impl Talk {
    /// Opens the agent's tools. `limits.tokens` of the agent is the maximum number of tokens of one
    /// completion, and `limits.turns` that of completions for one message.
    ///
    /// # Errors
    /// Returns an error if a tool cannot be opened.
    pub async fn open(agent: Agent, params: SamplingParams, seed: u64) -> Result<Self, ToolError> {
        let context = ToolContext {
            attempt: "chat".to_owned(),
            task: Task::default(),
            seed,
            stream: 0,
            // A user may take any time.
            deadline: Duration::MAX,
            params: params.clone(),
        };
        let tools = agent.tools.open(&context).await?;
        let cast = cast(&agent, &params, seed);
        Ok(Talk { agent, params, seed, cast, tools, history: Vec::new() })
    }

    /// Starts a new conversation with these messages.
    pub fn reset(&mut self, messages: Vec<Message>) {
        self.cast = cast(&self.agent, &self.params, self.seed);
        self.history = messages;
    }

    /// Appends a message of the user, and lets the model use its tools until it has an answer. If the
    /// returned future is dropped, the completion is aborted; [`interrupt`](Self::interrupt) then adds its
    /// text.
    ///
    /// # Errors
    /// Returns a message if the model or a tool fails.
    pub async fn ask(&mut self, text: String, observer: &mut dyn LoopObserver) -> Result<Finish, String> {
        let is_first = self.history.iter().all(|message| message.role.instructs());
        self.history.push(Message::user(text));
        if is_first {
            add_opening(&mut self.history, self.tools.opening());
        }
        let specs = self.tools.specs().to_vec();
        let mut tool_loop = ToolLoop {
            agent: &self.agent.name,
            cast: &self.cast,
            specs: &specs,
            limits: self.agent.loop_limits(),
            outcome: &mut Outcome::begun(),
            helped: &mut CallCounts::default(),
            observer: Some(observer),
        };
        match tool_loop.run(&mut self.history, &mut self.tools).await {
            Err(Broken::Call(error)) if error.kind == ErrorKind::TooLong => Ok(Finish::Context),
            ended => ended.map_err(|error| error.to_string()),
        }
    }

    /// Adds the text of an interrupted completion to the conversation.
    pub fn interrupt(&mut self, text: String) {
        self.history.push(Message::assistant(text));
    }

    /// Closes the tools.
    ///
    /// # Errors
    /// Returns an error if a tool fails to close.
    pub async fn close(self) -> Result<(), ToolError> {
        self.tools.close().await
    }
}

/// Creates the cast of a new conversation.
fn cast(agent: &Agent, params: &SamplingParams, seed: u64) -> Cast {
    let party = Arc::new(agent.party(params, None));
    Cast::new([party], agent.recorder("chat", seed, 0, usize::MAX))
}
