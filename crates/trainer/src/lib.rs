//! The training loop: sample, score, batch, update, checkpoint.
