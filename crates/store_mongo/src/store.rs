//! The ledger of a run in a MongoDB database.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use levade_store::backend::{self, Failure};
use levade_store::{
    Attempt, AttemptEnd, AttemptStart, AttemptSummary, Code, EvalKey, FailedAttempt, MongoUrl,
    Status, StepPlan, Store, StoreAccess, StoreError, TryCounts, WithdrawRequest, Withdrawal,
    WriteOutcome,
};
use levade_tree::{AttemptId, AttemptSlot, Purpose, RunId, Segment, SegmentId};
use mongodb::Collection;
use mongodb::bson::{Document, doc};

use crate::attempts::{self, AttemptHead, COUNTING};
use crate::connection::{Connection, IndexDefinition, Result, collect_documents, insert_new};
use crate::run_lease::{self, RunLease};
use crate::segments::SegmentCollections;
use crate::{fields, json, plans, withdrawals};

/// The store of a run in a MongoDB database.
///
/// Every write ends with one update of one document. Documents that were written before that update
/// are not reachable for readers until the update.
///
/// Every write ends with one update of one document. Documents that are written before it are not
/// reachable for readers until the update.
#[derive(Debug)]
pub struct MongoStore {
    connection: Arc<Connection>,
    run: RunId,
    /// Lease of the run, which this process holds. `None` if the store was opened only for reading.
    lease: Option<RunLease>,
}

impl MongoStore {
    /// Opens the store of the run in the directory `run_dir`. The name of the database is derived
    /// from `url` and from the name of the directory.
    ///
    /// # Errors
    /// - Returns [`StoreError::Deadline`] if no server responds, and [`StoreError::Open`] if the
    ///   server rejects the user or, for [`StoreAccess::Read`], if the database contains no run.
    /// - Returns [`StoreError::OtherRun`] if the database contains another run than `access`
    ///   starts, and [`StoreError::NotEmpty`] if it contains records of the same run.
    /// - Returns [`StoreError::Version`] if another build wrote the database in another format.
    /// - Returns [`StoreError::Leased`] if another trainer works on the run.
    pub async fn open(
        url: &MongoUrl,
        run_dir: &Path,
        access: StoreAccess<'_>,
    ) -> std::result::Result<Self, StoreError> {
        let owner = run_lease::owner_name(run_dir);
        Self::open_database(url, &url.run_database_name(run_dir), &owner, access).await
    }

    /// Opens the store in the database `database`, as the trainer `owner`.
    pub(crate) async fn open_database(
        url: &MongoUrl,
        database: &str,
        owner: &str,
        access: StoreAccess<'_>,
    ) -> std::result::Result<Self, StoreError> {
        let connection = Arc::new(Connection::open(url, database).await?);
        let location = || connection.location.clone();
        let stored = run_lease::read_run_id(&connection).await?;
        let has_records =
            || async { Ok(connection.collection("attempts").find_one(doc! {}).await?.is_some()) };
        if matches!(access, StoreAccess::Start(run) if stored.as_ref() == Some(run))
            && connection.run("read", "the attempts", has_records).await?
        {
            return Err(StoreError::NotEmpty { location: location() });
        }
        let (run, lease) = match (access, stored) {
            (StoreAccess::Read, Some(run)) => (run, None),
            (StoreAccess::Read, None) => {
                let source = "the database contains no run; name the one that the trainer wrote";
                let (code, source) = (Code::NotFound, source.into());
                return Err(StoreError::Open { location: location(), code, source });
            }
            (StoreAccess::Start(run), Some(found)) if *run != found => {
                let (found, expected) = (found.to_string(), run.to_string());
                return Err(StoreError::OtherRun { location: location(), found, expected });
            }
            (StoreAccess::Start(new) | StoreAccess::Resume(new), stored) => {
                let run = stored.unwrap_or_else(|| new.clone());
                run_lease::create_run(&connection, &run).await?;
                connection.create_indexes(list_index_definitions()).await?;
                (run, Some(RunLease::acquire(&connection, owner).await?))
            }
        };
        Ok(MongoStore { connection, run, lease })
    }

    fn attempts_collection(&self) -> Collection<Document> {
        self.connection.collection("attempts")
    }

