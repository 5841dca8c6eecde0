//! Probabilities of legal moves, as the policy of a seat assigns them at information sets.
//!
//! For each legal choice, the completion `{"move": …}` is scored, after the same conversation as in
//! a match. The probabilities are exact: no completion is sampled. Completions with reasoning,
//! other spacing or other tokens of the same text are not counted, so a recipe should ask for moves
//! only (`game.reasoning = false`).

use futures_util::{StreamExt, TryStreamExt, stream};
use levade_call::Backend;
use levade_game::{GameTree, InformationSet};
use levade_policy::{SampleRequest, SamplingParams};
use levade_text::Message;

use super::move_format::write_move;
use super::options::GameOptions;
use super::player::SeatPlayer;
use crate::roster::{Agent, Player};

/// Maximum number of prompts that are scored concurrently.
const CONCURRENCY: usize = 16;

/// Probabilities of the legal choices at an information set.
#[derive(Debug, Clone, PartialEq)]
pub struct MoveProbabilities {
    /// Probability of each legal choice, normalized so that the probabilities add up to 1.
    pub choices: Vec<f64>,
    /// Sum of the probabilities of all scored completions before the normalization.
    pub legal: f64,
}

impl MoveProbabilities {
    /// Computes the probabilities of the choices from the log-probability of each choice's
    /// completion.
    fn from_logprobs(logprobs: &[f64]) -> Self {
        let max = logprobs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = logprobs.iter().map(|logprob| (logprob - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        MoveProbabilities {
            choices: weights.iter().map(|weight| weight / sum).collect(),
            legal: sum * max.exp(),
        }
    }
}

/// Computes the probabilities of the legal choices at the information sets `sets` of a game tree,
/// when `player` plays `agent` at this sampling temperature.
///
/// # Errors
/// Returns a message if the policy is a chat API, which cannot score completions, if a conversation
/// does not fit into the context, or if the sampler fails or does not respond in time.
pub async fn compute_move_probabilities(
    options: &GameOptions,
    tree: &GameTree,
    sets: &[usize],
    (agent, player): (&Agent, &Player),
    temperature: f32,
) -> Result<Vec<MoveProbabilities>, String> {
    let scores = sets.iter().map(|set| async move {
        let path = tree.path(*set);
        let messages = build_conversation(options, tree, &path, (agent, player));
        let set = &tree.information_sets()[*set];
        let mut logprobs = Vec::with_capacity(set.choices.len());
        for choice in &set.choices {
            let completion = write_move(choice);
            logprobs
                .push(score_completion(player, &messages, completion, (agent, temperature)).await?);
        }
        Ok(MoveProbabilities::from_logprobs(&logprobs))
    });
    stream::iter(scores).buffered(CONCURRENCY).try_collect().await
}

/// Returns the conversation of a seat along `path`, up to the request for the last move.
pub(super) fn build_conversation(
    options: &GameOptions,
    tree: &GameTree,
    path: &[(&InformationSet, Option<usize>)],
    seated: (&Agent, &Player),
) -> Vec<Message> {
    let seat = &tree.seats()[path[0].0.seat];
    let mut seat_player = SeatPlayer::new(String::new(), seat, seated, options);
    for (set, choice) in path {
        seat_player.observe_events(set.observed.iter().map(String::as_str));
        let completion = choice.map(|index| write_move(&set.choices[index]));
        seat_player.replay_turn(options, &set.request, completion);
    }
    seat_player.history().to_vec()
}

/// Returns the log-probability that the player's policy writes `completion` after these messages.
async fn score_completion(
    player: &Player,
    messages: &[Message],
    completion: String,
    (agent, temperature): (&Agent, f32),
) -> Result<f64, String> {
    let policy = &player.policy;
    let failure = |why: String| format!("the policy {policy} cannot score a move: {why}");
    let (Backend::Tokens(sampler), Some(format)) = (&player.backend, &player.format) else {
        return Err(failure("chat APIs do not report the probability of a completion".to_owned()));
    };
    let chat = format.chat();
    let render = || {
        let mut prompt = chat.prompt(messages, &[])?;
        let opened = chat.opened_reasoning(messages, &[])?;
        let completion = chat.assistant(&Message::assistant(completion), opened)?;
        let scored = completion.len();
        prompt.extend(completion);
        Ok((prompt, scored))
    };
    let (prompt, scored) =
        render().map_err(|error: levade_text::TextError| failure(error.to_string()))?;
    let request = SampleRequest {
        id: "move".to_owned(),
        policy: policy.clone(),
        prompt,
        params: SamplingParams {
            max_tokens: 0,
            temperature,
            prompt_logprobs: Some(0),
            ..SamplingParams::default()
        },
        ..SampleRequest::default()
    };
    let timeout = agent.limits.completion_timeout;
    let response = async { sampler.sample(request).await?.collect(timeout).await };
    let response = player.wait_within(timeout, response).await;
    let completion = response
        .ok_or_else(|| failure(format!("the sampler did not respond within {timeout:?}")))?
        .map_err(|error| failure(error.to_string()))?;
    let logprobs = &completion.prompt_logprobs;
    if logprobs.len() < scored {
        let why = format!("the sampler scored {} of {scored} tokens", logprobs.len());
        return Err(failure(why));
    }
    Ok(logprobs[logprobs.len() - scored..].iter().map(|logprob| f64::from(*logprob)).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_normalized_over_legal_choices() {
        let found = MoveProbabilities::from_logprobs(&[0.1f64.ln(), 0.3f64.ln()]);
        assert!((found.choices[0] - 0.25).abs() < 1e-12 && (found.legal - 0.4).abs() < 1e-12);
        // Improbable completions do not underflow.
        let found = MoveProbabilities::from_logprobs(&[-2000.0, -2000.0]);
        assert_eq!(found, MoveProbabilities { choices: vec![0.5, 0.5], legal: 0.0 });
    }
}
