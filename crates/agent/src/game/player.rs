//! Players: the conversation of a seat, its budget, and its completions.

use levade_call::{Cast, Constraint, ErrorKind, Input, Request, SamplingOptions};
use levade_game::{Move, MoveRequest, Seat};
use levade_policy::FinishReason;
use levade_text::Message;

use super::move_format::{describe_format, move_schema, parse_move};
use super::options::GameOptions;
use crate::roster::{Agent, AttemptLimits, Player};

/// Player of one seat of a match, with its conversation.
pub(super) struct SeatPlayer {
    /// Name of the player in the record, `AGENT@SEAT`.
    pub name: String,
    /// Name of the agent that plays the seat, as in the recipe.
    pub agent: String,
    /// Name of the policy that plays the seat.
    pub policy: String,
    /// Limits of the player over the entire match.
    pub limits: AttemptLimits,
    /// Whether the sampler restricts completions to the schema of the request.
    pub is_constrained: bool,
    /// Text after every request for a move, which describes the format of a completion.
    format: String,
    history: Vec<Message>,
    /// Texts of events that the seat may observe, but that no request has shown to the player yet.
    unseen: Vec<String>,
    /// Number of tokens that the player has sampled in the match.
    tokens: usize,
    /// Number of model calls that the player has made.
    calls: u32,
    /// Number of the player's completions without a legal move.
    pub illegal: u32,
    /// Number of default moves that were played for the seat.
    pub defaults: u32,
    /// Recorded turn of each move of the seat. `None` if the call was not recorded as tokens.
    pub turns: Vec<Option<u32>>,
    /// Rewards of completions, each with the recorded turn of the completion. The turn is `None` if
    /// the call was not recorded as tokens.
    pub rewards: Vec<(Option<u32>, f64)>,
}

impl SeatPlayer {
    /// Creates the player of `seat`.
    pub fn new(
        name: String,
        seat: &Seat,
        (agent, player): (&Agent, &Player),
        options: &GameOptions,
    ) -> Self {
        let (_, format) = options.find_prompts(&agent.name, &player.policy);
        let system = options.system_prompt(&agent.name, &player.policy, seat);
        let history = if system.is_empty() { Vec::new() } else { vec![Message::system(system)] };
        SeatPlayer {
            name,
            agent: agent.name.clone(),
            policy: player.policy.clone(),
            limits: agent.limits,
            is_constrained: false,
            format: format.to_owned(),
            history,
            unseen: Vec::new(),
            tokens: 0,
            calls: 0,
            illegal: 0,
            defaults: 0,
            turns: Vec::new(),
            rewards: Vec::new(),
        }
    }

    /// Adds events that the seat may observe. The next request shows them to the player.
    pub fn observe_events<'a>(&mut self, events: impl Iterator<Item = &'a str>) {
        self.unseen.extend(events.map(str::to_owned));
    }

    /// Returns the message that requests a move from the player: the events that it has observed
    /// since its last move, the request, and the format of the completion.
    fn create_request_message(
        &mut self,
        options: &GameOptions,
        move_request: &MoveRequest,
    ) -> String {
        let mut message = std::mem::take(&mut self.unseen);
        message.push(move_request.prompt.clone());
        let format = describe_format(move_request, options.has_reasoning);
        message.push(self.format.replace("{format}", &format));
        message.join("\n")
    }

    /// Adds a request to the conversation without calling the model, and then the player's
    /// completion if there is one.
    pub fn replay_turn(
        &mut self,
        options: &GameOptions,
        move_request: &MoveRequest,
        completion: Option<String>,
    ) {
        let message = self.create_request_message(options, move_request);
        self.history.push(Message::user(message));
        self.history.extend(completion.map(Message::assistant));
    }

    /// Returns the messages of the player's conversation so far.
    pub fn history(&self) -> &[Message] {
        &self.history
    }

    /// Requests a move from the player. Returns the default move if the player makes no legal move.
    ///
    /// # Errors
    /// Returns a message that names the seat if a call fails.
    pub async fn request_move(
        &mut self,
        cast: &Cast,
        options: &GameOptions,
        move_request: &MoveRequest,
    ) -> Result<Move, String> {
        let mut message = self.create_request_message(options, move_request);
        let mut turn = None;
        for _ in 0..=options.retries {
            let Some(request) = self.create_model_call(&message, options, move_request) else {
                break;
            };
            let end = match run_model_call(cast, &self.name, request).await {
                // The default is played, and later requests find the history as it is.
                Err(error) if error.kind == ErrorKind::TooLong => break,
                called => called.map_err(|error| self.create_error_message(&error.to_string()))?,
            };
            self.calls += 1;
            self.tokens += end.tokens;
            if end.finish == FinishReason::Aborted {
                return Err(self.create_error_message("the sampler stopped"));
            }
            self.history.push(Message::user(std::mem::take(&mut message)));
            let (completion, written) = match end.recorded_completion {
                Some(recorded) => {
                    turn = Some(recorded.turn);
                    (recorded.parsed.content.clone(), recorded.raw_message())
                }
                None => (end.message.content.as_str().to_owned(), end.message),
            };
            self.history.push(written);
            match parse_move(move_request, &completion) {
                Ok(played) => {
                    self.turns.push(turn);
                    return Ok(played);
                }
                Err(why) => {
                    self.illegal += 1;
                    self.rewards.push((turn, options.illegal_reward));
                    message = format!("This is no legal move: {why}. Try again.");
                }
            }
        }
        // The message that was not sent is part of the next one.
        if !message.is_empty() {
            self.unseen.push(message);
        }
        self.defaults += 1;
        self.rewards.push((turn, options.default_reward));
        self.turns.push(turn);
        Ok(move_request.default.clone())
    }

    /// Creates the next model call of the player. Returns `None` if the player has reached a limit
    /// of its agent.
    fn create_model_call(
        &self,
        message: &str,
        options: &GameOptions,
        move_request: &MoveRequest,
    ) -> Option<Request> {
        let remaining = self.limits.max_tokens.saturating_sub(self.tokens);
        if remaining == 0 || self.calls >= self.limits.max_turns {
            return None;
        }
        let move_tokens = if options.move_tokens == 0 { usize::MAX } else { options.move_tokens };
        let mut messages = self.history.clone();
        messages.push(Message::user(message));
        Some(Request {
            sampling: SamplingOptions {
                max_tokens: Some(remaining.min(move_tokens)),
                ..SamplingOptions::default()
            },
            constraint: self
                .is_constrained
                .then(|| Constraint::JsonSchema(move_schema(move_request, options.has_reasoning))),
            ..Request::new(Input::Messages(messages))
        })
    }

    fn create_error_message(&self, why: &str) -> String {
        format!("the policy {} failed in the seat {}: {why}", self.policy, self.name)
    }
}

async fn run_model_call(
    cast: &Cast,
    name: &str,
    request: Request,
) -> Result<levade_call::End, levade_call::ApiError> {
    cast.call(name, request).await?.completion().await
}
