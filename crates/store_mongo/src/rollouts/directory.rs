//! Stores resources and workers.

use levade_store::rollouts::state::TryState;
use levade_store::rollouts::{ANNOUNCEMENT_KEY, Json, Resources, Worker, WorkerStatus};
use mongodb::bson::oid::ObjectId;
use mongodb::bson::{Bson, Document, doc};
use mongodb::options::ReturnDocument;

use super::feed::RESOURCES;
use super::{MongoRollouts, documents};
use crate::connection::{Result, collect_documents, is_duplicate};
use crate::{fields, json};

/// Returns the filter that excludes resources by which a run announces itself to runners.
pub(super) fn no_announcement_filter() -> Document {
    let key = format!("value.{ANNOUNCEMENT_KEY}");
    doc! { key: { "$exists": false } }
}

impl MongoRollouts {
    /// Adds a version of the resources with the id `id`.
    pub(super) async fn add_resources(&self, id: &str, value: &Json) -> Result<Resources> {
        let resources = self.collection("resources");
        loop {
            let of_id = resources.find_one(doc! { "id": id }).sort(doc! { "version": -1 });
            let (version, create_time) = match of_id.await? {
                Some(previous) => {
                    let version: i64 = fields::read_integer(&previous, "version")?;
                    (version + 1, fields::read_number(&previous, "create_time")?)
                }
                None => (1, self.clock.now()),
            };
            let mut document = doc! {
                "_id": format!("{id}/{version}"),
                "id": id,
                "version": version,
                "seq": self.reserve_numbers(RESOURCES, 1).await?,
                "create_time": create_time,
                "update_time": self.clock.now(),
            };
            json::write_json(&mut document, "value", value.get());
            match resources.insert_one(&document).await {
                // Another call has added the same version.
                Err(error) if is_duplicate(&error) => {}
                inserted => {
                    inserted?;
                    return documents::parse_resources(&document);
                }
            }
        }
    }

    /// Returns a version of resources, or `None` if it does not exist. `None` for `version` selects
    /// the latest version, and `None` for `id` the resources that were added last.
    pub(super) async fn find_resources(
        &self,
        id: Option<&str>,
        version: Option<u64>,
    ) -> Result<Option<Resources>> {
        let version = version.map(|version| i64::try_from(version).unwrap_or(i64::MAX));
        let (filter, order) = match (id, version) {
            (None, _) => (no_announcement_filter(), doc! { "seq": -1 }),
            (Some(id), None) => (doc! { "id": id }, doc! { "version": -1 }),
            (Some(id), Some(version)) => (doc! { "id": id, "version": version }, doc! { "seq": 1 }),
        };
        let found = self.collection("resources").find_one(filter).sort(order).await?;
        found.as_ref().map(documents::parse_resources).transpose()
    }

    /// Returns the latest versions of the resources that match `filter`, in the order of their
    /// creation.
    pub(super) async fn latest_resources(&self, filter: Document) -> Result<Vec<Resources>> {
        let pipeline = vec![
            doc! { "$match": filter },
            doc! { "$sort": { "seq": 1 } },
            doc! { "$group": {
                "_id": "$id",
                "first": { "$first": "$seq" },
                "latest": { "$last": "$_id" },
            } },
            doc! { "$sort": { "first": 1 } },
        ];
        let resources = self.collection("resources");
        let mut found = Vec::new();
        for group in collect_documents(resources.aggregate(pipeline).await?).await? {
            let id = fields::read_text(&group, "latest")?;
            if let Some(latest) = resources.find_one(doc! { "_id": id }).await? {
                found.push(documents::parse_resources(&latest)?);
            }
        }
        Ok(found)
    }

    /// Updates the record of a try's worker to match the status of the try. `is_lease` is `true` if
    /// the worker has just leased the try.
    pub(super) async fn sync_worker(
        &self,
        rollout_id: &str,
        of: &TryState,
        is_lease: bool,
    ) -> Result<()> {
        let Some(worker) = of.worker.as_deref().filter(|worker| !worker.is_empty()) else {
            return Ok(());
        };
        let status = of.worker_status();
        let is_busy = status == WorkerStatus::Busy;
        let now = self.clock.now();
        let mut set = doc! {
            "status": status.name(),
            "current_rollout": is_busy.then_some(rollout_id),
            "current_try": is_busy.then_some(&of.id),
        };
        set.insert(if is_busy { "busy" } else { "idle" }, now);
        if is_lease {
            set.insert("dequeue", now);
        }
        self.set_worker(worker, set, Document::new()).await.map(drop)
    }

    /// Records that a worker requested a lease and found no rollout.
    pub(super) async fn mark_worker_idle(&self, worker: &str) -> Result<()> {
        let now = self.clock.now();
        let mut set = doc! {
            "status": WorkerStatus::Idle.name(),
            "dequeue": now,
            "current_rollout": Bson::Null,
            "current_try": Bson::Null,
        };
        let is_idle = doc! { "_id": worker, "status": WorkerStatus::Idle.name() };
        let workers = self.collection("workers");
        if workers.update_one(is_idle, doc! { "$set": set.clone() }).await?.matched_count == 0 {
            set.insert("idle", now);
            self.set_worker(worker, set, Document::new()).await?;
        }
        Ok(())
    }

    /// Records a heartbeat of a worker. If `stats` is `None`, the previous statistics are kept.
    pub(super) async fn record_heartbeat_of_worker(
        &self,
        id: &str,
        stats: Option<&Json>,
    ) -> Result<Worker> {
        let mut set = doc! { "heartbeat": self.clock.now() };
        if let Some(stats) = stats {
            set.extend(json::to_fields("stats", Some(stats.get())));
        }
        let of_new = doc! { "status": WorkerStatus::Unknown.name() };
        documents::parse_worker(&self.set_worker(id, set, of_new).await?)
    }

    /// Sets the fields `set` in the document of a worker. If the worker is new, also sets the
    /// fields `of_new`.
    async fn set_worker(&self, id: &str, set: Document, mut of_new: Document) -> Result<Document> {
        of_new.insert("created", ObjectId::new());
        let change = doc! { "$set": set, "$setOnInsert": of_new };
        let workers = self.collection("workers");
        loop {
            let changed = workers
                .find_one_and_update(doc! { "_id": id }, change.clone())
                .upsert(true)
                .return_document(ReturnDocument::After);
            match changed.await {
                // Two concurrent calls can both try to create the worker.
                Err(error) if is_duplicate(&error) => {}
                changed => return Ok(changed?.unwrap_or_default()),
            }
        }
    }
}
