//! A fleet, simulated: samplers, a learner, and attempts that run ahead of it.
//!
//! Discrete events over service times. A sampler draws a token for each of its sequences in every pass, and
//! computes the prompt of a group once; tools take their time; a step is learnt from when all of its attempts
//! are done, and attempts of at most `ahead` later steps run meanwhile; then the samplers read the new
//! weights. Out come staleness, idle shares and what the gateway and the store have to do, for fleets that
//! nobody has at hand.
//!
//! Not here: failures, the network, evaluations, checkpoints, and what processors of the learner lose to each
//! other.

mod sampler;
mod sizes;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use levade_policy::uniform;
use serde::Deserialize;

use sampler::{Key, Sampler};
pub use sizes::{GATEWAY, STORE, Sizes};

/// How long things take, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// Each token of a prompt.
    pub prompt: f64,
    /// Each pass of a sampler, in which all of its sequences draw a token,
    pub batch: f64,
    /// and in it each sequence.
    pub sequence: f64,
    /// Each token that is learnt from, on one device.
    pub learn: f64,
    /// Each step of the optimiser.
    pub update: f64,
    /// Weights on their way to the samplers.
    pub publish: f64,
}

impl Service {
    /// Checks that times can pass.
    ///
    /// # Errors
    /// Names the first that cannot.
    pub fn check(&self) -> Result<(), String> {
        let Service { prompt, batch, sequence, learn, update, publish } = *self;
        let all = [
            ("prompt", prompt),
            ("batch", batch),
            ("sequence", sequence),
            ("learn", learn),
            ("update", update),
            ("publish", publish),
        ];
        if let Some((name, value)) = all.into_iter().find(|(_, value)| !(0.0..=1e6).contains(value)) {
            return Err(format!("{name} is {value}; give seconds from 0 to 1e6"));
        }
        match batch + sequence > 0.0 {
            true => Ok(()),
            false => Err("batch and sequence are 0, and a token takes time".into()),
        }
    }
}

/// A fleet, and what a run asks of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Fleet {
    /// Devices that sample.
    pub samplers: usize,
    /// Devices that learn; with 0 those that sample do, by turns.
    pub learners: usize,
    /// Most sequences that run together on a sampler.
    pub rows: usize,
    /// Groups of a step.
    pub groups: usize,
    /// Attempts of a group.
    pub group_size: usize,
    /// Steps by which attempts may be ahead of the learner.
    pub ahead: usize,
    /// Replies of an attempt.
    pub turns: usize,
    /// Tokens of a prompt, with all that tools say.
    pub prompt: f64,
    /// Tokens that an attempt samples, on average.
    pub reply: f64,
    /// Standard deviation of these over their mean.
    pub spread: f64,
    /// Seconds between two replies of an attempt.
    pub tool: f64,
    /// Tokens that are learnt from, over those that are sampled and the prompts of groups.
    pub learnt: f64,
    /// Seconds that the parts take.
    pub service: Service,
}

/// Findings of a simulation, over the steps after those that fill the pipeline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Found {
    /// Seconds of a step.
    pub step: f64,
    /// Tokens that are sampled a second.
    pub tokens: f64,
    /// Attempts a second.
    pub attempts: f64,
    /// Calls of the model a second.
    pub calls: f64,
    /// The share of their time in which samplers have nothing to do.
    pub samplers_idle: f64,
    /// The share in which the learner has not.
    pub learner_idle: f64,
    /// Versions between the weights that ended a reply and those that learn from it, mean over tokens.
    pub age: f64,
}

/// Most replies that are simulated, which takes less than a minute and a gigabyte.
pub const MOST_REPLIES: usize = 10_000_000;
/// Steps that are simulated after the pipeline is full.
const STEPS: usize = 6;

/// Stream of the lengths of replies.
const LENGTHS: u64 = 1;

enum Event {
    /// A reply of this sampler is done, unless it has changed since.
    Reply(usize, u64),
    /// The tool of this attempt has answered.
    Tool(usize),
    /// The step is learnt.
    Learnt,
}

