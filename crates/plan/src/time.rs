//! Tokens a second of sampling and of training, from the peaks of a device.

use super::devices::Device;
use super::fleet::Service;
use super::shape::Shape;

/// Share of the peak that training reaches: FSDP2 on dense models of 7B and more, as published.
const TRAINING: f64 = 0.38;
/// Share of the peak that prompts are computed at.
const PREFILL: f64 = 0.5;
/// Share of the bandwidth that sampling reaches.
const DRAWING: f64 = 0.6;
/// Bytes of weights a second on their way to a sampler: a link of 100 Gbit/s.
const LINK: f64 = 12.5e9;

/// Bytes a second between a device and the host's memory, as PCIe 4.0 reaches them.
const HOST: f64 = 25e9;

/// Work of a phase, and who does it.
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// Tokens of a prompt, with all that tools say.
    pub prompt: u64,
    /// Tokens that an attempt samples.
    pub reply: u64,
    /// Sequences that run together on a server,
    pub running: u64,
    /// devices of each server,
    pub tensor: u32,
    /// and servers.
    pub samplers: u32,
    /// Devices that learn; 0 where those that sample do.
    pub learners: u32,
    /// Stages of the learner's pipeline.
    pub stages: u64,
    /// Tokens of the micro-batches that its ranks work on at the same time.
    pub round: u64,
    /// Seconds of a step in which devices change hands.
    pub turns: f64,
}

/// Attempts of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attempts {
    /// Attempts that are sampled, also those that only others are compared with and those beyond the size of
    /// a group.
    pub sampled: u64,
    /// Attempts that are learnt from.
    pub learnt: u64,
}

/// How a step goes through what was sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Passes {
    /// Attempts at each task.
    pub group: u64,
    /// Steps of the optimiser over all of it,
    pub updates: u64,
    /// and how often it is gone through.
    pub epochs: u64,
}

/// Seconds in which devices change hands twice: a learner leaves with so many bytes of each and comes back,
/// and servers read weights.
pub fn turns(shape: &Shape, moved: u64) -> f64 {
    2.0 * moved as f64 / HOST + 2.0 * shape.parameters() as f64 / LINK
}

/// One step.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// Tokens that are sampled.
    pub sampled: u64,
    /// Tokens that go through the model to learn, prompts that attempts share once.
    pub learnt: u64,
    /// Seconds of sampling.
    pub sampling: f64,
    /// Seconds of learning.
    pub learning: f64,
    /// The share of these in which a stage of a pipeline waits for others.
    pub bubble: f64,
    /// Seconds in which devices change hands.
    pub turns: f64,
}

impl Step {
    /// Seconds of a step; the longer of the two where one runs ahead of the other.
    pub fn seconds(&self, overlaps: bool) -> f64 {
        match overlaps {
            true => self.sampling.max(self.learning),
            false => self.sampling + self.learning + self.turns,
        }
    }
}

impl Work {
    /// A step of so many attempts.
    pub fn step(&self, shape: &Shape, device: &Device, attempts: Attempts, passes: Passes) -> Step {
        let Work { prompt, reply, running, tensor, samplers, learners, stages, round, turns } = *self;
        let (samplers, running, tensor) = (samplers.max(1), running.max(1), f64::from(tensor.max(1)));
        let seen = prompt + reply / 2;
        let (flops, bandwidth) = (tensor * device.flops, tensor * device.bandwidth);
        // Every token that is drawn reads the weights, shared by those that run together, and its own path.
        let cache = running as f64 * seen as f64 * shape.cache_of_token(2) as f64;
        let read = 2.0 * shape.parameters() as f64 + cache;
        let computed = running as f64 * shape.forward(seen) / (PREFILL * flops);
        let of_row = (read / (DRAWING * bandwidth)).max(computed);
        let drawn = attempts.sampled.saturating_mul(reply);
        let drawing = drawn as f64 / (running as f64 / of_row) / f64::from(samplers);
        let prompts = attempts.learnt.div_ceil(passes.group.max(1)).saturating_mul(prompt);
        let filling = prompts as f64 * shape.forward(prompt / 2) / (PREFILL * flops) / f64::from(samplers);
        let learnt = attempts
            .learnt
            .saturating_mul(reply)
            .saturating_add(prompts)
            .saturating_mul(passes.epochs.max(1));
        // Forward and backward.
        let operations = 3.0 * learnt as f64 * shape.forward(seen);
        let devices = if learners > 0 { f64::from(learners) } else { f64::from(samplers) * tensor };
        // The first stage waits for the last of its micro-batches, and the last for the first.
        let rounds = (learnt / passes.updates.max(1)).div_ceil(round.max(1)).max(1) as f64;
        let bubble = stages.saturating_sub(1) as f64;
        let bubble = bubble / (rounds + bubble);
        let learning = operations / (TRAINING * device.flops * devices) / (1.0 - bubble);
        Step { sampled: drawn, learnt, sampling: drawing + filling, learning, bubble, turns }
    }
}

