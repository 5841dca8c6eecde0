//! Creates, leases, updates and ends rollouts. Each of these operations replaces the rollout's
//! document, if its revision has not changed since it was read.

use std::collections::{HashMap, HashSet};

use levade_store::WriteOutcome;
use levade_store::rollouts::state::{QueuePosition, check_config};
use levade_store::rollouts::{
    Json, Lease, LeaseEnd, LeaseRequest, NewRollout, Rollout, RolloutError, RolloutStatus,
    RolloutUpdate, Try, TrySelector, TryUpdate,
};
use mongodb::bson::{Bson, Document, doc};

use super::directory::no_announcement_filter;
use super::documents::StoredRollout;
use super::feed::CHANGES;
use super::{MongoRollouts, new_id};
use crate::connection::{Result, collect_documents, is_duplicate};
use crate::{fields, json};

/// Number of queued rollouts that a lease request reads in addition to the requested number,
/// because other workers may lease some of the rollouts first.
const SPARE_CANDIDATES: usize = 16;

impl MongoRollouts {
    /// Appends rollouts to their queues, with the ids `ids`. For an idempotency key that exists
    /// already, returns the rollout with this key instead.
    pub(super) async fn enqueue_as(
        &self,
        ids: &[String],
        new: &[NewRollout],
    ) -> Result<Vec<Rollout>> {
        new.iter().try_for_each(|new| check_config(&new.config))?;
        let latest = self.latest_resources_id(new).await?;
        let rollouts = self.collection("rollouts");
        loop {
            let [mut by_id, mut by_key] = self.find_known(ids, new).await?;
            let mut results: Vec<StoredRollout> = Vec::new();
            let mut missing = Vec::new();
            for (index, (id, new)) in ids.iter().zip(new).enumerate() {
                let same_key = new.key.as_ref().and_then(|key| by_key.get(key));
                let result = match (by_id.get(id), same_key) {
                    (Some(found), _) => found.clone(),
                    (None, Some(found)) => {
                        check_input(found, new)?;
                        found.clone()
                    }
                    (None, None) => {
                        missing.push(index);
                        let now = self.clock.now();
                        let created = StoredRollout::new(new, id.clone(), latest.as_deref(), now);
                        by_id.insert(id.clone(), created.clone());
                        by_key.extend(new.key.clone().map(|key| (key, created.clone())));
                        created
                    }
                };
                results.push(result);
            }
            let mut number = match missing.len() {
                0 => 0,
                count => self.reserve_numbers(CHANGES, count).await?,
            };
            let mut documents = Vec::new();
            let mut changes = Vec::new();
            for index in missing {
                let created = &mut results[index];
                created.save_state();
                for name in ["seq", "enqueued", "changed"] {
                    created.document.insert(name, number);
                }
                changes.push((created.state.id.clone(), number));
                documents.push(created.document.clone());
                number += 1;
            }
            let inserted = match documents.len() {
                0 => Ok(()),
                _ => rollouts.insert_many(documents).ordered(false).await.map(drop),
            };
            self.publish_changes(&changes).await?;
            match inserted {
                // Another call has created a rollout with one of the ids or keys.
                Err(error) if is_duplicate(&error) => {}
                Err(error) => return Err(error.into()),
                Ok(()) => return results.iter().map(StoredRollout::to_rollout).collect(),
            }
        }
    }

    /// Returns the stored rollouts that have an id of `ids`, keyed by id, and those that have an
    /// idempotency key of `new`, keyed by key.
    async fn find_known(
        &self,
        ids: &[String],
        new: &[NewRollout],
    ) -> Result<[HashMap<String, StoredRollout>; 2]> {
        let keys: Vec<&str> = new.iter().filter_map(|new| new.key.as_deref()).collect();
        let mut filters = vec![doc! { "_id": { "$in": ids } }];
        if !keys.is_empty() {
            filters.push(doc! { "key": { "$in": keys } });
        }
        let [mut by_id, mut by_key] = [HashMap::new(), HashMap::new()];
        for filter in filters {
            for document in
                collect_documents(self.collection("rollouts").find(filter).await?).await?
            {
                let found = StoredRollout::parse(document)?;
                let key = fields::read_optional_text(&found.document, "key")?;
                by_key.extend(key.map(|key| (key, found.clone())));
                by_id.insert(found.state.id.clone(), found);
            }
        }
        Ok([by_id, by_key])
    }