    fn segment_collections(&self) -> SegmentCollections<'_> {
        SegmentCollections::new(&self.connection)
    }

    async fn read<T, F>(
        &self,
        key: impl Into<String> + Send,
        operation: impl Fn() -> F + Send + Sync,
    ) -> std::result::Result<T, StoreError>
    where
        F: Future<Output = Result<T>> + Send,
    {
        self.connection.run("read", key, operation).await
    }

    /// Runs a write operation if this process holds the lease of the run.
    async fn write<T, F>(
        &self,
        key: impl Into<String> + Send,
        operation: impl Fn() -> F + Send + Sync,
    ) -> std::result::Result<T, StoreError>
    where
        F: Future<Output = Result<T>> + Send,
    {
        let Some(lease) = &self.lease else {
            let location = self.connection.location.clone();
            return Err(StoreError::ReadOnly { location, key: key.into() });
        };
        self.connection
            .run("record", key, || async {
                lease.check_and_renew().await?;
                operation().await
            })
            .await
    }

    async fn read_attempt_head(&self, id: &AttemptId) -> Result<Option<AttemptHead>> {
        let found = self.attempts_collection().find_one(doc! { "_id": id.to_string() }).await?;
        found.as_ref().map(attempts::parse_head).transpose()
    }

    /// Returns the fields of summaries and failed attempts that match `filter`, sorted by attempt
    /// slot and try.
    async fn find_attempts(&self, filter: Document) -> Result<Vec<Document>> {
        let attempts = self.attempts_collection();
        let found = attempts.find(filter).sort(attempts::slot_order());
        Ok(collect_documents(found.projection(attempts::summary_fields()).await?).await?)
    }

    async fn read_complete_attempt(&self, head: AttemptHead) -> Result<Attempt> {
        let AttemptHead { attempt, len, last } = head;
        let trajectory =
            self.segment_collections().read_trajectory(&attempt.id, len, last.as_deref()).await?;
        Ok(Attempt { trajectory, ..attempt })
    }

    /// Appends segments to an attempt. Returns `None` if another call changed the attempt in the
    /// meantime.
    async fn try_append(&self, id: &AttemptId, given: &[Segment]) -> Result<Option<WriteOutcome>> {
        let head = self.read_attempt_head(id).await?.ok_or(Failure::Unknown)?;
        let AttemptHead { attempt, len, last } = &head;
        let stored = |id: &SegmentId| id.0 < *len;
        let parents = given.iter().filter_map(|segment| segment.parent);
        let ids: BTreeSet<u32> = given
            .iter()
            .map(|segment| segment.id)
            .chain(parents)
            .filter(stored)
            .map(|id| id.0)
            .collect();
        let segments = self.segment_collections();
        let documents = match ids.is_empty() {
            true => BTreeMap::new(),
            false => segments.find(id, (*len, last.as_deref()), &ids).await?,
        };
        let mut known = BTreeMap::new();
        for segment in given {
            if let Some(document) = documents.get(&segment.id.0) {
                known.insert(segment.id.0, segments.parse(document).await?);
            }
        }
        let token_len = |id: SegmentId| match documents.get(&id.0) {
            Some(document) => fields::read_integer(document, "length"),
            None => Ok(0),
        };
        let stored = |id: SegmentId| Ok(known.get(&id.0).cloned());
        let new = backend::select_new_segments(attempt, *len, given, stored, token_len)?;
        if new.is_empty() {
            return Ok(Some(WriteOutcome::AlreadyRecorded));
        }
        let digest = segments.write(id, last.clone(), &new).await?;
        let (sampled, tokens) = attempts::count_tokens(&new);
        // The update matches only if the attempt is still running and still ends with the segment
        // that the new segments follow.
        let unchanged = doc! {
            "_id": id.to_string(),
            "status": Status::Running.name(),
            "segments": i64::from(*len),
            "last": last.as_deref(),
        };
        let append = doc! {
            "$set": { "last": digest },
            "$inc": { "segments": new.len() as i64, "sampled_tokens": sampled, "tokens": tokens },
        };
        let appended = self.attempts_collection().update_one(unchanged, append).await?;
        Ok((appended.matched_count > 0).then_some(WriteOutcome::Written))
    }

    /// Ends an attempt. Returns `None` if another call changed the attempt in the meantime.
    async fn try_end(&self, id: &AttemptId, end: &AttemptEnd) -> Result<Option<WriteOutcome>> {
        let AttemptHead { attempt, .. } =
            self.read_attempt_head(id).await?.ok_or(Failure::Unknown)?;
        if backend::check_end(&attempt, end)? == WriteOutcome::AlreadyRecorded {
            return Ok(Some(WriteOutcome::AlreadyRecorded));
        }
        let unchanged = doc! { "_id": id.to_string(), "status": attempt.status.name() };
        let ending = doc! { "$set": attempts::end_fields(end)? };
        let ended = self.attempts_collection().update_one(unchanged, ending).await?;
        Ok((ended.matched_count > 0).then_some(WriteOutcome::Written))
    }

    /// Records one complete attempt. Returns whether the attempt was not recorded before.
    async fn record_complete_attempt(&self, attempt: &Attempt) -> Result<bool> {
        let segments = attempt.trajectory.segments();
        let last = self.segment_collections().write(&attempt.id, None, segments).await?;
        let document = attempts::to_document(attempt, last.as_deref())?;
        match insert_new(&self.attempts_collection(), document).await? {
            None => Ok(true),
            Some(found) => {
                self.check_same(attempts::parse_head(&found)?, attempt).await.map(|()| false)
            }
        }
    }

    async fn check_same(&self, stored: AttemptHead, attempt: &Attempt) -> Result<()> {
        let stored = self.read_complete_attempt(stored).await?;
        match backend::find_attempt_difference(&stored, attempt) {
            None => Ok(()),
            Some(field) => Err(Failure::Conflict(attempt.slot.to_string(), field).into()),
        }
    }
}