/// An attempt under way.
#[derive(Debug, Clone, Copy)]
struct Attempt {
    step: usize,
    sampler: usize,
    /// Replies to come.
    left: usize,
    /// Tokens of each.
    tokens: f64,
}

/// Sums so far.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
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
    /// Places in `kept`, by their times and then as they were added.
    events: BinaryHeap<Reverse<(Key, usize)>>,
    kept: Vec<Event>,
    samplers: Vec<Sampler>,
    attempts: Vec<Attempt>,
    /// Attempts of each step that are not done.
    left: Vec<usize>,
    /// Tokens of each step.
    drawn: Vec<f64>,
    /// Steps that are learnt.
    version: usize,
    /// Since when it learns.
    learning: Option<f64>,
    sums: Sums,
}

impl Fleet {
    /// Replies that a simulation is made of.
    pub fn replies(&self) -> usize {
        let attempts = self.groups.saturating_mul(self.group_size);
        let steps = self.ahead.saturating_add(1 + STEPS);
        attempts.saturating_mul(steps).saturating_mul(self.turns.max(1))
    }

    /// Lets the fleet work for some steps.
    pub fn simulate(&self) -> Found {
        let filling = self.ahead + 1;
        let steps = filling + STEPS;
        let mut simulation = Simulation::new(self, steps);
        simulation.begin();
        let mut filled = Sums::default();
        while let Some(learnt) = simulation.next() {
            if learnt && simulation.version == filling {
                filled = simulation.measured();
            }
            if simulation.version == steps {
                break;
            }
        }
        let all = simulation.measured();
        let time = (all.time - filled.time).max(f64::MIN_POSITIVE);
        let over = |of: fn(&Sums) -> f64| of(&all) - of(&filled);
        Found {
            step: time / STEPS as f64,
            tokens: over(|sums| sums.tokens) / time,
            attempts: over(|sums| sums.attempts) / time,
            calls: over(|sums| sums.calls) / time,
            samplers_idle: over(|sums| sums.idle) / time / self.samplers as f64,
            learner_idle: 1.0 - over(|sums| sums.learning) / time,
            age: over(|sums| sums.ages) / over(|sums| sums.tokens).max(1.0),
        }
    }

    /// Tokens of an attempt's reply: of a log-normal distribution with this mean and spread.
    fn length(&self, attempt: usize) -> f64 {
        let [a, b] = [0, 1].map(|i| uniform(0, LENGTHS, 2 * attempt as u64 + i));
        let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        let variance = (1.0 + self.spread * self.spread).ln();
        (self.reply * (normal * variance.sqrt() - variance / 2.0).exp()).max(1.0)
    }
}

impl<'a> Simulation<'a> {
    fn new(fleet: &'a Fleet, steps: usize) -> Self {
        Simulation {
            fleet,
            now: 0.0,
            events: BinaryHeap::new(),
            kept: Vec::new(),
            samplers: (0..fleet.samplers).map(|_| Sampler::default()).collect(),
            attempts: Vec::new(),
            left: vec![fleet.groups * fleet.group_size; steps],
            drawn: vec![0.0; steps],
            version: 0,
            learning: None,
            sums: Sums::default(),
        }
    }

    /// Sums up to now.
    fn measured(&mut self) -> Sums {
        let (now, service) = (self.now, &self.fleet.service);
        self.samplers.iter_mut().for_each(|sampler| sampler.advance(now, service));
        Sums { time: now, idle: self.samplers.iter().map(|sampler| sampler.idle).sum(), ..self.sums }
    }

    fn at(&mut self, time: f64, event: Event) {
        self.kept.push(event);
        let place = self.kept.len() - 1;
        self.events.push(Reverse((Key(time), place)));
    }

    /// Tells of the next reply of a sampler whose sequences have changed.
    fn changed(&mut self, place: usize) {
        let sampler = &mut self.samplers[place];
        sampler.changes += 1;
        let changes = sampler.changes;
        if let Some(time) = sampler.next(&self.fleet.service) {
            self.at(time, Event::Reply(place, changes));
        }
    }

