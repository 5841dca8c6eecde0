//! Reads: single rows, pages, changes and totals.

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row, params_from_iter};

use super::control::to_failure;
use super::rows;
use crate::error::Failure;
use crate::rollouts::{
    LogicalOperator, Page, PageRequest, Resources, ResourcesFilter, Rollout, RolloutError,
    RolloutFilter, RolloutStatistics, SortOrder, Span, SpanFilter, TextFilter, Try, TrySelector,
    Worker, WorkerFilter,
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
struct QueryConditions {
    required: Vec<String>,
    joined: Vec<String>,
    values: Vec<Value>,
}

impl QueryConditions {
    fn require(&mut self, condition: &str, value: impl Into<Value>) {
        self.required.push(condition.to_owned());
        self.values.push(value.into());
    }

    /// Adds the condition `column IN names`. The names are not escaped, so they must be constants
    /// of the crate.
    fn add_one_of<'a>(&mut self, column: &str, names: Option<impl Iterator<Item = &'a str>>) {
        if let Some(names) = names {
            let quoted: Vec<String> = names.map(|name| format!("'{name}'")).collect();
            self.joined.push(format!("{column} IN ({})", quoted.join(", ")));
        }
    }

    fn add_contains(&mut self, column: &str, text: Option<&String>) {
        if let Some(text) = text {
            self.joined.push(format!("coalesce(instr({column}, ?), 0) > 0"));
            self.values.push(text.clone().into());
        }
    }

    fn add_equals(&mut self, column: &str, text: Option<&String>) {
        if let Some(text) = text {
            self.joined.push(format!("{column} = ?"));
            self.values.push(text.clone().into());
        }
    }

    fn add_text_filter(&mut self, column: &str, filter: &TextFilter) {
        self.add_equals(column, filter.exact.as_ref());
        self.add_contains(column, filter.contains.as_ref());
    }

    /// Returns the `WHERE` clause of the query. Values of required conditions must have been added
    /// first.
    fn where_clause(&self, logic: LogicalOperator) -> String {
        let mut all = self.required.clone();
        if !self.joined.is_empty() {
            let operator = if logic == LogicalOperator::And { " AND " } else { " OR " };
            all.push(format!("({})", self.joined.join(operator)));
        }
        if all.is_empty() { String::new() } else { format!("WHERE {}", all.join(" AND ")) }
    }
}

/// The SQL tables, columns and order from which a page of rows is read.
struct RowSource<'a> {
    from: &'a str,
    /// Tables for counting the rows, which can be fewer than the tables in `from`.
    count_from: &'a str,
    columns: &'a str,
    fields: &'a [Field],
    /// Column that sorts the rows by their creation.
    order: &'a str,
}

