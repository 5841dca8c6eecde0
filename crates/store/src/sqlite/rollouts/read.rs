//! Reads: single rows, pages, changes and totals.

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params_from_iter};

use super::control::reject;
use super::rows;
use crate::error::Failure;
use crate::rollouts::{
    Logic, Order, Page, PageRequest, Resources, ResourcesFilter, Rollout, RolloutError,
    RolloutFilter, Span, SpanFilter, Statistics, TextFilter, Try, TryName, Worker, WorkerFilter,
};

/// A field to sort by: its serialized name, and the SQL expression of its value.
type Field = (&'static str, &'static str);

const ROLLOUT_FIELDS: &[Field] = &[
    ("rollout_id", "r.id"),
    ("input", "r.input"),
    ("start_time", "r.start_time"),
    ("end_time", "coalesce(r.end_time, 9e999)"),
    ("mode", "coalesce(r.mode, '')"),
    ("resources_id", "coalesce(r.resources_id, '')"),
    ("status", "r.status"),
    ("config", "coalesce(r.timeout, 0)"),
    ("metadata", "coalesce(r.metadata, '')"),
];

const TRY_FIELDS: &[Field] = &[
    ("rollout_id", "t.rollout"),
    ("attempt_id", "t.id"),
    ("sequence_id", "t.number"),
    ("start_time", "t.start_time"),
    ("end_time", "coalesce(t.end_time, 9e999)"),
    ("status", "t.status"),
    ("worker_id", "coalesce(t.worker, '')"),
    ("last_heartbeat_time", "coalesce(t.heartbeat, 9e999)"),
    ("metadata", "coalesce(t.metadata, '')"),
];

const WORKER_FIELDS: &[Field] = &[
    ("worker_id", "id"),
    ("status", "status"),
    ("heartbeat_stats", "coalesce(stats, '')"),
    ("last_heartbeat_time", "coalesce(heartbeat, 9e999)"),
    ("last_dequeue_time", "coalesce(dequeue, 9e999)"),
    ("last_busy_time", "coalesce(busy, 9e999)"),
    ("last_idle_time", "coalesce(idle, 9e999)"),
    ("current_rollout_id", "coalesce(current_rollout, '')"),
    ("current_attempt_id", "coalesce(current_try, '')"),
];

const RESOURCES_FIELDS: &[Field] = &[
    ("resources_id", "id"),
    ("create_time", "create_time"),
    ("update_time", "update_time"),
    ("version", "version"),
    ("resources", "value"),
];

const SPAN_FIELDS: &[Field] = &[
    ("rollout_id", "r.id"),
    ("attempt_id", "t.id"),
    ("sequence_id", "s.number"),
    ("trace_id", "s.trace_id"),
    ("span_id", "s.span_id"),
    ("parent_id", "coalesce(s.parent_id, '')"),
    ("name", "s.name"),
    ("status", "json_extract(s.body, '$.status.status_code')"),
    ("attributes", "json_extract(s.body, '$.attributes')"),
    ("events", "json_extract(s.body, '$.events')"),
    ("links", "json_extract(s.body, '$.links')"),
    ("start_time", "coalesce(s.start_time, 9e999)"),
    ("end_time", "coalesce(s.end_time, 9e999)"),
    ("context", "coalesce(json_extract(s.body, '$.context'), '')"),
    ("parent", "coalesce(json_extract(s.body, '$.parent'), '')"),
    ("resource", "json_extract(s.body, '$.resource')"),
];

/// The conditions of an SQL query, and the values of their parameters.
#[derive(Default)]
struct Conditions {
    required: Vec<String>,
    joined: Vec<String>,
    values: Vec<Value>,
}

impl Conditions {
    fn require(&mut self, condition: &str, value: impl Into<Value>) {
        self.required.push(condition.to_owned());
        self.values.push(value.into());
    }

