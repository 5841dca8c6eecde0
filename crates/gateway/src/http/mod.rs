//! The HTTP layer: paths, keys, request bodies, and responses.

mod answer;
mod incoming;
mod serve;

pub(crate) use answer::{
    CollectedCompletion, Dialect, EventMerger, answer, failed, frame, gather_all, json, merge_all,
};
pub(crate) use incoming::{IncomingRequest, or_default, read};
#[cfg(test)]
pub(crate) use serve::router;
pub use serve::serve;
