//! Names that translated templates use, and know about.

use std::collections::HashMap;

/// The function that bodies of loops and macros call first, with the bytes of their text.
pub(crate) const TICK: &str = "__levade_tick";
/// The function that looks at a value before a namespace keeps it.
pub(crate) const KEEP: &str = "__levade_keep";

/// The function that looks at what a loop runs over.
pub(crate) const ITER: &str = "__levade_iter";

/// The function that reads an attribute named like a method of Python's `dict`.
pub(crate) const ATTRIBUTE: &str = "__levade_attribute";

/// Macros that read `varargs` or `kwargs`, with the names of their parameters.
pub(super) type OpenMacros = HashMap<String, Vec<String>>;