    /// Adds the condition `column IN names`. The names are not escaped, so they must be constants
    /// of the crate.
    fn one_of<'a>(&mut self, column: &str, names: Option<impl Iterator<Item = &'a str>>) {
        if let Some(names) = names {
            let quoted: Vec<String> = names.map(|name| format!("'{name}'")).collect();
            self.joined.push(format!("{column} IN ({})", quoted.join(", ")));
        }
    }

    fn contains(&mut self, column: &str, text: Option<&String>) {
        if let Some(text) = text {
            self.joined.push(format!("coalesce(instr({column}, ?), 0) > 0"));
            self.values.push(text.clone().into());
        }
    }

    fn equals(&mut self, column: &str, text: Option<&String>) {
        if let Some(text) = text {
            self.joined.push(format!("{column} = ?"));
            self.values.push(text.clone().into());
        }
    }

    fn text(&mut self, column: &str, filter: &TextFilter) {
        self.equals(column, filter.exact.as_ref());
        self.contains(column, filter.contains.as_ref());
    }

    /// Returns the `WHERE` clause of the query. Values of required conditions must have been added
    /// first.
    fn clause(&self, logic: Logic) -> String {
        let mut all = self.required.clone();
        if !self.joined.is_empty() {
            let operator = if logic == Logic::And { " AND " } else { " OR " };
            all.push(format!("({})", self.joined.join(operator)));
        }
        if all.is_empty() { String::new() } else { format!("WHERE {}", all.join(" AND ")) }
    }
}

/// The SQL tables, columns and order from which a page of rows is read.
struct Source<'a> {
    from: &'a str,
    /// Tables for counting the rows, which can be fewer than `from`.
    count_from: &'a str,
    columns: &'a str,
    fields: &'a [Field],
    /// Column that sorts the rows by their creation.
    order: &'a str,
}

