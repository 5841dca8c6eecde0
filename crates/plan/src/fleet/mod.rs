//! Simulates a run on a fleet: samplers, a learner, and attempts that run ahead of the learner.
//!
//! The simulation estimates staleness, idle fractions and the load on the gateway and the store,
//! for fleets that are not available for a measurement. It processes discrete events with the times
//! of [`ServiceTimes`]:
//!
//! - In every pass, a sampler generates one token for each of its sequences. It computes the prompt
//!   of a group once.
//! - A tool call takes a fixed time.
//! - The learner trains on a step when all attempts of the step are done. Meanwhile, attempts of at
//!   most `ahead` later steps run.
//! - After each step, the samplers load the new weights.
//!
//! Out of scope: failures, the network, evaluations, checkpoints, and the communication overhead
//! between the learner's devices.

mod sampler;
mod sizes;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use levade_policy::uniform;
use serde::Deserialize;

use sampler::{HeapKey, SimulatedSampler};
pub use sizes::{FleetSizes, GATEWAY_CALLS_PER_SECOND, STORE_ATTEMPTS_PER_SECOND};

/// Times that the simulated samplers and the learner take for their work, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceTimes {
    /// Prefill time of a sampler per prompt token, in seconds.
    pub prompt: f64,
    /// Fixed time per decoding pass of a sampler, in seconds. In each pass, every running sequence
    /// samples one token.
    pub batch: f64,
    /// Additional time per decoding pass for each running sequence, in seconds.
    pub sequence: f64,
    /// Training time per token on one device, in seconds.
    pub learn: f64,
    /// Additional time of the learner per step for the optimizer, in seconds.
    pub update: f64,
    /// Time per step in which the samplers wait for new weights, in seconds.
    pub publish: f64,
}

impl ServiceTimes {
    /// Checks that all times are in 0..=1e6 seconds, and that a decoding pass takes some time.
    ///
    /// # Errors
    /// Returns a message that names the first time out of range, or the times of a decoding pass if
    /// both are 0.
    pub fn check(&self) -> Result<(), String> {
        let ServiceTimes { prompt, batch, sequence, learn, update, publish } = *self;
        let all = [
            ("prompt", prompt),
            ("batch", batch),
            ("sequence", sequence),
            ("learn", learn),
            ("update", update),
            ("publish", publish),
        ];
        if let Some((name, value)) = all.into_iter().find(|(_, value)| !(0.0..=1e6).contains(value))
        {
            return Err(format!("the time `{name}` is {value}, but must be in 0..=1e6 seconds"));
        }
        if batch + sequence > 0.0 {
            Ok(())
        } else {
            Err("the times `batch` and `sequence` are both 0, but one must be more than 0".into())
        }
    }
}

/// A simulated fleet of devices, and the workload of the run that it executes.
#[derive(Debug, Clone, PartialEq)]
pub struct Fleet {
    /// Number of devices that sample. Each device is simulated as one sampler.
    pub samplers: usize,
    /// Number of devices that only train. If 0, the sampling devices also train, alternately
    /// (colocated).
    pub learners: usize,
    /// Maximum number of sequences that a sampler runs concurrently. Further sequences wait.
    pub rows: usize,
    /// Number of groups per training step.
    pub groups: usize,
    /// Number of attempts per group.
    pub group_size: usize,
    /// Maximum number of steps by which attempts may run ahead of the learner. 0 if sampling waits
    /// for training.
    pub ahead: usize,
    /// Number of completions (model calls) per attempt.
    pub turns: usize,
    /// Number of context tokens per attempt: the prompt and all tool results.
    pub prompt: f64,
    /// Mean number of tokens sampled per attempt, over all of its completions.
    pub completion_tokens: f64,
    /// Standard deviation of the sampled tokens per attempt, divided by their mean.
    pub spread: f64,
    /// Time between two completions of an attempt, for the tool call, in seconds.
    pub tool: f64,
    /// Number of trained tokens, as a fraction of the sampled tokens plus one prompt per group.
    pub trained_fraction: f64,
    /// Times that samplers and learner take for their work.
    pub service: ServiceTimes,
}

