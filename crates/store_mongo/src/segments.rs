//! Stores the segments of attempts, each in one document, without a transaction.
//!
//! The id of a segment's document is a digest of its content and of the segments before it, like
//! the id of a git commit. The document of the attempt contains the id of the last segment, so one
//! update of the attempt appends any number of segments. Segments that a lost or rejected call left
//! behind are not reachable from any attempt. A prompt is stored once, even if several attempts
//! start with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use levade_store::backend::{Failure, SegmentColumns, decode_columns, kind_name, parse_kind};
use levade_tree::{AttemptId, Kind, Segment, SegmentId, Trajectory};
use mongodb::bson::{Bson, Document, doc};
use sha2::{Digest, Sha256};

use crate::connection::{Connection, Result, collect_documents, insert_missing};
use crate::fields;

/// Maximum total size of the columns in one document, in bytes. Longer columns are stored in chunks
/// of this size, because MongoDB limits a document to 16 MB.
const CHUNK_BYTES: usize = 8 << 20;

/// Names of the per-token columns of a segment, in the order in which chunks contain them.
const COLUMNS: [&str; 3] = ["tokens", "logprobs", "versions"];

/// Reads and writes the segments of attempts in a database.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SegmentCollections<'a> {
    pub connection: &'a Connection,
    /// Maximum total size of the columns in one document, in bytes.
    pub chunk_bytes: usize,
}

impl<'a> SegmentCollections<'a> {
    /// Creates a reader and writer that splits columns into chunks of [`CHUNK_BYTES`].
    pub fn new(connection: &'a Connection) -> Self {
        SegmentCollections { connection, chunk_bytes: CHUNK_BYTES }
    }

    /// Writes segments that follow the segment with the digest `previous`, and returns the digest
    /// of the last segment. The segments become part of the attempt when the attempt's document is
    /// updated to contain this digest.
    pub async fn write(
        &self,
        attempt: &AttemptId,
        previous: Option<String>,
        segments: &[Segment],
    ) -> Result<Option<String>> {
        let mut last = previous;
        let mut documents = Vec::new();
        for segment in segments {
            let document = self.write_and_build_document(attempt, last.as_deref(), segment).await?;
            last = Some(fields::read_text(&document, "digest")?);
            documents.push(document);
        }
        // Batches are as large as possible, but never larger than a request may be.
        while !documents.is_empty() {
            let mut size = 0;
            let fits = documents.iter().take_while(|document| {
                size += COLUMNS.iter().map(|name| column_bytes(document, name)).sum::<usize>();
                size <= 2 * CHUNK_BYTES
            });
            let count = fits.count().max(1);
            let batch: Vec<Document> = documents.drain(..count).collect();
            insert_missing(&self.connection.collection("segments"), batch).await?;
        }
        Ok(last)
    }

    /// Creates the document of a segment, after writing its prompt and its chunks.
    async fn write_and_build_document(
        &self,
        attempt: &AttemptId,
        previous: Option<&str>,
        segment: &Segment,
    ) -> Result<Document> {
        let SegmentColumns { tokens, logprobs, versions } = SegmentColumns::encode(segment);
        let index = segment.id.0;
        let attempt = attempt.to_string();
        let mut document = doc! {
            "attempt": &attempt,
            "index": i64::from(index),
            "previous": previous,
            "parent": segment.parent.map(|parent| i64::from(parent.0)),
            "after": segment.after.map(i64::from),
            "kind": kind_name(segment.kind),
            "agent": &segment.agent,
            "policy": &segment.policy,
            "turn": i64::from(segment.turn),
            "temperature": f64::from(segment.temperature),
            "filtered": segment.filtered,
            "length": segment.tokens.len() as i64,
        };
        let mut hash = Sha256::new();
        hash.update(document.to_string().as_bytes());
        for column in [&tokens, &logprobs, &versions] {
            hash.update((column.len() as u64).to_le_bytes());
            hash.update(column);
        }
        let digest = to_hex(&hash.finalize()[..8]);
        let id = format!("{attempt}/{index}/{digest}");
        document.insert("_id", &id);
        document.insert("digest", digest);
        let is_absent = |name: &str, value: &Bson| {
            *value == Bson::Null || name == "filtered" && *value == Bson::Boolean(false)
        };
        let mut document: Document =
            document.into_iter().filter(|(name, value)| !is_absent(name, value)).collect();
        let mut columns = [tokens, logprobs, versions];
        // All attempts at a task start with the same prompt.
        if (segment.kind, segment.parent) == (Kind::Context, None) {
            document.insert("prompt", self.write_prompt(std::mem::take(&mut columns[0])).await?);
        }
        self.put_columns(&id, columns, &mut document).await?;
        Ok(document)
    }

