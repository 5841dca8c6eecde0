//! Routes of Agent Lightning 1.0 below `/api`: rollouts, their states, and events of their agents.
//!
//! A controller reads rollouts by state, starts a process for each, and reports states. The process
//! reports events: rewards, model requests, or anything else. A state is stored as the status of
//! the rollout, and an event as a span of its latest try. So a runner of 0.3 can lease a rollout
//! that is enqueued here, and a controller can start a rollout that was enqueued by 0.3.
//!
//! # Differences from Agent Lightning's server
//! - States survive the server. `timeout_seconds` is enforced: a rollout that exceeds it fails.
//! - `next_after` of the terminal rollouts is a cursor and not an index. A rollout that changes
//!   after its end is returned again.
//! - A deleted rollout is cancelled and hidden from these routes, but its record is kept.
//! - The first event of a queued rollout starts its try.
//!
//! Out of scope: the registry of models and the proxy of model calls; a gateway answers those.

mod events;
mod rollouts;
mod triplets;
mod wire;

use crate::openapi::{Routes, op};

/// Returns the HTTP routes of Agent Lightning 1.0.
pub(crate) fn routes() -> Routes {
    rollouts::routes().merge(events::routes()).with_prefix("/api").merge(
        Routes::new("agent-lightning-1.0").get(
            "/healthz",
            rollouts::health,
            op("Report that the server runs", 200, "Health"),
        ),
    )
}
