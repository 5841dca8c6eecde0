//! Contract tests of queries, resources, workers and spans.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Store, inputs, lease_one, new, raw, retrying, span};
use crate::rollouts::{
    LogicalOperator, ManualClock, NewRollout, NewSpan, PageRequest, ResourcesFilter, RolloutFilter,
    RolloutStatus, SortOrder, SpanFilter, SpanOutcome, TrySelector, WorkerFilter, WorkerStatus,
};

pub async fn filters_combine_by_logic(store: Store, _: Arc<ManualClock>) {
    let created = store.enqueue(&[new(1), new(2), new(3)]).await.unwrap();
    store.cancel_rollouts(&[created[0].id.clone()]).await.unwrap();
    let filter = |status: Option<&[RolloutStatus]>,
                  ids: Option<&[usize]>,
                  contains: Option<usize>,
                  logic| {
        RolloutFilter {
            status_in: status.map(<[_]>::to_vec),
            id_in: ids.map(|ids| ids.iter().map(|index| created[*index].id.clone()).collect()),
            id_contains: contains.map(|index| created[index].id[3..].to_owned()),
            logic,
        }
    };
    let cancelled = Some(&[RolloutStatus::Cancelled][..]);
    for (filter, expected) in [
        (filter(None, None, None, LogicalOperator::Or), vec!["1", "2", "3"]),
        (filter(cancelled, Some(&[0, 1]), None, LogicalOperator::And), vec!["1"]),
        (filter(cancelled, Some(&[1]), None, LogicalOperator::And), vec![]),
        (filter(cancelled, Some(&[2]), None, LogicalOperator::Or), vec!["1", "3"]),
        (filter(None, None, Some(1), LogicalOperator::And), vec!["2"]),
        (filter(Some(&[]), None, None, LogicalOperator::And), vec![]),
        (filter(None, Some(&[]), None, LogicalOperator::And), vec![]),
    ] {
        let found = store.query_rollouts(&filter, &PageRequest::default()).await.unwrap();
        assert_eq!(inputs(&found.items), expected, "{filter:?}");
    }
    let started = store.start_rollout(&new(4), Some("w")).await.unwrap();
    let named =
        |name: &str, id: &str| NewSpan { name: name.to_owned(), ..span(&started, id, None) };
    store.add_spans(vec![named("a.x", "1"), named("b.x", "2"), named("c.y", "3")]).await.unwrap();
    let mut filter = SpanFilter { logic: LogicalOperator::Or, ..SpanFilter::new(&started.id) };
    assert_eq!(store.query_spans(&filter, &PageRequest::default()).await.unwrap().total, 3);
    filter.name.contains = Some(".x".to_owned());
    filter.span_id.exact = Some("3".to_owned());
    assert_eq!(store.query_spans(&filter, &PageRequest::default()).await.unwrap().total, 3);
    filter.logic = LogicalOperator::And;
    assert_eq!(store.query_spans(&filter, &PageRequest::default()).await.unwrap().total, 0);
    filter.span_id.exact = None;
    filter.try_name = Some(TrySelector::Latest);
    assert_eq!(store.query_spans(&filter, &PageRequest::default()).await.unwrap().total, 2);
    filter.try_name = Some(TrySelector::Id("at-none".to_owned()));
    assert_eq!(store.query_spans(&filter, &PageRequest::default()).await.unwrap().total, 0);
}

pub async fn pages_count_all_matches_and_reject_unknown_fields(store: Store, _: Arc<ManualClock>) {
    store.enqueue(&(0..5).map(new).collect::<Vec<_>>()).await.unwrap();
    for (limit, offset, expected) in [
        (Some(2), 0, vec!["0", "1"]),
        (Some(2), 4, vec!["4"]),
        (Some(2), 5, vec![]),
        (Some(9), 9, vec![]),
        (None, 3, vec!["3", "4"]),
        (None, 7, vec![]),
    ] {
        let page = PageRequest { limit, offset, ..PageRequest::default() };
        let found = store.query_rollouts(&RolloutFilter::default(), &page).await.unwrap();
        assert_eq!((inputs(&found.items), found.total), (expected, 5), "{limit:?} {offset}");
    }
    let wrong = PageRequest { sort_by: Some("zz".to_owned()), ..PageRequest::default() };
    for error in [
        store.query_rollouts(&RolloutFilter::default(), &wrong).await.map(drop),
        store.query_tries("x", &wrong).await.map(drop),
        store.query_workers(&WorkerFilter::default(), &wrong).await.map(drop),
        store.query_resources(&ResourcesFilter::default(), &wrong).await.map(drop),
        store.query_spans(&SpanFilter::new("x"), &wrong).await.map(drop),
    ] {
        let text = error.unwrap_err().to_string();
        assert!(text.starts_with("Invalid sort_by: zz, allowed fields are: "), "{text}");
    }
}