    /// Stores a prompt unless it is stored already, and returns its id.
    async fn write_prompt(&self, tokens: Vec<u8>) -> Result<String> {
        let id = to_hex(&Sha256::digest(&tokens));
        let prompts = self.connection.collection("prompts");
        let is_known = prompts.find_one(doc! { "_id": &id }).projection(doc! { "_id": 1 });
        if is_known.await?.is_none() {
            let mut document = doc! { "_id": &id, "length": (tokens.len() / 4) as i64 };
            self.put_columns(&id, [tokens, Vec::new(), Vec::new()], &mut document).await?;
            insert_missing(&prompts, vec![document]).await?;
        }
        Ok(id)
    }

    /// Adds per-token columns to a document. Columns that are too large are written to chunks,
    /// whose ids are added to the document instead.
    async fn put_columns(
        &self,
        id: &str,
        columns: [Vec<u8>; 3],
        document: &mut Document,
    ) -> Result<()> {
        let lengths = columns.each_ref().map(Vec::len);
        if lengths.iter().sum::<usize>() <= self.chunk_bytes {
            for (name, column) in COLUMNS.into_iter().zip(columns) {
                if !column.is_empty() {
                    document.insert(name, fields::to_binary(column));
                }
            }
            return Ok(());
        }
        let chunks = self.connection.collection("chunks");
        for (index, data) in columns.concat().chunks(self.chunk_bytes).enumerate() {
            let chunk = doc! {
                "_id": format!("{id}/{index}"),
                "of": id,
                "index": index as i64,
                "data": fields::to_binary(data.to_vec()),
            };
            insert_missing(&chunks, vec![chunk]).await?;
        }
        document.insert("chunked", lengths.map(|len| len as i64).to_vec());
        Ok(())
    }

    /// Reads the per-token columns of a segment's document, which may be in chunks.
    async fn read_columns(&self, document: &Document) -> Result<[Vec<u8>; 3]> {
        let Ok(lengths) = document.get_array("chunked") else {
            let mut columns = [Vec::new(), Vec::new(), Vec::new()];
            for (name, column) in COLUMNS.into_iter().zip(&mut columns) {
                *column = fields::read_bytes(document, name)?.to_vec();
            }
            return Ok(columns);
        };
        let id = fields::read_text(document, "_id")?;
        let chunks = self.connection.collection("chunks");
        let chunks =
            collect_documents(chunks.find(doc! { "of": &id }).sort(doc! { "index": 1 }).await?)
                .await?;
        let mut data = Vec::new();
        for chunk in &chunks {
            data.extend_from_slice(fields::read_bytes(chunk, "data")?);
        }
        let lengths: Vec<usize> =
            lengths.iter().filter_map(fields::as_integer).map(|len| len as usize).collect();
        let [tokens, logprobs, versions] = lengths[..] else {
            return Err(Failure::Corrupt(format!("the chunks of {id} have no lengths")).into());
        };
        if data.len() != tokens + logprobs + versions {
            return Err(Failure::Corrupt(format!("a chunk of {id} is missing")).into());
        }
        let versions = data.split_off(tokens + logprobs);
        let logprobs = data.split_off(tokens);
        Ok([data, logprobs, versions])
    }

    /// Returns the documents of the segments at `indices` of an attempt, keyed by index. The last
    /// segment of the attempt has the index `len` − 1 and the digest `last`.
    pub async fn find(
        &self,
        attempt: &AttemptId,
        (len, last): (u32, Option<&str>),
        indices: &BTreeSet<u32>,
    ) -> Result<BTreeMap<u32, Document>> {
        let of: Vec<i64> = indices.iter().map(|index| i64::from(*index)).collect();
        let attempt = attempt.to_string();
        let segments = self.connection.collection("segments");
        let filter = doc! { "attempt": &attempt, "index": { "$in": of } };
        let mut found: BTreeMap<u32, Vec<Document>> = BTreeMap::new();
        for document in collect_documents(segments.find(filter).await?).await? {
            found.entry(fields::read_integer(&document, "index")?).or_default().push(document);
        }
        if found.values().any(|candidates| candidates.len() > 1) {
            let names = doc! { "index": 1, "digest": 1, "previous": 1 };
            let all = collect_documents(
                segments.find(doc! { "attempt": &attempt }).projection(names).await?,
            )
            .await?;
            let chain = order_digests(&all, len, last)?;
            for (index, candidates) in &mut found {
                let name = chain.get(*index as usize).map(String::as_str);
                candidates.retain(|of| of.get_str("digest").ok() == name);
            }
        }
        Ok(found.into_iter().filter_map(|(i, mut of)| Some((i, of.pop()?))).collect())
    }

