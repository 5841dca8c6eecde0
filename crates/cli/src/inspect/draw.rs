//! Draws a recorded attempt as a graph.

use levade_run::dir::RunDir;
use levade_store::{Attempt, Store};
use levade_traces::{CallTree, TimesFile};

use super::{dot, graph, svg};
use crate::recorded::{open_run_chats, read_attempt_with_times};

/// Draws an attempt as a graph of its model calls and tool calls.
pub async fn draw_attempt(
    run: &RunDir,
    store: &dyn Store,
    attempt: &Attempt,
    format: graph::Format,
) -> anyhow::Result<String> {
    let times = TimesFile::read(run.root())?;
    let timed = read_attempt_with_times(store, &attempt.id, &times).await?;
    let attempt = timed.as_ref().unwrap_or(attempt);
    let tree = CallTree::new(attempt, &open_run_chats(run)?);
    let graph = graph::AttemptGraph::new(attempt, &tree);
    Ok(match format {
        graph::Format::Svg => svg::format_svg(&graph),
        graph::Format::Dot => dot::format_dot(&graph),
    })
}
