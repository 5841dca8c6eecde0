//! Executes leased attempts, in the process of a runner.

use std::sync::Arc;
use std::time::Duration;

use levade_call::{Backend, ChatApi, OpeningLimit, Truncation};
use levade_process::RunOutput;
use levade_tools::ToolSet;
use levade_tree::{TimedPart, Timing};

use super::wire::{AttemptReport, LeasedAttempt, ToolTime};
use crate::environments::EnvironmentLoop;
use crate::program::SessionEndpoint;
use crate::{
    Agent, AgentLoop, AttemptContext, AttemptLimits, BuiltInLoop, ContextPolicy, Player, Program,
};

/// Time that a runner adds to the timeout of a completion. The gateway's own timeout, which
/// excludes time in which devices train, therefore expires first.
const COMPLETION_GRACE: Duration = Duration::from_secs(3600);

/// Agent whose loop a runner executes.
#[derive(Clone)]
pub enum RunnerAgent {
    /// The agent runs in the tool loop with these tools.
    Tools(ToolSet),
    /// The agent is a program.
    Program(Program),
    /// The agent is played by an environment, which leads the attempt.
    Environment(EnvironmentLoop),
}

impl RunnerAgent {
    /// Makes an attempt. `api` calls the endpoint of the attempt. If the returned future is
    /// dropped, programs and tools of the attempt are stopped.
    pub async fn run(&self, leased: LeasedAttempt, api: Arc<dyn ChatApi>) -> AttemptReport {
        let LeasedAttempt {
            name,
            task,
            messages,
            agent,
            tool_descriptions,
            seed,
            stream,
            is_evaluation,
            params,
            limits,
            endpoint,
            ..
        } = leased;
        let player = Player {
            policy: endpoint.model.clone(),
            backend: Backend::Messages(api),
            format: None,
            context: usize::MAX,
            is_trained: false,
            opening: OpeningLimit { max_tokens: usize::MAX, truncation: Truncation::Reject },
            context_policy: ContextPolicy::UNLIMITED,
        };
        let limits = AttemptLimits {
            completion_timeout: limits.completion_timeout.saturating_add(COMPLETION_GRACE),
            ..limits
        };
        let mut own = Agent::new(&agent, player.clone(), limits);
        if let RunnerAgent::Tools(tools) = self {
            own.tools = tools.clone().with_descriptions(&tool_descriptions);
        }
        let context = AttemptContext {
            task,
            messages,
            seed,
            stream,
            is_evaluation,
            params,
            ..AttemptContext::new(&name, vec![own])
        };
        match self {
            RunnerAgent::Tools(_) => {
                let made = BuiltInLoop.run(context).await;
                let timings = made.outcome.timings.0.iter().cloned();
                let tool_times = timings.filter_map(|Timing { part, interval }| match part {
                    TimedPart::Tool { turn, index, result } => {
                        Some(ToolTime { turn, index, result, interval })
                    }
                    _ => None,
                });
                let tool_times = tool_times.collect();
                AttemptReport::Tools { outcome: Box::new(made.outcome), tool_times }
            }
            RunnerAgent::Program(program) => {
                execute_program(program, &context, &endpoint, &player).await
            }
            RunnerAgent::Environment(led) => match led.create_program(&context.task) {
                Ok(program) => execute_program(&program, &context, &endpoint, &player).await,
                Err(why) => AttemptReport::Failed { why },
            },
        }
    }
}

async fn execute_program(
    program: &Program,
    context: &AttemptContext,
    endpoint: &SessionEndpoint,
    player: &Player,
) -> AttemptReport {
    match program.execute_program(context, endpoint, player, std::future::pending()).await {
        Ok(RunOutput { code, stdout, stderr }) => {
            AttemptReport::Program { code, stdout: stdout.text(), stderr: stderr.text() }
        }
        Err(why) => AttemptReport::Failed { why },
    }
}
