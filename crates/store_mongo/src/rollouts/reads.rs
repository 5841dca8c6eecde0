//! Filters, orders and pages of queries.

use std::cmp::Ordering;

use levade_store::rollouts::{
    LogicalOperator, Page, PageRequest, Resources, ResourcesFilter, Rollout, RolloutError,
    RolloutFilter, RolloutStatistics, SortOrder, Span, SpanFilter, TextFilter, Try, TrySelector,
    Worker, WorkerFilter,
};
use mongodb::bson::{Bson, Document, doc};

use super::MongoRollouts;
use super::directory::no_announcement_filter;
use super::documents::{self, StoredRollout};
use crate::connection::{Result, collect_documents};
use crate::fields;

/// A field by which stored documents can be sorted: its serialized name, its path in the document,
/// and the sort value if the field is missing.
type Field = (&'static str, &'static str, MissingFieldValue);

/// Value by which a document is sorted if it lacks the sort field.
#[derive(Debug, Clone, Copy)]
enum MissingFieldValue {
    /// A time later than all other times.
    Latest,
    /// The empty text.
    Empty,
    /// The number 0.
    Zero,
}

impl From<MissingFieldValue> for Bson {
    fn from(missing: MissingFieldValue) -> Self {
        match missing {
            MissingFieldValue::Latest => f64::INFINITY.into(),
            MissingFieldValue::Empty => "".into(),
            MissingFieldValue::Zero => 0.into(),
        }
    }
}

const ROLLOUT_FIELDS: &[Field] = &[
    ("rollout_id", "_id", MissingFieldValue::Empty),
    ("input", "input", MissingFieldValue::Empty),
    ("start_time", "start_time", MissingFieldValue::Latest),
    ("end_time", "end_time", MissingFieldValue::Latest),
    ("mode", "mode", MissingFieldValue::Empty),
    ("resources_id", "resources_id", MissingFieldValue::Empty),
    ("status", "status", MissingFieldValue::Empty),
    ("config", "config.timeout_seconds", MissingFieldValue::Zero),
    ("metadata", "metadata", MissingFieldValue::Empty),
];

const SPAN_FIELDS: &[Field] = &[
    ("rollout_id", "rollout", MissingFieldValue::Empty),
    ("attempt_id", "try", MissingFieldValue::Empty),
    ("sequence_id", "number", MissingFieldValue::Zero),
    ("trace_id", "trace_id", MissingFieldValue::Empty),
    ("span_id", "span_id", MissingFieldValue::Empty),
    ("parent_id", "parent_id", MissingFieldValue::Empty),
    ("name", "name", MissingFieldValue::Empty),
    ("status", "body.status.status_code", MissingFieldValue::Empty),
    ("attributes", "body.attributes", MissingFieldValue::Empty),
    ("events", "body.events", MissingFieldValue::Empty),
    ("links", "body.links", MissingFieldValue::Empty),
    ("start_time", "start_time", MissingFieldValue::Latest),
    ("end_time", "end_time", MissingFieldValue::Latest),
    ("context", "body.context", MissingFieldValue::Empty),
    ("parent", "body.parent", MissingFieldValue::Empty),
    ("resource", "body.resource", MissingFieldValue::Empty),
];

/// Sort key of an item, for items that are sorted in memory. Numbers and times precede texts.
#[derive(Debug, PartialEq, PartialOrd)]
enum SortKey {
    Number(f64),
    Text(String),
}

impl From<Option<f64>> for SortKey {
    fn from(time: Option<f64>) -> Self {
        SortKey::Number(time.unwrap_or(f64::INFINITY))
    }
}

impl From<Option<&str>> for SortKey {
    fn from(text: Option<&str>) -> Self {
        SortKey::Text(text.unwrap_or_default().to_owned())
    }
}

/// Fields by which items of type `T` can be sorted in memory: their serialized names, and functions
/// that return the sort key.
type Keys<T> = &'static [(&'static str, fn(&T) -> SortKey)];

