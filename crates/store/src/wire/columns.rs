//! Columns of numbers behind the JSON head of a record.

use levade_tree::VersionRun;

use crate::PerToken;

/// Binary columns of a record that is being encoded.
#[derive(Default)]
pub struct ColumnWriter(pub(super) Vec<u8>);

impl ColumnWriter {
    /// Appends a column, and returns its length in bytes.
    fn push_column(&mut self, bytes: impl IntoIterator<Item = u8>) -> u32 {
        let start = self.0.len();
        self.0.extend(bytes);
        (self.0.len() - start) as u32
    }

    pub(super) fn push_tokens(&mut self, tokens: &[u32]) -> u32 {
        self.push_column(tokens.iter().flat_map(|token| token.to_le_bytes()))
    }

    pub(super) fn push_floats(&mut self, values: &[f32]) -> u32 {
        self.push_column(values.iter().flat_map(|value| value.to_le_bytes()))
    }

    pub(super) fn push_versions(&mut self, versions: &[VersionRun]) -> u32 {
        self.push_column(
            versions
                .iter()
                .flat_map(|run| run.version.to_le_bytes().into_iter().chain(run.len.to_le_bytes())),
        )
    }

    pub(super) fn push_per_token(&mut self, values: &PerToken) -> u32 {
        self.push_column(values.to_bytes())
    }
}

/// Binary columns of a record that is being decoded. They are read in the order in which they were
/// written. Lengths are in bytes.
pub struct ColumnReader<'a>(pub(super) &'a [u8]);

impl ColumnReader<'_> {
    fn take_column(&mut self, len: u32) -> Result<&[u8], String> {
        let split = self.0.split_at_checked(len as usize);
        let (column, rest) = split.ok_or_else(|| {
            format!("a column of the record is truncated: {} of {len} bytes left", self.0.len())
        })?;
        self.0 = rest;
        Ok(column)
    }

    /// Reads a column that consists of numbers with `N` bytes each.
    fn take_numbers<T, const N: usize>(
        &mut self,
        len: u32,
        number: impl Fn(&[u8; N]) -> T,
    ) -> Result<Vec<T>, String> {
        let (numbers, rest) = self.take_column(len)?.as_chunks::<N>();
        if rest.is_empty() {
            Ok(numbers.iter().map(number).collect())
        } else {
            Err(format!(
                "a column of the record has {len} bytes, which is not a multiple of {N} bytes, \
                 the size of its numbers"
            ))
        }
    }

    pub(super) fn take_tokens(&mut self, len: u32) -> Result<Vec<u32>, String> {
        self.take_numbers(len, |bytes| u32::from_le_bytes(*bytes))
    }

    pub(super) fn take_floats(&mut self, len: u32) -> Result<Vec<f32>, String> {
        self.take_numbers(len, |bytes| f32::from_le_bytes(*bytes))
    }

    pub(super) fn take_versions(&mut self, len: u32) -> Result<Vec<VersionRun>, String> {
        self.take_numbers(len, |[a, b, c, d, e, f, g, h, len @ ..]: &[u8; 12]| VersionRun {
            version: u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]),
            len: u32::from_le_bytes(*len),
        })
    }

    pub(super) fn take_per_token(&mut self, len: u32) -> Result<PerToken, String> {
        PerToken::from_bytes(self.take_column(len)?).ok_or_else(|| {
            format!(
                "a column of the record has {len} bytes, which is not a list of run-length \
                     encoded numbers"
            )
        })
    }
}