/// Returns the definitions of all indexes of a run's collections.
fn list_index_definitions() -> Vec<IndexDefinition> {
    let slot = doc! {
        "purpose": 1, "phase": 1, "step": 1, "group": 1, "sample": 1, "number": 1,
    };
    vec![
        IndexDefinition {
            is_unique: true,
            ..IndexDefinition::plain("attempts", "attempt_slot", slot)
        },
        IndexDefinition::plain("attempts", "attempt_status", doc! { "status": 1 }),
        IndexDefinition::plain("segments", "segment_order", doc! { "attempt": 1, "index": 1 }),
        IndexDefinition::plain("chunks", "chunk_order", doc! { "of": 1, "index": 1 }),
        IndexDefinition::plain(
            "planned_sequences",
            "sequence_order",
            doc! { "phase": 1, "step": 1, "index": 1 },
        ),
        IndexDefinition::plain("planned_sequences", "sequence_attempt", doc! { "attempt": 1 }),
    ]
}

/// Repeats the operation `attempt` until it returns a result. The operation returns `None` if
/// another call changed the same document in the meantime.
async fn retry_until_settled<T, F>(attempt: impl Fn() -> F + Send) -> Result<T>
where
    F: Future<Output = Result<Option<T>>> + Send,
{
    loop {
        if let Some(result) = attempt().await? {
            return Ok(result);
        }
    }
}

#[async_trait]
impl Store for MongoStore {
    fn run(&self) -> &RunId {
        &self.run
    }

    fn location(&self) -> &str {
        &self.connection.location
    }

    async fn start_attempt(
        &self,
        start: &AttemptStart,
    ) -> std::result::Result<WriteOutcome, StoreError> {
        self.write(start.slot.to_string(), || async {
            backend::check_attempt_id(&self.run, &start.id, &start.slot, start.number)?;
            let document = attempts::to_document(&Attempt::from_start(start), None)?;
            match insert_new(&self.attempts_collection(), document).await? {
                None => Ok(WriteOutcome::Written),
                Some(found) => {
                    Ok(backend::check_restart(&attempts::parse_head(&found)?.attempt, start)?)
                }
            }
        })
        .await
    }

    async fn append_segments(
        &self,
        id: &AttemptId,
        segments: &[Segment],
    ) -> std::result::Result<WriteOutcome, StoreError> {
        self.write(format!("attempt {id}"), || {
            retry_until_settled(|| self.try_append(id, segments))
        })
        .await
    }

    async fn end_attempt(
        &self,
        id: &AttemptId,
        end: &AttemptEnd,
    ) -> std::result::Result<WriteOutcome, StoreError> {
        self.write(format!("attempt {id}"), || async {
            backend::check_end_values(end)?;
            retry_until_settled(|| self.try_end(id, end)).await
        })
        .await
    }

    async fn abandon_running(&self) -> std::result::Result<u64, StoreError> {
        self.write("running attempts", || async {
            let running = doc! { "status": Status::Running.name() };
            let abandoned = doc! { "$set": { "status": Status::Abandoned.name() } };
            Ok(self.attempts_collection().update_many(running, abandoned).await?.matched_count)
        })
        .await
    }

