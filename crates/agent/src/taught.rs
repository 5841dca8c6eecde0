//! Attempts by a teacher: a policy of others acts in the place of one that is trained, and its replies become
//! demonstrations for that one.
//!
//! A teacher is asked in messages and answers so. Each of its replies is then written as the trained policy
//! would have written it after its own prompt: thought, text and calls in the format of its chat, encoded by
//! its tokenizer. These tokens are [demonstrated](levade_tree::Kind::Demonstrated), in a tree like that of
//! any attempt.

use std::sync::Arc;

use async_trait::async_trait;
use levade_conversation::{Conversation, Format, Request};
use levade_gateway::{Answer, ExternalCall, Query, Responder, Said, Sampling, ToolChoice};
use levade_policy::{FinishReason, awake, within};
use levade_text::{Message, Parsed, ToolSpec};
use levade_tree::{Finish, Outcome, Trajectory};

use crate::attempt::learn_from;
use crate::demonstrate::DemonstrationError;
use crate::tools::{Observation, OpenTools, ToolContext};
use crate::{Agent, AgentLoop, Attempt, AttemptContext, AttemptRequest, Teacher};

/// A reply, and what it was a reply to.
pub(crate) struct Exchange {
    pub messages: Vec<Message>,
    pub tools: Vec<ToolSpec>,
    pub reply: Message,
}

impl Exchange {
    /// Whole replies among the calls of an agent that others answered.
    pub(crate) fn of(calls: &[ExternalCall], agent: &str) -> Vec<Exchange> {
        let whole = |call: &ExternalCall| {
            call.agent == agent && call.fault.is_none() && call.finish == FinishReason::StopId
        };
        let exchange = |at: usize| {
            let mut messages = ExternalCall::history(calls, at);
            let reply = messages.pop()?;
            Some(Exchange { messages, tools: ExternalCall::tools(calls, at).to_vec(), reply })
        };
        (0..calls.len()).filter(|&at| whole(&calls[at])).filter_map(exchange).collect()
    }
}

/// A party of a conversation: how it is written, and the names of agent and policy.
pub(crate) struct Pupil<'a> {
    pub format: &'a Arc<Format>,
    pub agent: &'a str,
    pub policy: &'a str,
}

/// Writes replies down as demonstrations for these parties. Returns their tokens, and how many are to be
/// imitated.
///
/// # Errors
/// When a conversation cannot be written in the format of its party.
pub(crate) fn taught<'a>(
    lessons: impl IntoIterator<Item = (Pupil<'a>, Vec<Exchange>)>,
) -> Result<(Trajectory, usize), DemonstrationError> {
    let (mut conversation, mut count) = (Conversation::new(), 0);
    for (Pupil { format, agent, policy }, exchanges) in lessons {
        for Exchange { messages, tools, reply } in exchanges {
            let request = Request { agent, policy, format, messages: &messages, tools: &tools };
            let prepared = conversation.prepare(&request)?;
            let opened = format.chat().opened_thought(&messages, &tools)?;
            let said = format.chat().assistant(&reply, opened)?;
            count += said.len();
            conversation.demonstrate(prepared, said)?;
        }
    }
    Ok((conversation.into_trajectory(), count))
}

#[async_trait]
impl AgentLoop for Agent {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let AttemptContext { name: id, task, messages, seed, stream, params, .. } = context;
        Agent::run(self, AttemptRequest { id, task, messages, seed, stream, params }).await
    }

    fn taught(&self, teacher: &Teacher) -> Option<Arc<dyn AgentLoop>> {
        // Agents that its tools ask would act by their own policies.
        let is_helped = !self.tools.helpers().is_empty();
        (!is_helped).then(|| Arc::new(Taught { agent: self.clone(), teacher: teacher.clone() }) as _)
    }
}

/// The built-in loop with a teacher in the place of its policy.
pub(crate) struct Taught {
    pub agent: Agent,
    pub teacher: Teacher,
}

#[async_trait]
impl AgentLoop for Taught {
    async fn run(&self, context: AttemptContext) -> Attempt {
        let mut run = Lesson { exchanges: Vec::new(), outcome: Outcome::begun() };
        let ended = self.open_and_loop(&mut run, context).await;
        let Lesson { exchanges, mut outcome } = run;
        match ended {
            Ok(finish) => outcome.finish = finish,
            Err((place, why)) => {
                outcome.trouble(place, why.clone());
                outcome.error = Some(why);
            }
        }
        let (format, agent, policy) =
            (self.agent.format.clone(), self.agent.name.clone(), self.agent.policy.clone());
        finished(outcome, move || {
            let pupil = Pupil { format: &format, agent: &agent, policy: &policy };
            taught([(pupil, exchanges)])
        })
        .await
    }
}

