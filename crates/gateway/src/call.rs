//! A client's call: its request, and the name of the requested model.

use levade_call::{Input, Request};

/// Request of a client, with the name of the requested model.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Name of the requested model. Can be empty.
    pub model: String,
    /// Request without the model's name.
    pub request: Request,
}

impl Call {
    /// Creates a call with default options.
    pub fn new(model: impl Into<String>, input: Input) -> Self {
        Call { model: model.into(), request: Request::new(input) }
    }
}
