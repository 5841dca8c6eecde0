//! The form of records and errors between a client and a server of stores.
//!
//! A record is a JSON head and binary columns. Numbers per token (token ids, log-probabilities,
//! versions, advantages) are little-endian columns, and scores and rewards are the bits of their
//! numbers, so that every bit survives, NaN included: JSON cannot carry NaN, and reads it as null.
//! [`encode`] and [`decode`] convert a record. [`WireError`] is the form of a [`StoreError`].
//!
//! # Format
//! `LVR`, the version byte 1, the length of the head as `u32`, the head, and the columns in the
//! order in which the head mentions their lengths.
//!
//! Out of scope: HTTP, which the crates `levade-store-server` and `levade-store-client` implement.
//!
//! [`StoreError`]: crate::StoreError

mod error;

pub use error::WireError;