    /// Begins all attempts that may begin: a group goes where the fewest attempts are.
    fn begin(&mut self) {
        let (fleet, of_step) = (self.fleet, self.fleet.groups * self.fleet.group_size);
        let last = self.left.len().min(self.version + fleet.ahead + 1);
        while self.attempts.len() < last * of_step {
            let first = self.attempts.len();
            let places = 0..self.samplers.len();
            let Some(place) = places.min_by_key(|&place| self.samplers[place].attempts) else { return };
            let sampler = &mut self.samplers[place];
            sampler.advance(self.now, &fleet.service);
            sampler.hold(self.now, fleet.prompt * fleet.service.prompt);
            sampler.attempts += fleet.group_size;
            for at in first..first + fleet.group_size {
                let (length, step) = (fleet.length(at), at / of_step);
                let tokens = length / fleet.turns.max(1) as f64;
                self.attempts.push(Attempt { step, sampler: place, left: fleet.turns.max(1), tokens });
                self.drawn[step] += length;
                sampler.begin(at, tokens, fleet.rows);
            }
            self.changed(place);
        }
    }

    /// The next event: whether a step was learnt by it; `None` where there is none.
    fn next(&mut self) -> Option<bool> {
        let Reverse((Key(time), place)) = self.events.pop()?;
        self.now = time;
        match self.kept[place] {
            Event::Reply(place, changes) if self.samplers[place].changes == changes => {
                self.replied(place);
            }
            Event::Reply(..) => {}
            Event::Tool(attempt) => self.ask(attempt),
            Event::Learnt => {
                self.learnt();
                return Some(true);
            }
        }
        Some(false)
    }

    /// Asks for the next reply of an attempt.
    fn ask(&mut self, attempt: usize) {
        let (fleet, Attempt { sampler: place, tokens, .. }) = (self.fleet, self.attempts[attempt]);
        let sampler = &mut self.samplers[place];
        sampler.advance(self.now, &fleet.service);
        sampler.begin(attempt, tokens, fleet.rows);
        self.changed(place);
    }

    /// Replies of a sampler are done.
    fn replied(&mut self, place: usize) {
        let fleet = self.fleet;
        self.samplers[place].advance(self.now, &fleet.service);
        for attempt in self.samplers[place].ended(fleet.rows) {
            let Attempt { step, tokens, .. } = self.attempts[attempt];
            self.sums.calls += 1.0;
            self.sums.tokens += tokens;
            self.sums.ages += tokens * (step - self.version.min(step)) as f64;
            self.attempts[attempt].left -= 1;
            if self.attempts[attempt].left > 0 {
                self.at(self.now + fleet.tool, Event::Tool(attempt));
                continue;
            }
            self.sums.attempts += 1.0;
            self.samplers[place].attempts -= 1;
            self.left[step] -= 1;
        }
        self.changed(place);
        self.learn();
    }

    /// Begins to learn from a step that is done.
    fn learn(&mut self) {
        let fleet = self.fleet;
        if self.learning.is_some() || self.left.get(self.version) != Some(&0) {
            return;
        }
        self.learning = Some(self.now);
        let devices = if fleet.learners > 0 { fleet.learners } else { fleet.samplers };
        let tokens = self.drawn[self.version] + fleet.groups as f64 * fleet.prompt;
        let seconds = fleet.learnt * tokens * fleet.service.learn / devices as f64 + fleet.service.update;
        if fleet.learners == 0 {
            self.hold_all(seconds);
        }
        self.at(self.now + seconds, Event::Learnt);
    }

    fn learnt(&mut self) {
        self.sums.learning += self.learning.take().map_or(0.0, |since| self.now - since);
        self.version += 1;
        if self.fleet.learners > 0 {
            self.hold_all(self.fleet.service.publish);
        }
        self.begin();
        self.learn();
    }

