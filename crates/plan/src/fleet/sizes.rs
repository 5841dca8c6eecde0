//! Simulates one run on fleets of several sizes, and finds the bottleneck.

use super::{Fleet, FleetEstimate};

/// Number of API calls per second that one core of the gateway serves, measured on two slow cores
/// (`bench/log/2026-11-26-gateway.md`).
pub const GATEWAY_CALLS_PER_SECOND: f64 = 1675.0;
/// Number of attempts per second that the store can write, measured on two slow cores
/// (`bench/log/2026-11-26-open-house.md`).
pub const STORE_ATTEMPTS_PER_SECOND: f64 = 980.0;

/// Fractions of a fleet's devices, in eighths, that are tried for the learner.
const EIGHTHS: [usize; 6] = [1, 2, 3, 4, 5, 6];

/// A run that is simulated on fleets of several sizes.
pub struct FleetSizes<'a> {
    /// Number of devices of each fleet to simulate.
    pub devices: &'a [usize],
    /// Workload of the run on the smallest fleet. A larger fleet has proportionally more groups per
    /// step.
    pub fleet: Fleet,
    /// Whether separate devices train (disaggregated). If so, their number is chosen such that the
    /// mean step is shortest.
    pub disaggregated: bool,
}

impl FleetSizes<'_> {
    /// Returns the number of groups per step in the simulation of `devices` devices.
    fn num_groups(&self, devices: usize) -> usize {
        let min_devices = self.devices.iter().copied().min().unwrap_or(1).max(1);
        (self.fleet.groups.saturating_mul(devices) / min_devices).max(1)
    }

    /// Returns the number of completions that a simulation of the largest fleet processes.
    pub fn num_completions(&self) -> usize {
        let groups = self.num_groups(self.devices.iter().copied().max().unwrap_or(1));
        Fleet { groups, ..self.fleet.clone() }.num_completions()
    }

    /// Simulates a fleet of `devices` devices. If separate devices train, chooses their number such
    /// that a step is shortest. Returns the fleet with the results of its simulation.
    pub fn best_split(&self, devices: usize) -> (Fleet, FleetEstimate) {
        let groups = self.num_groups(devices);
        let with = |learners: usize| {
            let fleet =
                Fleet { samplers: devices - learners, learners, groups, ..self.fleet.clone() };
            let estimate = fleet.simulate();
            (fleet, estimate)
        };
        if !self.disaggregated {
            return with(0);
        }
        let mut learner_counts: Vec<usize> =
            EIGHTHS.iter().map(|eighths| (devices * eighths / 8).clamp(1, devices - 1)).collect();
        learner_counts.dedup();
        let tried = learner_counts.into_iter().map(with);
        tried.min_by(|(_, a), (_, b)| a.step.total_cmp(&b.step)).unwrap_or_else(|| with(1))
    }
}

impl FleetEstimate {
    /// Describes the bottleneck of the simulated run: the gateway, the store, the learner or the
    /// samplers.
    pub fn bottleneck(&self) -> String {
        let gateway = self.calls / GATEWAY_CALLS_PER_SECOND;
        let store = self.attempts / STORE_ATTEMPTS_PER_SECOND;
        let parts = [
            (gateway, format!("the gateway: it needs {gateway:.1} cores")),
            (
                store,
                format!(
                    "the store: {:.0} attempts per second are {:.0} % of its capacity",
                    self.attempts,
                    100.0 * store
                ),
            ),
            (
                1.0 - self.learner_idle_fraction,
                "the learner, which is never idle: give it more devices".to_owned(),
            ),
            (
                1.0 - self.sampler_idle_fraction,
                "the samplers: the learner waits for them".to_owned(),
            ),
        ];
        let busiest = parts.into_iter().max_by(|(a, _), (b, _)| a.total_cmp(b));
        busiest.map(|(_, description)| description).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::ServiceTimes;
    use super::*;

    fn estimate(
        calls: f64,
        attempts: f64,
        sampler_idle_fraction: f64,
        learner_idle_fraction: f64,
    ) -> FleetEstimate {
        FleetEstimate {
            step: 1.0,
            tokens: 1.0,
            attempts,
            calls,
            sampler_idle_fraction,
            learner_idle_fraction,
            age: 0.0,
        }
    }

    #[test]
    fn bottleneck_names_busiest_part() {
        assert!(
            estimate(4000.0, 100.0, 0.0, 0.0)
                .bottleneck()
                .starts_with("the gateway: it needs 2.4 cores")
        );
        assert!(
            estimate(100.0, 1960.0, 0.0, 0.0).bottleneck().contains("are 200 % of its capacity")
        );
        assert!(estimate(1.0, 1.0, 0.5, 0.1).bottleneck().starts_with("the learner"));
        assert!(estimate(1.0, 1.0, 0.1, 0.5).bottleneck().starts_with("the samplers"));
    }

    #[test]
    fn learner_fraction_minimizes_step_time() {
        let service = ServiceTimes {
            prompt: 0.0,
            batch: 0.01,
            sequence: 0.0001,
            learn: 0.004,
            update: 0.0,
            publish: 0.0,
        };
        let fleet = Fleet {
            samplers: 1,
            learners: 1,
            rows: 256,
            groups: 8,
            group_size: 8,
            ahead: 1,
            turns: 1,
            prompt: 0.0,
            completion_tokens: 100.0,
            spread: 0.0,
            tool: 0.0,
            trained_fraction: 1.0,
            service,
        };
        let sizes = FleetSizes { devices: &[8, 16], fleet, disaggregated: true };
        let (chosen, estimate) = sizes.best_split(8);
        assert_eq!((chosen.samplers + chosen.learners, chosen.groups), (8, 8));
        for learners in 1..8 {
            let other = Fleet { samplers: 8 - learners, learners, ..chosen.clone() }.simulate();
            assert!(estimate.step <= other.step + 1e-9 || learners == 7, "{learners} learners");
        }
        assert_eq!(sizes.best_split(16).0.groups, 16);
        let colocated = FleetSizes { disaggregated: false, ..sizes };
        assert_eq!(
            (colocated.best_split(8).0.samplers, colocated.best_split(8).0.learners),
            (8, 0)
        );
    }
}