const TRY_KEYS: Keys<Try> = &[
    ("rollout_id", |of| Some(of.rollout_id.as_str()).into()),
    ("attempt_id", |of| Some(of.id.as_str()).into()),
    ("sequence_id", |of| SortKey::Number(f64::from(of.number))),
    ("start_time", |of| Some(of.start_time).into()),
    ("end_time", |of| of.end_time.into()),
    ("status", |of| Some(of.status.name()).into()),
    ("worker_id", |of| of.worker_id.as_deref().into()),
    ("last_heartbeat_time", |of| of.last_heartbeat_time.into()),
    ("metadata", |of| of.metadata.as_ref().map(|json| json.get()).into()),
];

const WORKER_KEYS: Keys<Worker> = &[
    ("worker_id", |of| Some(of.id.as_str()).into()),
    ("status", |of| Some(of.status.name()).into()),
    ("heartbeat_stats", |of| of.heartbeat_stats.as_ref().map(|json| json.get()).into()),
    ("last_heartbeat_time", |of| of.last_heartbeat_time.into()),
    ("last_dequeue_time", |of| of.last_dequeue_time.into()),
    ("last_busy_time", |of| of.last_busy_time.into()),
    ("last_idle_time", |of| of.last_idle_time.into()),
    ("current_rollout_id", |of| of.current_rollout_id.as_deref().into()),
    ("current_attempt_id", |of| of.current_try_id.as_deref().into()),
];

const RESOURCES_KEYS: Keys<Resources> = &[
    ("resources_id", |of| Some(of.id.as_str()).into()),
    ("create_time", |of| Some(of.create_time).into()),
    ("update_time", |of| Some(of.update_time).into()),
    ("version", |of| SortKey::Number(of.version as f64)),
    ("resources", |of| Some(of.value.get()).into()),
];

fn unknown_field_error(name: &str, fields: impl Iterator<Item = &'static str>) -> RolloutError {
    let fields = fields.collect::<Vec<_>>().join(", ");
    RolloutError::Invalid(format!("Invalid sort_by: {name}, allowed fields are: {fields}"))
}

/// Sorts `items` in memory and returns the requested page. `items` must be in the order of their
/// creation.
fn sort_and_page<T>(mut items: Vec<T>, keys: Keys<T>, page: &PageRequest) -> Result<Page<T>> {
    if let Some(name) = page.sort_by.as_deref() {
        let Some((_, key)) = keys.iter().find(|(field, _)| *field == name) else {
            return Err(unknown_field_error(name, keys.iter().map(|(name, _)| *name)).into());
        };
        items.sort_by(|a, b| {
            let order = key(a).partial_cmp(&key(b)).unwrap_or(Ordering::Equal);
            if page.order == SortOrder::Asc { order } else { order.reverse() }
        });
    }
    let total = items.len() as u64;
    let [offset, limit] = [page.offset, page.limit.unwrap_or(u64::MAX)]
        .map(|count| usize::try_from(count).unwrap_or(usize::MAX));
    Ok(Page { items: items.into_iter().skip(offset).take(limit).collect(), total })
}

