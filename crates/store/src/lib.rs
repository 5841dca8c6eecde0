//! Durable record of attempts, segments, rewards and training steps.
