//! Agents that are programs: the gateway of a run, and who calls through it.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use dressage_agent::program::{Replies, Workers};
use dressage_agent::{Program, ProgramAgent};
use dressage_gateway::{Gateway, Options, When, serve};
use dressage_trainer::AgentParts;
use dressage_trainer::recipe::{AgentKeys, AgentKind, PolicyKeys, Recipe, RewardKeys};
use regex::Regex;
use tokio::net::TcpListener;

/// An agent of a recipe, as programs may call it.
///
/// # Errors
/// When its rule is no regular expression.
pub fn caller(
    recipe: &Recipe,
    (name, keys): (&str, &AgentKeys),
    policy: String,
    replies: Replies,
) -> anyhow::Result<ProgramAgent> {
    let matches = &keys.matches;
    let system = match matches.system.as_str() {
        "" => None,
        pattern => Some(Regex::new(pattern).with_context(|| format!("agent.{name}.match.system"))?),
    };
    let in_recipe = recipe.policy_of(keys).unwrap_or_default();
    let learns = |(policy, keys): &(String, PolicyKeys)| *policy == in_recipe && keys.is_trained();
    let trained = keys.train && recipe.policies().iter().any(learns);
    Ok(ProgramAgent {
        name: name.to_owned(),
        policy,
        replies,
        when: When {
            models: matches.model.clone(),
            system,
            tools: matches.tools.clone(),
            has_tools: matches.has_tools,
        },
        trained,
    })
}

/// Whether programs give rewards of their own.
fn takes_rewards(reward: &RewardKeys) -> bool {
    let is_program = |kind: &str| kind == "program";
    is_program(reward.scorer.name()) || reward.scorers.iter().any(|keys| is_program(keys.scorer.name()))
}

/// Puts programs in the place of the built-in loop for the agents that are such, and starts the gateway that
/// they call. It ends with this process.
///
/// # Errors
/// When no port of this machine can be listened at, or this binary is not found.
pub async fn put_in(
    recipe: &Recipe,
    parts: &mut [AgentParts],
    callers: &[ProgramAgent],
) -> anyhow::Result<()> {
    let agents = recipe.agents();
    if agents.iter().all(|(_, keys)| keys.kind != AgentKind::Program) {
        return Ok(());
    }
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("no port is free on 127.0.0.1")?;
    let address = format!("http://{}", listener.local_addr()?);
    // Attempts bound the calls, and the sampler's own queue orders them.
    let open = Options { open: false, running: 1 << 20, reply: Duration::MAX, ..Options::default() };
    let gateway = Gateway::new(Vec::new(), open);
    let served = gateway.clone();
    tokio::spawn(async move {
        if let Err(error) = serve(&served, listener, std::future::pending()).await {
            tracing::error!(%error, "the gateway has ended");
        }
    });
    let keeper = std::env::current_exe().context("this program's own file is not found")?;
    for (name, keys) in agents.into_iter().filter(|(_, keys)| keys.kind == AgentKind::Program) {
        let Some(place) = callers.iter().position(|caller| caller.name == name) else { continue };
        // The one that the attempt is of comes first.
        let mut called = callers.to_vec();
        called.swap(0, place);
        // No attempt is of an agent whose policy others serve.
        let Replies::Tokens { context, .. } = callers[place].replies else { continue };
        let program = Program {
            command: keys.command.clone(),
            folder: keys.folder.clone(),
            passes: keys.environment.clone(),
            keeper: vec![keeper.to_string_lossy().into_owned(), "keep".into()],
            gateway: gateway.clone(),
            address: address.clone(),
            agents: called,
            limits: keys.limits(context),
            rewards: takes_rewards(&recipe.reward),
            workers: (keys.workers > 0).then(|| Arc::new(Workers::new(keys.workers, keys.worker_attempts))),
        };
        if let Some(parts) = parts.iter_mut().find(|parts| parts.name == name) {
            parts.custom = Some(Arc::new(program));
        }
    }
    Ok(())
}
