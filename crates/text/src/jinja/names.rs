//! Names that the translator and translated templates share.

use std::collections::HashMap;

/// Function that the bodies of loops and macros call first, with the length of their text in bytes.
pub(crate) const TICK: &str = "__levade_tick";
/// Function that checks a container when it is created or stored in a namespace.
pub(crate) const KEEP: &str = "__levade_keep";

/// Function that checks the value over which a loop iterates.
pub(crate) const ITER: &str = "__levade_iter";

/// Function that reads an attribute with the name of a method of Python's `dict`.
pub(crate) const ATTRIBUTE: &str = "__levade_attribute";

/// Macros that read `varargs` or `kwargs`, with the names of their parameters.
pub(super) type OpenMacros = HashMap<String, Vec<String>>;
