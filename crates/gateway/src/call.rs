//! A client's call: its request, and the name of the requested model.

use levade_call::{Input, Request};

/// A client's request for completions, with the name of the requested model.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// Name of the requested model. Can be empty.
    pub model: String,
    /// Prompt, tools and sampling options of the request.
    pub request: Request,
}

impl Call {
    /// Creates a call of `model` with the prompt `input` and default options.
    pub fn new(model: impl Into<String>, input: Input) -> Self {
        Call { model: model.into(), request: Request::new(input) }
    }
}
