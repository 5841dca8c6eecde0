//! Scorers: from an answer to a number.
