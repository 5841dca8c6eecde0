//! The HTTP layer: paths, keys, request bodies, and responses.

mod incoming;
mod response;
mod serve;

pub(crate) use incoming::{IncomingRequest, or_default, query_field, read};
pub(crate) use response::{
    CollectedCompletion, Dialect, EventMerger, error_response, frame, gather_all, json, merge_all,
    write_response,
};
pub use serve::{router, serve};
