//! An allocator that ends the process with an error where there is no memory, and not with an abort.
//!
//! Large blocks are planned before the start, but limits can be passed all the same: others take memory
//! meanwhile, and address space (`ulimit -v`) goes by other rules. No code here could go on then, and a run
//! goes on from its last checkpoint.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use levade_engine::available_memory;

/// The system's allocator.
pub struct OrEnd;

// SAFETY: every call is passed on as it is; what comes back null never returns to the caller.
unsafe impl GlobalAlloc for OrEnd {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        or_end(unsafe { System.realloc(start, layout, size) }, size)
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

fn or_end(start: *mut u8, size: usize) -> *mut u8 {
    if start.is_null() {
        end(size);
    }
    start
}

thread_local! {
    /// Whether this thread is about to end the process.
    static ENDING: Cell<bool> = const { Cell::new(false) };
}

#[cold]
fn end(size: usize) -> ! {
    static SAID: AtomicBool = AtomicBool::new(false);
    // To say what is free takes memory, too; where there is none for that, the first line must do.
    if !ENDING.replace(true) {
        if SAID.swap(true, Ordering::SeqCst) {
            // Another thread is saying it.
            std::thread::sleep(Duration::from_secs(1));
        } else {
            say(size);
        }
    }
    std::process::exit(1)
}

fn say(size: usize) {
    let mut out = std::io::stderr();
    // Nobody is left to tell of a failure.
    let _ = writeln!(out, "\nerror: there is no memory: {size} bytes were asked for and cannot be had");
    if let Some(free) = available_memory() {
        let _ = writeln!(out, "{} MiB are free, by the machine, its control groups and `ulimit`", free >> 20);
    }
    let _ = writeln!(
        out,
        "set `engine.memory_mb` to less, raise the limit, or free memory; a run goes on from its last checkpoint with --resume"
    );
}
