//! Samplers, learners and chat APIs in other processes, and routers over several samplers.
//!
//! - A [`Router`] is one [`Sampler`](levade_policy::Sampler) over several samplers of one policy:
//!   replicas of an engine, or servers on other machines. It selects a replica for each call,
//!   continues a call at another replica after a failure, distributes new weights, and limits
//!   admission.
//! - A [`Server`] is a vLLM or SGLang server as a sampler. [`PublishingLearner`] is a learner whose
//!   weights such servers load from directories; [`WeightBroadcast`] broadcasts the weights into
//!   the servers' memory.
//! - A [`RemoteLearner`] is a [`Learner`](levade_policy::Learner) in other processes, such as a
//!   group of PyTorch processes, over HTTP. The learner executes each request once, even if a
//!   response is lost.
//! - [`Colocation`] hand devices over between colocated servers and a learner: one side sleeps
//!   while the other works.
//! - An [`External`] policy is a third-party model behind an OpenAI-compatible chat API: an
//!   opponent, a judge or a teacher. Its requests consist of messages, and it returns a
//!   [`ChatResponse`] or a [`ChatStream`].
//! - A [`Service`] is a client of an HTTP service that answers JSON requests, such as a scoring
//!   service.
//! - A [`Mixture`] selects the policy that plays a role of an attempt, as a function of seed,
//!   stream and role.
//!
//! # Example
//! ```
//! use std::{sync::Arc, time::Duration};
//! use levade_policy::{SampleRequest, Sampler, SamplingParams, Simulator, SimulatorConfig};
//! use levade_remote::{Health, Router, RouterOptions};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), levade_policy::PolicyError> {
//! let replica = || Arc::new(Simulator::new(SimulatorConfig::default())) as Arc<dyn Sampler>;
//! let replicas = vec![("east".into(), replica()), ("west".into(), replica())];
//! let router =
//!     Router::new(replicas, RouterOptions { max_running: 64, ..RouterOptions::default() })?;
//!
//! let params = SamplingParams { max_tokens: 8, ..SamplingParams::default() };
//! let request = SampleRequest {
//!     seed: 1,
//!     stream: 7,
//!     prompt: vec![1, 2, 3],
//!     params,
//!     ..Default::default()
//! };
//! let completion = router.sample(request.clone()).await?.collect(Duration::from_secs(10)).await?;
//!
//! // Tokens are functions of seed, stream and position, so a single replica samples the same
//! // completion.
//! let standalone = replica().sample(request).await?.collect(Duration::from_secs(10)).await?;
//! assert_eq!(completion, standalone);
//! assert!(router.replicas().iter().all(|replica| replica.health == Health::Serving));
//! # Ok(()) }
//! ```
//!
//! # Guarantees
//! - **A token is returned once**, in order, and sampled with weights no older than the request and
//!   the tokens before it require.
//! - **A request that an API may have processed is not sent to it again.**
//! - **Errors name the operation that was waited for, and the server.** Deadlines exclude time in
//!   which the process or a replica was suspended.
//! - **Keys never appear in errors or logs.**
//!
//! Out of scope: serving over HTTP (`levade-gateway`), and the use of completions.

mod calls;
mod devices;
mod external;
mod learner;
mod mixture;
mod publish;
mod push;
mod router;
mod server;
mod turns;

pub use devices::{Offload, TransferReport};
pub use external::{
    CalledTool, ChatEvent, ChatParams, ChatRequest, ChatResponse, ChatStream, Endpoint, External,
    ExternalError, ExternalOptions, Finish, Service, ServiceOptions, Usage,
};
pub use learner::{
    Adapter, CRITIC, Description, GroupLayout, LearnerDescription, LearnerOptions,
    LearnerRequirements, POLICY, Processes, REFERENCE, RemoteLearner,
};
pub use mixture::Mixture;
pub use publish::PublishingLearner;
pub use push::{
    BroadcastWeights, GroupBackend, GroupInfo, GroupSpec, Rendezvous, RendezvousInfo, SendReport,
    WeightBroadcast,
};
pub use router::{Choice, Health, PrefixOptions, ReplicaStatus, Router, RouterOptions};
pub use server::{
    DirChecks, InFlight, ProbeDifference, Server, ServerKind, ServerOptions, TokenizerProbe,
};
pub use turns::{ColocatedServer, Colocation};