impl Source<'_> {
    fn order(&self, page: &PageRequest) -> Result<String, Failure> {
        let Some(name) = page.sort_by.as_deref() else { return Ok(self.order.to_owned()) };
        let Some((_, value)) = self.fields.iter().find(|(field, _)| *field == name) else {
            let names: Vec<&str> = self.fields.iter().map(|(name, _)| *name).collect();
            let text = format!("Invalid sort_by: {name}, allowed fields are: {}", names.join(", "));
            return Err(reject(RolloutError::Invalid(text)));
        };
        let direction = if page.order == Order::Asc { "ASC" } else { "DESC" };
        Ok(format!("{value} {direction}, {}", self.order))
    }

    fn page<T>(
        &self,
        db: &Connection,
        conditions: &Conditions,
        logic: Logic,
        page: &PageRequest,
        read: fn(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Page<T>, Failure> {
        let clause = conditions.clause(logic);
        let order = self.order(page)?;
        let limit = page.limit.map_or(-1, |limit| i64::try_from(limit).unwrap_or(i64::MAX));
        let offset = i64::try_from(page.offset).unwrap_or(i64::MAX);
        let sql = format!(
            "SELECT {} FROM {} {clause} ORDER BY {order} LIMIT {limit} OFFSET {offset}",
            self.columns, self.from
        );
        // Pages differ in their limits, so only queries of all rows are worth keeping.
        let items = match limit {
            -1 if offset == 0 => rows_of(&mut *db.prepare_cached(&sql)?, conditions, read)?,
            _ => rows_of(&mut db.prepare(&sql)?, conditions, read)?,
        };
        let is_complete = page.limit.is_none_or(|limit| (items.len() as u64) < limit);
        let total = if is_complete && (offset == 0 || !items.is_empty()) {
            page.offset + items.len() as u64
        } else {
            let sql = format!("SELECT count(*) FROM {} {clause}", self.count_from);
            let mut count = db.prepare_cached(&sql)?;
            count.query_row(params_from_iter(&conditions.values), |row| row.get::<_, i64>(0))?
                as u64
        };
        Ok(Page { items, total })
    }
}

fn rows_of<T>(
    query: &mut rusqlite::Statement<'_>,
    conditions: &Conditions,
    read: fn(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<Vec<T>, Failure> {
    Ok(query.query_map(params_from_iter(&conditions.values), read)?.collect::<Result<_, _>>()?)
}

/// Returns the rollout with the id `id`, or `None` if it does not exist.
pub(super) fn rollout(db: &Connection, id: &str) -> Result<Option<Rollout>, Failure> {
    let sql = format!("SELECT {} FROM {} WHERE r.id = ?1", rows::ROLLOUT, rows::ROLLOUT_FROM);
    Ok(db.prepare_cached(&sql)?.query_row([id], rows::rollout).optional()?)
}

/// Returns one page of the rollouts that match `filter`.
pub(super) fn rollouts(
    db: &Connection,
    filter: &RolloutFilter,
    page: &PageRequest,
) -> Result<Page<Rollout>, Failure> {
    let mut conditions = Conditions::default();
    conditions.one_of(
        "r.status",
        filter.status_in.as_ref().map(|all| all.iter().map(|status| status.name())),
    );
    if let Some(ids) = &filter.id_in {
        let ids =
            serde_json::to_string(ids).map_err(|error| Failure::Unstorable(error.to_string()))?;
        conditions.joined.push("r.id IN (SELECT value FROM json_each(?))".to_owned());
        conditions.values.push(ids.into());
    }
    conditions.contains("r.id", filter.id_contains.as_ref());
    let source = Source {
        from: rows::ROLLOUT_FROM,
        count_from: "rollouts r",
        columns: rows::ROLLOUT,
        fields: ROLLOUT_FIELDS,
        order: "r.seq",
    };
    source.page(db, &conditions, filter.logic, page, rows::rollout)
}

/// Returns one page of the tries of a rollout.
pub(super) fn tries(
    db: &Connection,
    rollout_id: &str,
    page: &PageRequest,
) -> Result<Page<Try>, Failure> {
    let mut conditions = Conditions::default();
    conditions
        .require("t.rollout = (SELECT seq FROM rollouts WHERE id = ?)", rollout_id.to_owned());
    let from = "tries t JOIN rollouts r ON r.seq = t.rollout";
    let source = Source {
        from,
        count_from: from,
        columns: rows::TRY,
        fields: TRY_FIELDS,
        order: "t.number",
    };
    source.page(db, &conditions, Logic::And, page, rows::attempt)
}

/// Returns at most `max` rollouts that changed after the sequence number `since`, in the order of
/// their last change.
pub(super) fn changes(db: &Connection, since: u64, max: usize) -> Result<Vec<Rollout>, Failure> {
    let sql = format!(
        "SELECT {} FROM {} WHERE r.changed > ?1 ORDER BY r.changed LIMIT ?2",
        rows::ROLLOUT,
        rows::ROLLOUT_FROM
    );
    let since = i64::try_from(since).unwrap_or(i64::MAX);
    let max = i64::try_from(max).unwrap_or(i64::MAX);
    let mut query = db.prepare_cached(&sql)?;
    Ok(query.query_map((since, max), rows::rollout)?.collect::<Result<_, _>>()?)
}

/// Returns the rollouts of `ids` that have ended, in the order of `ids`, and whether any other
/// rollout of `ids` has not ended.
pub(super) fn finished(db: &Connection, ids: &[String]) -> Result<(Vec<Rollout>, bool), Failure> {
    let sql = "SELECT status FROM rollouts WHERE id = ?1";
    let mut status_of = db.prepare_cached(sql)?;
    let mut ended = Vec::new();
    let mut has_open = false;
    for id in ids {
        match status_of
            .query_row([id], |row| row.get::<_, crate::rollouts::RolloutStatus>(0))
            .optional()?
        {
            Some(status) if status.is_finished() => ended.extend(rollout(db, id)?),
            Some(_) => has_open = true,
            None => {}
        }
    }
    Ok((ended, has_open))
}

/// Returns a version of resources, or `None` if it does not exist. `None` for `version` selects the
/// latest version, and `None` for `id` the resources that were added last.
pub(super) fn resources(
    db: &Connection,
    id: Option<&str>,
    version: Option<u64>,
) -> Result<Option<Resources>, Failure> {
    let select = format!("SELECT {} FROM resources", rows::RESOURCES);
    let version = version.map(|version| i64::try_from(version).unwrap_or(i64::MAX));
    let found = match (id, version) {
        (None, _) => {
            let no_announcement = rows::no_announcement();
            let sql = format!("{select} WHERE {no_announcement} ORDER BY seq DESC LIMIT 1");
            db.prepare_cached(&sql)?.query_row([], rows::resources)
        }
        (Some(id), None) => {
            let sql = format!("{select} WHERE id = ?1 ORDER BY version DESC LIMIT 1");
            db.prepare_cached(&sql)?.query_row([id], rows::resources)
        }
        (Some(id), Some(version)) => {
            let sql = format!("{select} WHERE id = ?1 AND version = ?2");
            db.prepare_cached(&sql)?.query_row((id, version), rows::resources)
        }
    };
    Ok(found.optional()?)
}

/// Returns one page of the latest versions of the resources that match `filter`.
pub(super) fn query_resources(
    db: &Connection,
    filter: &ResourcesFilter,
    page: &PageRequest,
) -> Result<Page<Resources>, Failure> {
    let mut conditions = Conditions::default();
    conditions.required.push("latest = 1".to_owned());
    if filter.without_announcements {
        conditions.required.push(rows::no_announcement());
    }
    conditions
        .text("id", &TextFilter { exact: filter.id.clone(), contains: filter.id_contains.clone() });
    let source = Source {
        from: "resources",
        count_from: "resources",
        columns: rows::RESOURCES,
        fields: RESOURCES_FIELDS,
        order: "first",
    };
    source.page(db, &conditions, Logic::And, page, rows::resources)
}

/// Returns the worker with the id `id`, or `None` if the worker is unknown.
pub(super) fn worker(db: &Connection, id: &str) -> Result<Option<Worker>, Failure> {
    let sql = format!("SELECT {} FROM workers WHERE id = ?1", rows::WORKER);
    Ok(db.prepare_cached(&sql)?.query_row([id], rows::worker).optional()?)
}

/// Returns one page of the workers that match `filter`.
pub(super) fn workers(
    db: &Connection,
    filter: &WorkerFilter,
    page: &PageRequest,
) -> Result<Page<Worker>, Failure> {
    let mut conditions = Conditions::default();
    conditions.one_of(
        "status",
        filter.status_in.as_ref().map(|all| all.iter().map(|status| status.name())),
    );
    conditions.contains("id", filter.id_contains.as_ref());
    let source = Source {
        from: "workers",
        count_from: "workers",
        columns: rows::WORKER,
        fields: WORKER_FIELDS,
        order: "seq",
    };
    source.page(db, &conditions, filter.logic, page, rows::worker)
}

/// Returns one page of the spans that match `filter`.
pub(super) fn spans(
    db: &Connection,
    filter: &SpanFilter,
    page: &PageRequest,
) -> Result<Page<Span>, Failure> {
    let mut conditions = Conditions::default();
    let rollout = "(SELECT seq FROM rollouts WHERE id = ?)";
    conditions.require(&format!("s.rollout = {rollout}"), filter.rollout_id.clone());
    match &filter.try_name {
        None => {}
        Some(TryName::Latest) => {
            let latest = "(SELECT t.seq FROM rollouts r JOIN tries t ON t.rollout = r.seq AND t.number = r.tries WHERE r.id = ?)";
            conditions.require(&format!("s.try = {latest}"), filter.rollout_id.clone());
        }
        Some(TryName::Id(id)) => {
            conditions.require("s.try IN (SELECT seq FROM tries WHERE id = ?)", id.clone());
        }
    }
    conditions.text("s.trace_id", &filter.trace_id);
    conditions.text("s.span_id", &filter.span_id);
    conditions.text("s.parent_id", &filter.parent_id);
    conditions.text("s.name", &filter.name);
    let source = Source {
        from: "spans s JOIN rollouts r ON r.seq = s.rollout JOIN tries t ON t.seq = s.try",
        count_from: "spans s",
        columns: rows::SPAN,
        fields: SPAN_FIELDS,
        order: "s.seq",
    };
    source.page(db, &conditions, filter.logic, page, rows::span)
}

fn count(row: &Row<'_>, index: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(index).map(|count| count as u64)
}

/// Counts the stored rollouts, tries, spans, resources and workers.
pub(super) fn statistics(db: &Connection) -> Result<Statistics, Failure> {
    let sql =
        "SELECT (SELECT count(*) FROM rollouts), (SELECT count(*) FROM tries), (SELECT spans FROM totals),
                   (SELECT count(*) FROM resources WHERE latest = 1), (SELECT count(*) FROM workers),
                   (SELECT count(*) FROM rollouts WHERE queued = 1),
                   (SELECT count(*) FROM rollouts WHERE status IN ('preparing', 'running'))";
    Ok(db.prepare_cached(sql)?.query_row([], |row| {
        Ok(Statistics {
            rollouts: count(row, 0)?,
            tries: count(row, 1)?,
            spans: count(row, 2)?,
            resources: count(row, 3)?,
            workers: count(row, 4)?,
            queued_rollouts: count(row, 5)?,
            active_rollouts: count(row, 6)?,
        })
    })?)
}
