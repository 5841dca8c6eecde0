//! A user while one attempt runs.

use std::sync::Arc;

use levade_call::{Cast, Input, Request};
use levade_policy::FinishReason;
use levade_text::{Message, Role};
use levade_tools::PythonUser;
use levade_tree::{Outcome, Trajectory};
use serde_json::{Value, json};

use super::{INSTRUCTION, STOP, SimulatedUser, UserAgent, UserSpeaker};
use crate::AttemptContext;
use crate::cast::PartyBuilder;
use crate::recorded_calls::{CLOSE_TIMEOUT, add_recorded_calls};
use crate::roster::Player;

/// Simulated user of one attempt, with its conversation.
pub(crate) struct UserSession<'a> {
    user: &'a SimulatedUser,
    voice: UserVoice<'a>,
    /// Number of the user's messages so far. The first message counts even if the task supplies it.
    turns: u32,
    /// Whether the attempt is waiting for the user.
    is_waiting: bool,
    /// Whether the user has ended the conversation.
    has_ended: bool,
}

/// Agent or Python class that plays the user in one attempt, with the conversation from the user's
/// side.
enum UserVoice<'a> {
    /// An agent plays the user. In the agent's conversation, the user is the assistant. This
    /// conversation has a separate recorder.
    Agent { cast: Cast, player: &'a Player, name: &'a str, history: Vec<Message> },
    /// A Python class plays the user. The class reads messages as JSON.
    Python { class: PythonUser, history: Vec<Value> },
}

/// Response of a simulated user to a message of the agent.
pub(crate) enum UserResponse {
    /// The user answers with this message.
    Message(String),
    /// The user has ended the conversation.
    End,
    /// The user does not end the conversation, but has already written the maximum number of
    /// messages.
    MaxTurns,
}

/// Conversation and scorer input of a user whose attempt has ended.
pub(crate) struct EndedUser {
    /// Conversation of the agent that played the user. `None` if a Python class played the user.
    pub recorded: Option<(Trajectory, Outcome)>,
    /// Data about the user that scorers receive.
    pub scorer_input: Value,
    /// Message about a failure when the user was closed. `None` if there was no failure.
    pub warning: Option<String>,
}

impl<'a> UserSession<'a> {
    /// Creates the simulated user of the attempt of `context`.
    ///
    /// # Errors
    /// Returns a message that names the user if its agent has no policy, if the task's row lacks
    /// the instruction, or if the process of the user cannot be started.
    pub async fn open(
        user: &'a SimulatedUser,
        context: &'a AttemptContext,
        parties: &PartyBuilder<'_>,
    ) -> Result<Self, String> {
        let failed = |why: String| format!("the user {} cannot start: {why}", user.name);
        let voice = match &user.speaker {
            UserSpeaker::Agent(keys) => {
                open_agent_voice(user, keys, context, parties).map_err(failed)?
            }
            UserSpeaker::Python(users) => {
                let own = context.find_own_agent().map_err(failed)?;
                let tool_context = context.create_tool_context(own, context.limits.attempt_timeout);
                let opening = users.open(&tool_context, user.opens);
                let opened =
                    context.select_player(own).map_err(failed)?.wait_within(user.timeout, opening);
                let timeout = user.timeout;
                let late = || Err(format!("the user was not ready within {timeout:?}"));
                let class = opened.await.unwrap_or_else(late).map_err(failed)?;
                // The task's question is the first message of a user who does not open.
                let question =
                    (!user.opens).then(|| to_json_message("user", find_question(context)));
                UserVoice::Python { class, history: Vec::from_iter(question) }
            }
        };
        let turns = u32::from(!user.opens);
        Ok(UserSession { user, voice, turns, is_waiting: false, has_ended: false })
    }

    /// Returns whether the user writes the first message.
    pub fn opens(&self) -> bool {
        self.user.opens
    }

    /// Returns the error message for an attempt whose timeout expires while the attempt waits for
    /// the user. Returns `None` if the attempt does not wait for the user.
    pub fn timeout_error(&self) -> Option<String> {
        let user = &self.user.name;
        self.is_waiting
            .then(|| format!("the user {user} had not answered when the attempt's time was up"))
    }

    /// Returns the first message of a user who opens the conversation.
    ///
    /// # Errors
    /// Returns a message that names the user if the user fails, or ends the conversation before its
    /// first message.
    pub async fn request_opening(&mut self, player: &Player) -> Result<String, String> {
        match self.request_next_message(player).await?.0 {
            UserResponse::Message(text) => Ok(text),
            UserResponse::End | UserResponse::MaxTurns => Err(self
                .create_error_message("the user ended the conversation before its first message")),
        }
    }

    /// Returns the user's response to a message of the agent. Also returns the score that the user
    /// gives the agent's turn, or `None` if the user gives no score. If a Python class plays the
    /// user, the clock of `player`, the agent's policy, measures the timeout.
    ///
    /// # Errors
    /// Returns a message that names the user if the user fails.
    pub async fn respond_to(
        &mut self,
        text: &str,
        player: &Player,
    ) -> Result<(UserResponse, Option<f64>), String> {
        match &mut self.voice {
            UserVoice::Agent { history, .. } => history.push(Message::user(text)),
            UserVoice::Python { history, .. } => history.push(to_json_message("assistant", text)),
        }
        self.request_next_message(player).await
    }

