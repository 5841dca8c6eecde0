//! Functions for a backend in another crate: the checks of every write, failures without a
//! location, and the encodings that all backends share.
//!
//! A backend checks a write with these functions before it changes anything, and adds its location
//! to a [`Failure`] with [`Failure::into_error`]. So every backend accepts the same values and
//! returns the same errors.

pub use crate::checks::{
    are_plans_equal, check_attempt, check_attempt_id, check_end, check_end_values, check_plan,
    check_restart, find_attempt_difference, select_new_segments,
};
pub use crate::columns::{SegmentColumns, decode_columns, kind_name, parse_kind};
pub use crate::error::{Cause, Failure};
pub use crate::plan_header::{StepPlanHeader, indexed_sequences, push_sequence};
