//! Workers in Python: a loader for their modules, and the protocol module that they share.

use serde_json::{Value, json};

/// Python program of a worker, which loads the worker's modules from the first line of its input.
const LOADER: &str = include_str!("python/start.py");

/// Python source of the module `levade_worker.protocol`.
const PROTOCOL: &str = include_str!("python/protocol.py");

/// Returns the command that starts a worker with the Python interpreter `interpreter`.
pub fn python_command(interpreter: &str) -> Vec<String> {
    // Buffered output would be lost if a process terminates itself.
    [interpreter, "-u", "-c", LOADER].map(str::to_owned).to_vec()
}

/// Returns the first input line for a worker. `modules` contains the names and sources of its
/// Python modules, each after the modules that it imports; the last module must be `serve`. `first`
/// contains the data for `serve.main(first, line)`. All modules can import
/// `levade_worker.protocol`.
pub fn python_first_line(modules: &[(&str, &str)], mut first: Value) -> Value {
    let modules: Vec<_> =
        [("protocol", PROTOCOL)].into_iter().chain(modules.iter().copied()).collect();
    first["modules"] = json!(modules);
    first
}