    /// Requests the user's next message. Returns the user's response, and the score that the user
    /// gives the agent's turn.
    async fn request_next_message(
        &mut self,
        player: &Player,
    ) -> Result<(UserResponse, Option<f64>), String> {
        self.is_waiting = true;
        let timeout = self.user.timeout;
        // The clock of the policy that plays the user excludes the time in which its device trains.
        let clock = match &self.voice {
            UserVoice::Agent { player, .. } => *player,
            UserVoice::Python { .. } => player,
        };
        let written = clock.wait_within(timeout, self.voice.write_message()).await;
        self.is_waiting = false;
        let written =
            written.unwrap_or_else(|| Err(format!("the user did not answer within {timeout:?}")));
        let WrittenMessage { text, ends, score } =
            written.map_err(|why| self.create_error_message(&why))?;
        let response = match text {
            _ if ends => UserResponse::End,
            Some(text) if self.user.contains_stop_mark(&text) => UserResponse::End,
            Some(text) if text.trim().is_empty() => {
                return Err(self.create_error_message("the user wrote an empty message"));
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

    fn create_error_message(&self, why: &str) -> String {
        let user = &self.user.name;
        match &self.voice {
            UserVoice::Agent { player, .. } => {
                format!("the policy {} failed as the user {user}: {why}", player.policy)
            }
            UserVoice::Python { .. } => format!("the user {user} failed: {why}"),
        }
    }

    /// Closes the user, and returns its conversation and its data for scorers. The clock of
    /// `player`, the agent's policy, measures the timeout for a Python class.
    pub async fn close(self, player: &Player) -> EndedUser {
        let UserSession { user, voice, turns, has_ended, .. } = self;
        let mut scorer_input = json!({ "name": user.name, "turns": turns, "ended": has_ended });
        let mut warning = None;
        let recorded = match voice {
            UserVoice::Agent { cast, player, name, .. } => {
                let recording = cast.recorder().close(CLOSE_TIMEOUT).await;
                let mut outcome = Outcome::initial();
                add_recorded_calls(&mut outcome, &recording);
                outcome.cast.insert(name.to_owned(), player.policy.clone());
                scorer_input["policy"] = json!(player.policy);
                Some((recording.trajectory, outcome))
            }
            UserVoice::Python { class, .. } => {
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

/// Message that a user has written, with its effects on the conversation.
struct WrittenMessage {
    text: Option<String>,
    ends: bool,
    score: Option<f64>,
}

impl UserVoice<'_> {
    /// Requests the user's next message, and adds the message to the conversation.
    ///
    /// # Errors
    /// Returns a message if the user fails.
    async fn write_message(&mut self) -> Result<WrittenMessage, String> {
        let (cast, name, history) = match self {
            UserVoice::Agent { cast, name, history, .. } => (cast, *name, history),
            UserVoice::Python { class, history } => {
                let response = class.respond_to(json!(history)).await?;
                history.extend(response.text.as_ref().map(|text| to_json_message("user", text)));
                let score = response.score.filter(|score| score.is_finite());
                if response.score.is_some() && score.is_none() {
                    return Err("the score that the user gave is not finite".to_owned());
                }
                return Ok(WrittenMessage { text: response.text, ends: response.ends, score });
            }
        };
        let request = Request::new(Input::Messages(history.clone()));
        let reader = cast.call(name, request).await.map_err(|error| error.to_string())?;
        let end = reader.completion().await.map_err(|error| error.to_string())?;
        match end.finish {
            FinishReason::StopId | FinishReason::StopString => {}
            FinishReason::Length => {
                return Err(format!(
                    "the user's message had not ended after {} tokens",
                    end.tokens
                ));
            }
            FinishReason::Context => {
                return Err(
                    "the user's conversation has filled the context of its policy".to_owned()
                );
            }
            FinishReason::Aborted => {
                return Err("the sampler stopped before the user's message was complete".to_owned());
            }
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
            return Err("the user called a tool, but users have no tools".to_owned());
        }
        history.push(written);
        Ok(WrittenMessage { text: Some(text), ends: false, score: None })
    }
}

/// Creates the voice of a user that an agent plays.
///
/// # Errors
/// Returns a message if there is no such agent or policy, or if the task's row lacks the
/// instruction.
fn open_agent_voice<'a>(
    user: &SimulatedUser,
    keys: &'a UserAgent,
    context: &'a AttemptContext,
    parties: &PartyBuilder<'_>,
) -> Result<UserVoice<'a>, String> {
    let name = keys.agent.as_str();
    let agent = context.roster.find(name);
    let agent = agent.ok_or_else(|| format!("the agent {name} is not running in this process"))?;
    let player = context.select_player(agent)?;
    let party = parties.create_user_party(agent, player, user.timeout)?;
    let instruction = keys.find_instruction(&context.task)?;
    let prompt = keys.prompt.replace(STOP, &user.stop).replace(INSTRUCTION, &instruction);
    let mut history = vec![Message::system(prompt), Message::user(keys.greeting.as_str())];
    if !user.opens {
        history.push(Message::assistant(find_question(context)));
    }
    let cast = Cast::new([Arc::new(party)], context.create_recorder(usize::MAX));
    Ok(UserVoice::Agent { cast, player, name, history })
}

/// Returns a message of the conversation in the JSON format that a Python class reads.
fn to_json_message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// Returns the last user message among the opening messages of the attempt.
fn find_question(context: &AttemptContext) -> &str {
    let message = context.messages.iter().rfind(|message| message.role == Role::User);
    message.map_or(context.task.question.as_str(), |message| message.content.as_str())
}