/// Returns the condition that a text field contains `text`.
fn contains_condition(text: &str) -> Bson {
    let mut pattern = String::new();
    for c in text.chars() {
        if c.is_ascii() && !c.is_ascii_alphanumeric() {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    doc! { "$regex": pattern }.into()
}

/// Combines conditions by the operator `logic`. An empty list of conditions matches every document.
fn combine_conditions(conditions: Vec<Document>, logic: LogicalOperator) -> Document {
    match (conditions.is_empty(), logic) {
        (true, _) => Document::new(),
        (false, LogicalOperator::And) => doc! { "$and": conditions },
        (false, LogicalOperator::Or) => doc! { "$or": conditions },
    }
}

/// Appends the conditions that `filter` sets on the text field `name`.
fn add_text_conditions(conditions: &mut Vec<Document>, name: &str, filter: &TextFilter) {
    if let Some(text) = &filter.exact {
        conditions.push(doc! { name: text });
    }
    if let Some(text) = &filter.contains {
        conditions.push(doc! { name: contains_condition(text) });
    }
}

impl MongoRollouts {
    /// Returns the documents of the requested page of a collection, and the number of matching
    /// documents on all pages.
    async fn read_page(
        &self,
        collection: &str,
        filter: Document,
        (fields, creation): (&[Field], &str),
        page: &PageRequest,
    ) -> Result<(Vec<Document>, u64)> {
        const KEY: &str = "sort_key";
        let mut pipeline = vec![doc! { "$match": filter.clone() }];
        match page.sort_by.as_deref() {
            None => pipeline.push(doc! { "$sort": { creation: 1 } }),
            Some(name) => {
                let Some((_, path, missing)) = fields.iter().find(|(field, ..)| *field == name)
                else {
                    return Err(
                        unknown_field_error(name, fields.iter().map(|(name, ..)| *name)).into()
                    );
                };
                let key = doc! { "$ifNull": [format!("${path}"), Bson::from(*missing)] };
                let direction = if page.order == SortOrder::Asc { 1 } else { -1 };
                pipeline.push(doc! { "$addFields": { KEY: key } });
                pipeline.push(doc! { "$sort": { KEY: direction, creation: 1 } });
            }
        }
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        if page.offset > 0 {
            pipeline.push(doc! { "$skip": number(page.offset) });
        }
        if let Some(limit) = page.limit {
            pipeline.push(doc! { "$limit": number(limit) });
        }
        let collection = self.collection(collection);
        let items = collect_documents(collection.aggregate(pipeline).await?).await?;
        let is_all = page.offset == 0 && page.limit.is_none();
        let total = match is_all {
            true => items.len() as u64,
            false => collection.count_documents(filter).await?,
        };
        Ok((items, total))
    }

    /// Returns one page of the rollouts that match `filter`.
    pub(super) async fn find_rollouts(
        &self,
        filter: &RolloutFilter,
        page: &PageRequest,
    ) -> Result<Page<Rollout>> {
        let mut conditions = Vec::new();
        if let Some(statuses) = &filter.status_in {
            let names: Vec<&str> = statuses.iter().map(|status| status.name()).collect();
            conditions.push(doc! { "status": { "$in": names } });
        }
        if let Some(ids) = &filter.id_in {
            conditions.push(doc! { "_id": { "$in": ids } });
        }
        if let Some(text) = &filter.id_contains {
            conditions.push(doc! { "_id": contains_condition(text) });
        }
        let filter = combine_conditions(conditions, filter.logic);
        let (found, total) =
            self.read_page("rollouts", filter, (ROLLOUT_FIELDS, "seq"), page).await?;
        let rollouts = found.into_iter().map(|of| StoredRollout::parse(of)?.to_rollout());
        Ok(Page { items: rollouts.collect::<Result<_>>()?, total })
    }

    /// Returns the rollout with the id `id`, or `None` if it does not exist.
    pub(super) async fn find_rollout(&self, id: &str) -> Result<Option<StoredRollout>> {
        let found = self.collection("rollouts").find_one(doc! { "_id": id }).await?;
        found.map(StoredRollout::parse).transpose()
    }

    /// Returns one page of the tries of the rollout `id`.
    pub(super) async fn find_tries(&self, id: &str, page: &PageRequest) -> Result<Page<Try>> {
        let tries = match self.find_rollout(id).await? {
            Some(rollout) => rollout.tries()?,
            None => Vec::new(),
        };
        sort_and_page(tries, TRY_KEYS, page)
    }

    /// Returns the rollouts of `ids` that have ended, in the order of `ids`, and whether any other
    /// rollout of `ids` has not ended.
    pub(super) async fn find_finished(&self, ids: &[String]) -> Result<(Vec<Rollout>, bool)> {
        let rollouts = self.collection("rollouts");
        let found = collect_documents(rollouts.find(doc! { "_id": { "$in": ids } }).await?).await?;
        let mut ended = Vec::new();
        let mut has_open = false;
        for document in found {
            let rollout = StoredRollout::parse(document)?;
            if rollout.state.status.is_finished() {
                ended.push(rollout.to_rollout()?);
            } else {
                has_open = true;
            }
        }
        ended.sort_by_key(|rollout| ids.iter().position(|id| *id == rollout.id));
        Ok((ended, has_open))
    }

    /// Returns one page of the latest versions of the resources that match `filter`.
    pub(super) async fn find_latest_resources(
        &self,
        filter: &ResourcesFilter,
        page: &PageRequest,
    ) -> Result<Page<Resources>> {
        let mut conditions = Vec::new();
        let (exact, contains) = (filter.id.clone(), filter.id_contains.clone());
        add_text_conditions(&mut conditions, "id", &TextFilter { exact, contains });
        if filter.without_announcements {
            conditions.push(no_announcement_filter());
        }
        let found =
            self.latest_resources(combine_conditions(conditions, LogicalOperator::And)).await?;
        sort_and_page(found, RESOURCES_KEYS, page)
    }

    /// Returns the worker with the id `id`, or `None` if the worker is unknown.
    pub(super) async fn find_worker(&self, id: &str) -> Result<Option<Worker>> {
        let found = self.collection("workers").find_one(doc! { "_id": id }).await?;
        found.as_ref().map(documents::parse_worker).transpose()
    }

    /// Returns one page of the workers that match `filter`.
    pub(super) async fn find_workers(
        &self,
        filter: &WorkerFilter,
        page: &PageRequest,
    ) -> Result<Page<Worker>> {
        let mut conditions = Vec::new();
        if let Some(statuses) = &filter.status_in {
            let names: Vec<&str> = statuses.iter().map(|status| status.name()).collect();
            conditions.push(doc! { "status": { "$in": names } });
        }
        if let Some(text) = &filter.id_contains {
            conditions.push(doc! { "_id": contains_condition(text) });
        }
        let workers = self.collection("workers");
        let found =
            workers.find(combine_conditions(conditions, filter.logic)).sort(doc! { "created": 1 });
        let found = collect_documents(found.await?).await?;
        let items = found.iter().map(documents::parse_worker).collect::<Result<_>>()?;
        sort_and_page(items, WORKER_KEYS, page)
    }

    /// Returns one page of the spans that match `filter`.
    pub(super) async fn find_spans(
        &self,
        filter: &SpanFilter,
        page: &PageRequest,
    ) -> Result<Page<Span>> {
        let mut required = doc! { "rollout": &filter.rollout_id };
        match &filter.try_name {
            None => {}
            Some(TrySelector::Id(id)) => drop(required.insert("try", id)),
            Some(TrySelector::Latest) => {
                let rollout = self.find_rollout(&filter.rollout_id).await?;
                let latest = rollout.and_then(|rollout| Some(rollout.state.latest?.id));
                // If the rollout has no try, no span may match.
                required.insert("try", latest.unwrap_or_default());
            }
        }
        let mut conditions = Vec::new();
        add_text_conditions(&mut conditions, "trace_id", &filter.trace_id);
        add_text_conditions(&mut conditions, "span_id", &filter.span_id);
        add_text_conditions(&mut conditions, "parent_id", &filter.parent_id);
        add_text_conditions(&mut conditions, "name", &filter.name);
        let joined = combine_conditions(conditions, filter.logic);
        if !joined.is_empty() {
            required = doc! { "$and": [required, joined] };
        }
        let (found, total) = self.read_page("spans", required, (SPAN_FIELDS, "_id"), page).await?;
        Ok(Page { items: found.iter().map(documents::parse_span).collect::<Result<_>>()?, total })
    }

    /// Counts the stored rollouts, tries, spans, resources and workers.
    pub(super) async fn count_rows(&self) -> Result<RolloutStatistics> {
        let rollouts = self.collection("rollouts");
        let count = async |name: &str, filter: Document| {
            Result::Ok(self.collection(name).count_documents(filter).await?)
        };
        let tries =
            doc! { "$group": { "_id": Bson::Null, "tries": { "$sum": { "$size": "$tries" } } } };
        let tries = collect_documents(rollouts.aggregate(vec![tries]).await?).await?;
        let tries = tries.first().map(|of| fields::read_integer(of, "tries")).transpose()?;
        let resources = self.collection("resources").distinct("id", doc! {}).await?;
        Ok(RolloutStatistics {
            rollouts: count("rollouts", doc! {}).await?,
            tries: tries.unwrap_or(0),
            spans: count("spans", doc! {}).await?,
            resources: resources.len() as u64,
            workers: count("workers", doc! {}).await?,
            queued_rollouts: count("rollouts", doc! { "queued": 1 }).await?,
            active_rollouts: {
                let active = doc! { "status": { "$in": ["preparing", "running"] } };
                count("rollouts", active).await?
            },
        })
    }
}
