//! A user while one attempt runs.

use std::sync::Arc;

use levade_call::{Cast, Input, Request};
use levade_policy::FinishReason;
use levade_text::{Message, Role};
use levade_tools::PythonUser;
use levade_tree::{Outcome, Trajectory};
use serde_json::{Value, json};

use super::{INSTRUCTION, STOP, SimulatedUser, Speaker, UserAgent};
use crate::AttemptContext;
use crate::cast::PartyBuilder;
use crate::recorded_calls::{CLOSE_TIMEOUT, add_recorded_calls};
use crate::roster::Player;

/// Simulated user in one attempt.
pub(crate) struct UserSession<'a> {
    user: &'a SimulatedUser,
    voice: Voice<'a>,
    /// Number of the user's messages so far, the first one of a user who does not open included.
    turns: u32,
    /// Whether the attempt waits for the user.
    is_waiting: bool,
    /// Whether the user has ended the conversation.
    has_ended: bool,
}

/// Agent or class that plays the user in this attempt, with the conversation as it reads it.
enum Voice<'a> {
    /// An agent plays the user. Its conversation, in which the user is the assistant, has a
    /// separate recorder.
    Agent { cast: Cast, player: &'a Player, name: &'a str, history: Vec<Message> },
    /// A class in Python, which reads messages as JSON.
    Python { class: PythonUser, history: Vec<Value> },
}

/// Response of a user.
pub(crate) enum UserResponse {
    /// Message that the agent reads.
    Message(String),
    /// The user has ended the conversation.
    End,
    /// The user wants to continue, but has already written the maximum number of messages.
    MaxTurns,
}

/// Conversation and scorer input of a user whose attempt has ended.
pub(crate) struct EndedUser {
    /// Conversation of the user's agent, if an agent played the user.
    pub recorded: Option<(Trajectory, Outcome)>,
    /// Data about the user for scorers.
    pub scorer_input: Value,
    /// Failure at the end.
    pub warning: Option<String>,
}

impl<'a> UserSession<'a> {
    /// Starts the user of the attempt of `context`.
    ///
    /// # Errors
    /// Returns a message that names the user if its agent has no policy, if its row lacks the
    /// instruction, or if no process can be started.
    pub async fn open(
        user: &'a SimulatedUser,
        context: &'a AttemptContext,
        parties: &PartyBuilder<'_>,
    ) -> Result<Self, String> {
        let failed = |why: String| format!("the user {} cannot start: {why}", user.name);
        let voice = match &user.speaker {
            Speaker::Agent(keys) => open_agent(user, keys, context, parties).map_err(failed)?,
            Speaker::Python(users) => {
                let own = context.own_agent().map_err(failed)?;
                let tool_context = context.tool_context(own, context.limits.attempt_timeout);
                let opening = users.open(&tool_context, user.opens);
                let opened =
                    context.player(own).map_err(failed)?.wait_within(user.timeout, opening);
                let timeout = user.timeout;
                let late = || Err(format!("the user was not ready within {timeout:?}"));
                let class = opened.await.unwrap_or_else(late).map_err(failed)?;
                // The task's question is the first message of a user who does not open.
                let question = (!user.opens).then(|| message("user", question(context)));
                Voice::Python { class, history: Vec::from_iter(question) }
            }
        };
        let turns = u32::from(!user.opens);
        Ok(UserSession { user, voice, turns, is_waiting: false, has_ended: false })
    }

    /// Returns whether the user writes the first message.
    pub fn opens(&self) -> bool {
        self.user.opens
    }

    /// Returns the message of an error if the attempt's time is up while it waits for the user.
    pub fn timeout_error(&self) -> Option<String> {
        let user = &self.user.name;
        self.is_waiting
            .then(|| format!("the user {user} had not answered when the attempt's time was up"))
    }

    /// Returns the first message of a user that opens the conversation.
    ///
    /// # Errors
    /// Returns a message that names the user if it fails, or ends the conversation at once.
    pub async fn opening(&mut self, player: &Player) -> Result<String, String> {
        match self.next(player).await?.0 {
            UserResponse::Message(text) => Ok(text),
            UserResponse::End | UserResponse::MaxTurns => {
                Err(self.failure("the user ended the conversation before its first message"))
            }
        }
    }

    /// Returns the user's response to a message of the agent, and the score that the user gives the
    /// agent's turn, if any. The clock is that of `player`, the agent's policy.
    ///
    /// # Errors
    /// Returns a message that names the user if it fails.
    pub async fn respond_to(
        &mut self,
        text: &str,
        player: &Player,
    ) -> Result<(UserResponse, Option<f64>), String> {
        match &mut self.voice {
            Voice::Agent { history, .. } => history.push(Message::user(text)),
            Voice::Python { history, .. } => history.push(message("assistant", text)),
        }
        self.next(player).await
    }

    /// Returns the user's next message.
    async fn next(&mut self, player: &Player) -> Result<(UserResponse, Option<f64>), String> {
        self.is_waiting = true;
        let timeout = self.user.timeout;
        // The clock of the policy that plays the user excludes the time in which its device trains.
        let clock = match &self.voice {
            Voice::Agent { player, .. } => *player,
            Voice::Python { .. } => player,
        };
        let written = clock.wait_within(timeout, self.voice.write()).await;
        self.is_waiting = false;
        let written =
            written.unwrap_or_else(|| Err(format!("the user did not answer within {timeout:?}")));
        let Written { text, ends, score } = written.map_err(|why| self.failure(&why))?;
        let response = match text {
            _ if ends => UserResponse::End,
            Some(text) if self.user.is_stop(&text) => UserResponse::End,
            Some(text) if text.trim().is_empty() => {
                return Err(self.failure("the user wrote an empty message"));
            }
            Some(_) if self.turns >= self.user.max_turns => UserResponse::MaxTurns,
            Some(text) => {
                self.turns += 1;
                UserResponse::Message(text)
            }
            None => UserResponse::End,
        };
        self.has_ended = matches!(response, UserResponse::End);
        Ok((response, score))
    }

