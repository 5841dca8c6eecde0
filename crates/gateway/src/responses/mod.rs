//! OpenAI's Responses API: inputs and outputs are lists of items, and a request can continue an
//! earlier response by its id.

mod caller_memory;
mod endpoints;
mod items;
mod memory;
mod request;
mod tools;
mod write;

#[cfg(test)]
mod endpoint_tests;
#[cfg(test)]
mod extras_tests;

pub(crate) use endpoints::{
    count_input_tokens, create_response, delete_response, get_response, list_input_items,
};
pub(crate) use memory::ResponseMemory;
