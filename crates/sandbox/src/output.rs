//! Captured output of any length, of which the start and the end are kept.

use std::collections::VecDeque;

/// Captured output of a stream: all bytes if they are within the limit, and otherwise the first and
/// the last bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CapturedOutput {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    max_bytes: usize,
    /// Number of bytes that were received, including omitted bytes.
    pub total: u64,
}

impl CapturedOutput {
    /// Creates an empty capture that keeps at most `max_bytes` bytes.
    pub(crate) fn new(max_bytes: usize) -> Self {
        CapturedOutput { max_bytes, ..CapturedOutput::default() }
    }

    /// Appends bytes that were received from the stream.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room =
            (self.max_bytes - self.max_bytes / 2).saturating_sub(self.head.len()).min(bytes.len());
        let (first, rest) = bytes.split_at(room);
        self.head.extend_from_slice(first);
        let keeps = self.max_bytes / 2;
        let rest = &rest[rest.len().saturating_sub(keeps)..];
        let excess = (self.tail.len() + rest.len()).saturating_sub(keeps);
        self.tail.drain(..excess);
        self.tail.extend(rest);
    }

    /// Returns the number of received bytes that were not kept.
    pub fn omitted_bytes(&self) -> u64 {
        self.total - (self.head.len() + self.tail.len()) as u64
    }

    /// Returns the captured output as text, with a line in place of the omitted bytes. Invalid
    /// UTF-8 is replaced.
    pub fn text(&self) -> String {
        let tail: Vec<u8> = self.tail.iter().copied().collect();
        if self.omitted_bytes() == 0 {
            let all = [self.head.as_slice(), &tail].concat();
            return String::from_utf8_lossy(&all).into_owned();
        }
        let head = String::from_utf8_lossy(&self.head);
        let tail = String::from_utf8_lossy(&tail);
        format!(
            "{head}\n[... {} of {} bytes are left out ...]\n{tail}",
            self.omitted_bytes(),
            self.total
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captured_output_keeps_both_ends_for_any_chunking() {
        let bytes: Vec<u8> = (0..1000u32).map(|at| b'a' + (at % 26) as u8).collect();
        for length in [1, 7, 64, 999, 1000] {
            let mut kept = CapturedOutput::new(100);
            bytes.chunks(length).for_each(|chunk| kept.push(chunk));
            assert_eq!((kept.total, kept.omitted_bytes()), (1000, 900));
            let text = kept.text();
            let (head, tail) =
                text.split_once("\n[... 900 of 1000 bytes are left out ...]\n").unwrap();
            assert_eq!(
                (head.as_bytes(), tail.as_bytes()),
                (&bytes[..50], &bytes[950..]),
                "{length}"
            );
        }
        let mut full = CapturedOutput::new(100);
        full.push(&bytes[..60]);
        full.push(&bytes[60..100]);
        assert_eq!((full.text().as_bytes(), full.omitted_bytes()), (&bytes[..100], 0));
    }
}