/// The attempt of an outcome and of what was taught in it. Templates take time, so they are rendered away
/// from the async workers.
pub(crate) async fn finished(
    mut outcome: Outcome,
    written: impl FnOnce() -> Result<(Trajectory, usize), DemonstrationError> + Send + 'static,
) -> Attempt {
    let written = match tokio::task::spawn_blocking(written).await {
        Ok(written) => written.map_err(|error| error.to_string()),
        Err(error) => Err(format!("rendering came to no end: {error}")),
    };
    match written {
        Ok((trajectory, tokens)) => {
            outcome.sampled_tokens = tokens;
            Attempt { trajectory, outcome }
        }
        Err(why) => {
            outcome.trouble("chat template", why.clone());
            (outcome.error, outcome.finish) = (Some(why), Finish::Failed);
            Attempt { trajectory: Trajectory::new(), outcome }
        }
    }
}

/// A lesson under way.
struct Lesson {
    exchanges: Vec<Exchange>,
    outcome: Outcome,
}

/// Where an attempt broke, and why.
type Broke = (&'static str, String);

impl Taught {
    async fn open_and_loop(&self, run: &mut Lesson, context: AttemptContext) -> Result<Finish, Broke> {
        let longest = self.agent.limits.attempt;
        let AttemptContext { name: attempt, task, messages, seed, stream, params, .. } = context;
        let teacher = self.teacher.of(&task).map_err(|why| ("teacher", why))?;
        let of_tools = ToolContext { attempt, task, seed, stream, deadline: longest, params };
        let broke = |error: crate::tools::ToolError| ("tools", error.to_string());
        let mut tools = self.agent.tools.open(&of_tools).await.map_err(broke)?;
        let turns = self.turns(run, teacher, messages, &mut tools);
        let turns = within(&*self.agent.sampler, longest, turns).await;
        let ended = turns.unwrap_or_else(|| {
            run.outcome.trouble("attempt", format!("was not done within {longest:?}"));
            Ok(Finish::Deadline)
        });
        run.outcome.calls = tools.counts();
        let (evidence, missing) = tools.evidence().await;
        run.outcome.evidence = evidence;
        for error in missing {
            run.outcome.trouble("tools", error.to_string());
        }
        tools.close().await.map_err(broke)?;
        ended
    }

    async fn turns(
        &self,
        run: &mut Lesson,
        teacher: Arc<dyn Responder>,
        mut history: Vec<Message>,
        tools: &mut OpenTools,
    ) -> Result<Finish, Broke> {
        let limits = self.agent.limits;
        loop {
            let turn = run.outcome.turns;
            let Answer { message, finish, .. } = self.ask(&*teacher, &history, tools.specs()).await?;
            run.outcome.turns += 1;
            if finish != FinishReason::StopId {
                return Ok(Finish::MaxTokens);
            }
            let (messages, specs) = (history.clone(), tools.specs().to_vec());
            run.exchanges.push(Exchange { messages, tools: specs, reply: message.clone() });
            if message.tool_calls.is_empty() {
                run.outcome.final_text = message.content.as_str().to_owned();
                run.outcome.thought = message.reasoning_content.unwrap_or_default();
                return Ok(Finish::Answered);
            }
            let last = run.outcome.turns >= limits.turns;
            let calls = message.tool_calls.iter().cloned().map(Ok).collect();
            let parsed = Parsed { content: message.content.as_str().to_owned(), calls, bare: false };
            let before = tools.counts();
            let answers = tools.answer(&parsed, !last).await;
            run.outcome.calls_by_turn.push((turn, tools.counts().since(&before)));
            let learnt = learn_from(&mut run.outcome, turn, &answers);
            if let Some(answer) = learnt.map_err(|why| ("tools", why))? {
                run.outcome.final_text = answer;
                return Ok(Finish::Ended);
            }
            if last {
                return Ok(Finish::MaxTurns);
            }
            history.push(message);
            history.extend(answers.iter().map(Observation::message));
        }
    }

    /// Asks the teacher for the next reply.
    async fn ask(
        &self,
        teacher: &dyn Responder,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Answer, Broke> {
        let deadline = self.agent.limits.reply;
        let mut parts = teacher.respond(Query {
            messages: messages.to_vec(),
            tools: tools.to_vec(),
            tool_choice: ToolChoice::Auto,
            parallel_calls: true,
            constraint: None,
            sampling: Sampling::default(),
            deadline,
        });
        let whole = async {
            while let Some(part) = parts.recv().await {
                if let Said::Ended(answer) = part.map_err(|fault| fault.to_string())? {
                    return Ok(*answer);
                }
            }
            Err("its reply stopped in the middle".to_owned())
        };
        let late = || Err(format!("its reply was not done within {deadline:?}"));
        let said = awake::within(deadline, whole).await.unwrap_or_else(late);
        said.map_err(|why| ("teacher", why))
    }
}

#[cfg(test)]
#[path = "taught_tests.rs"]
mod tests;