impl RowSource<'_> {
    fn order_clause(&self, page: &PageRequest) -> Result<String, Failure> {
        let Some(name) = page.sort_by.as_deref() else { return Ok(self.order.to_owned()) };
        let Some((_, value)) = self.fields.iter().find(|(field, _)| *field == name) else {
            let names: Vec<&str> = self.fields.iter().map(|(name, _)| *name).collect();
            let text = format!("Invalid sort_by: {name}, allowed fields are: {}", names.join(", "));
            return Err(to_failure(RolloutError::Invalid(text)));
        };
        let direction = if page.order == SortOrder::Asc { "ASC" } else { "DESC" };
        Ok(format!("{value} {direction}, {}", self.order))
    }

    fn read_page<T>(
        &self,
        db: &Connection,
        conditions: &QueryConditions,
        logic: LogicalOperator,
        page: &PageRequest,
        read: fn(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Page<T>, Failure> {
        let clause = conditions.where_clause(logic);
        let order = self.order_clause(page)?;
        let limit = page.limit.map_or(-1, |limit| i64::try_from(limit).unwrap_or(i64::MAX));
        let offset = i64::try_from(page.offset).unwrap_or(i64::MAX);
        let sql = format!(
            "SELECT {} FROM {} {clause} ORDER BY {order} LIMIT {limit} OFFSET {offset}",
            self.columns, self.from
        );
        // Pages differ in their limits, so only queries of all rows are worth keeping.
        let items = match limit {
            -1 if offset == 0 => read_rows(&mut *db.prepare_cached(&sql)?, conditions, read)?,
            _ => read_rows(&mut db.prepare(&sql)?, conditions, read)?,
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

fn read_rows<T>(
    query: &mut rusqlite::Statement<'_>,
    conditions: &QueryConditions,
    read: fn(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<Vec<T>, Failure> {
    Ok(query.query_map(params_from_iter(&conditions.values), read)?.collect::<Result<_, _>>()?)
}

/// Returns the rollout with the id `id`, or `None` if it does not exist.
pub(super) fn find_rollout(db: &Connection, id: &str) -> Result<Option<Rollout>, Failure> {
    let sql = format!("SELECT {} FROM {} WHERE r.id = ?1", rows::ROLLOUT, rows::ROLLOUT_FROM);
    Ok(db.prepare_cached(&sql)?.query_row([id], rows::parse_rollout).optional()?)
}

/// Returns one page of the rollouts that match `filter`.
pub(super) fn query_rollouts(
    db: &Connection,
    filter: &RolloutFilter,
    page: &PageRequest,
) -> Result<Page<Rollout>, Failure> {
    let mut conditions = QueryConditions::default();
    conditions.add_one_of(
        "r.status",
        filter.status_in.as_ref().map(|all| all.iter().map(|status| status.name())),
    );
    if let Some(ids) = &filter.id_in {
        let ids =
            serde_json::to_string(ids).map_err(|error| Failure::Unstorable(error.to_string()))?;
        conditions.joined.push("r.id IN (SELECT value FROM json_each(?))".to_owned());
        conditions.values.push(ids.into());
    }
    conditions.add_contains("r.id", filter.id_contains.as_ref());
    let source = RowSource {
        from: rows::ROLLOUT_FROM,
        count_from: "rollouts r",
        columns: rows::ROLLOUT,
        fields: ROLLOUT_FIELDS,
        order: "r.seq",
    };
    source.read_page(db, &conditions, filter.logic, page, rows::parse_rollout)
}

/// Returns one page of the tries of a rollout.
pub(super) fn query_tries(
    db: &Connection,
    rollout_id: &str,
    page: &PageRequest,
) -> Result<Page<Try>, Failure> {
    let mut conditions = QueryConditions::default();
    conditions
        .require("t.rollout = (SELECT seq FROM rollouts WHERE id = ?)", rollout_id.to_owned());
    let from = "tries t JOIN rollouts r ON r.seq = t.rollout";
    let source = RowSource {
        from,
        count_from: from,
        columns: rows::TRY,
        fields: TRY_FIELDS,
        order: "t.number",
    };
    source.read_page(db, &conditions, LogicalOperator::And, page, rows::parse_try)
}

/// Returns at most `max` rollouts that changed after the sequence number `since`, in the order of
/// their last change.
pub(super) fn changed_rollouts(
    db: &Connection,
    since: u64,
    max: usize,
) -> Result<Vec<Rollout>, Failure> {
    let sql = format!(
        "SELECT {} FROM {} WHERE r.changed > ?1 ORDER BY r.changed LIMIT ?2",
        rows::ROLLOUT,
        rows::ROLLOUT_FROM
    );
    let since = i64::try_from(since).unwrap_or(i64::MAX);
    let max = i64::try_from(max).unwrap_or(i64::MAX);
    let mut query = db.prepare_cached(&sql)?;
    Ok(query.query_map((since, max), rows::parse_rollout)?.collect::<Result<_, _>>()?)
}

/// Returns the rollouts of `ids` that have ended, in the order of `ids`, and whether any other
/// rollout of `ids` has not ended.
pub(super) fn finished_rollouts(
    db: &Connection,
    ids: &[String],
) -> Result<(Vec<Rollout>, bool), Failure> {
    let sql = "SELECT status FROM rollouts WHERE id = ?1";
    let mut status_of = db.prepare_cached(sql)?;
    let mut ended = Vec::new();
    let mut has_open = false;
    for id in ids {
        match status_of
            .query_row([id], |row| row.get::<_, crate::rollouts::RolloutStatus>(0))
            .optional()?
        {
            Some(status) if status.is_finished() => ended.extend(find_rollout(db, id)?),
            Some(_) => has_open = true,
            None => {}
        }
    }
    Ok((ended, has_open))
}

/// Returns a version of resources, or `None` if it does not exist. `None` for `version` selects the
/// latest version, and `None` for `id` the resources that were added last.
pub(super) fn find_resources(
    db: &Connection,
    id: Option<&str>,
    version: Option<u64>,
) -> Result<Option<Resources>, Failure> {
    let select = format!("SELECT {} FROM resources", rows::RESOURCES);
    let version = version.map(|version| i64::try_from(version).unwrap_or(i64::MAX));
    let found = match (id, version) {
        (None, _) => {
            let no_announcement = rows::no_announcement_condition();
            let sql = format!("{select} WHERE {no_announcement} ORDER BY seq DESC LIMIT 1");
            db.prepare_cached(&sql)?.query_row([], rows::parse_resources)
        }
        (Some(id), None) => {
            let sql = format!("{select} WHERE id = ?1 ORDER BY version DESC LIMIT 1");
            db.prepare_cached(&sql)?.query_row([id], rows::parse_resources)
        }
        (Some(id), Some(version)) => {
            let sql = format!("{select} WHERE id = ?1 AND version = ?2");
            db.prepare_cached(&sql)?.query_row((id, version), rows::parse_resources)
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
    let mut conditions = QueryConditions::default();
    conditions.required.push("latest = 1".to_owned());
    if filter.without_announcements {
        conditions.required.push(rows::no_announcement_condition());
    }
    conditions.add_text_filter(
        "id",
        &TextFilter { exact: filter.id.clone(), contains: filter.id_contains.clone() },
    );
    let source = RowSource {
        from: "resources",
        count_from: "resources",
        columns: rows::RESOURCES,
        fields: RESOURCES_FIELDS,
        order: "first",
    };
    source.read_page(db, &conditions, LogicalOperator::And, page, rows::parse_resources)
}

/// Returns the worker with the id `id`, or `None` if the worker is unknown.
pub(super) fn find_worker(db: &Connection, id: &str) -> Result<Option<Worker>, Failure> {
    let sql = format!("SELECT {} FROM workers WHERE id = ?1", rows::WORKER);
    Ok(db.prepare_cached(&sql)?.query_row([id], rows::parse_worker).optional()?)
}

/// Returns one page of the workers that match `filter`.
pub(super) fn query_workers(
    db: &Connection,
    filter: &WorkerFilter,
    page: &PageRequest,
) -> Result<Page<Worker>, Failure> {
    let mut conditions = QueryConditions::default();
    conditions.add_one_of(
        "status",
        filter.status_in.as_ref().map(|all| all.iter().map(|status| status.name())),
    );
    conditions.add_contains("id", filter.id_contains.as_ref());
    let source = RowSource {
        from: "workers",
        count_from: "workers",
        columns: rows::WORKER,
        fields: WORKER_FIELDS,
        order: "seq",
    };
    source.read_page(db, &conditions, filter.logic, page, rows::parse_worker)
}

/// Returns one page of the spans that match `filter`.
pub(super) fn query_spans(
    db: &Connection,
    filter: &SpanFilter,
    page: &PageRequest,
) -> Result<Page<Span>, Failure> {
    let mut conditions = QueryConditions::default();
    let rollout = "(SELECT seq FROM rollouts WHERE id = ?)";
    conditions.require(&format!("s.rollout = {rollout}"), filter.rollout_id.clone());
    match &filter.try_name {
        None => {}
        Some(TrySelector::Latest) => {
            let latest = "(SELECT t.seq FROM rollouts r JOIN tries t ON t.rollout = r.seq AND t.number = r.tries WHERE r.id = ?)";
            conditions.require(&format!("s.try = {latest}"), filter.rollout_id.clone());
        }
        Some(TrySelector::Id(id)) => {
            conditions.require("s.try IN (SELECT seq FROM tries WHERE id = ?)", id.clone());
        }
    }
    conditions.add_text_filter("s.trace_id", &filter.trace_id);
    conditions.add_text_filter("s.span_id", &filter.span_id);
    conditions.add_text_filter("s.parent_id", &filter.parent_id);
    conditions.add_text_filter("s.name", &filter.name);
    let source = RowSource {
        from: "spans s JOIN rollouts r ON r.seq = s.rollout JOIN tries t ON t.seq = s.try",
        count_from: "spans s",
        columns: rows::SPAN,
        fields: SPAN_FIELDS,
        order: "s.seq",
    };
    source.read_page(db, &conditions, filter.logic, page, rows::parse_span)
}

fn read_count(row: &Row<'_>, index: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(index).map(|count| count as u64)
}

/// Counts the stored rollouts, tries, spans, resources and workers.
pub(super) fn count_rows(db: &Connection) -> Result<RolloutStatistics, Failure> {
    let sql =
        "SELECT (SELECT count(*) FROM rollouts), (SELECT count(*) FROM tries), (SELECT spans FROM totals),
                   (SELECT count(*) FROM resources WHERE latest = 1), (SELECT count(*) FROM workers),
                   (SELECT count(*) FROM rollouts WHERE queued = 1),
                   (SELECT count(*) FROM rollouts WHERE status IN ('preparing', 'running'))";
    Ok(db.prepare_cached(sql)?.query_row([], |row| {
        Ok(RolloutStatistics {
            rollouts: read_count(row, 0)?,
            tries: read_count(row, 1)?,
            spans: read_count(row, 2)?,
            resources: read_count(row, 3)?,
            workers: read_count(row, 4)?,
            queued_rollouts: read_count(row, 5)?,
            active_rollouts: read_count(row, 6)?,
        })
    })?)
}