pub async fn missing_values_sort_last_for_times_and_first_for_text(
    store: Store,
    _: Arc<ManualClock>,
) {
    let with =
        |input, mode: Option<&str>| NewRollout { mode: mode.map(str::to_owned), ..new(input) };
    let created = store
        .enqueue(&[with(1, Some("val")), with(2, None), with(3, Some("train")), with(4, None)])
        .await
        .unwrap();
    store.cancel_rollouts(&[created[1].id.clone()]).await.unwrap();
    for (field, order, expected) in [
        ("mode", SortOrder::Asc, ["2", "4", "3", "1"]),
        ("mode", SortOrder::Desc, ["1", "3", "2", "4"]),
        ("end_time", SortOrder::Asc, ["2", "1", "3", "4"]),
        ("end_time", SortOrder::Desc, ["1", "3", "4", "2"]),
    ] {
        let page = PageRequest { sort_by: Some(field.to_owned()), order, ..PageRequest::default() };
        let found = store.query_rollouts(&RolloutFilter::default(), &page).await.unwrap();
        assert_eq!(inputs(&found.items), expected, "{field} {order:?}");
    }
}

pub async fn resources_are_append_only_versions(store: Store, clock: Arc<ManualClock>) {
    assert!(store.resources(None, None).await.unwrap().is_none());
    let first = store.put_resources(None, &raw("1")).await.unwrap();
    assert_eq!(first.version, 1);
    store.put_resources(Some("prompt"), &raw("2")).await.unwrap();
    clock.advance(1.0);
    let second = store.put_resources(Some(&first.id), &raw("3")).await.unwrap();
    assert_eq!((second.version, second.create_time, second.update_time), (2, 1000.0, 1001.0));
    for (id, version, value) in [
        (None, None, Some("3")),
        (Some("prompt"), None, Some("2")),
        (Some(first.id.as_str()), Some(1), Some("1")),
        (Some(first.id.as_str()), Some(3), None),
        (Some("none"), None, None),
    ] {
        let found = store.resources(id, version).await.unwrap();
        assert_eq!(found.as_ref().map(|found| found.value.get()), value, "{id:?} {version:?}");
    }
    let all =
        store.query_resources(&ResourcesFilter::default(), &PageRequest::default()).await.unwrap();
    let ids: Vec<_> = all.items.iter().map(|found| (found.id.as_str(), found.version)).collect();
    assert_eq!((ids, all.total), (vec![(first.id.as_str(), 2), ("prompt", 1)], 2));
    assert_eq!(store.enqueue(&[new(1)]).await.unwrap()[0].resources_id, Some(first.id));
}

