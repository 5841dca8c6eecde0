//! MongoDB as a backend of the ledger ([`MongoStore`]) and of rollouts ([`MongoRollouts`]).
//!
//! Servers differ in what they can do: a single server has no transactions, and servers that only
//! speak the protocol lack more. So every write is designed to be one update of one document. What
//! belongs to it is written before and cannot be reached until then. A process that is killed
//! between two writes leaves documents that no reader reaches, and a repeated call completes.
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
