//! Agent loops, tools and tasks.
//!
//! [`tasks`] says what is asked and where it comes from; [`tools`] says what an agent can do besides write, and turns
//! every call, good or bad, into an observation.

pub mod tasks;
pub mod tools;
