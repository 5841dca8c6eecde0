//! Anthropic's API: messages, token counting, and models.

mod endpoints;
mod messages;
mod models;
mod request;
mod write;

#[cfg(test)]
mod endpoint_tests;

pub(crate) use endpoints::{count_tokens, messages, rejection_response};
pub(crate) use models::{model, models};
