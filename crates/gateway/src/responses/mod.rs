//! OpenAI's Responses API: calls in items, and responses that are continued by their ids.

mod endpoints;
mod items;
mod memory;
mod recall;
mod request;
mod tools;
mod write;

#[cfg(test)]
mod endpoint_tests;
#[cfg(test)]
mod extras_tests;

pub(crate) use endpoints::{delete, get, input_items, input_tokens, responses};
pub(crate) use memory::Memory;