/// Results of a simulated run. The steps that fill the pipeline are not measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FleetEstimate {
    /// Mean duration of a training step, in seconds.
    pub step: f64,
    /// Number of sampled tokens per second.
    pub tokens: f64,
    /// Number of completed attempts per second.
    pub attempts: f64,
    /// Number of model calls per second.
    pub calls: f64,
    /// Fraction of time in which samplers are idle, averaged over all samplers.
    pub sampler_idle_fraction: f64,
    /// Fraction of time in which the learner is idle.
    pub learner_idle_fraction: f64,
    /// Mean off-policy lag over sampled tokens: the number of versions between the weights at the
    /// end of a completion and the weights that train on the completion.
    pub age: f64,
}

/// Maximum number of completions in a simulation. A simulation of this size takes less than a
/// minute and less than 1 GB.
pub const MAX_COMPLETIONS: usize = 10_000_000;
/// Number of steps that are measured after the pipeline is full.
const STEPS: usize = 6;

/// Random stream from which the lengths of completions are sampled.
const LENGTH_STREAM: u64 = 1;

enum SimulationEvent {
    /// A completion ends on the sampler with this index. The second value is the sampler's count of
    /// changes when the event was scheduled. If the count has changed since, the event is ignored.
    Completion(usize, u64),
    /// The tool call of the attempt with this index has ended.
    Tool(usize),
    /// The learner has finished its current step.
    Trained,
}

/// An attempt in the simulation that has started.
#[derive(Debug, Clone, Copy)]
struct SimulatedAttempt {
    step: usize,
    sampler: usize,
    /// Number of completions of the attempt that have not ended.
    remaining: usize,
    /// Number of tokens of each completion of the attempt.
    tokens: f64,
}

/// Totals since the start of the simulation. Times are in seconds. `ages` is the sum over tokens of
/// their off-policy lag.
#[derive(Debug, Clone, Copy, Default)]
struct SimulationTotals {
    time: f64,
    tokens: f64,
    attempts: f64,
    calls: f64,
    learning: f64,
    idle: f64,
    ages: f64,
}

struct Simulation<'a> {
    fleet: &'a Fleet,
    now: f64,
    /// Queue of future events by time, as indices into `scheduled`. Events at equal times are
    /// processed in the order in which they were added.
    events: BinaryHeap<Reverse<(HeapKey, usize)>>,
    scheduled: Vec<SimulationEvent>,
    samplers: Vec<SimulatedSampler>,
    attempts: Vec<SimulatedAttempt>,
    /// Number of unfinished attempts of each step.
    remaining: Vec<usize>,
    /// Number of sampled tokens of each step.
    sampled: Vec<f64>,
    /// Number of steps that the learner has finished.
    version: usize,
    /// Time at which the learner started its current step. `None` if the learner is idle.
    learning: Option<f64>,
    sums: SimulationTotals,
}

impl Fleet {
    /// Returns the number of completions that a simulation of the fleet processes.
    pub fn num_completions(&self) -> usize {
        let attempts = self.groups.saturating_mul(self.group_size);
        let steps = self.ahead.saturating_add(1 + STEPS);
        attempts.saturating_mul(steps).saturating_mul(self.turns.max(1))
    }