    /// Lets all samplers draw nothing for so long.
    fn hold_all(&mut self, seconds: f64) {
        for place in 0..self.samplers.len() {
            self.samplers[place].advance(self.now, &self.fleet.service);
            self.samplers[place].hold(self.now, seconds);
            self.changed(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet() -> Fleet {
        let service =
            Service { prompt: 0.001, batch: 0.02, sequence: 0.001, learn: 0.002, update: 0.5, publish: 1.0 };
        Fleet {
            samplers: 2,
            learners: 1,
            rows: 64,
            groups: 4,
            group_size: 8,
            ahead: 0,
            turns: 1,
            prompt: 100.0,
            reply: 200.0,
            spread: 0.0,
            tool: 0.0,
            learnt: 1.0,
            service,
        }
    }

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-6 * expected.abs().max(1.0), "{found} is not {expected}");
    }

    #[test]
    fn a_step_takes_what_its_parts_take_one_after_the_other() {
        let found = fleet().simulate();
        // Two groups on each sampler: their prompts, then 200 passes of 16 sequences.
        let sampling = 2.0 * 0.1 + 200.0 * (0.02 + 16.0 * 0.001);
        let learning = (32.0 * 200.0 + 4.0 * 100.0) * 0.002 + 0.5;
        close(found.step, sampling + learning + 1.0);
        close(found.tokens, 32.0 * 200.0 / found.step);
        close(found.attempts, 32.0 / found.step);
        close(found.calls, 32.0 / found.step);
        close(found.samplers_idle, learning / found.step);
        close(found.learner_idle, 1.0 - learning / found.step);
        close(found.age, 0.0);
    }

    #[test]
    fn what_learns_on_the_same_devices_needs_no_weights_sent() {
        let alone = Fleet { learners: 0, ..fleet() };
        let learning = (32.0 * 200.0 + 4.0 * 100.0) * 0.002 / 2.0 + 0.5;
        let sampling = 2.0 * 0.1 + 200.0 * 0.036;
        let found = alone.simulate();
        close(found.step, sampling + learning);
        close(found.samplers_idle, 0.0);
    }

    #[test]
    fn attempts_that_run_ahead_hide_the_shorter_of_the_two() {
        let found = Fleet { ahead: 1, ..fleet() }.simulate();
        let learning = (32.0 * 200.0 + 4.0 * 100.0) * 0.002 + 0.5;
        // Learning takes longer, and never waits.
        close(found.step, learning);
        close(found.learner_idle, 0.0);
        close(found.age, 1.0);
        assert!(found.samplers_idle > 0.2, "{found:?}");
    }

    #[test]
    fn tokens_that_are_not_learnt_from_take_no_time_to_learn() {
        let found = Fleet { learnt: 0.25, ..fleet() }.simulate();
        close(fleet().simulate().step - found.step, 0.75 * (32.0 * 200.0 + 4.0 * 100.0) * 0.002);
    }

    #[test]
    fn tools_take_their_time_between_replies_alone() {
        let found = Fleet { turns: 4, tool: 3.0, ..fleet() }.simulate();
        close(found.step, fleet().simulate().step + 9.0);
        close(found.calls, 4.0 * found.attempts);
    }

    #[test]
    fn sequences_beyond_the_rows_wait() {
        let found = Fleet { rows: 8, ..fleet() }.simulate();
        let sampling = 2.0 * 0.1 + 2.0 * 200.0 * (0.02 + 8.0 * 0.001);
        close(found.step, sampling + (32.0 * 200.0 + 400.0) * 0.002 + 0.5 + 1.0);
    }

    #[test]
    fn lengths_have_their_mean_and_their_spread() {
        let fleet = Fleet { spread: 0.5, ..fleet() };
        let lengths: Vec<f64> = (0..20_000).map(|at| fleet.length(at)).collect();
        let mean = lengths.iter().sum::<f64>() / lengths.len() as f64;
        let variance = lengths.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / lengths.len() as f64;
        assert!((mean / 200.0 - 1.0).abs() < 0.02, "{mean}");
        assert!((variance.sqrt() / mean - 0.5).abs() < 0.02, "{}", variance.sqrt() / mean);
        // The longest of a step holds up all of it.
        assert!(fleet.simulate().step > 1.1 * Fleet { spread: 0.0, ..fleet }.simulate().step);
    }
}
