//! Names that the translator and translated templates share.

use std::collections::HashMap;

/// Name of the function that the bodies of loops and macros call first, with the length of their
/// text in bytes.
pub(crate) const TICK: &str = "__levade_tick";
/// Name of the function that checks a container when it is created or stored in a namespace.
pub(crate) const KEEP: &str = "__levade_keep";

/// Name of the function that checks the value over which a loop iterates.
pub(crate) const ITER: &str = "__levade_iter";

/// Name of the function that reads an attribute with the name of a method of Python's `dict`.
pub(crate) const ATTRIBUTE: &str = "__levade_attribute";

/// Macros that read `varargs` or `kwargs`, each with the names of its parameters.
pub(super) type OpenMacros = HashMap<String, Vec<String>>;