    /// Simulates the steps that fill the pipeline and six further steps. Only the further steps are
    /// measured.
    pub fn simulate(&self) -> FleetEstimate {
        let filling = self.ahead + 1;
        let steps = filling + STEPS;
        let mut simulation = Simulation::new(self, steps);
        simulation.start_attempts();
        let mut filled = SimulationTotals::default();
        while let Some(step_finished) = simulation.process_next_event() {
            if step_finished && simulation.version == filling {
                filled = simulation.current_totals();
            }
            if simulation.version == steps {
                break;
            }
        }
        let all = simulation.current_totals();
        let time = (all.time - filled.time).max(f64::MIN_POSITIVE);
        let delta = |metric: fn(&SimulationTotals) -> f64| metric(&all) - metric(&filled);
        FleetEstimate {
            step: time / STEPS as f64,
            tokens: delta(|sums| sums.tokens) / time,
            attempts: delta(|sums| sums.attempts) / time,
            calls: delta(|sums| sums.calls) / time,
            sampler_idle_fraction: delta(|sums| sums.idle) / time / self.samplers as f64,
            learner_idle_fraction: 1.0 - delta(|sums| sums.learning) / time,
            age: delta(|sums| sums.ages) / delta(|sums| sums.tokens).max(1.0),
        }
    }

    /// Samples the number of tokens of an attempt from a log-normal distribution with mean
    /// `completion_tokens` and relative standard deviation `spread`. The result is at least 1.
    fn sample_length(&self, attempt: usize) -> f64 {
        let [a, b] = [0, 1].map(|i| uniform(0, LENGTH_STREAM, 2 * attempt as u64 + i));
        let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        let variance = (1.0 + self.spread * self.spread).ln();
        (self.completion_tokens * (normal * variance.sqrt() - variance / 2.0).exp()).max(1.0)
    }
}

impl<'a> Simulation<'a> {
    fn new(fleet: &'a Fleet, steps: usize) -> Self {
        Simulation {
            fleet,
            now: 0.0,
            events: BinaryHeap::new(),
            scheduled: Vec::new(),
            samplers: (0..fleet.samplers).map(|_| SimulatedSampler::default()).collect(),
            attempts: Vec::new(),
            remaining: vec![fleet.groups * fleet.group_size; steps],
            sampled: vec![0.0; steps],
            version: 0,
            learning: None,
            sums: SimulationTotals::default(),
        }
    }

    /// Returns the totals from the start of the simulation to the current time.
    fn current_totals(&mut self) -> SimulationTotals {
        let now = self.now;
        let service = &self.fleet.service;
        self.samplers.iter_mut().for_each(|sampler| sampler.advance(now, service));
        SimulationTotals {
            time: now,
            idle: self.samplers.iter().map(|sampler| sampler.idle).sum(),
            ..self.sums
        }
    }

    fn schedule(&mut self, time: f64, event: SimulationEvent) {
        self.scheduled.push(event);
        let index = self.scheduled.len() - 1;
        self.events.push(Reverse((HeapKey(time), index)));
    }

    /// Schedules the end of the next completion on a sampler, after its running sequences have
    /// changed.
    fn reschedule(&mut self, index: usize) {
        let sampler = &mut self.samplers[index];
        sampler.changes += 1;
        let changes = sampler.changes;
        if let Some(time) = sampler.next_completion_time(&self.fleet.service) {
            self.schedule(time, SimulationEvent::Completion(index, changes));
        }
    }

    /// Starts all attempts that may run, given `ahead`. Each group goes to the sampler with the
    /// fewest attempts.
    fn start_attempts(&mut self) {
        let fleet = self.fleet;
        let of_step = self.fleet.groups * self.fleet.group_size;
        let last = self.remaining.len().min(self.version + fleet.ahead + 1);
        while self.attempts.len() < last * of_step {
            let first = self.attempts.len();
            let indices = 0..self.samplers.len();
            let Some(index) = indices.min_by_key(|&index| self.samplers[index].attempts) else {
                return;
            };
            let sampler = &mut self.samplers[index];
            sampler.advance(self.now, &fleet.service);
            sampler.pause(self.now, fleet.prompt * fleet.service.prompt);
            sampler.attempts += fleet.group_size;
            for at in first..first + fleet.group_size {
                let length = fleet.sample_length(at);
                let step = at / of_step;
                let tokens = length / fleet.turns.max(1) as f64;
                self.attempts.push(SimulatedAttempt {
                    step,
                    sampler: index,
                    remaining: fleet.turns.max(1),
                    tokens,
                });
                self.sampled[step] += length;
                sampler.start_completion(at, tokens, fleet.rows);
            }
            self.reschedule(index);
        }
    }