    /// Creates a rollout with the id `id` and starts its first try at once.
    pub(super) async fn start_as(
        &self,
        id: &str,
        new: &NewRollout,
        worker: Option<&str>,
    ) -> Result<Rollout> {
        check_config(&new.config)?;
        let [by_id, by_key] = self.find_known(&[id.to_owned()], std::slice::from_ref(new)).await?;
        let same_key = new.key.as_ref().and_then(|key| by_key.get(key));
        if let Some(found) = by_id.get(id).or(same_key) {
            let key = new.key.clone().or_else(|| new.id.clone()).unwrap_or_default();
            return Err(RolloutError::Conflict { key, rollout_id: found.state.id.clone() }.into());
        }
        let latest = self.latest_resources_id(std::slice::from_ref(new)).await?;
        let now = self.clock.now();
        let mut created = StoredRollout::new(new, id.to_owned(), latest.as_deref(), now);
        created.start_try(new_id("at-", 6), worker, None, now);
        let number = self.reserve_numbers(CHANGES, 1).await?;
        for name in ["seq", "enqueued", "changed"] {
            created.document.insert(name, number);
        }
        self.collection("rollouts").insert_one(created.document.clone()).await?;
        self.publish_changes(&[(id.to_owned(), number)]).await?;
        self.sync_latest(&created, false).await?;
        created.to_rollout()
    }

    /// Returns the id of the resources that were added last, or `None` if there are none or no
    /// rollout of `new` needs the id.
    async fn latest_resources_id(&self, new: &[NewRollout]) -> Result<Option<String>> {
        if new.iter().all(|new| new.resources_id.is_some()) {
            return Ok(None);
        }
        let resources = self.collection("resources");
        let latest = resources.find_one(no_announcement_filter()).sort(doc! { "seq": -1 });
        let latest = latest.projection(doc! { "id": 1 }).await?;
        Ok(latest.map(|latest| fields::read_text(&latest, "id")).transpose()?)
    }

    /// Replaces the document of a rollout if its revision has not changed since it was read.
    /// `number` is the change number, or `None` if the change is not announced. Returns whether the
    /// document was replaced.
    async fn replace_if_unchanged(
        &self,
        changed: &mut StoredRollout,
        number: Option<i64>,
    ) -> Result<bool> {
        let revision: i64 = fields::read_integer(&changed.document, "rev")?;
        if let Some(number) = number {
            changed.document.insert("changed", number);
            if changed.state.moves_to_end {
                changed.document.insert("enqueued", number);
            }
        }
        changed.document.insert("rev", revision + 1);
        let unchanged = doc! { "_id": &changed.state.id, "rev": revision };
        let rollouts = self.collection("rollouts");
        let replaced = rollouts.find_one_and_replace(unchanged, changed.document.clone());
        Ok(replaced.projection(doc! { "_id": 1 }).await?.is_some())
    }

    /// Applies `change` to the rollout `id` in one atomic step. Returns the result of `change`, and
    /// the changed rollout.
    pub(super) async fn update<T>(
        &self,
        id: &str,
        change: impl Fn(&mut StoredRollout, f64) -> Result<T>,
    ) -> Result<(T, StoredRollout)> {
        loop {
            let found = self.collection("rollouts").find_one(doc! { "_id": id }).await?;
            let before =
                found.ok_or_else(|| RolloutError::UnknownRollout { rollout_id: id.to_owned() })?;
            let mut changed = StoredRollout::parse(before.clone())?;
            let value = change(&mut changed, self.clock.now())?;
            if changed.document == before {
                return Ok((value, changed));
            }
            let number = match changed.state.is_changed {
                true => Some(self.reserve_numbers(CHANGES, 1).await?),
                false => None,
            };
            if self.replace_if_unchanged(&mut changed, number).await? {
                if let Some(number) = number {
                    self.publish_changes(&[(id.to_owned(), number)]).await?;
                }
                return Ok((value, changed));
            }
        }
    }

    /// Starts another try of the rollout `id`.
    pub(super) async fn start_another(&self, id: &str, worker: Option<&str>) -> Result<Rollout> {
        let try_id = new_id("at-", 6);
        let ((), started) = self
            .update(id, |of, now| {
                of.start_try(try_id.clone(), worker, None, now);
                Ok(())
            })
            .await?;
        self.sync_latest(&started, false).await?;
        started.to_rollout()
    }

