//! Global allocator that ends the process with an error message, instead of an abort, when memory
//! runs out.
//!
//! Large blocks are planned before a run starts, but an allocation can still fail: other processes
//! take memory during the run, and the limit on address space (`ulimit -v`) follows other rules.
//! The process cannot continue after that; the run resumes from its last checkpoint.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use levade_engine::available_memory;

/// Allocator that calls the system's allocator, and ends the process if an allocation fails.
pub struct EndingAllocator;

// SAFETY: every call is forwarded unchanged, and a null pointer is never returned to the caller.
unsafe impl GlobalAlloc for EndingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `alloc`.
        end_if_null(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `alloc_zeroed`.
        end_if_null(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller upholds the contract of `realloc`.
        end_if_null(unsafe { System.realloc(start, layout, size) }, size)
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(start, layout) }
    }
}

fn end_if_null(start: *mut u8, size: usize) -> *mut u8 {
    if start.is_null() {
        end_process(size);
    }
    start
}

thread_local! {
    /// Whether this thread has started to end the process.
    static ENDING: Cell<bool> = const { Cell::new(false) };
}

#[cold]
fn end_process(size: usize) -> ! {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    // Reporting the free memory allocates as well. If that allocation fails, this function is
    // entered again on the same thread and exits after the first line of the message.
    if !ENDING.replace(true) {
        if REPORTED.swap(true, Ordering::SeqCst) {
            // Another thread is printing the message.
            std::thread::sleep(Duration::from_secs(1));
        } else {
            report_out_of_memory(size);
        }
    }
    std::process::exit(1)
}

fn report_out_of_memory(size: usize) {
    let mut out = std::io::stderr();
    // The process ends, so a failed write cannot be reported.
    let _ =
        writeln!(out, "\nerror: out of memory: {size} bytes were requested and are not available");
    if let Some(free) = available_memory() {
        let _ = writeln!(
            out,
            "{} MiB are free, according to the machine, its control groups and `ulimit`",
            free >> 20
        );
    }
    let _ = writeln!(
        out,
        "lower `engine.memory_mb`, raise the limit, or free memory; --resume continues a run from \
         its last checkpoint"
    );
}
