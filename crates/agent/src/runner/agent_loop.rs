//! Agent loop of the trainer whose attempts runners make.

use std::sync::Arc;

use async_trait::async_trait;
use levade_call::Recording;
use levade_gateway::Reward;
use levade_process::{RunOutput, Tail};
use levade_tree::{Finish, Outcome};
use tokio::sync::oneshot;
use tracing::{Instrument, debug_span};

use super::merge::merge;
use super::queue::{LeaseResult, RunnerQueue};
use super::wire::{AttemptReport, LeasedAttempt};
use crate::cast::Caller;
use crate::environments::LedLoop;
use crate::program::{OpenProgram, SessionEndpoint};
use crate::{Agent, AgentLoop, Attempt, AttemptContext, BuiltInLoop, Program};

/// Agent loop that a runner executes. The programs open the sessions; their commands run on the
/// runner.
#[derive(Clone)]
pub enum LeasedLoop {
    /// The runner executes the tool loop.
    Tools(Program),
    /// The runner executes a program.
    Program(Program),
    /// The environment that leads the attempt.
    Environment(LedLoop),
}

/// Agent loop whose attempts are made by runners, on this host or others.
#[derive(Clone)]
pub struct RunnerLoop {
    /// Loop that the runner executes.
    pub leased: LeasedLoop,
    /// Queue from which runners lease.
    pub queue: Arc<RunnerQueue>,
}

#[async_trait]
impl AgentLoop for RunnerLoop {
    /// Makes one attempt. If the returned future is dropped, the rollout is cancelled and the
    /// session is closed, by a task that outlives the future.
    async fn run(&self, context: AttemptContext) -> Attempt {
        let (sender, attempt) = oneshot::channel();
        let span = debug_span!("leased", id = %context.name);
        tokio::spawn(self.clone().attempt(context, sender).instrument(span));
        let ended = "the task of the attempt has ended without a result";
        attempt.await.unwrap_or_else(|_| Attempt::failed("runners", ended))
    }

    fn can_be_taught(&self, agent: &Agent) -> bool {
        match &self.leased {
            LeasedLoop::Tools(_) => BuiltInLoop.can_be_taught(agent),
            LeasedLoop::Program(program) => program.can_be_taught(agent),
            LeasedLoop::Environment(led) => led.can_be_taught(agent),
        }
    }
}

impl RunnerLoop {
    /// Makes one attempt and sends it. Ends early if `sender` has no receiver.
    async fn attempt(self, context: AttemptContext, mut sender: oneshot::Sender<Attempt>) {
        let (program, caller) = match &self.leased {
            LeasedLoop::Tools(program) => (Ok(program.clone()), Caller::RemoteToolLoop),
            LeasedLoop::Program(program) => (Ok(program.clone()), Caller::Program),
            LeasedLoop::Environment(led) => (led.program_for(&context.task), Caller::Program),
        };
        let program = match program {
            Ok(program) => program,
            // Sending fails if the caller has dropped the attempt.
            Err(why) => return drop(sender.send(Attempt::failed("environment", why))),
        };
        let opened = match program.open(&context, caller) {
            Ok(opened) => opened,
            Err(why) => return drop(sender.send(Attempt::failed("policies", why))),
        };
        let endpoint = opened.endpoint(&program);
        let player = opened.own_player();
        let timeout = context.limits.attempt_timeout;
        let rollout = self.queue.enqueue(&self.input(&context, endpoint)).await;
        let result = match &rollout {
            Err(why) => Some(LeaseResult::Failed(why.clone())),
            Ok(rollout) => tokio::select! {
                // A fixed order of the branches makes simulations repeatable.
                biased;
                result = self.queue.wait(rollout, player, timeout) => Some(result),
                () = sender.closed() => None,
            },
        };
        let is_reported = matches!(result, Some(LeaseResult::Reported(_)));
        let recorded = opened.close(&program.gateway).await;
        if let Some(result) = result {
            let attempt = self.complete(&context, (&program, &opened), result, recorded).await;
            // Sending fails if the caller has dropped the attempt.
            let _ = sender.send(attempt);
        }
        // Last, because the store may be unreachable.
        if let Some(rollout) = rollout.ok().filter(|_| !is_reported) {
            self.queue.cancel(&rollout).await;
        }
    }

    fn input(&self, context: &AttemptContext, endpoint: SessionEndpoint) -> LeasedAttempt {
        let (resources_id, recipe_version) = self.queue.recipe();
        let own = context.own_agent();
        LeasedAttempt {
            resources_id,
            recipe_version,
            name: context.name.clone(),
            task: context.task.clone(),
            messages: context.messages.clone(),
            agent: context.agent.clone(),
            seed: context.seed,
            stream: context.stream,
            is_evaluation: context.is_evaluation,
            tool_descriptions: own
                .as_ref()
                .map_or_else(|_| Default::default(), |own| own.tools.descriptions().clone()),
            params: own.map_or_else(|_| context.params.clone(), |own| context.params_of(own)),
            limits: context.limits,
            endpoint,
        }
    }

    /// Returns the attempt that ended with `result`.
    async fn complete(
        &self,
        context: &AttemptContext,
        (program, opened): (&Program, &OpenProgram<'_>),
        result: LeaseResult,
        recorded: (Recording, Vec<Reward>),
    ) -> Attempt {
        let is_tools = matches!(self.leased, LeasedLoop::Tools(_));
        let report = match result {
            LeaseResult::Lost(why) => return Attempt::lost(recorded.0.trajectory, why),
            LeaseResult::Failed(why) => {
                let failed = Attempt::failed("runners", why);
                return Attempt { trajectory: recorded.0.trajectory, ..failed };
            }
            LeaseResult::TimedOut if is_tools => {
                let mut outcome = Outcome { finish: Finish::Deadline, ..Outcome::initial() };
                let timeout = context.limits.attempt_timeout;
                outcome.add_warning("attempt", format!("was not done within {timeout:?}"));
                AttemptReport::Tools { outcome: Box::new(outcome), tool_times: Vec::new() }
            }
            LeaseResult::TimedOut => {
                AttemptReport::Program { code: None, stdout: String::new(), stderr: String::new() }
            }
            LeaseResult::Reported(report) => report,
        };
        match report {
            AttemptReport::Tools { outcome, tool_times } => {
                let external = recorded.0.external.clone();
                let made =
                    merge(&context.agent, &context.limits, (*outcome, tool_times), recorded.0);
                opened.complete(context, made, &external).await
            }
            AttemptReport::Program { code, stdout, stderr } => {
                let [stdout, stderr] = [stdout, stderr].map(|text| Tail::from(text.as_str()));
                let ended = Ok(RunOutput { code, stdout, stderr });
                program.complete(context, opened, ended, recorded).await
            }
            AttemptReport::Failed { why } => {
                program.complete(context, opened, Err(why), recorded).await
            }
        }
    }
}
