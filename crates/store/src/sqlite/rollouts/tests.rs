use std::collections::BTreeSet;

use rusqlite::trace::{TraceEvent, TraceEventCodes};

use super::*;
use crate::rollouts::{ManualClock, SystemClock};
use crate::rollouts_contract;

rollouts_contract!(in_memory, async |clock: Arc<ManualClock>| {
    ((), open_rollouts("memory:", clock).await.unwrap())
});

rollouts_contract!(in_a_file, async |clock: Arc<ManualClock>| {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rollouts.db").display().to_string();
    let store = open_rollouts(&file, clock).await.unwrap();
    (dir, store)
});

fn json(text: &str) -> Box<serde_json::value::RawValue> {
    serde_json::value::RawValue::from_string(text.to_owned()).unwrap()
}

fn new(input: &str) -> NewRollout {
    NewRollout::new(json(input))
}

#[tokio::test]
async fn reopened_file_keeps_rollouts_and_queue_order() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("rollouts.db").display().to_string();
    let store = open_rollouts(&file, Arc::new(SystemClock::default())).await.unwrap();
    store.enqueue(&[new("1"), new("2"), new("3")]).await.unwrap();
    let leased = store.lease_rollouts(&LeaseRequest::new(1, Some("w"))).await.unwrap();
    drop(store);
    let store = open_rollouts(&file, Arc::new(SystemClock::default())).await.unwrap();
    let lease = leased[0].latest_try.as_ref().unwrap().lease();
    store.end_lease(&lease, LeaseEnd::Released, None).await.unwrap();
    let again = store.lease_rollouts(&LeaseRequest::new(9, Some("w"))).await.unwrap();
    assert_eq!(
        again.iter().map(|rollout| rollout.input.get()).collect::<Vec<_>>(),
        ["1", "2", "3"]
    );
}

#[tokio::test]
async fn open_rejects_foreign_files_and_unknown_versions() {
    let dir = tempfile::tempdir().unwrap();
    let open = async |name: &str| {
        let file = dir.path().join(name).display().to_string();
        open_rollouts(&file, Arc::new(SystemClock::default())).await
    };
    let foreign = Connection::open(dir.path().join("foreign.db")).unwrap();
    foreign.execute_batch("CREATE TABLE t (a); INSERT INTO t VALUES (1)").unwrap();
    assert!(matches!(open("foreign.db").await.err().unwrap(), StoreError::Foreign { .. }));
    assert_eq!(foreign.query_row("SELECT a FROM t", [], |row| row.get::<_, i64>(0)).unwrap(), 1);
    drop(open("later.db").await.unwrap());
    let later = Connection::open(dir.path().join("later.db")).unwrap();
    later.pragma_update(None, "user_version", schema::SCHEMA_VERSION + 1).unwrap();
    assert!(matches!(open("later.db").await.err().unwrap(), StoreError::Version { .. }));
    std::fs::write(dir.path().join("text.db"), "not a database, but a longer text").unwrap();
    let error = open("text.db").await.err().unwrap();
    assert!(error.is_user_error() && error.to_string().contains("text.db"), "{error}");
    assert!(open("none/rollouts.db").await.err().unwrap().is_user_error());
}

/// Runs the operations that a busy server runs at every request.
fn run_hot_operations(db: &Connection) {
    let call = CallContext { db, now: 1000.0 };
    let mut keyed = new("1");
    keyed.key = Some("key".to_owned());
    let created = queue::enqueue_rollouts(call, &[keyed, new("2")]).unwrap();
    let keyed = LeaseRequest { key: Some("k".to_owned()), ..LeaseRequest::new(1, Some("w")) };
    assert!(queue::can_lease(call, &keyed).unwrap());
    let leased = queue::lease_rollouts(call, &LeaseRequest::new(1, Some("w"))).unwrap();
    let id = &leased[0].id;
    let of = leased[0].latest_try.as_ref().unwrap();
    reports::record_heartbeat(call, &of.lease()).unwrap();
    let span = NewSpan {
        rollout_id: id.clone(),
        try_id: of.id.clone(),
        number: None,
        trace_id: "t".to_owned(),
        span_id: "s".to_owned(),
        parent_id: None,
        name: "n".to_owned(),
        start_time: None,
        end_time: None,
        body: json("{}"),
    };
    spans::add_spans(call, &[span]).unwrap();
    spans::reserve_numbers(call, id, 1).unwrap();
    let update = TryUpdate { worker_id: Some("w".to_owned()), ..TryUpdate::default() };
    reports::update_try(call, id, &TrySelector::Id(of.id.clone()), &update).unwrap();
    reports::update_rollout(call, id, &RolloutUpdate::default()).unwrap();
    reports::has_expired(call).unwrap();
    reports::expire_tries(call).unwrap();
    reports::end_lease(call, &of.lease(), LeaseEnd::Succeeded, Some(&json("{}"))).unwrap();
    queue::cancel_rollouts(call, &[created[1].id.clone()]).unwrap();
    directory::put_resources(call, Some("r"), &json("{}")).unwrap();
    directory::record_worker_heartbeat(call, "w", None).unwrap();
    let by_number =
        PageRequest { sort_by: Some("sequence_id".to_owned()), ..PageRequest::default() };
    let by_id = RolloutFilter { id_in: Some(vec![id.clone()]), ..RolloutFilter::default() };
    read::find_rollout(db, id).unwrap();
    read::query_rollouts(db, &by_id, &PageRequest::default()).unwrap();
    read::query_tries(db, id, &by_number).unwrap();
    read::changed_rollouts(db, 0, 10).unwrap();
    read::finished_rollouts(db, std::slice::from_ref(id)).unwrap();
    read::find_resources(db, None, None).unwrap();
    read::find_resources(db, Some("r"), None).unwrap();
    read::find_worker(db, "w").unwrap();
    let latest = SpanFilter { try_name: Some(TrySelector::Latest), ..SpanFilter::new(id) };
    read::query_spans(db, &latest, &by_number).unwrap();
    read::query_spans(db, &SpanFilter::new(id), &by_number).unwrap();
}

#[test]
fn frequent_queries_use_indexes_not_table_scans() {
    let mut db = schema::open_in_memory().unwrap();
    let (to, statements) = std::sync::mpsc::channel();
    let note = move |event: TraceEvent<'_>| {
        if let TraceEvent::Stmt(_, sql) = event {
            to.send(sql.to_owned()).unwrap();
        }
    };
    db.trace_v2(TraceEventCodes::SQLITE_TRACE_STMT, Some(note)).unwrap();
    run_hot_operations(&db);
    let all: BTreeSet<String> = statements.try_iter().collect();
    assert!(all.len() > 30, "{all:?}");
    for sql in all.iter().filter(|sql| !sql.starts_with("--")) {
        let mut plan = db.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
        let mut rows = plan.raw_query();
        let mut steps = Vec::new();
        while let Some(row) = rows.next().unwrap() {
            steps.push(row.get::<_, String>(3).unwrap());
        }
        for step in &steps {
            let is_small =
                ["CONSTANT ROW", "json_each", "totals"].iter().any(|table| step.contains(table));
            let is_ordered = sql.contains("LIMIT 1") && !step.contains("USING");
            assert!(!step.starts_with("SCAN") || is_small || is_ordered, "{sql}: {steps:?}");
        }
        let is_queue =
            sql.contains("queued = 1") || sql.contains("changed >") || sql.contains("expires <");
        let sorts = steps.iter().any(|step| step.contains("TEMP B-TREE"));
        assert!(!is_queue || !sorts, "{sql}: {steps:?}");
    }
}
