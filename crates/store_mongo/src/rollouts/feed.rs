//! Sequence numbers of changes, and the feed that reads them.
//!
//! A counter document issues the numbers. A writer may write its rollout after a reader has already
//! read a change with a larger number; the reader would then miss the rollout. Therefore reader and
//! writer follow this protocol:
//!
//! - The reader announces the number up to which it reads, and then reads.
//! - The writer writes its rollout, and then reads the announced number. If its own number is not
//!   above the announced one, it takes another number and writes again.
//!
//! The later of the two sees the other's write, so no change is missed.

use levade_store::rollouts::Rollout;
use mongodb::bson::{Document, doc};
use mongodb::options::ReturnDocument;

use super::MongoRollouts;
use super::documents::StoredRollout;
use crate::connection::{Result, collect_documents, is_duplicate};
use crate::fields;

/// Name of the counter of rollout changes, which also numbers the positions in the queues.
pub(super) const CHANGES: &str = "changes";

/// Name of the counter of resource versions.
pub(super) const RESOURCES: &str = "resources";

impl MongoRollouts {
    /// Reserves `count` consecutive numbers of a counter, and returns the first number.
    pub(super) async fn reserve_numbers(&self, counter: &str, count: usize) -> Result<i64> {
        let count = count as i64;
        let counters = self.collection("counters");
        let last = loop {
            let increment = counters
                .find_one_and_update(doc! { "_id": counter }, doc! { "$inc": { "last": count } })
                .upsert(true)
                .return_document(ReturnDocument::After);
            match increment.await {
                // Two concurrent calls can both try to create the counter.
                Err(error) if is_duplicate(&error) => {}
                incremented => break incremented?,
            }
        };
        let last: i64 = fields::read_integer(&last.unwrap_or_default(), "last")?;
        Ok(last - count + 1)
    }

    /// Returns the largest change number up to which any reader has announced to read.
    async fn read_announced_number(&self) -> Result<i64> {
        let counter = self.collection("counters").find_one(doc! { "_id": CHANGES }).await?;
        let read =
            counter.map(|counter| fields::read_optional_integer(&counter, "read")).transpose()?;
        Ok(read.flatten().unwrap_or(0))
    }

    /// Ensures that readers of changes see the changes that were just written, and wakes waiting
    /// calls of this process. Each change is a pair (rollout id, change number).
    pub(super) async fn publish_changes(&self, changes: &[(String, i64)]) -> Result<()> {
        let read =
            if changes.is_empty() { return Ok(()) } else { self.read_announced_number().await? };
        for (id, number) in changes {
            let (mut number, mut read) = (*number, read);
            while number <= read {
                let again = self.reserve_numbers(CHANGES, 1).await?;
                let unchanged = doc! { "_id": id, "changed": number };
                let renumber = doc! { "$set": { "changed": again }, "$inc": { "rev": 1_i64 } };
                let renumbered =
                    self.collection("rollouts").update_one(unchanged, renumber).await?;
                if renumbered.matched_count == 0 {
                    // The rollout has changed again, and the later change has its own number.
                    break;
                }
                (number, read) = (again, self.read_announced_number().await?);
            }
        }
        self.changes.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Returns at most `max` rollouts that changed after the change number `since`, in the order of
    /// their last change.
    pub(super) async fn changed_after(&self, since: u64, max: usize) -> Result<Vec<Rollout>> {
        let since = i64::try_from(since).unwrap_or(i64::MAX);
        let max = i64::try_from(max).unwrap_or(i64::MAX);
        let rollouts = self.collection("rollouts");
        let find = |filter: Document| rollouts.find(filter).sort(doc! { "changed": 1 }).limit(max);
        let numbers = find(doc! { "changed": { "$gt": since } }).projection(doc! { "changed": 1 });
        let numbers = collect_documents(numbers.await?).await?;
        let Some(last) = numbers.last() else { return Ok(Vec::new()) };
        let last: i64 = fields::read_integer(last, "changed")?;
        let announce = doc! { "$max": { "read": last } };
        self.collection("counters").update_one(doc! { "_id": CHANGES }, announce).await?;
        let found =
            collect_documents(find(doc! { "changed": { "$gt": since, "$lte": last } }).await?)
                .await?;
        found.into_iter().map(|of| StoredRollout::parse(of)?.to_rollout()).collect()
    }
}
