//! A call of a client: its request, and the model that it asks for.

use levade_call::{Input, Request};

/// Request of a client, with the name of the model that it asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Name of the model.
    pub model: String,
    /// The request.
    pub request: Request,
}

impl Call {
    /// Creates a call with default options.
    pub fn new(model: impl Into<String>, input: Input) -> Self {
        Call { model: model.into(), request: Request::new(input) }
    }
}
