//! Anthropic's API: messages, token counting, and models.

mod endpoints;
mod messages;
mod models;
mod request;
mod write;

#[cfg(test)]
mod endpoint_tests;

pub(crate) use endpoints::{count_tokens, create_message, rejection_response};
pub(crate) use models::{get_model, list_models};
