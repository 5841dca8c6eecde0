//! Encodes the values per token of a segment as little-endian bytes, which every backend stores.

use levade_tree::{Kind, Segment, VersionRun};

/// The per-token values of a segment as every backend stores them: one list of little-endian bytes
/// for each kind of value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentColumns {
    /// Token ids of the segment, 4 bytes (`u32`) each.
    pub tokens: Vec<u8>,
    /// Log-probabilities of the tokens, 4 bytes (`f32`) each.
    pub logprobs: Vec<u8>,
    /// Run-length encoded weight versions that sampled the tokens: 12 bytes for each run, the
    /// version (`u64`) and the number of tokens (`u32`).
    pub versions: Vec<u8>,
}

impl SegmentColumns {
    /// Encodes the per-token values of `segment` as little-endian bytes.
    pub fn encode(segment: &Segment) -> Self {
        let versions = segment.versions.iter();
        SegmentColumns {
            tokens: segment.tokens.iter().flat_map(|token| token.to_le_bytes()).collect(),
            logprobs: segment.logprobs.iter().flat_map(|value| value.to_le_bytes()).collect(),
            versions: versions
                .flat_map(|run| run.version.to_le_bytes().into_iter().chain(run.len.to_le_bytes()))
                .collect(),
        }
    }
}

/// Returns `segment` with the per-token values that [`SegmentColumns::encode`] has encoded. Returns
/// `None` if the length of a list is not a multiple of its item size.
pub fn decode_columns(
    segment: Segment,
    tokens: &[u8],
    logprobs: &[u8],
    versions: &[u8],
) -> Option<Segment> {
    let (tokens, []) = tokens.as_chunks::<4>() else { return None };
    let (logprobs, []) = logprobs.as_chunks::<4>() else { return None };
    let (versions, []) = versions.as_chunks::<12>() else { return None };
    Some(Segment {
        tokens: tokens.iter().map(|word| u32::from_le_bytes(*word)).collect(),
        logprobs: logprobs.iter().map(|word| f32::from_le_bytes(*word)).collect(),
        versions: versions.iter().map(parse_version_run).collect::<Option<_>>()?,
        ..segment
    })
}

fn parse_version_run(bytes: &[u8; 12]) -> Option<VersionRun> {
    let (version, len) = bytes.split_first_chunk::<8>()?;
    let len = u32::from_le_bytes(len.try_into().ok()?);
    Some(VersionRun { version: u64::from_le_bytes(*version), len })
}

/// Returns the name of a segment kind in stored data.
pub fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Context => "given",
        Kind::Sampled => "sampled",
        Kind::Demonstrated => "demonstrated",
    }
}

/// Returns the segment kind with the stored name `name`, or `None` if the name is unknown.
pub fn parse_kind(name: &str) -> Option<Kind> {
    [Kind::Context, Kind::Sampled, Kind::Demonstrated]
        .into_iter()
        .find(|&kind| kind_name(kind) == name)
}
