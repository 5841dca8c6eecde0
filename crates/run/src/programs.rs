//! Agents that are programs: the gateway of a run, and the programs that call it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use levade_agent::environments::{EnvironmentLoop, Environments};
use levade_agent::game::{GameLoop, GameWorkers};
use levade_agent::program::create_worker_pool;
use levade_agent::user::SimulatedUser;
use levade_agent::{Program, SessionLoop, SessionQueue, SessionQueueOptions};
use levade_gateway::{CallPattern, Gateway, GatewayOptions, serve};
use levade_policy::environment::read_variable;
use levade_process::{Launch, Supervisor};
use levade_recipe::{AgentKeys, AgentKind, GameKeys, Recipe, RewardKeys, SessionGatewayKeys};
use levade_tools::PythonUsers;
use levade_trainer::AgentSpec;
use regex::Regex;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::failure::unusable;
use crate::host::{Host, ServedGateway};

/// Returns the pattern that attributes calls of programs to an agent.
///
/// # Errors
/// Returns an error if `match.system` is not a valid regular expression.
pub fn create_call_pattern(name: &str, keys: &AgentKeys) -> anyhow::Result<CallPattern> {
    let matches = &keys.matches;
    let system = match matches.system.as_str() {
        "" => None,
        pattern => Some(Regex::new(pattern).with_context(|| format!("agent.{name}.match.system"))?),
    };
    Ok(CallPattern {
        models: matches.model.clone(),
        system,
        tools: matches.tools.clone(),
        has_tools: matches.has_tools,
    })
}

/// Returns whether the recipe has a scorer of type `program`, which takes the rewards that programs
/// post.
pub(crate) fn takes_rewards(reward: &RewardKeys) -> bool {
    let is_program = |kind: &str| kind == "program";
    is_program(reward.scorer.name())
        || reward.scorers.iter().any(|keys| is_program(keys.scorer.name()))
}

/// Address of a gateway that clients on other hosts can reach.
#[derive(Debug, Clone)]
pub struct GatewayAddress<'a> {
    /// Address and port at which the gateway listens.
    pub listen: &'a str,
    /// URL by which clients reach the gateway. If empty, the URL is `http://` followed by `listen`.
    pub url: &'a str,
    /// API keys with which clients start sessions. If empty, clients cannot start sessions.
    pub keys: Vec<String>,
}

/// Gateway that the run's programs call. It stops when this process ends, or when its host stops
/// it.
pub struct ProgramGateway {
    gateway: Gateway,
    /// Task that serves the gateway's calls. `None` if the host stops the task, or if another
    /// process serves the calls.
    served: Option<ServedGateway>,
    address: String,
    /// Supervisor that starts the programs.
    supervisor: Supervisor,
}

