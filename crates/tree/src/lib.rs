//! Segments of tokens, the trajectories that they form, and the batches that a learner trains on.
//!
//! The unit of record is a [`Segment`]: a run of token ids that were context for the model (a
//! prompt, a tool result, a template boundary; *given* in names), *sampled* by it (with the
//! behavior log-probability and the weight version of every token) or *demonstrated* to it (an
//! assistant turn by another author). Segments form a [`Trajectory`]: a chat turn appends, an
//! edited history forks. A *sequence* (`sequence` in names) runs from a root to one segment: it
//! contains the tokens of one model call. Attempts have names ([`AttemptId`]) that are derived from
//! their slot in a run ([`AttemptSlot`]).
//!
//! A [`TreeBatch`] is the input of a learner. Sequences are merged **on token ids only**, so every
//! shared token goes through the model once. A trained token has one [`Term`] for each sequence
//! that trains it.
//!
//! # Example
//! ```
//! use levade_tree::{SequenceInput, SequenceTarget, Term, TreeBatch};
//!
//! // Two sequences share the tokens 1 2 3; each trains its own last token.
//! let term = |sequence| Term { sequence, weight: 1.0, ..Term::default() };
//! let input = |sequence, tokens: &[u32]| SequenceInput {
//!     tokens: tokens.to_vec().into(),
//!     targets: vec![SequenceTarget {
//!         index: tokens.len() as u32 - 1,
//!         temperature: 1.0,
//!         term: term(sequence),
//!     }],
//! };
//! let batch = TreeBatch::merge(&[input(0, &[1, 2, 3, 4]), input(1, &[1, 2, 3, 5])])?;
//! assert_eq!(batch.tokens, [1, 2, 3, 4, 5]);
//! assert_eq!(batch.nodes.len(), 3);
//! # Ok::<(), levade_tree::TreeError>(())
//! ```
//!
//! # Guarantees
//! - **Plain data**, no I/O. Merging the same sequences twice yields equal batches.
//! - **Context tokens are never targets.**
//!
//! Out of scope: rewards and advantages (`levade-rl`), and text.

mod batch;
mod component;
mod identity;
mod outcome;
mod seat;
mod segment;
mod timing;
mod tokens;

pub use batch::{Node, SequenceInput, SequenceTarget, Target, Term, TreeBatch};
pub use component::{Component, CreditTarget};
pub use identity::{AttemptId, AttemptSlot, DEFAULT, InvalidAttemptId, Purpose, RunId};
pub use outcome::{AttemptWarning, CallCounts, ContextTruncation, Drift, Finish, Outcome};
pub use seat::{SEAT_SEPARATOR, agent_of, is_seat, parse_seat, seat_name};
pub use segment::{Kind, MaskReason, Part, Segment, SegmentId, Trajectory, VersionRun};
pub use timing::{TimeInterval, TimedPart, Timing, Timings};
pub use tokens::Tokens;

/// Errors in a trajectory or a batch.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TreeError {
    /// A segment names a parent that is not in the trajectory.
    #[error("segment {segment} names parent {parent}, but the trajectory has only {len} segments")]
    NoParent {
        /// Index of the segment that is being added.
        segment: u32,
        /// Index of the parent that the segment names.
        parent: u32,
        /// Number of segments in the trajectory.
        len: usize,
    },
    /// A segment continues its parent at a position that the parent does not have.
    #[error(
        "segment {segment} continues its parent after {after} tokens, but must do so after 1 to \
         {len} tokens"
    )]
    Fork {
        /// Index of the segment that is being added.
        segment: u32,
        /// Number of parent tokens that precede the fork.
        after: usize,
        /// Number of tokens of the parent.
        len: usize,
    },
    /// The per-token data of a segment does not match its tokens.
    #[error("segment {segment} has {tokens} tokens but {found} {what}")]
    Length {
        /// Index of the segment that is being added.
        segment: u32,
        /// Number of tokens of the segment.
        tokens: usize,
        /// Number of values in the segment's per-token data.
        found: usize,
        /// Kind of the values, such as "log-probabilities".
        what: &'static str,
    },
    /// A token to train on has no preceding token, or its index is beyond the end of its sequence.
    #[error("sequence {sequence} has a target at token {index}, but targets must be in 1..{len}")]
    Target {
        /// Index of the sequence in the input of the merge.
        sequence: usize,
        /// Index of the target token in the sequence.
        index: u32,
        /// Number of tokens of the sequence.
        len: usize,
    },
    /// The batch is inconsistent, so [`TreeBatch::merge`] cannot have returned it.
    #[error("the batch is malformed: {0}; create it with TreeBatch::merge, and send it unchanged")]
    Malformed(String),
    /// A sequence of the batch has no tokens.
    #[error("sequence {sequence} is empty")]
    EmptySequence {
        /// Index of the sequence in the input of the merge.
        sequence: usize,
    },
}