/// Seconds of one device, of which `tensor` share the passes of a server, for paths of a prompt and a reply;
/// devices change hands in `turns`.
pub fn service(
    shape: &Shape,
    device: &Device,
    (prompt, reply): (u64, u64),
    tensor: u32,
    turns: f64,
) -> Service {
    let seen = prompt + reply / 2;
    let of_path = seen as f64 * shape.cache_of_token(2) as f64 / (DRAWING * device.bandwidth);
    let weights = 2.0 * shape.parameters() as f64;
    Service {
        prompt: shape.forward(prompt / 2) / (PREFILL * device.flops),
        batch: weights / (DRAWING * device.bandwidth * f64::from(tensor.max(1))),
        sequence: of_path.max(shape.forward(seen) / (PREFILL * device.flops)),
        learn: 3.0 * shape.forward(seen) / (TRAINING * device.flops),
        update: 0.0,
        publish: if turns > 0.0 { turns } else { weights / LINK },
    }
}

/// The assumptions behind these numbers.
pub fn assumptions(device: &Device, shares: bool, stages: u64) -> String {
    let turns = match shares {
        true => {
            format!(
                " or judges; {:.0} GB/s to the host's memory and {:.1} GB/s of weights",
                HOST / 1e9,
                LINK / 1e9
            )
        }
        false => ", judges or weights on their way".to_owned(),
    };
    let stages = if stages > 1 { "; stages of the pipeline take equally long" } else { "" };
    format!(
        "assumed: {} with {:.0} TFLOP/s in bf16 and {:.2} TB/s at their peaks; training reaches {:.0} %, prompts {:.0} %,\n\
         sampling {:.0} % of the bandwidth; prompts of a group are computed once; no time for tools{turns};\n\
         the longest attempt of a step is no longer than the others{stages}",
        device.name,
        device.flops / 1e12,
        device.bandwidth / 1e12,
        100.0 * TRAINING,
        100.0 * PREFILL,
        100.0 * DRAWING
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_devices_take_less_time() {
        let text = r#"{"hidden_size":3584,"num_hidden_layers":28,"num_attention_heads":28,
            "num_key_value_heads":4,"intermediate_size":18944,"vocab_size":152064}"#;
        let (shape, device) = (Shape::read(text).unwrap(), Device::named("h100").unwrap());
        let work = Work {
            prompt: 500,
            reply: 1000,
            running: 128,
            tensor: 1,
            samplers: 4,
            learners: 4,
            stages: 1,
            round: 4 * 8192,
            turns: 0.0,
        };
        let passes = Passes { group: 8, updates: 1, epochs: 1 };
        let attempts = Attempts { sampled: 512, learnt: 512 };
        let step = work.step(&shape, device, attempts, passes);
        assert_eq!((step.sampled, step.learnt), (512_000, 512_000 + 64 * 500));
        // A 7B model draws some thousands of tokens a second on one H100 and learns from more.
        let drawn = step.sampled as f64 / step.sampling / 4.0;
        let learnt = step.learnt as f64 / step.learning / 4.0;
        assert!((5_000.0..30_000.0).contains(&drawn), "{drawn}");
        assert!((5_000.0..12_000.0).contains(&learnt), "{learnt}");
        let more = Work { samplers: 8, learners: 8, ..work.clone() }.step(&shape, device, attempts, passes);
        assert!(more.sampling < 0.6 * step.sampling && more.learning < 0.6 * step.learning);
        assert!(step.seconds(true) < step.seconds(false));
        let spare = work.step(&shape, device, Attempts { sampled: 640, ..attempts }, passes);
        assert_eq!((spare.sampled, spare.learnt, spare.learning), (640_000, step.learnt, step.learning));
        assert!(spare.sampling > 1.1 * step.sampling);
        // Two devices to a server read as fast as two servers, and the weights once.
        let shared = Work { tensor: 2, samplers: 2, running: 256, ..work.clone() };
        let shared = shared.step(&shape, device, attempts, passes);
        assert!(shared.sampling <= step.sampling && shared.sampling > 0.5 * step.sampling);
        // 544 k tokens are 17 rounds of 32 k: of 20 times a stage works in 17.
        let staged = |updates| {
            let passes = Passes { updates, ..passes };
            Work { stages: 4, ..work.clone() }.step(&shape, device, attempts, passes)
        };
        assert!((staged(1).bubble - 3.0 / 20.0).abs() < 1e-9, "{}", staged(1).bubble);
        assert!((staged(1).learning / step.learning - 20.0 / 17.0).abs() < 1e-9);
        assert!(staged(8).bubble > 0.4, "fewer micro-batches fill it less");
        // By turns a step takes all three.
        let by_turns = Work { turns: turns(&shape, 14 << 30), ..work }.step(&shape, device, attempts, passes);
        assert!((by_turns.seconds(false) - step.seconds(false) - by_turns.turns).abs() < 1e-9);
        assert!((2.0..4.0).contains(&by_turns.turns), "{}", by_turns.turns);
    }
}
