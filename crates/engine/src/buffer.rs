//! Aligned, zeroed memory for tensors.
//!
//! Large buffers are separate mappings that advise the kernel to use huge pages. Streaming half a
//! gigabyte of weights per token through 4 KiB pages spends a noticeable fraction of the time on
//! address translation, and faulting these pages in one by one takes longer than a training step.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapMut;

/// Minimum size, in bytes, of a buffer that gets its own memory mapping: two huge pages.
const MAPPED: usize = 4 << 20;
const CACHE_LINE: usize = 64;

/// Fixed-size slice of f32, aligned to at least a cache line, and initially zero.
pub struct Buffer {
    start: NonNull<f32>,
    len: usize,
    /// Owner of a large buffer's memory, which other buffers can share. `None` if the memory comes
    /// from the allocator.
    mapping: Option<Arc<MmapMut>>,
}

// SAFETY: the buffer owns its memory exclusively, as a boxed slice would.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates a buffer of `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        let layout = Self::allocation_layout(len);
        if len == 0 {
            return Buffer { start: NonNull::dangling(), len, mapping: None };
        }
        if layout.size() >= MAPPED
            && let Some((mapping, start)) = map_zeroed(layout)
        {
            return Buffer { start, len, mapping: Some(Arc::new(mapping)) };
        }
        // SAFETY: the layout has a size above zero.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(raw.cast()) else { handle_alloc_error(layout) };
        Buffer { start, len, mapping: None }
    }

    /// Allocates zeroed buffers of the lengths `lens` in one memory mapping. Buffers that are read
    /// together then use huge pages even if each buffer is too small for a mapping of its own. The
    /// memory is freed with the last buffer.
    pub fn zeroed_together(lens: &[usize]) -> Vec<Self> {
        let layout = Self::allocation_layout(lens.iter().map(|len| padded_len(*len)).sum());
        let mapped = if layout.size() < MAPPED { None } else { map_zeroed(layout) };
        let Some((mapping, start)) = mapped else {
            return lens.iter().map(|len| Buffer::zeroed(*len)).collect();
        };
        let mapping = Arc::new(mapping);
        let mut next = start;
        lens.iter()
            .map(|&len| {
                let start = next;
                // SAFETY: the mapping is as long as all buffers together.
                next = unsafe { next.add(padded_len(len)) };
                Buffer { start, len, mapping: Some(Arc::clone(&mapping)) }
            })
            .collect()
    }

    /// Grows the buffer to at least `len` values and returns the first `len` values. The contents
    /// are lost if the buffer grows.
    pub fn reserve(&mut self, len: usize) -> &mut [f32] {
        if self.len < len {
            *self = Buffer::zeroed(0);
            *self = Buffer::zeroed(len);
        }
        &mut self[..len]
    }

    fn allocation_layout(len: usize) -> Layout {
        match Layout::from_size_align(len.saturating_mul(size_of::<f32>()), CACHE_LINE) {
            Ok(layout) => layout,
            Err(_) => panic!("a buffer of {len} values exceeds the address space"),
        }
    }
}

fn padded_len(len: usize) -> usize {
    len.next_multiple_of(CACHE_LINE / size_of::<f32>())
}

/// Maps zeroed memory, advises huge pages, and returns the mapping with its address. Returns `None`
/// if mapping fails; callers then use the allocator, which handles out-of-memory.
fn map_zeroed(layout: Layout) -> Option<(MmapMut, NonNull<f32>)> {
    let mut mapping = MmapMut::map_anon(layout.size()).ok()?;
    #[cfg(target_os = "linux")]
    // Only advice: if the kernel rejects it, only speed is lost.
    let _ = mapping.advise(memmap2::Advice::HugePage);
    let start = NonNull::new(mapping.as_mut_ptr().cast())?;
    Some((mapping, start))
}

impl Default for Buffer {
    fn default() -> Self {
        Buffer::zeroed(0)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.len > 0 && self.mapping.is_none() {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.start.as_ptr().cast(), Self::allocation_layout(self.len)) };
        }
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: `start` points to `len` initialized values (dangling but aligned when `len` is
        // 0).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Mutable slice to which several threads write, each to its own part.
///
/// Kernels split their output by rows and columns; a column split cannot be expressed with
/// `split_at_mut`.
pub struct SharedSlice<'a, T = f32> {
    start: *mut T,
    len: usize,
    lifetime: std::marker::PhantomData<&'a mut [T]>,
}

impl<T> Clone for SharedSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedSlice<'_, T> {}

// SAFETY: access goes through `slice`, whose caller guarantees that parts in use at the same time
// do not overlap.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Shares `slice` for the duration of a parallel region.
    pub fn new(slice: &'a mut [T]) -> Self {
        SharedSlice {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            lifetime: std::marker::PhantomData,
        }
    }

    /// Returns the `len` elements from index `at` on.
    ///
    /// # Safety
    /// No other slice that is in use at the same time may overlap this slice.
    ///
    /// # Panics
    /// Panics if the elements are not within the shared slice.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub unsafe fn slice(&self, at: usize, len: usize) -> &mut [T] {
        assert!(at + len <= self.len, "part {at}+{len} of {}", self.len);
        // SAFETY: in bounds by the assertion, not aliased as guaranteed by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }

    /// Returns a pointer to the element at index `at`, for kernels that address rows by a stride.
    ///
    /// # Panics
    /// Panics if `at` is past the end.
    pub fn pointer(&self, at: usize) -> *mut T {
        assert!(at <= self.len, "element {at} of {}", self.len);
        self.start.wrapping_add(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Buffers in one mapping are zero, aligned and disjoint, and outlive their neighbors.
    #[test]
    fn buffers_in_one_mapping_are_independent() {
        let lens = [MAPPED / 4, 0, 1, 17, 3 << 10];
        for lens in [&lens[..], &lens[1..]] {
            let mut buffers = Buffer::zeroed_together(lens);
            for (i, (buffer, len)) in buffers.iter_mut().zip(lens).enumerate() {
                assert_eq!(buffer.len(), *len);
                assert!(
                    buffer.iter().all(|x| *x == 0.0),
                    "zeros at first, whatever was written to the others"
                );
                assert_eq!(buffer.as_ptr().addr() % if *len > 0 { CACHE_LINE } else { 1 }, 0);
                buffer.fill(i as f32 + 1.0);
            }
            while let Some(last) = buffers.pop() {
                drop(last);
                for (i, buffer) in buffers.iter().enumerate() {
                    assert!(buffer.iter().all(|x| *x == i as f32 + 1.0));
                }
            }
        }
    }
}
