//! The training loop: sample, score, batch, update, checkpoint.

pub mod recipe;