    /// Returns all segments of an attempt that has `len` segments and whose last segment has the
    /// digest `last`.
    pub async fn read_trajectory(
        &self,
        attempt: &AttemptId,
        len: u32,
        last: Option<&str>,
    ) -> Result<Trajectory> {
        let mut trajectory = Trajectory::new();
        if len == 0 {
            return Ok(trajectory);
        }
        let of = doc! { "attempt": attempt.to_string() };
        let segments = self.connection.collection("segments");
        let documents =
            collect_documents(segments.find(of).sort(doc! { "index": 1 }).await?).await?;
        let chain = order_digests(&documents, len, last)?;
        let mut by_digest: BTreeMap<&str, &Document> = BTreeMap::new();
        for document in &documents {
            by_digest.insert(document.get_str("digest").unwrap_or_default(), document);
        }
        for (index, digest) in chain.iter().enumerate() {
            let Some(document) = by_digest.get(digest.as_str()) else { continue };
            let segment = self.parse(document).await?;
            let pushed = trajectory.push(segment);
            pushed.map_err(|error| Failure::Corrupt(format!("segment {index}: {error}")))?;
        }
        Ok(trajectory)
    }

    /// Parses the document of a segment, after reading its prompt and its chunks.
    pub async fn parse(&self, document: &Document) -> Result<Segment> {
        let index: u32 = fields::read_integer(document, "index")?;
        let corrupt = |what: &str| Failure::Corrupt(format!("segment {index}: {what}"));
        let [mut tokens, logprobs, versions] = self.read_columns(document).await?;
        if let Some(prompt) = fields::read_optional_text(document, "prompt")? {
            let found =
                self.connection.collection("prompts").find_one(doc! { "_id": prompt }).await?;
            [tokens, _, _] =
                self.read_columns(&found.ok_or_else(|| corrupt("the prompt is missing"))?).await?;
        }
        let kind = fields::read_text(document, "kind")?;
        let turn = fields::read_integer(document, "turn")?;
        let segment = Segment {
            id: SegmentId(index),
            parent: fields::read_optional_integer(document, "parent")?.map(SegmentId),
            after: fields::read_optional_integer(document, "after")?,
            kind: parse_kind(&kind).ok_or_else(|| corrupt(&format!("unknown kind `{kind}`")))?,
            temperature: fields::read_number(document, "temperature")? as f32,
            filtered: fields::read_optional_integer(document, "filtered")? == Some(1_i64),
            agent: fields::read_text(document, "agent")?,
            policy: fields::read_text(document, "policy")?,
            ..Segment::context(None, Vec::new(), turn)
        };
        let segment = decode_columns(segment, &tokens, &logprobs, &versions);
        Ok(segment.ok_or_else(|| corrupt("a list of numbers is truncated"))?)
    }
}

/// Returns the digests of an attempt's segments in order. The chain ends with the digest `last`.
fn order_digests(documents: &[Document], len: u32, last: Option<&str>) -> Result<Vec<String>> {
    let mut previous: BTreeMap<(i64, &str), Option<&str>> = BTreeMap::new();
    for document in documents {
        let index = fields::read_integer(document, "index")?;
        let name = document.get_str("digest").unwrap_or_default();
        previous.insert((index, name), document.get_str("previous").ok());
    }
    let mut chain = Vec::new();
    let mut next = last;
    for index in (0..len).rev() {
        let name = next.and_then(|name| Some((name, previous.get(&(i64::from(index), name))?)));
        let Some((name, before)) = name else {
            return Err(Failure::Corrupt(format!("segment {index} is missing")).into());
        };
        chain.push(name.to_owned());
        next = *before;
    }
    chain.reverse();
    Ok(chain)
}

/// Returns the size of a column in a document, in bytes.
fn column_bytes(document: &Document, name: &str) -> usize {
    fields::read_bytes(document, name).map_or(0, <[u8]>::len)
}

/// Formats bytes as hexadecimal digits.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