    /// Leases at most [`LeaseRequest::max`] rollouts, the oldest first within a priority. If a
    /// request with the same key is repeated, returns the leases of the first request.
    pub(super) async fn lease_once(
        &self,
        request: &LeaseRequest,
        key: &str,
    ) -> Result<Vec<Rollout>> {
        let leased = self.find_repeated_leases(key).await?;
        if !leased.is_empty() {
            return Ok(leased);
        }
        let worker = request.worker.as_deref();
        let ttl = request.ttl.map(|ttl| ttl.as_secs_f64());
        let mut leased: Vec<StoredRollout> = Vec::new();
        let mut changes = Vec::new();
        while leased.len() < request.max {
            let needed = request.max - leased.len();
            let candidates =
                self.find_oldest(&request.queues, needed.saturating_add(SPARE_CANDIDATES));
            let candidates = candidates.await?;
            if candidates.is_empty() {
                break;
            }
            let mut number = self.reserve_numbers(CHANGES, candidates.len().min(needed)).await?;
            for candidate in candidates {
                if leased.len() == request.max {
                    break;
                }
                let mut started = StoredRollout::parse(candidate)?;
                started.start_try(new_id("at-", 6), worker, ttl, self.clock.now());
                started.document.insert("lease_key", key);
                // Another worker may have leased the rollout in the meantime.
                if self.replace_if_unchanged(&mut started, Some(number)).await? {
                    changes.push((started.state.id.clone(), number));
                    leased.push(started);
                    number += 1;
                }
            }
        }
        self.publish_changes(&changes).await?;
        match (leased.last(), worker) {
            // A worker has one current try. Of several leased tries, it is the last one.
            (Some(last), Some(_)) => self.sync_latest(last, true).await?,
            (None, Some(worker)) => self.mark_worker_idle(worker).await?,
            _ => {}
        }
        leased.iter().map(StoredRollout::to_rollout).collect()
    }

    /// Returns the rollouts that an earlier request with the same key leased and whose leases are
    /// in progress.
    async fn find_repeated_leases(&self, key: &str) -> Result<Vec<Rollout>> {
        let rollouts = self.collection("rollouts");
        let order = doc! { "priority": -1, "enqueued": 1 };
        let found =
            collect_documents(rollouts.find(doc! { "lease_key": key }).sort(order).await?).await?;
        found.into_iter().map(|of| StoredRollout::parse(of)?.to_rollout()).collect()
    }

    /// Returns the documents of the first `max` queued rollouts, by priority and then by age.
    async fn find_oldest(&self, queues: &[String], max: usize) -> Result<Vec<Document>> {
        let order = doc! { "priority": -1, "enqueued": 1 };
        let rollouts = self.collection("rollouts");
        let found = rollouts.find(queued_filter(queues)).sort(order);
        Ok(collect_documents(found.limit(i64::try_from(max).unwrap_or(i64::MAX)).await?).await?)
    }

