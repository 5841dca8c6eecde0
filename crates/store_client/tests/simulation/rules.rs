//! The rules of a store of rollouts, which are checked after each request and at intervals.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use hyper::Response;
use levade_store::rollouts::{
    Json, Lease, LeaseEnd, LeaseRequest, PageRequest, Rollout, RolloutFilter, RolloutStatus,
    Rollouts, Try, TryStatus,
};
use serde::Deserialize;

use crate::server::SCAN_INTERVAL;
use crate::world::World;

/// Time in addition to a lease and the server's search for timeouts, in seconds.
const SLACK: f64 = 0.5;

/// Events so far, as servers executed them and as clients know them.
pub struct Rules {
    /// Duration of a lease in seconds.
    lease: f64,
    /// Last change of the store that was checked.
    since: u64,
    /// Status and number of tries, by rollout.
    seen: BTreeMap<String, (RolloutStatus, u32)>,
    /// Key of the request that leased a try.
    leased_by: BTreeMap<(String, u32), String>,
    /// Tries that a request for leases returned, by its key.
    leases: BTreeMap<String, Vec<Lease>>,
    /// Ends of tries that the store accepted, with the metadata.
    ends: BTreeMap<(String, u32), (LeaseEnd, Option<String>)>,
    /// Keys of the rollouts that clients know as enqueued, by id. Keys differ between repetitions
    /// of a seed; ids do not.
    acknowledged_rollouts: BTreeMap<String, String>,
    /// Tries that clients know as leased.
    acknowledged_leases: Vec<Lease>,
    /// Ends that clients know as recorded.
    acknowledged_ends: Vec<(Lease, LeaseEnd)>,
    /// Number of checked requests.
    pub requests: u64,
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> T {
    serde_json::from_slice(body).unwrap()
}

fn lease_of(rollout: &Rollout) -> Lease {
    rollout.latest_try.as_ref().unwrap().lease()
}

fn by_number() -> PageRequest {
    PageRequest { sort_by: Some("sequence_id".to_owned()), limit: None, ..PageRequest::default() }
}

/// Returns the time of the last report of a try.
fn last_report(of: &Try) -> f64 {
    of.last_heartbeat_time.unwrap_or(of.start_time)
}

impl Rules {
    /// Creates the rules for leases of `lease` seconds.
    pub fn new(lease: f64) -> Self {
        Rules {
            lease,
            since: 0,
            seen: BTreeMap::new(),
            leased_by: BTreeMap::new(),
            leases: BTreeMap::new(),
            ends: BTreeMap::new(),
            acknowledged_rollouts: BTreeMap::new(),
            acknowledged_leases: Vec::new(),
            acknowledged_ends: Vec::new(),
            requests: 0,
        }
    }

    /// Records the writes that a response acknowledges to a client.
    pub fn acknowledge(&mut self, method: &str, sent: &Bytes, body: &Bytes) {
        match method {
            "enqueue" => {
                let enqueued = parse::<Vec<Rollout>>(body).into_iter();
                self.acknowledged_rollouts.extend(enqueued.map(|of| (of.id, of.key.unwrap())));
            }
            "lease" => {
                self.acknowledged_leases.extend(parse::<Vec<Rollout>>(body).iter().map(lease_of))
            }
            "finish" => {
                let (lease, end, _): (Lease, LeaseEnd, Option<Json>) = parse(sent);
                self.acknowledged_ends.push((lease, end));
            }
            _ => {}
        }
    }

    /// Checks a request that succeeded.
    pub async fn check_response(
        &mut self,
        world: &World,
        store: &dyn Rollouts,
        (node, method, sent): (&str, &str, &Bytes),
        response: &Response<Bytes>,
    ) {
        self.requests += 1;
        match method {
            "lease" => {
                let (request,): (LeaseRequest,) = parse(sent);
                let leased: Vec<Rollout> = parse(response.body());
                self.check_leases(world, store, &request.key.unwrap(), &leased).await;
            }
            "heartbeat" => {
                let (lease,): (Lease,) = parse(sent);
                let current = store.rollout(&lease.rollout_id).await.unwrap().unwrap();
                let is_current = lease_of(&current) == lease;
                world.check(is_current && current.status == RolloutStatus::Running, || {
                    let number = lease_of(&current).number;
                    let status = current.status.name();
                    let reported = lease.number;
                    format!("a report on try {reported} counted for try {number}, {status}: {node}")
                });
            }
            "finish" => {
                let (lease, end, metadata): (Lease, LeaseEnd, Option<Json>) = parse(sent);
                let metadata = metadata.map(|metadata| metadata.get().to_owned());
                let name = (lease.rollout_id.clone(), lease.number);
                let latest = lease_of(&store.rollout(&name.0).await.unwrap().unwrap()).number;
                world.check(latest == lease.number, || {
                    format!("the end of try {} counted while try {latest} ran", lease.number)
                });
                let first =
                    self.ends.entry(name).or_insert_with(|| (end, metadata.clone())).clone();
                world.check(first == (end, metadata.clone()), || {
                    format!("try {} ended by {first:?} and {end:?} {metadata:?}", lease.number)
                });
            }
            _ => {}
        }
    }

