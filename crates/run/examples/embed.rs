//! Embeds a run: starts it, prints its events, stops it after two steps, and resumes it until it
//! finishes.
//!
//! `cargo run --release -p levade-run --example embed`

mod tiny;

use levade_run::{Event, Run, resume, start};
use levade_trainer::Event as Training;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let recipe = tiny::recipe(dir.path(), "run", &[])?;
    println!("{:?}", watch(start(recipe.clone())?, Some(2)).await?);
    println!("{:?}", watch(resume(recipe)?, None).await?);
    Ok(())
}

/// Prints the events of a run, and asks the run to stop after `steps_left` steps. Returns how the
/// run ended.
async fn watch(
    mut run: Run,
    mut steps_left: Option<u32>,
) -> anyhow::Result<Option<levade_trainer::RunEnd>> {
    while let Some(event) = run.next().await {
        if !event.is_progress() {
            println!("{}", serde_json::to_string(&event)?);
        }
        if let (Event::Training(Training::Step { .. }), Some(remaining_steps)) =
            (&event, &mut steps_left)
        {
            *remaining_steps -= 1;
            if *remaining_steps == 0 {
                run.stop();
            }
        }
    }
    run.end().await
}