    async fn record_attempts(
        &self,
        given: &[Attempt],
    ) -> std::result::Result<WriteOutcome, StoreError> {
        let key = match given {
            [one] => one.slot.to_string(),
            all => format!("{} attempts", all.len()),
        };
        self.write(key, || async {
            // Everything is checked before anything is written.
            let mut new: BTreeMap<AttemptId, &Attempt> = BTreeMap::new();
            for attempt in given {
                backend::check_attempt(&self.run, attempt)?;
                if let Some(earlier) = new.get(&attempt.id) {
                    if let Some(field) = backend::find_attempt_difference(earlier, attempt) {
                        return Err(Failure::Conflict(attempt.slot.to_string(), field).into());
                    }
                } else if let Some(stored) = self.read_attempt_head(&attempt.id).await? {
                    self.check_same(stored, attempt).await?;
                } else {
                    new.insert(attempt.id, attempt);
                }
            }
            let mut outcome = WriteOutcome::AlreadyRecorded;
            for attempt in new.into_values() {
                if self.record_complete_attempt(attempt).await? {
                    outcome = WriteOutcome::Written;
                }
            }
            Ok(outcome)
        })
        .await
    }

    async fn attempt(&self, id: &AttemptId) -> std::result::Result<Option<Attempt>, StoreError> {
        self.read(format!("attempt {id}"), || async {
            match self.read_attempt_head(id).await? {
                Some(head) => self.read_complete_attempt(head).await.map(Some),
                None => Ok(None),
            }
        })
        .await
    }

    async fn last_try(
        &self,
        slot: &AttemptSlot,
    ) -> std::result::Result<Option<Attempt>, StoreError> {
        self.read(slot.to_string(), || async {
            let mut filter = attempts::slot_filter(slot);
            filter.insert("status", doc! { "$in": COUNTING.to_vec() });
            match self.attempts_collection().find_one(filter).sort(doc! { "number": -1 }).await? {
                Some(found) => {
                    self.read_complete_attempt(attempts::parse_head(&found)?).await.map(Some)
                }
                None => Ok(None),
            }
        })
        .await
    }

    async fn count_tries(&self, slot: &AttemptSlot) -> std::result::Result<TryCounts, StoreError> {
        self.read(slot.to_string(), || async {
            let names = doc! { "number": 1, "status": 1 };
            let attempts = self.attempts_collection();
            let found = attempts.find(attempts::slot_filter(slot)).projection(names).await?;
            let mut tries = TryCounts::default();
            for document in collect_documents(found).await? {
                tries.next = tries.next.max(fields::read_integer::<u32>(&document, "number")? + 1);
                let is_failed = document.get_str("status").ok() == Some(Status::Superseded.name());
                tries.failed += u32::from(is_failed);
            }
            Ok(tries)
        })
        .await
    }

    async fn tasks(
        &self,
        purpose: Purpose,
    ) -> std::result::Result<Vec<serde_json::Value>, StoreError> {
        self.read(format!("tasks for {}", purpose.name()), || async {
            let pipeline = vec![
                doc! { "$match": { "purpose": purpose.name() } },
                doc! { "$group": { "_id": { "task": "$task", "task_text": "$task_text" } } },
            ];
            let mut tasks = BTreeMap::new();
            for group in
                collect_documents(self.attempts_collection().aggregate(pipeline).await?).await?
            {
                let text =
                    attempts::json_text(group.get_document("_id").unwrap_or(&group), "task")?;
                let task = serde_json::from_str(&text)
                    .map_err(|error| Failure::Corrupt(format!("a task is not JSON: {error}")))?;
                tasks.insert(text, task);
            }
            Ok(tasks.into_values().collect())
        })
        .await
    }

    async fn summaries(
        &self,
        purpose: Purpose,
    ) -> std::result::Result<Vec<AttemptSummary>, StoreError> {
        self.read(format!("attempts for {}", purpose.name()), || async {
            let filter = doc! { "purpose": purpose.name(), "status": { "$in": COUNTING.to_vec() } };
            let mut summaries: BTreeMap<AttemptSlot, AttemptSummary> = BTreeMap::new();
            for document in self.find_attempts(filter).await? {
                let summary = attempts::parse_summary(&document)?;
                // Tries are in order, so the last one that counts replaces the earlier ones.
                summaries.insert(summary.slot, summary);
            }
            Ok(summaries.into_values().collect())
        })
        .await
    }