impl ProgramGateway {
    /// Starts the gateway at `address`. If `address` is `None`, the gateway listens on a free port
    /// of this machine.
    ///
    /// # Errors
    /// Returns an error if the port is in use.
    pub async fn start(
        supervisor: Supervisor,
        address: Option<GatewayAddress<'_>>,
    ) -> anyhow::Result<Self> {
        let (listen, url, keys) = match address {
            Some(GatewayAddress { listen, url, keys }) => (listen, url, keys),
            None => ("127.0.0.1:0", "", Vec::new()),
        };
        let bound = TcpListener::bind(listen).await;
        let listener =
            bound.with_context(|| format!("the gateway of programs cannot listen at {listen}"))?;
        let address = match url {
            "" => format!("http://{}", listener.local_addr()?),
            url => url.trim_end_matches('/').to_owned(),
        };
        // Attempts limit the number of calls, and the sampler's own queue orders them.
        let options = GatewayOptions {
            keys,
            open: false,
            running: 1 << 20,
            permit_timeout: Duration::MAX,
            ..GatewayOptions::default()
        };
        let gateway = Gateway::new(Vec::new(), options);
        let (stop, stopped) = oneshot::channel();
        let stopped = async move {
            // A gateway whose handle is dropped continues.
            if stopped.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let routed = gateway.clone();
        let served = tokio::spawn(async move {
            if let Err(error) = serve(&routed, listener, stopped).await {
                tracing::error!(%error, "the gateway has exited");
            }
        });
        let served = Some(ServedGateway { address: address.clone(), stop, served });
        Ok(ProgramGateway { gateway, served, address, supervisor })
    }

    /// Lets `host` stop the gateway at the end of a run, because a restart of the run may use the
    /// same address.
    pub(crate) fn with_stop_by_host(mut self, host: &Host) -> Self {
        self.served.take().into_iter().for_each(|served| host.add_gateway(served));
        self
    }

    /// Creates the program that plays an agent. `rewards` is whether the program can post rewards.
    pub fn program(&self, keys: &AgentKeys, rewards: bool) -> Program {
        let workers = (keys.workers > 0).then(|| {
            let launch = Launch {
                dir: keys.folder.clone(),
                passes: keys.environment.clone(),
                ..Launch::new(&keys.command)
            };
            Arc::new(create_worker_pool(
                &self.supervisor,
                launch,
                None,
                (keys.workers, keys.worker_attempts),
            ))
        });
        Program {
            command: keys.command.clone(),
            dir: keys.folder.clone(),
            passes: keys.environment.clone(),
            supervisor: self.supervisor.clone(),
            gateway: self.gateway.clone(),
            address: self.address.clone(),
            rewards,
            // A seat of an environment requests the model of its name.
            has_seats: keys.kind == AgentKind::Environment,
            workers,
        }
    }
}

/// Replaces the built-in loop of agents with their programs, environments, games or external
/// sessions. Also adds simulated users to the agents that talk to users.
///
/// # Errors
/// Returns the errors of [`ProgramGateway::start`]. Returns an error if the recipe's game does not
/// exist, or if no key can start sessions.
pub async fn replace_agent_loops(
    recipe: &Recipe,
    parts: &mut [AgentSpec],
    environments: &Environments,
    host: &Host,
) -> anyhow::Result<()> {
    let agents = recipe.agents();
    add_users(recipe, parts, host);
    if let Some(game) = game_loop(recipe, host)? {
        let game = Arc::new(game);
        let is_game =
            |name: &str| recipe.agent_named(name).is_some_and(|keys| keys.kind == AgentKind::Game);
        for parts in parts.iter_mut().filter(|parts| is_game(&parts.name)) {
            parts.custom = Some(Arc::clone(&game) as _);
        }
    }
    if !agents.iter().any(|(_, keys)| keys.kind.calls_over_http()) {
        return Ok(());
    }
    let session_keys = recipe.sessions.clone().unwrap_or_default();
    let has_sessions = recipe.has_session_agents();
    let address = has_sessions.then(|| read_session_address(&session_keys)).transpose()?;
    let supervisor = host.supervisor().clone();
    let started = ProgramGateway::start(supervisor, address).await?.with_stop_by_host(host);
    let queue = has_sessions.then(|| open_session_queue(&started, &session_keys, host));
    for (name, keys) in agents.into_iter().filter(|(_, keys)| keys.kind.calls_over_http()) {
        let program = started.program(keys, takes_rewards(&recipe.reward));
        if let Some(parts) = parts.iter_mut().find(|parts| parts.name == name) {
            let environments = environments.clone();
            parts.custom = Some(match (keys.kind, &queue) {
                (AgentKind::Environment, _) => Arc::new(EnvironmentLoop { program, environments }),
                (AgentKind::Session, Some(queue)) => {
                    Arc::new(SessionLoop { program, queue: Arc::clone(queue) })
                }
                _ => Arc::new(program),
            });
        }
    }
    Ok(())
}

/// Reads API keys from an environment variable, which separates them by commas.
pub fn read_api_keys(variable: &str) -> Vec<String> {
    let text = read_variable(variable).unwrap_or_default().to_string_lossy().into_owned();
    text.split(',').map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned).collect()
}