    /// Returns whether a rollout waits in one of the queues, or an earlier request with the same
    /// key has leased a rollout. A repeated request can arrive while the first one still waits.
    pub(super) async fn can_lease(&self, queues: &[String], key: &str) -> Result<bool> {
        let rollouts = self.collection("rollouts");
        for filter in [queued_filter(queues), doc! { "lease_key": key }] {
            if rollouts.find_one(filter).projection(doc! { "_id": 1 }).await?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Records a heartbeat of the try of `lease`. Returns the time until which the next progress
    /// report must arrive, or `None` if there is no such timeout.
    pub(super) async fn report_heartbeat(&self, lease: &Lease) -> Result<Option<f64>> {
        let report = |of: &mut StoredRollout, now| {
            let until = of.state.record_heartbeat(lease, now)?;
            of.save_state();
            Ok(until)
        };
        Ok(self.update(&lease.rollout_id, report).await?.0)
    }

    /// Ends a lease, and with it the try. If `metadata` is set, it replaces the metadata of the
    /// try.
    pub(super) async fn end_lease(
        &self,
        lease: &Lease,
        end: LeaseEnd,
        metadata: Option<&Json>,
    ) -> Result<WriteOutcome> {
        let (outcome, finished) = self
            .update(&lease.rollout_id, |of, now| {
                let outcome = of.state.end_lease(lease, end, now)?;
                if outcome == WriteOutcome::Written {
                    of.save_state();
                    if let Some(metadata) = metadata {
                        of.set_try_metadata(of.earlier.len(), metadata);
                    }
                }
                Ok(outcome)
            })
            .await?;
        if outcome == WriteOutcome::Written {
            self.sync_latest(&finished, false).await?;
        }
        Ok(outcome)
    }

    /// Cancels the rollouts in `ids` that have not ended, and returns the number of cancelled
    /// rollouts.
    pub(super) async fn cancel_all(&self, ids: &[String]) -> Result<u64> {
        let mut cancelled = 0;
        let known = doc! { "_id": { "$in": ids } };
        let found = self.collection("rollouts").find(known).projection(doc! { "_id": 1 }).await?;
        let found: HashSet<String> = collect_documents(found)
            .await?
            .iter()
            .map(|of| fields::read_text(of, "_id"))
            .collect::<std::result::Result<_, _>>()?;
        for id in ids.iter().filter(|id| found.contains(*id)) {
            let cancel = |of: &mut StoredRollout, now| {
                if of.state.status.is_finished() {
                    return Ok(0);
                }
                of.state.set_status(RolloutStatus::Cancelled, QueuePosition::Old, now);
                of.save_state();
                Ok(1)
            };
            cancelled += self.update(id, cancel).await?.0;
        }
        Ok(cancelled)
    }

    /// Ends all tries that exceeded a timeout, and returns them.
    pub(super) async fn expire_all(&self) -> Result<Vec<Try>> {
        let past = doc! { "expires": { "$lt": self.clock.now() } };
        let rollouts = self.collection("rollouts");
        let found = rollouts.find(past).sort(doc! { "expires": 1 });
        let found = collect_documents(found.projection(doc! { "_id": 1 }).await?).await?;
        let mut expired = Vec::new();
        for found in &found {
            let (is_expired, of) = self
                .update(&fields::read_text(found, "_id")?, |of, now| {
                    let is_expired = of.state.expire_latest_try(now);
                    of.save_state();
                    Ok(is_expired)
                })
                .await?;
            if is_expired {
                self.sync_latest(&of, false).await?;
                expired.extend(of.try_at(of.earlier.len())?);
            }
        }
        Ok(expired)
    }

    /// Replaces fields of the rollout `id`.
    pub(super) async fn change_rollout(&self, id: &str, update: &RolloutUpdate) -> Result<Rollout> {
        let change = |of: &mut StoredRollout, now| {
            if let Some(config) = &update.config {
                check_config(config)?;
                of.state.config = config.clone();
            }
            of.state.is_changed = true;
            if let Some(status) = update.status {
                of.state.set_status(status, QueuePosition::End, now);
            }
            of.save_state();
            if let Some(input) = &update.input {
                of.document.extend(json::to_fields("input", Some(input.get())));
            }
            if let Some(metadata) = &update.metadata {
                let metadata = metadata.as_ref().map(|metadata| metadata.get());
                of.document.extend(json::to_fields("metadata", metadata));
            }
            for (name, value) in [("mode", &update.mode), ("resources_id", &update.resources_id)] {
                if let Some(value) = value {
                    of.document.insert(name, value.as_deref());
                }
            }
            // A change without an effect also gets a number.
            of.document.insert("changed", Bson::Null);
            Ok(())
        };
        self.update(id, change).await?.1.to_rollout()
    }

    /// Replaces fields of a try. If the try is the latest one, the status of its rollout is updated
    /// to match.
    pub(super) async fn change_try(
        &self,
        rollout_id: &str,
        name: &TrySelector,
        update: &TryUpdate,
    ) -> Result<Try> {
        let ((index, needs_sync), changed) = self
            .update(rollout_id, |of, now| {
                let rollout_id = rollout_id.to_owned();
                let Some(latest) = of.latest_index() else {
                    return Err(RolloutError::NoTries { rollout_id }.into());
                };
                let index = match name {
                    TrySelector::Latest => latest,
                    TrySelector::Id(id) => of.find_try(id).ok_or_else(|| {
                        RolloutError::UnknownTry { rollout_id, try_id: id.clone() }
                    })?,
                };
                Ok((index, of.update_try(index, update, now)))
            })
            .await?;
        if let Some(of) = changed.try_state(index).filter(|_| needs_sync) {
            self.sync_worker(rollout_id, of, false).await?;
        }
        Ok(changed
            .try_at(index)?
            .ok_or_else(|| RolloutError::NoTries { rollout_id: rollout_id.to_owned() })?)
    }

    /// Updates the record of the worker that executes the latest try. `is_lease` is `true` if the
    /// worker has just leased it.
    async fn sync_latest(&self, of: &StoredRollout, is_lease: bool) -> Result<()> {
        match &of.state.latest {
            Some(latest) => self.sync_worker(&of.state.id, latest, is_lease).await,
            None => Ok(()),
        }
    }
}

fn queued_filter(queues: &[String]) -> Document {
    match queues {
        [one] => doc! { "queue": one, "queued": 1 },
        all => doc! { "queue": { "$in": all }, "queued": 1 },
    }
}

fn check_input(found: &StoredRollout, new: &NewRollout) -> Result<()> {
    let rollout = found.to_rollout()?;
    if rollout.input.get() == new.input.get() {
        return Ok(());
    }
    let key = new.key.clone().unwrap_or_default();
    Err(RolloutError::Conflict { key, rollout_id: rollout.id }.into())
}
