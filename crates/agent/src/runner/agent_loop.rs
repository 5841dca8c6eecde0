//! Agent loop of the trainer whose attempts runners make.

use std::sync::Arc;

use async_trait::async_trait;
use levade_call::Recording;
use levade_gateway::Reward;
use levade_process::{RunOutput, Tail};
use levade_tree::{Finish, Outcome};
use tokio::sync::oneshot;
use tracing::{Instrument, debug_span};

use super::merge::merge_recording;
use super::queue::{LeaseResult, RunnerQueue};
use super::wire::{AttemptReport, LeasedAttempt};
use crate::cast::CallerKind;
use crate::environments::EnvironmentLoop;
use crate::program::{OpenProgram, SessionEndpoint};
use crate::{Agent, AgentLoop, Attempt, AttemptContext, BuiltInLoop, Program};

/// Agent loop that a runner executes. The programs in the variants open the sessions in this
/// process; their commands run on the runner.
#[derive(Clone)]
pub enum LeasedLoop {
    /// The runner executes the tool loop.
    Tools(Program),
    /// The runner executes a program.
    Program(Program),
    /// The runner executes the environment that leads the attempt.
    Environment(EnvironmentLoop),
}

/// Agent loop that leaves its attempts to runners, on this host or on other hosts.
#[derive(Clone)]
pub struct RunnerLoop {
    /// Agent loop that the runner executes.
    pub leased: LeasedLoop,
    /// Queue from which runners lease the attempts.
    pub queue: Arc<RunnerQueue>,
}

#[async_trait]
impl AgentLoop for RunnerLoop {
    /// Makes one attempt through a runner. If the returned future is dropped, a task that outlives
    /// the future cancels the rollout and closes the session.
    async fn run(&self, context: AttemptContext) -> Attempt {
        let (sender, attempt) = oneshot::channel();
        let span = debug_span!("leased", id = %context.name);
        tokio::spawn(self.clone().run_attempt(context, sender).instrument(span));
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
    /// Makes one attempt and sends the attempt to `sender`. Returns early if the receiver of
    /// `sender` is dropped.
    async fn run_attempt(self, context: AttemptContext, mut sender: oneshot::Sender<Attempt>) {
        let (program, caller) = match &self.leased {
            LeasedLoop::Tools(program) => (Ok(program.clone()), CallerKind::RemoteToolLoop),
            LeasedLoop::Program(program) => (Ok(program.clone()), CallerKind::Program),
            LeasedLoop::Environment(led) => {
                (led.create_program(&context.task), CallerKind::Program)
            }
        };
        let program = match program {
            Ok(program) => program,
            // Sending fails if the caller has dropped the attempt.
            Err(why) => return drop(sender.send(Attempt::failed("environment", why))),
        };
        let opened = match program.open_session(&context, caller) {
            Ok(opened) => opened,
            Err(why) => return drop(sender.send(Attempt::failed("policies", why))),
        };
        let endpoint = opened.create_endpoint(&program);
        let player = opened.own_player();
        let timeout = context.limits.attempt_timeout;
        let rollout = self.queue.enqueue(&self.create_lease_input(&context, endpoint)).await;
        let result = match &rollout {
            Err(why) => Some(LeaseResult::Failed(why.clone())),
            Ok(rollout) => tokio::select! {
                // A fixed order of the branches makes simulations repeatable.
                biased;
                result = self.queue.wait_for_end(rollout, player, timeout) => Some(result),
                () = sender.closed() => None,
            },
        };
        let is_reported = matches!(result, Some(LeaseResult::Reported(_)));
        let recorded = opened.close_session(&program.gateway).await;
        if let Some(result) = result {
            let attempt =
                self.complete_attempt(&context, (&program, &opened), result, recorded).await;
            // Sending fails if the caller has dropped the attempt.
            let _ = sender.send(attempt);
        }
        // Last, because the store may be unreachable.
        if let Some(rollout) = rollout.ok().filter(|_| !is_reported) {
            self.queue.cancel(&rollout).await;
        }
    }

    fn create_lease_input(
        &self,
        context: &AttemptContext,
        endpoint: SessionEndpoint,
    ) -> LeasedAttempt {
        let (resources_id, recipe_version) = self.queue.recipe_resources();
        let own = context.find_own_agent();
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
            params: own
                .map_or_else(|_| context.params.clone(), |own| context.agent_sampling_params(own)),
            limits: context.limits,
            endpoint,
        }
    }

    /// Creates the attempt from the result of its lease and its recorded calls.
    async fn complete_attempt(
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
                let made = merge_recording(
                    &context.agent,
                    &context.limits,
                    (*outcome, tool_times),
                    recorded.0,
                );
                opened.complete_attempt(context, made, &external).await
            }
            AttemptReport::Program { code, stdout, stderr } => {
                let [stdout, stderr] = [stdout, stderr].map(|text| Tail::from(text.as_str()));
                let ended = Ok(RunOutput { code, stdout, stderr });
                program.complete_attempt(context, opened, ended, recorded).await
            }
            AttemptReport::Failed { why } => {
                program.complete_attempt(context, opened, Err(why), recorded).await
            }
        }
    }
}
