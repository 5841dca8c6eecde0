//! Draws a recorded attempt as a graph.

use levade_run::dir::RunDir;
use levade_store::{Attempt, Store};
use levade_traces::{CallTree, TimesFile};

use super::{dot, graph, svg};
use crate::recorded::{attempt_with_times, run_chats};

/// Draws an attempt as a graph of its model calls and tool calls.
pub async fn draw(
    run: &RunDir,
    store: &dyn Store,
    attempt: &Attempt,
    format: graph::Format,
) -> anyhow::Result<String> {
    let times = TimesFile::read(run.root())?;
    let timed = attempt_with_times(store, &attempt.id, &times).await?;
    let attempt = timed.as_ref().unwrap_or(attempt);
    let tree = CallTree::new(attempt, &run_chats(run)?);
    let graph = graph::Graph::new(attempt, &tree);
    Ok(match format {
        graph::Format::Svg => svg::svg(&graph),
        graph::Format::Dot => dot::dot(&graph),
    })
}
