//! Samplers that are elsewhere, or many; learners that are elsewhere.
//!
//! A [`Router`] is one [`Sampler`](levade_policy::Sampler) over several of one policy: replicas of an
//! engine, servers on other machines. It decides which of them draws a reply, goes on at another one when one
//! fails, sends new weights to all, and tells callers to come back when there is too much to do. So whatever
//! asks a sampler asks a router in the same way.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use levade_policy::{SampleRequest, Sampler, SamplingParams, Simulator, SimulatorConfig};
//! use levade_remote::{Health, Router, RouterOptions};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), levade_policy::PolicyError> {
//! let replica = || Arc::new(Simulator::new(SimulatorConfig::default())) as Arc<dyn Sampler>;
//! let members = vec![("east".into(), replica()), ("west".into(), replica())];
//! let router = Router::new(members, RouterOptions { most_running: 64, ..RouterOptions::default() })?;
//!
//! let params = SamplingParams { max_tokens: 8, ..SamplingParams::default() };
//! let request = SampleRequest { seed: 1, stream: 7, prompt: vec![1, 2, 3], params, ..Default::default() };
//! let reply = router.sample(request.clone()).await?.collect(Duration::from_secs(10)).await?;
//!
//! // Draws are functions of seed, stream and position: whoever draws them, it is the same reply.
//! let alone = replica().sample(request).await?.collect(Duration::from_secs(10)).await?;
//! assert_eq!(reply, alone);
//! assert!(router.members().iter().all(|member| member.health == Health::Serving));
//! # Ok(()) }
//! ```
//!
//! A [`Server`] is one of vLLM or SGLang as a sampler, and [`Publishing`] a learner whose weights such
//! servers adopt from folders. [`Pushing`] sends them straight into the servers' memory.
//!
//! An [`External`] policy is one that others serve through an OpenAI-compatible chat API: an opponent, a
//! judge or a demonstrator. It is asked in messages, and answers with a [`ChatReply`] or a [`ChatStream`].
//!
//! A [`Service`] is asked in JSON and answers in JSON, as one that scores does.
//!
//! A [`RemoteLearner`] is a [`Learner`](levade_policy::Learner) in other processes, such as a group of
//! PyTorch's: it is asked for every verb over HTTP, and does what it is asked once, although an answer may
//! get lost.
//!
//! [`Turns`] are taken at devices that servers and a learner share: one side sleeps while the other works.
//!
//! A [`Mixture`] says which policy plays a role of an attempt, as a function of seed, stream and role.
//!
//! Guarantees: a token is handed out once, in order, and drawn with weights that are no older than the
//! request and the tokens before it ask for. A request that an API may have served is not sent to it again.
//! Errors say what was waited for, and from whom; deadlines do not count time in which the process or a
//! member stood still. Keys are shown nowhere. Not here: serving over HTTP, and what policies are asked.

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

pub use devices::{Moved, Offloads};
pub use external::{
    CalledTool, ChatEvent, ChatParams, ChatReply, ChatRequest, ChatStream, Endpoint, External, ExternalError,
    ExternalOptions, Finish, Service, ServiceOptions, Usage,
};
pub use learner::{
    Adapter, CRITIC, Described, Description, Expected, GroupLayout, LearnerOptions, POLICY, Processes,
    REFERENCE, RemoteLearner,
};
pub use mixture::Mixture;
pub use publish::Publishing;
pub use push::{Broadcasts, GroupBackend, Meeting, Opened, Opening, Pushing, Rendezvous, Sent};
pub use router::{Choice, Health, MemberStatus, PrefixOptions, Router, RouterOptions};
pub use server::{
    FolderChecks, InFlight, ProbeDifference, Server, ServerKind, ServerOptions, TokenizerProbe,
};
pub use turns::{Sharer, Turns};
