//! Tombstones of attempts, and the erasure of withdrawn attempts.
//!
//! A tombstone is a member of the attempt's document, so one update withdraws an attempt and
//! removes its texts. Segments, chunks, prompts and quotes are removed afterwards. A repeated
//! request completes an interrupted erasure.

use std::collections::HashSet;

use levade_store::backend::Failure;
use levade_store::{Status, WithdrawRequest, Withdrawal, erase_quotes};
use levade_tree::Outcome;
use mongodb::bson::{Bson, Document, doc};

use crate::attempts::{self, AttemptHead};
use crate::connection::{Connection, Result, collect_documents};
use crate::{fields, json};

/// Name of the document field that contains the tombstones of an attempt.
const FIELD: &str = "withdrawals";

/// Adds the tombstones that a request demands, and returns them. If the request erases, also erases
/// the texts and tokens of the attempts.
pub(crate) async fn record_withdrawals(
    to: &Connection,
    request: &WithdrawRequest,
) -> Result<Vec<Withdrawal>> {
    let attempts = to.collection("attempts");
    let documents =
        collect_documents(attempts.find(doc! {}).sort(attempts::slot_order()).await?).await?;
    let mut missing: HashSet<_> = request.attempts.iter().copied().collect();
    let mut selected: Vec<(AttemptHead, Vec<(i64, Withdrawal)>)> = Vec::new();
    let mut next_order = 0;
    for document in &documents {
        let head = attempts::parse_head(document)?;
        let earlier = parse_tombstones(document)?;
        next_order = earlier.iter().map(|(order, _)| order + 1).fold(next_order, i64::max);
        missing.remove(&head.attempt.id);
        // The task of an erased attempt was removed, so only the attempt's id can select it.
        if request.selects(&head.attempt) {
            selected.push((head, earlier));
        }
    }
    if let Some(id) = missing.iter().min() {
        return Err(Failure::Unstorable(format!("attempt {id} is not recorded")).into());
    }
    let mut added = Vec::new();
    for (head, earlier) in &selected {
        let id = head.attempt.id.to_string();
        let earlier: Vec<Withdrawal> = earlier.iter().map(|(_, found)| found.clone()).collect();
        let Some(tombstone) = request.tombstone(&head.attempt, &earlier) else { continue };
        let mut set = doc! { "status": Status::Withdrawn.name() };
        if request.erase {
            set.extend(erased_fields()?);
        }
        let text = serde_json::to_string(&tombstone)
            .map_err(|error| Failure::Unstorable(error.to_string()))?;
        let mut member = doc! { "order": next_order };
        json::write_json(&mut member, "tombstone", &text);
        next_order += 1;
        let update = doc! { "$set": set, "$push": { FIELD: member } };
        attempts.update_one(doc! { "_id": &id }, update).await?;
        added.push(tombstone);
    }
    if request.erase {
        for (head, _) in &selected {
            remove_segments(to, &head.attempt.id.to_string()).await?;
        }
        remove_unused_prompts(to).await?;
        let names = selected.iter().map(|(head, _)| head.attempt.slot.name()).collect();
        erase_quotes_in_evals(to, &names).await?;
    }
    added.sort_by_key(|tombstone| (tombstone.slot, tombstone.number));
    Ok(added)
}

/// Returns the tombstones of all withdrawn attempts, in the order in which they were added.
pub(crate) async fn read_tombstones(from: &Connection) -> Result<Vec<Withdrawal>> {
    let withdrawn = doc! { "status": Status::Withdrawn.name() };
    let attempts = from.collection("attempts");
    let found = attempts.find(withdrawn);
    let found = collect_documents(found.projection(doc! { FIELD: 1 }).await?).await?;
    let mut tombstones: Vec<(i64, Withdrawal)> =
        found.iter().map(parse_tombstones).collect::<Result<Vec<_>>>()?.concat();
    tombstones.sort_by_key(|(order, _)| *order);
    Ok(tombstones.into_iter().map(|(_, tombstone)| tombstone).collect())
}

/// Reads the tombstones of an attempt, each with its index among all tombstones of the run.
fn parse_tombstones(of: &Document) -> Result<Vec<(i64, Withdrawal)>> {
    let Ok(members) = of.get_array(FIELD) else { return Ok(Vec::new()) };
    members
        .iter()
        .filter_map(Bson::as_document)
        .map(|member| {
            let text = attempts::json_text(member, "tombstone")?;
            let tombstone = serde_json::from_str(&text).map_err(|error| {
                Failure::Corrupt(format!("a tombstone cannot be read: {error}"))
            })?;
            Ok((fields::read_integer(member, "order")?, tombstone))
        })
        .collect()
}

/// Returns the document fields of an attempt whose texts and tokens are erased.
fn erased_fields() -> Result<Document> {
    let outcome = serde_json::to_string(&Outcome::initial())
        .map_err(|error| Failure::Unstorable(error.to_string()))?;
    let mut fields = doc! {
        "segments": 0_i64, "last": null, "sampled_tokens": 0_i64, "tokens": 0_i64, "error": null,
    };
    fields.extend(json::to_fields("task", Some("null")));
    fields.extend(json::to_fields("outcome", Some(&outcome)));
    Ok(fields)
}

async fn remove_segments(from: &Connection, attempt: &str) -> Result<()> {
    let segments = from.collection("segments");
    let own = doc! { "attempt": attempt };
    for segment in
        collect_documents(segments.find(own.clone()).projection(doc! { "_id": 1 }).await?).await?
    {
        let of = fields::read_text(&segment, "_id")?;
        from.collection("chunks").delete_many(doc! { "of": of }).await?;
    }
    segments.delete_many(own).await?;
    Ok(())
}

/// Removes the prompts that no segment refers to anymore.
async fn remove_unused_prompts(from: &Connection) -> Result<()> {
    let prompts = from.collection("prompts");
    for prompt in
        collect_documents(prompts.find(doc! {}).projection(doc! { "_id": 1 }).await?).await?
    {
        let id = fields::read_text(&prompt, "_id")?;
        let user = from.collection("segments").find_one(doc! { "prompt": &id }).await?;
        if user.is_none() {
            from.collection("chunks").delete_many(doc! { "of": &id }).await?;
            prompts.delete_one(doc! { "_id": &id }).await?;
        }
    }
    Ok(())
}

/// Erases quotes of attempts from the results of evaluations. `names` are the names of the
/// attempts' slots.
async fn erase_quotes_in_evals(from: &Connection, names: &HashSet<String>) -> Result<()> {
    let evals = from.collection("evals");
    for document in collect_documents(evals.find(doc! {}).await?).await? {
        let text = attempts::json_text(&document, "result")?;
        let mut result = serde_json::from_str(&text)
            .map_err(|error| Failure::Corrupt(format!("a result is not JSON: {error}")))?;
        if erase_quotes(&mut result, names) {
            let fields = json::to_fields("result", Some(&result.to_string()));
            let set: Document = fields.into_iter().collect();
            let id = doc! { "_id": document.get("_id") };
            evals.update_one(id, doc! { "$set": set }).await?;
        }
    }
    Ok(())
}