    /// Processes the next event. Returns whether the learner finished a step. Returns `None` if no
    /// event is left.
    fn process_next_event(&mut self) -> Option<bool> {
        let Reverse((HeapKey(time), index)) = self.events.pop()?;
        self.now = time;
        match self.scheduled[index] {
            SimulationEvent::Completion(index, changes)
                if self.samplers[index].changes == changes =>
            {
                self.finish_completions(index);
            }
            SimulationEvent::Completion(..) => {}
            SimulationEvent::Tool(attempt) => self.start_call(attempt),
            SimulationEvent::Trained => {
                self.finish_step();
                return Some(true);
            }
        }
        Some(false)
    }

    /// Requests the next completion of the attempt with this index from its sampler.
    fn start_call(&mut self, attempt: usize) {
        let fleet = self.fleet;
        let SimulatedAttempt { sampler: index, tokens, .. } = self.attempts[attempt];
        let sampler = &mut self.samplers[index];
        sampler.advance(self.now, &fleet.service);
        sampler.start_completion(attempt, tokens, fleet.rows);
        self.reschedule(index);
    }

    /// Processes the completions that have ended on the sampler with this index.
    fn finish_completions(&mut self, index: usize) {
        let fleet = self.fleet;
        self.samplers[index].advance(self.now, &fleet.service);
        for attempt in self.samplers[index].take_finished(fleet.rows) {
            let SimulatedAttempt { step, tokens, .. } = self.attempts[attempt];
            self.sums.calls += 1.0;
            self.sums.tokens += tokens;
            self.sums.ages += tokens * (step - self.version.min(step)) as f64;
            self.attempts[attempt].remaining -= 1;
            if self.attempts[attempt].remaining > 0 {
                self.schedule(self.now + fleet.tool, SimulationEvent::Tool(attempt));
                continue;
            }
            self.sums.attempts += 1.0;
            self.samplers[index].attempts -= 1;
            self.remaining[step] -= 1;
        }
        self.reschedule(index);
        self.start_training();
    }

    /// Starts to train on the next step if the learner is idle and all attempts of that step are
    /// done.
    fn start_training(&mut self) {
        let fleet = self.fleet;
        if self.learning.is_some() || self.remaining.get(self.version) != Some(&0) {
            return;
        }
        self.learning = Some(self.now);
        let devices = if fleet.learners > 0 { fleet.learners } else { fleet.samplers };
        let tokens = self.sampled[self.version] + fleet.groups as f64 * fleet.prompt;
        let seconds = fleet.trained_fraction * tokens * fleet.service.learn / devices as f64
            + fleet.service.update;
        if fleet.learners == 0 {
            self.pause_all_samplers(seconds);
        }
        self.schedule(self.now + seconds, SimulationEvent::Trained);
    }

    fn finish_step(&mut self) {
        self.sums.learning += self.learning.take().map_or(0.0, |since| self.now - since);
        self.version += 1;
        if self.fleet.learners > 0 {
            self.pause_all_samplers(self.fleet.service.publish);
        }
        self.start_attempts();
        self.start_training();
    }

