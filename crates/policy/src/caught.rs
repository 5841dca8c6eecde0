//! Calls of a library that panics on some damaged files: the panic becomes a text for an error, and prints
//! nothing.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether this thread is inside [`caught`].
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Makes the call. What it was given must not be used again after a panic.
///
/// # Errors
/// The panic's message.
pub fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    // The hook is the process's: it asks which thread panics, and leaves the others to the hook that was
    // there.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                before(info);
            }
        }));
    });
    let outer = QUIET.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    QUIET.set(outer);
    result.map_err(|cause| {
        let text = cause.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| cause.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_text() {
        assert_eq!(caught(|| 1), Ok(1));
        assert_eq!(caught(|| -> i32 { panic!("at {}", 7) }), Err("at 7".into()));
        assert_eq!(caught(|| caught(|| -> i32 { panic!("inner") }).is_err()), Ok(true));
        assert!(!QUIET.get());
    }
}
