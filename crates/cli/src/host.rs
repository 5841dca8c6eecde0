//! Creates the host of subcommands: this binary supervises child processes, and setup events are
//! printed.

use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;
use levade_process::Supervisor;
use levade_run::{Event, Host};

use crate::screen::{self, Style};

/// Creates the supervisor of child processes. The supervisor process is this binary.
///
/// # Errors
/// Returns an error if the path of this binary is unknown.
pub fn create_supervisor() -> anyhow::Result<Supervisor> {
    Supervisor::from_current_exe().context("cannot find the executable of this program")
}

/// Creates the host of a subcommand that does not start a run. The host prints setup events.
///
/// # Errors
/// Returns an error if the path of this binary is unknown.
pub fn create_host() -> anyhow::Result<Host> {
    let setup = Mutex::new(SetupPrinter::default());
    Ok(Host::new(create_supervisor()?, move |event| {
        setup.lock().unwrap_or_else(PoisonError::into_inner).print_event(&event);
    }))
}

/// Printer of setup events. It shows a progress bar while a model is downloaded.
#[derive(Default)]
pub struct SetupPrinter {
    stage: String,
    bar: Option<indicatif::ProgressBar>,
}

impl SetupPrinter {
    /// Prints a setup event and ignores other events.
    pub fn print_event(&mut self, event: &Event) {
        let dim = |text: &str| Style::stderr().dim(text);
        match event {
            Event::Fetching { stage, done, total } => self.show_progress(stage, *done, *total),
            Event::Fetched => self.end_progress(),
            Event::Setup { part, text } => eprintln!("{} {text}", dim(&format!("{part:<6}"))),
            Event::Note(note) => eprintln!("{} {note}", dim("note:")),
            _ => {}
        }
    }

    fn show_progress(&mut self, stage: &str, done: u64, total: Option<u64>) {
        if self.stage != stage {
            self.end_progress();
            self.stage = stage.to_owned();
            if !screen::has_bars() {
                eprintln!("{stage}");
            }
            let template = match total {
                Some(_) => "{msg} {bar:30} {bytes}/{total_bytes} · {bytes_per_sec} · {eta} left",
                None => "{spinner} {msg} · {elapsed}",
            };
            let bar =
                screen::create_bar(total.unwrap_or(0), template).with_message(self.stage.clone());
            bar.enable_steady_tick(std::time::Duration::from_millis(120));
            self.bar = Some(bar);
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }

    fn end_progress(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
