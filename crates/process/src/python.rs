//! Workers in Python: a loader for their modules, and the protocol module that they share.

use serde_json::{Value, json};

/// Program of a worker, which loads the worker's modules from the first line of its input.
const LOADER: &str = include_str!("python/start.py");

/// Source of the module `levade_worker.protocol`.
const PROTOCOL: &str = include_str!("python/protocol.py");

/// Returns the command of a worker that `interpreter` runs.
pub fn python_command(interpreter: &str) -> Vec<String> {
    // Buffered output would be lost if a process terminates itself.
    [interpreter, "-u", "-c", LOADER].map(str::to_owned).to_vec()
}

/// Returns the first line for a worker. `modules` holds the names and sources of its modules, each
/// after those that it imports; the last one must be `serve`. `first` holds the data for
/// `serve.main(first, line)`. All modules can import `levade_worker.protocol`.
pub fn python_first_line(modules: &[(&str, &str)], mut first: Value) -> Value {
    let modules: Vec<_> =
        [("protocol", PROTOCOL)].into_iter().chain(modules.iter().copied()).collect();
    first["modules"] = json!(modules);
    first
}
