//! Over HTTP: paths, keys, bodies, and how answers are written.

mod answer;
mod incoming;
mod serve;

pub(crate) use answer::{Dialect, Gathered, answer, failed, frame, gather_all, json};
pub(crate) use incoming::{Incoming, read};
pub use serve::serve;