    /// Pauses all samplers for `seconds`.
    fn pause_all_samplers(&mut self, seconds: f64) {
        for index in 0..self.samplers.len() {
            self.samplers[index].advance(self.now, &self.fleet.service);
            self.samplers[index].pause(self.now, seconds);
            self.reschedule(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet() -> Fleet {
        let service = ServiceTimes {
            prompt: 0.001,
            batch: 0.02,
            sequence: 0.001,
            learn: 0.002,
            update: 0.5,
            publish: 1.0,
        };
        Fleet {
            samplers: 2,
            learners: 1,
            rows: 64,
            groups: 4,
            group_size: 8,
            ahead: 0,
            turns: 1,
            prompt: 100.0,
            completion_tokens: 200.0,
            spread: 0.0,
            tool: 0.0,
            trained_fraction: 1.0,
            service,
        }
    }

    fn assert_close(estimate: f64, expected: f64) {
        assert!(
            (estimate - expected).abs() <= 1e-6 * expected.abs().max(1.0),
            "{estimate} is not {expected}"
        );
    }

    #[test]
    fn step_time_without_overlap_is_sum_of_parts() {
        let estimate = fleet().simulate();
        // Two groups on each sampler: two prompts, then 200 passes of 16 sequences.
        let sampling = 2.0 * 0.1 + 200.0 * (0.02 + 16.0 * 0.001);
        let learning = (32.0 * 200.0 + 4.0 * 100.0) * 0.002 + 0.5;
        assert_close(estimate.step, sampling + learning + 1.0);
        assert_close(estimate.tokens, 32.0 * 200.0 / estimate.step);
        assert_close(estimate.attempts, 32.0 / estimate.step);
        assert_close(estimate.calls, 32.0 / estimate.step);
        assert_close(estimate.sampler_idle_fraction, learning / estimate.step);
        assert_close(estimate.learner_idle_fraction, 1.0 - learning / estimate.step);
        assert_close(estimate.age, 0.0);
    }

    #[test]
    fn colocated_fleet_publishes_no_weights() {
        let colocated = Fleet { learners: 0, ..fleet() };
        let learning = (32.0 * 200.0 + 4.0 * 100.0) * 0.002 / 2.0 + 0.5;
        let sampling = 2.0 * 0.1 + 200.0 * 0.036;
        let estimate = colocated.simulate();
        assert_close(estimate.step, sampling + learning);
        assert_close(estimate.sampler_idle_fraction, 0.0);
    }

    #[test]
    fn running_ahead_hides_shorter_phase() {
        let estimate = Fleet { ahead: 1, ..fleet() }.simulate();
        let learning = (32.0 * 200.0 + 4.0 * 100.0) * 0.002 + 0.5;
        // Training takes longer than sampling, so the learner never waits.
        assert_close(estimate.step, learning);
        assert_close(estimate.learner_idle_fraction, 0.0);
        assert_close(estimate.age, 1.0);
        assert!(estimate.sampler_idle_fraction > 0.2, "{estimate:?}");
    }

    #[test]
    fn untrained_tokens_take_no_training_time() {
        let estimate = Fleet { trained_fraction: 0.25, ..fleet() }.simulate();
        assert_close(
            fleet().simulate().step - estimate.step,
            0.75 * (32.0 * 200.0 + 4.0 * 100.0) * 0.002,
        );
    }

    #[test]
    fn tool_time_is_added_between_completions() {
        let estimate = Fleet { turns: 4, tool: 3.0, ..fleet() }.simulate();
        assert_close(estimate.step, fleet().simulate().step + 9.0);
        assert_close(estimate.calls, 4.0 * estimate.attempts);
    }

    #[test]
    fn sequences_beyond_max_concurrency_wait() {
        let estimate = Fleet { rows: 8, ..fleet() }.simulate();
        let sampling = 2.0 * 0.1 + 2.0 * 200.0 * (0.02 + 8.0 * 0.001);
        assert_close(estimate.step, sampling + (32.0 * 200.0 + 400.0) * 0.002 + 0.5 + 1.0);
    }

    #[test]
    fn lengths_match_mean_and_spread() {
        let fleet = Fleet { spread: 0.5, ..fleet() };
        let lengths: Vec<f64> = (0..20_000).map(|at| fleet.sample_length(at)).collect();
        let mean = lengths.iter().sum::<f64>() / lengths.len() as f64;
        let variance =
            lengths.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / lengths.len() as f64;
        assert!((mean / 200.0 - 1.0).abs() < 0.02, "{mean}");
        assert!((variance.sqrt() / mean - 0.5).abs() < 0.02, "{}", variance.sqrt() / mean);
        // The longest attempt delays its step.
        assert!(fleet.simulate().step > 1.1 * Fleet { spread: 0.0, ..fleet }.simulate().step);
    }
}