    /// Checks that no try has two owners, and that a repeated request gets the same leases.
    async fn check_leases(
        &mut self,
        world: &World,
        store: &dyn Rollouts,
        key: &str,
        leased: &[Rollout],
    ) {
        for lease in leased.iter().map(lease_of) {
            let name = (lease.rollout_id, lease.number);
            let owner = self.leased_by.entry(name).or_insert_with(|| key.to_owned());
            world.check(owner == key, || format!("try {} is leased twice", lease.number));
        }
        let mut expected = Vec::new();
        for lease in self.leases.get(key).into_iter().flatten() {
            let current = store.rollout(&lease.rollout_id).await.unwrap().unwrap();
            if current.status.is_active() && lease_of(&current) == *lease {
                expected.push(lease.clone());
            }
        }
        let found: Vec<Lease> = leased.iter().map(lease_of).collect();
        world.check(expected.is_empty() || expected == found, || {
            let (expected, found) = (expected.len(), found.len());
            format!("a repeated request has {expected} leases and got {found} others")
        });
        let known = self.leases.entry(key.to_owned()).or_default();
        known.extend(found.into_iter().filter(|lease| !expected.contains(lease)));
    }

    /// Checks the rollouts that have changed since the last check.
    pub async fn check_store(&mut self, world: &World, store: &dyn Rollouts) {
        let (changed, last) =
            store.wait_for_changes(self.since, 10_000, Duration::ZERO).await.unwrap();
        self.since = last;
        for rollout in changed {
            let tries = store.query_tries(&rollout.id, &by_number()).await.unwrap().items;
            let number = tries.len() as u32;
            let before = self.seen.insert(rollout.id.clone(), (rollout.status, number));
            let (status, seen) = before.unwrap_or((RolloutStatus::Queuing, 0));
            world.check(number >= seen, || format!("{seen} tries have become {number}"));
            let is_same = status == rollout.status && number == seen;
            world.check(is_same || !status.is_finished(), || {
                format!("a rollout that {} is {}", status.name(), rollout.status.name())
            });
            for pair in tries.windows(2).skip((seen as usize).saturating_sub(1)) {
                self.check_successor(world, &pair[0], &pair[1]);
            }
        }
    }

    /// Checks that a try started only after the one before had ended or lost its lease.
    fn check_successor(&self, world: &World, before: &Try, next: &Try) {
        let is_over = match before.status {
            // Only a released try has an end.
            TryStatus::Unresponsive => {
                before.end_time.is_some() || next.start_time > last_report(before) + self.lease
            }
            TryStatus::Failed => true,
            _ => false,
        };
        world.check(is_over, || {
            let (number, status) = (next.number, before.status.name());
            format!("try {number} started while the one before was {status}, with a lease")
        });
    }

    /// Checks that no lease has lasted longer than its timeout while a server ran.
    pub async fn check_timeouts(&mut self, world: &World, store: &dyn Rollouts, server_start: f64) {
        use RolloutStatus::{Preparing, Running};
        let filter =
            RolloutFilter { status_in: Some(vec![Preparing, Running]), ..RolloutFilter::default() };
        let active = store
            .query_rollouts(&filter, &PageRequest { limit: None, ..PageRequest::default() })
            .await
            .unwrap();
        for rollout in active.items {
            let end = last_report(rollout.latest_try.as_ref().unwrap()) + self.lease;
            let late = store.now() - end.max(server_start) - SCAN_INTERVAL.as_secs_f64();
            world.check(late <= SLACK, || format!("a lease is {late} s longer than its timeout"));
        }
    }

    /// Checks that the store contains every acknowledged write.
    pub async fn check_acknowledged(&mut self, world: &World, store: &dyn Rollouts) {
        self.check_store(world, store).await;
        let mut tries: BTreeMap<&str, Vec<Try>> = BTreeMap::new();
        for (id, key) in &self.acknowledged_rollouts {
            let found = store.rollout(id).await.unwrap();
            world.check(found.as_ref().is_some_and(|of| of.key.as_ref() == Some(key)), || {
                format!("the rollout {id} is lost")
            });
            tries.insert(id, store.query_tries(id, &by_number()).await.unwrap().items);
        }
        let find = |lease: &Lease| {
            let tries = tries.get(lease.rollout_id.as_str());
            tries.and_then(|tries| tries.get(lease.number as usize - 1))
        };
        for lease in &self.acknowledged_leases {
            // A rollout may be leased before the trainer knows its id.
            let is_known = tries.contains_key(lease.rollout_id.as_str());
            world.check(!is_known || find(lease).is_some(), || format!("{lease:?} is lost"));
        }
        for (lease, end) in &self.acknowledged_ends {
            let Some(of) = find(lease) else { continue };
            let is_kept = match end {
                LeaseEnd::Succeeded => of.status == TryStatus::Succeeded,
                LeaseEnd::Failed => of.status == TryStatus::Failed,
                LeaseEnd::Released => of.end_time.is_some(),
            };
            let (number, status) = (of.number, of.status.name());
            world.check(is_kept, || format!("{end:?} of try {number} is lost: {status}"));
        }
    }
}