    async fn failures(
        &self,
        purpose: Purpose,
    ) -> std::result::Result<Vec<FailedAttempt>, StoreError> {
        self.read(format!("failures for {}", purpose.name()), || async {
            let filter = doc! { "purpose": purpose.name(), "$or": [
                { "status": { "$in": [Status::Failed.name(), Status::Superseded.name()] } },
                { "status": Status::Abandoned.name(), "error": { "$ne": null } },
            ] };
            self.find_attempts(filter).await?.iter().map(attempts::parse_failure).collect()
        })
        .await
    }

    async fn record_step(&self, plan: &StepPlan) -> std::result::Result<WriteOutcome, StoreError> {
        let key = format!("plan of phase {}/step {}", plan.phase, plan.step);
        self.write(key.clone(), || async {
            backend::check_plan(plan)?;
            let steps = self.connection.collection("steps");
            let id = doc! { "_id": plans::step_id(plan.phase, plan.step) };
            let found = match steps.find_one(id).await? {
                Some(found) => Some(found),
                None => {
                    let head = plans::write_sequences(&self.connection, plan).await?;
                    insert_new(&steps, head).await?
                }
            };
            let Some(found) = found else { return Ok(WriteOutcome::Written) };
            let stored = plans::read_plan(&self.connection, &found).await?;
            if backend::are_plans_equal(&stored, plan) {
                return Ok(WriteOutcome::AlreadyRecorded);
            }
            Err(Failure::Conflict(key.clone(), "plan").into())
        })
        .await
    }

    async fn step_plan(
        &self,
        phase: u32,
        step: u32,
    ) -> std::result::Result<Option<StepPlan>, StoreError> {
        self.read(format!("plan of phase {phase}/step {step}"), || async {
            let steps = self.connection.collection("steps");
            match steps.find_one(doc! { "_id": plans::step_id(phase, step) }).await? {
                Some(head) => plans::read_plan(&self.connection, &head).await.map(Some),
                None => Ok(None),
            }
        })
        .await
    }

    async fn planned_steps(&self) -> std::result::Result<Vec<(u32, u32)>, StoreError> {
        self.read("the planned steps", || async {
            let steps = self.connection.collection("steps");
            let found = steps.find(doc! {}).projection(doc! { "phase": 1, "step": 1 }).await?;
            let mut planned = Vec::new();
            for step in collect_documents(found).await? {
                planned.push((
                    fields::read_integer(&step, "phase")?,
                    fields::read_integer(&step, "step")?,
                ));
            }
            planned.sort_unstable();
            Ok(planned)
        })
        .await
    }

    async fn record_eval(
        &self,
        key: EvalKey,
        result: &serde_json::Value,
    ) -> std::result::Result<WriteOutcome, StoreError> {
        let text = result.to_string();
        let text = text.as_str();
        self.write(key.to_string(), || async {
            let [phase, step] = [key.phase, key.step].map(i64::from);
            let id = plans::step_id(key.phase, key.step);
            let mut document = doc! { "_id": id, "phase": phase, "step": step };
            json::write_json(&mut document, "result", text);
            match insert_new(&self.connection.collection("evals"), document).await? {
                None => Ok(WriteOutcome::Written),
                Some(found) if attempts::json_text(&found, "result")? == text => {
                    Ok(WriteOutcome::AlreadyRecorded)
                }
                Some(_) => Err(Failure::Conflict(key.to_string(), "result").into()),
            }
        })
        .await
    }

    async fn evals(&self) -> std::result::Result<Vec<(EvalKey, serde_json::Value)>, StoreError> {
        self.read("evaluations", || async {
            let mut results = BTreeMap::new();
            for found in
                collect_documents(self.connection.collection("evals").find(doc! {}).await?).await?
            {
                let [phase, step] =
                    [fields::read_integer(&found, "phase")?, fields::read_integer(&found, "step")?];
                let key = EvalKey { phase, step };
                let result = serde_json::from_str(&attempts::json_text(&found, "result")?);
                let corrupt =
                    |error| Failure::Corrupt(format!("the result of {key} is not JSON: {error}"));
                results.insert(key, result.map_err(corrupt)?);
            }
            Ok(results.into_iter().collect())
        })
        .await
    }

    async fn withdraw(
        &self,
        request: &WithdrawRequest,
    ) -> std::result::Result<Vec<Withdrawal>, StoreError> {
        self.write("withdrawals", || withdrawals::record_withdrawals(&self.connection, request))
            .await
    }

    async fn withdrawals(&self) -> std::result::Result<Vec<Withdrawal>, StoreError> {
        self.read("withdrawals", || withdrawals::read_tombstones(&self.connection)).await
    }
}
