//! The HTTP layer: paths, keys, request bodies, and responses.

mod answer;
mod incoming;
mod serve;

pub(crate) use answer::{Dialect, Gathered, Merged, answer, failed, frame, gather_all, json, merge_all};
pub(crate) use incoming::{Incoming, or_default, read};
#[cfg(test)]
pub(crate) use serve::router;
pub use serve::serve;
