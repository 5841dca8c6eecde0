//! Talks: interactive conversations of a user with an agent, whose tools stay open.

use std::sync::Arc;
use std::time::Duration;

use levade_call::{Cast, ErrorKind};
use levade_text::Message;
use levade_tools::OpenTools;
use levade_tree::{CallCounts, Finish, Outcome};

use crate::AttemptContext;
use crate::cast::{CallerKind, PartyBuilder};
use crate::tool_loop::{LoopObserver, ToolLoop, ToolLoopError, ToolLoopLimits, add_opening};

/// Interactive conversation of a user with an agent. The agent's tools stay open until the
/// conversation is closed.
pub struct InteractiveConversation {
    context: AttemptContext,
    limits: ToolLoopLimits,
    cast: Cast,
    tools: OpenTools,
    /// Messages of the conversation since its last reset.
    history: Vec<Message>,
}

impl InteractiveConversation {
    /// Opens the tools of the agent of `context`, and starts a conversation with the opening
    /// messages of `context`. `limits.max_tokens` is the maximum number of tokens of one
    /// completion, and `limits.max_turns` the maximum number of completions for one message of the
    /// user.
    ///
    /// # Errors
    /// Returns a message if the agent has no policy, or if a tool cannot be opened.
    pub async fn open(context: AttemptContext) -> Result<Self, String> {
        let agent = context.find_own_agent()?;
        let limits = ToolLoopLimits {
            max_turns: context.limits.max_turns,
            opening: context.select_player(agent)?.opening,
        };
        // A user can take any time.
        let tools = agent.tools.open(&context.create_tool_context(agent, Duration::MAX)).await;
        let tools = tools.map_err(|error| error.to_string())?;
        let cast = create_cast(&context)?;
        let history = context.messages.clone();
        Ok(InteractiveConversation { context, limits, cast, tools, history })
    }

    /// Starts a new conversation with the opening messages.
    ///
    /// # Errors
    /// Returns a message if the agent has no policy.
    pub fn reset(&mut self) -> Result<(), String> {
        self.cast = create_cast(&self.context)?;
        self.history = self.context.messages.clone();
        Ok(())
    }

    /// Appends a message of the user, and runs the tool loop until the model has an answer or a
    /// limit is reached. If the returned future is dropped, the completion is aborted;
    /// [`interrupt`](Self::interrupt) then adds its text to the conversation.
    ///
    /// # Errors
    /// Returns a message if the model or a tool fails.
    pub async fn send_message_to_agent(
        &mut self,
        text: String,
        observer: &mut dyn LoopObserver,
    ) -> Result<Finish, String> {
        let is_first = self.history.iter().all(|message| message.role.instructs());
        self.history.push(Message::user(text));
        if is_first {
            add_opening(&mut self.history, self.tools.opening());
        }
        let specs = self.tools.specs().to_vec();
        let mut tool_loop = ToolLoop {
            agent: &self.context.agent,
            cast: &self.cast,
            specs: &specs,
            limits: self.limits,
            outcome: &mut Outcome::initial(),
            helped: &mut CallCounts::default(),
            observer: Some(observer),
            user: None,
        };
        match tool_loop.run(&mut self.history, &mut self.tools).await {
            Err(ToolLoopError::Call(error)) if error.kind == ErrorKind::TooLong => {
                Ok(Finish::Context)
            }
            ended => ended.map_err(|error| error.to_string()),
        }
    }

    /// Adds the text of an interrupted completion to the conversation.
    pub fn interrupt(&mut self, text: String) {
        self.history.push(Message::assistant(text));
    }

    /// Closes the tool sessions of the conversation.
    ///
    /// # Errors
    /// Returns a message if a tool fails to close.
    pub async fn close(self) -> Result<(), String> {
        self.tools.close().await.map_err(|error| error.to_string())
    }
}

/// Creates the cast of a new conversation: the parties that answer the model calls.
fn create_cast(context: &AttemptContext) -> Result<Cast, String> {
    let agent = context.find_own_agent()?;
    let party = PartyBuilder::new(context, CallerKind::ToolLoop)?
        .create_party(agent, context.select_player(agent)?)?;
    Ok(Cast::new([Arc::new(party)], context.create_recorder(usize::MAX)))
}
