//! Stores the segments of attempts. A prompt is stored once, however many attempts start with it.

use levade_tree::{Kind, Segment, SegmentId, Trajectory};
use rusqlite::{Connection, OptionalExtension, Row, params};
use sha2::{Digest, Sha256};

use crate::columns::{SegmentColumns, decode_columns, kind_name, parse_kind};
use crate::error::Failure;

/// Query for the columns of a segment, in the order in which [`parse_segment`] reads them.
macro_rules! select {
    ($rest:literal) => {
        concat!(
            "SELECT s.id, parent, kind, agent, turn, temperature, filtered, coalesce(s.tokens, \
             p.tokens), logprobs, versions,
                 after, policy
             FROM segments s LEFT JOIN prompts p ON p.id = s.prompt WHERE attempt = ?1 ",
            $rest
        )
    };
}

/// Inserts segments of the attempt whose row id is `attempt`.
pub(super) fn insert_segments<'a>(
    to: &Connection,
    attempt: i64,
    segments: impl IntoIterator<Item = &'a Segment>,
) -> Result<(), Failure> {
    let mut statement = to.prepare_cached(
        "INSERT INTO segments (attempt, id, parent, after, kind, agent, policy, turn, \
         temperature, filtered, prompt,
             tokens, logprobs, versions, crc)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14,
             checksum(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?15, ?13, ?14))",
    )?;
    for segment in segments {
        let SegmentColumns { tokens, logprobs, versions } = SegmentColumns::encode(segment);
        // All attempts at a task start with the same prompt.
        let (prompt, own) = match (segment.kind, segment.parent) {
            (Kind::Context, None) => (Some(find_or_insert_prompt(to, &tokens)?), None),
            _ => (None, Some(&tokens)),
        };
        statement.execute(params![
            attempt,
            segment.id.0,
            segment.parent.map(|parent| parent.0),
            segment.after,
            kind_name(segment.kind),
            segment.agent,
            segment.policy,
            segment.turn,
            f64::from(segment.temperature),
            segment.filtered,
            prompt,
            own,
            logprobs,
            versions,
            tokens,
        ])?;
    }
    Ok(())
}

/// Returns the row id of the prompt with these tokens. Inserts the prompt if it is not stored yet.
fn find_or_insert_prompt(to: &Connection, tokens: &[u8]) -> Result<i64, Failure> {
    let digest = Sha256::digest(tokens);
    let find = "SELECT id FROM prompts WHERE digest = ?1";
    let found = to.prepare_cached(find)?.query_row([&digest[..]], |row| row.get(0)).optional()?;
    match found {
        Some(id) => Ok(id),
        None => {
            let insert = "INSERT INTO prompts (digest, tokens) VALUES (?1, ?2)";
            Ok(to.prepare_cached(insert)?.insert(params![&digest[..], tokens])?)
        }
    }
}

/// Verifies the checksums of all segments of an attempt.
pub(super) fn verify_checksums(from: &Connection, attempt: i64) -> Result<(), Failure> {
    let mut statement = from.prepare_cached(
        "SELECT s.id, p.digest, p.tokens,
             crc IS NULL OR crc IS checksum(attempt, s.id, parent, after, kind, agent, policy, \
         turn, temperature, filtered, coalesce(s.tokens, p.tokens), logprobs, versions)
         FROM segments s LEFT JOIN prompts p ON p.id = s.prompt WHERE attempt = ?1",
    )?;
    let mut rows = statement.query([attempt])?;
    while let Some(row) = rows.next()? {
        let id: u32 = row.get(0)?;
        let prompt: (Option<Vec<u8>>, Option<Vec<u8>>) = (row.get(1)?, row.get(2)?);
        let is_prompt_intact = match prompt {
            (Some(digest), Some(tokens)) => digest == Sha256::digest(&tokens)[..],
            _ => true,
        };
        if !row.get::<_, bool>(3)? || !is_prompt_intact {
            return Err(Failure::Corrupt(format!("segment {id} has a wrong checksum")));
        }
    }
    Ok(())
}

