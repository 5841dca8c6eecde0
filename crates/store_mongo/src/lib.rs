//! MongoDB as a backend of the ledger ([`MongoStore`]) and of rollouts ([`MongoRollouts`]).
//!
//! This crate uses no transactions, because a single MongoDB server does not support them, and
//! other servers with the same protocol lack further features. Instead, every write ends with one
//! update of one document. Other documents that belong to the write are written before, and no
//! reader reaches them until the update. A process that is killed in between leaves documents that
//! no reader reaches, and a repeated call completes the write.
//!
//! # Guarantees
//! - **Durable.** A write returns after the majority of the servers has it in its journal.
//! - **One trainer.** The lease of a run names its trainer. A trainer that lost the lease cannot
//!   write.
//! - **Readable.** Tasks, outcomes, scores, spans and metadata are plain fields. Only values per
//!   token are binary: little-endian `u32` and `f32`, as in SQLite.
//! - **Exact.** JSON is returned to the byte, and numbers to the bit.
//! - **Waits have a deadline**, and errors name the address without its password.

mod attempts;
mod connection;
mod fields;
mod json;
mod plans;
mod rollouts;
mod run_lease;
mod segments;
mod store;
#[cfg(test)]
mod tests;
mod withdrawals;

pub use rollouts::MongoRollouts;
pub use store::MongoStore;