/// Returns the address at which external agents start sessions.
///
/// # Errors
/// Returns an error if no key can start sessions.
fn read_session_address(keys: &SessionGatewayKeys) -> anyhow::Result<GatewayAddress<'_>> {
    let SessionGatewayKeys { listen, gateway, key_env, .. } = keys;
    let keys = read_api_keys(key_env);
    if keys.is_empty() {
        return Err(unusable(format!(
            "the environment variable {key_env} (sessions.key_env) contains no key; set it to the \
             keys with which agents start sessions, separated by commas"
        )));
    }
    Ok(GatewayAddress { listen, url: gateway, keys })
}

/// Creates the queue from which external agents start the attempts of a run. Reports to the user at
/// which URL the agents start sessions.
fn open_session_queue(
    started: &ProgramGateway,
    keys: &SessionGatewayKeys,
    host: &Host,
) -> Arc<SessionQueue> {
    let url = format!("{}/rl/start_session", started.address);
    host.setup("sessions", format!("agents start sessions at {url}"));
    let options =
        SessionQueueOptions { url, wait: keys.wait_timeout(), silence: keys.silence_timeout() };
    let noticed = host.clone();
    SessionQueue::open(&started.gateway, options, move |text| noticed.note(text))
}

/// Creates the agent loop that plays the recipe's game. Returns `None` if no agent plays a game. If
/// a program implements the rules, the first match starts the program.
///
/// # Errors
/// Returns an error if the recipe's game does not exist.
pub fn game_loop(recipe: &Recipe, host: &Host) -> anyhow::Result<Option<GameLoop>> {
    if recipe.agents().iter().all(|(_, keys)| keys.kind != AgentKind::Game) {
        return Ok(None);
    }
    let workers = |keys: &GameKeys, timeout| {
        let launch = Launch {
            dir: keys.folder.clone(),
            passes: keys.environment.clone(),
            ..Launch::new(&keys.command)
        };
        GameWorkers::new(&keys.name, host.supervisor(), launch, keys.workers, timeout)
    };
    recipe.game_loop(workers).map(Some).map_err(anyhow::Error::msg)
}

/// Creates the simulated user `name` of the recipe. Returns `None` if the recipe has no such user.
/// The first conversation starts the process of a user in Python.
pub fn simulated_user(recipe: &Recipe, name: &str, host: &Host) -> Option<SimulatedUser> {
    let python = |keys: &_| PythonUsers::new(name, keys, host.supervisor().clone());
    recipe.simulated_user(name, python)
}

/// Adds simulated users to the agents that talk to users. Agents with the same user share the
/// user's processes.
fn add_users(recipe: &Recipe, parts: &mut [AgentSpec], host: &Host) {
    let mut users: BTreeMap<String, Arc<SimulatedUser>> = BTreeMap::new();
    for parts in parts {
        let Some(keys) = recipe.agent_named(&parts.name) else { continue };
        let name = &keys.user;
        if !users.contains_key(name) {
            let Some(user) = simulated_user(recipe, name, host) else { continue };
            users.insert(name.clone(), user.into());
        }
        parts.user = users.get(name).cloned();
    }
}

/// Creates the program of an agent for a runner. The program calls the gateway of another process.
pub(crate) fn runner_program(keys: &AgentKeys, supervisor: &Supervisor) -> Program {
    let gateway = Gateway::new(Vec::new(), GatewayOptions::default());
    let address = String::new();
    let supervisor = supervisor.clone();
    ProgramGateway { gateway, served: None, address, supervisor }.program(keys, false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn restart_listens_at_address_of_stopped_gateway() {
        let host = Host::default();
        let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let listen = free.local_addr().unwrap().to_string();
        drop(free);
        let start = || {
            let address = GatewayAddress { listen: &listen, url: "", keys: Vec::new() };
            ProgramGateway::start(Supervisor::default(), Some(address))
        };
        start().await.unwrap().with_stop_by_host(&host);
        let error = start().await.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(&listen), "{error}");
        // A client keeps its connection.
        let client = tokio::net::TcpStream::connect(&listen).await.unwrap();
        host.stop_gateways().await;
        start().await.unwrap().with_stop_by_host(&host);
        drop(client);
        host.stop_gateways().await;
    }
}