/// Returns the number of segments of an attempt.
pub(super) fn count_segments(from: &Connection, attempt: i64) -> Result<u32, Failure> {
    let count = "SELECT coalesce(max(id) + 1, 0) FROM segments WHERE attempt = ?1";
    Ok(from.prepare_cached(count)?.query_row([attempt], |row| row.get(0))?)
}

/// Returns the number of tokens in a segment, or 0 if the segment is not stored.
pub(super) fn count_segment_tokens(
    from: &Connection,
    attempt: i64,
    id: SegmentId,
) -> Result<usize, Failure> {
    // SQLite returns the length of a blob without reading its bytes.
    let bytes: Option<i64> = from
        .prepare_cached(
            "SELECT length(coalesce(s.tokens, p.tokens)) FROM segments s LEFT JOIN prompts p ON \
             p.id = s.prompt
             WHERE attempt = ?1 AND s.id = ?2",
        )?
        .query_row(params![attempt, id.0], |row| row.get(0))
        .optional()?
        .flatten();
    Ok(bytes.unwrap_or(0) as usize / 4)
}

/// Returns the segment with the id `id` of an attempt, or `None` if it is not stored.
pub(super) fn read_segment(
    from: &Connection,
    attempt: i64,
    id: SegmentId,
) -> Result<Option<Segment>, Failure> {
    let mut statement = from.prepare_cached(select!("AND s.id = ?2"))?;
    let mut rows = statement.query(params![attempt, id.0])?;
    rows.next()?.map(parse_segment).transpose()
}

/// Returns the complete trajectory of an attempt: all its segments.
pub(super) fn read_trajectory(from: &Connection, attempt: i64) -> Result<Trajectory, Failure> {
    let mut statement = from.prepare_cached(select!("ORDER BY s.id"))?;
    let mut rows = statement.query([attempt])?;
    let mut trajectory = Trajectory::new();
    while let Some(row) = rows.next()? {
        let segment = parse_segment(row)?;
        let id = segment.id.0;
        let damaged = |what: &str| Failure::Corrupt(format!("segment {id}: {what}"));
        let id_in_trajectory = trajectory.push(segment).map_err(|e| damaged(&e.to_string()))?;
        if id_in_trajectory.0 != id {
            return Err(damaged(&format!("segment {} is missing", id_in_trajectory.0)));
        }
    }
    Ok(trajectory)
}

fn parse_segment(row: &Row<'_>) -> Result<Segment, Failure> {
    let id: u32 = row.get(0)?;
    let kind: String = row.get(2)?;
    let damaged = |what: &str| Failure::Corrupt(format!("segment {id}: {what}"));
    let bytes = |column: usize| -> Result<&[u8], Failure> {
        row.get_ref(column)?.as_blob().map_err(|_| damaged("a list of numbers is not a BLOB"))
    };
    if row.get_ref(7)? == rusqlite::types::ValueRef::Null {
        return Err(damaged("the prompt is missing"));
    }
    let tokens = bytes(7)?;
    let logprobs = bytes(8)?;
    let versions = bytes(9)?;
    let segment = Segment {
        id: SegmentId(id),
        parent: row.get::<_, Option<u32>>(1)?.map(SegmentId),
        after: row.get(10)?,
        kind: parse_kind(&kind).ok_or_else(|| damaged(&format!("unknown kind `{kind}`")))?,
        temperature: row.get::<_, f64>(5)? as f32,
        filtered: row.get(6)?,
        agent: row.get(3)?,
        policy: row.get(11)?,
        ..Segment::context(None, Vec::new(), row.get(4)?)
    };
    decode_columns(segment, tokens, logprobs, versions)
        .ok_or_else(|| damaged("a list of numbers is truncated"))
}
