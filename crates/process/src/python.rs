//! Workers in Python: a loader for their modules, and the protocol that they share.

use serde_json::{Value, json};

/// The program of a worker, which loads its modules from the first line of its input.
const LOADER: &str = include_str!("python/start.py");

/// The module `levade_worker.protocol`.
const PROTOCOL: &str = include_str!("python/protocol.py");

/// Returns the command of a worker that `interpreter` runs.
pub fn python_command(interpreter: &str) -> Vec<String> {
    // Output that is buffered would be lost if a process ends itself.
    [interpreter, "-u", "-c", LOADER].map(str::to_owned).to_vec()
}

/// Returns the first line for a worker: the names and sources of its modules, each after those that it
/// imports, and what `serve.main(first, line)` finds in `first`. The last module must be `serve`. All
/// modules can import `levade_worker.protocol`.
pub fn python_first_line(modules: &[(&str, &str)], mut first: Value) -> Value {
    let modules: Vec<_> = [("protocol", PROTOCOL)].into_iter().chain(modules.iter().copied()).collect();
    first["modules"] = json!(modules);
    first
}
