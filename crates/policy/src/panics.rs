//! Calls a library that panics on some damaged files: converts the panic to an error text and
//! prints nothing.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether this thread is inside [`catch_panic`].
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `call` and catches a panic. After a panic, the values that `call` captured must not be used
/// again.
///
/// # Errors
/// Returns the panic's message if `call` panics.
pub fn catch_panic<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    // The hook applies to the process. It silences only threads that are inside `catch_panic`, and
    // leaves panics of other threads to the previous hook.
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
        text.or_else(|| cause.downcast_ref::<&str>().copied())
            .unwrap_or("a panic without message")
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catch_panic_returns_panic_message() {
        assert_eq!(catch_panic(|| 1), Ok(1));
        assert_eq!(catch_panic(|| -> i32 { panic!("at {}", 7) }), Err("at 7".into()));
        assert_eq!(catch_panic(|| catch_panic(|| -> i32 { panic!("inner") }).is_err()), Ok(true));
        assert!(!QUIET.get());
    }
}