    fn failure(&self, why: &str) -> String {
        let user = &self.user.name;
        match &self.voice {
            Voice::Agent { player, .. } => {
                format!("the policy {} failed as the user {user}: {why}", player.policy)
            }
            Voice::Python { .. } => format!("the user {user} failed: {why}"),
        }
    }

    /// Ends the user, and returns its conversation and its data for scorers. The clock is that of
    /// `player`, the agent's policy.
    pub async fn close(self, player: &Player) -> EndedUser {
        let UserSession { user, voice, turns, has_ended, .. } = self;
        let mut scorer_input = json!({ "name": user.name, "turns": turns, "ended": has_ended });
        let mut warning = None;
        let recorded = match voice {
            Voice::Agent { cast, player, name, .. } => {
                let recording = cast.recorder().close(CLOSE_TIMEOUT).await;
                let mut outcome = Outcome::initial();
                add_recorded_calls(&mut outcome, &recording);
                outcome.cast.insert(name.to_owned(), player.policy.clone());
                scorer_input["policy"] = json!(player.policy);
                Some((recording.trajectory, outcome))
            }
            Voice::Python { class, .. } => {
                match player.wait_within(user.timeout, class.finish()).await {
                    Some(Ok(score)) => {
                        if let Some(score) = score {
                            scorer_input["score"] = json!(score);
                        }
                    }
                    Some(Err(why)) => warning = Some(why),
                    None => {
                        warning = Some(format!("the user was not done within {:?}", user.timeout));
                    }
                }
                None
            }
        };
        EndedUser { recorded, scorer_input, warning }
    }
}

/// Message that a user has written, with its effects.
struct Written {
    text: Option<String>,
    ends: bool,
    score: Option<f64>,
}

impl Voice<'_> {
    /// Returns the user's next message, and adds it to the conversation.
    ///
    /// # Errors
    /// Returns a message if the user fails.
    async fn write(&mut self) -> Result<Written, String> {
        let (cast, name, history) = match self {
            Voice::Agent { cast, name, history, .. } => (cast, *name, history),
            Voice::Python { class, history } => {
                let response = class.respond_to(json!(history)).await?;
                history.extend(response.text.as_ref().map(|text| message("user", text)));
                let score = response.score.filter(|score| score.is_finite());
                if response.score.is_some() && score.is_none() {
                    return Err("the score that the user gave is not finite".to_owned());
                }
                return Ok(Written { text: response.text, ends: response.ends, score });
            }
        };
        let request = Request::new(Input::Messages(history.clone()));
        let reader = cast.call(name, request).await.map_err(|error| error.to_string())?;
        let end = reader.completion().await.map_err(|error| error.to_string())?;
        match end.finish {
            FinishReason::StopId | FinishReason::StopString => {}
            FinishReason::Length => {
                return Err(format!("the message had not ended after {} tokens", end.tokens));
            }
            FinishReason::Context => return Err("the context of the user is full".to_owned()),
            FinishReason::Aborted => return Err("the sampler of the user stopped".to_owned()),
        }
        let (text, has_calls, written) = match end.recorded_completion {
            Some(recorded) => {
                let calls = !recorded.parsed.calls.is_empty();
                (recorded.parsed.content.clone(), calls, recorded.raw_message())
            }
            None => {
                let calls = !end.message.tool_calls.is_empty();
                (end.message.content.as_str().to_owned(), calls, end.message)
            }
        };
        if has_calls {
            return Err("the user called a tool, but a user has none".to_owned());
        }
        history.push(written);
        Ok(Written { text: Some(text), ends: false, score: None })
    }
}

/// Starts a user that an agent plays.
///
/// # Errors
/// Returns a message if there is no such agent or policy, or if the row lacks the instruction.
fn open_agent<'a>(
    user: &SimulatedUser,
    keys: &'a UserAgent,
    context: &'a AttemptContext,
    parties: &PartyBuilder<'_>,
) -> Result<Voice<'a>, String> {
    let name = keys.agent.as_str();
    let agent = context.roster.find(name);
    let agent = agent.ok_or_else(|| format!("the agent {name} is not running in this process"))?;
    let player = context.player(agent)?;
    let party = parties.user(agent, player, user.timeout)?;
    let instruction = keys.instruction_of(&context.task)?;
    let prompt = keys.prompt.replace(STOP, &user.stop).replace(INSTRUCTION, &instruction);
    let mut history = vec![Message::system(prompt), Message::user(keys.greeting.as_str())];
    if !user.opens {
        history.push(Message::assistant(question(context)));
    }
    let cast = Cast::new([Arc::new(party)], context.recorder(usize::MAX));
    Ok(Voice::Agent { cast, player, name, history })
}

/// Returns a message as a class in Python reads it.
fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// Returns the last message of the user among the messages with which the attempt starts.
fn question(context: &AttemptContext) -> &str {
    let message = context.messages.iter().rfind(|message| message.role == Role::User);
    message.map_or(context.task.question.as_str(), |message| message.content.as_str())
}