pub async fn announcements_are_never_the_latest_resources(store: Store, _: Arc<ManualClock>) {
    let announcement = raw(r#"{"levade_runner_protocol":1,"recipe":"[run]"}"#);
    store.put_resources(Some("run/a"), &announcement).await.unwrap();
    assert!(store.resources(None, None).await.unwrap().is_none());
    assert_eq!(store.enqueue(&[new(1)]).await.unwrap()[0].resources_id, None);
    let prompt = store.put_resources(Some("prompt"), &raw(r#"{"p":1}"#)).await.unwrap();
    for queue in ["run/a", "b"] {
        store.put_resources(Some(queue), &announcement).await.unwrap();
    }
    let latest = store.resources(None, None).await.unwrap().unwrap();
    assert_eq!((&latest.id, latest.value.get()), (&prompt.id, r#"{"p":1}"#));
    assert_eq!(store.enqueue(&[new(2)]).await.unwrap()[0].resources_id, Some(prompt.id.clone()));
    assert_eq!(store.start_rollout(&new(3), None).await.unwrap().resources_id, Some(prompt.id));
    // Runners find the announcements by their ids.
    let found = store.resources(Some("b"), None).await.unwrap().unwrap();
    assert_eq!(found.value.get(), announcement.get());
    for (without_announcements, expected) in
        [(false, &["run/a", "prompt", "b"][..]), (true, &["prompt"][..])]
    {
        let filter = ResourcesFilter { without_announcements, ..ResourcesFilter::default() };
        let page = store.query_resources(&filter, &PageRequest::default()).await.unwrap();
        let ids: Vec<_> = page.items.iter().map(|found| found.id.as_str()).collect();
        assert_eq!((&ids[..], page.total), (expected, expected.len() as u64));
    }
}

pub async fn worker_status_follows_status_of_its_try(store: Store, clock: Arc<ManualClock>) {
    assert!(store.worker("w").await.unwrap().is_none());
    assert_eq!(
        store.record_worker_heartbeat("w", Some(raw("{\"cpu\":1}"))).await.unwrap().status,
        WorkerStatus::Unknown
    );
    assert!(lease_one(&store, "w").await.is_none());
    let idle = store.worker("w").await.unwrap().unwrap();
    assert_eq!((idle.status, idle.last_idle_time), (WorkerStatus::Idle, Some(1000.0)));
    store.enqueue(&[retrying(1, &[])]).await.unwrap();
    clock.advance(1.0);
    let leased = lease_one(&store, "w").await.unwrap();
    let busy = store.worker("w").await.unwrap().unwrap();
    assert_eq!((busy.status, busy.last_dequeue_time), (WorkerStatus::Busy, Some(1001.0)));
    assert_eq!(busy.current_rollout_id.as_ref(), Some(&leased.id));
    clock.advance(11.0);
    store.expire_tries().await.unwrap();
    let lost = store.record_worker_heartbeat("w", None).await.unwrap();
    assert_eq!(
        (lost.status, lost.current_rollout_id, lost.current_try_id),
        (WorkerStatus::Unknown, None, None)
    );
    assert_eq!(lost.heartbeat_stats.unwrap().get(), "{\"cpu\":1}");
    let filter =
        WorkerFilter { status_in: Some(vec![WorkerStatus::Unknown]), ..WorkerFilter::default() };
    assert_eq!(store.query_workers(&filter, &PageRequest::default()).await.unwrap().total, 1);
}

pub async fn span_numbers_are_unique_and_increasing(store: Store, _: Arc<ManualClock>) {
    let reserved: Vec<_> = (0..20)
        .map(|_| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { store.reserve_span_numbers("ro-none", 3).await.unwrap() })
        })
        .collect();
    let mut firsts = Vec::new();
    for one in reserved {
        firsts.push(one.await.unwrap());
    }
    firsts.sort_unstable();
    assert_eq!(firsts, (0..20).map(|index| 1 + 3 * index).collect::<Vec<_>>());
    let started = store.start_rollout(&new(1), None).await.unwrap();
    store.add_spans(vec![span(&started, "a", Some(7)), span(&started, "b", None)]).await.unwrap();
    assert_eq!(store.reserve_span_numbers(&started.id, 1).await.unwrap(), 9);
    store.add_spans(vec![span(&started, "c", Some(2))]).await.unwrap();
    assert_eq!(store.reserve_span_numbers(&started.id, 1).await.unwrap(), 10);
    let sorted = PageRequest { sort_by: Some("sequence_id".to_owned()), ..PageRequest::default() };
    let spans = store.query_spans(&SpanFilter::new(&started.id), &sorted).await.unwrap().items;
    assert_eq!(spans.iter().map(|span| span.number).collect::<Vec<_>>(), [2, 7, 8]);
}

pub async fn spans_report_one_outcome_each(store: Store, clock: Arc<ManualClock>) {
    let started = store.start_rollout(&new(1), Some("w")).await.unwrap();
    let other = NewSpan { rollout_id: "ro-none".to_owned(), ..span(&started, "x", None) };
    let elsewhere = NewSpan { try_id: "at-none".to_owned(), ..span(&started, "x", None) };
    clock.advance(2.0);
    let all = vec![
        span(&started, "a", None),
        other,
        elsewhere,
        span(&started, "a", None),
        span(&started, "b", None),
    ];
    let outcomes = store.add_spans(all).await.unwrap();
    let expected = [
        SpanOutcome::Stored(1),
        SpanOutcome::UnknownRollout,
        SpanOutcome::UnknownTry,
        SpanOutcome::Duplicate,
        SpanOutcome::Stored(2),
    ];
    assert_eq!(outcomes, expected);
    let found = store.rollout(&started.id).await.unwrap().unwrap();
    assert_eq!(found.status, RolloutStatus::Running);
    assert_eq!(found.latest_try.unwrap().last_heartbeat_time, Some(1002.0));
    assert_eq!(store.statistics().await.unwrap().spans, 2);
}

pub async fn json_round_trips_to_the_byte(store: Store, _: Arc<ManualClock>) {
    let text = r#"{"b": 1.0, "a": 12345678901234567890123, "é": "\u00e9\ud83d\ude00", "n": [null, -0.0, 1e400]}"#;
    let mut rollout = NewRollout::new(raw(text));
    rollout.metadata = Some(raw(text));
    let started = store.start_rollout(&rollout, None).await.unwrap();
    let body = NewSpan { body: raw(text), ..span(&started, "a", None) };
    store.add_spans(vec![body]).await.unwrap();
    let found = store.rollout(&started.id).await.unwrap().unwrap();
    let spans = store
        .query_spans(&SpanFilter::new(&started.id), &PageRequest::default())
        .await
        .unwrap()
        .items;
    let texts = HashMap::from([
        ("input", found.input.get().to_owned()),
        ("metadata", found.metadata.unwrap().get().to_owned()),
        ("span", spans[0].body.get().to_owned()),
    ]);
    assert!(texts.values().all(|found| found == text), "{texts:?}");
}
