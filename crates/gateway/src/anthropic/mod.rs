//! Anthropic's API: messages, and the counting of their tokens.

mod endpoints;
mod messages;
mod request;
mod write;

#[cfg(test)]
mod endpoint_tests;

pub(crate) use endpoints::{count_tokens, messages};
