//! Tokens a second of sampling and of training, from the peaks of a device.

use super::devices::Device;
use super::fleet::Service;
use super::shape::Shape;

/// Share of the peak that training reaches: FSDP2 on dense models of 7B and more, as published.
const TRAINING: f64 = 0.38;
/// Share of the peak that prompts are computed at.
const PREFILL: f64 = 0.5;
/// Share of the bandwidth that drawing reaches.
const DRAWING: f64 = 0.6;
/// Bytes of weights a second on their way to a sampler: a link of 100 Gbit/s.
const LINK: f64 = 12.5e9;

/// Work of a phase, and who does it.
#[derive(Debug, Clone, PartialEq)]
pub struct Work {
    /// Tokens of a prompt, with all that tools say.
    pub prompt: u64,
    /// Tokens that an attempt samples.
    pub reply: u64,
    /// Sequences that run together on a device.
    pub running: u64,
    /// Devices that sample.
    pub samplers: u32,
    /// Devices that learn; 0 where those that sample do.
    pub learners: u32,
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
}

impl Step {
    /// Seconds of a step; the longer of the two where one runs ahead of the other.
    pub fn seconds(&self, overlaps: bool) -> f64 {
        if overlaps { self.sampling.max(self.learning) } else { self.sampling + self.learning }
    }
}

impl Work {
    /// A step of so many attempts, in groups, gone through so many times.
    pub fn step(&self, shape: &Shape, device: &Device, attempts: u64, (group, epochs): (u64, u64)) -> Step {
        let Work { prompt, reply, running, samplers, learners } = *self;
        let (samplers, running) = (samplers.max(1), running.max(1));
        let seen = prompt + reply / 2;
        // Every token that is drawn reads the weights, shared by those that run together, and its own path.
        let read = (2 * shape.parameters()) as f64 + (running * seen * shape.cache_of_token(2)) as f64;
        let computed = running as f64 * shape.forward(seen) / (PREFILL * device.flops);
        let of_row = (read / (DRAWING * device.bandwidth)).max(computed);
        let drawn = attempts * reply;
        let drawing = drawn as f64 / (running as f64 / of_row) / f64::from(samplers);
        let prompts = attempts.div_ceil(group.max(1)) * prompt;
        let filling =
            prompts as f64 * shape.forward(prompt / 2) / (PREFILL * device.flops) / f64::from(samplers);
        let learnt = (drawn + prompts) * epochs.max(1);
        // Forward and backward.
        let operations = 3.0 * learnt as f64 * shape.forward(seen);
        let devices = if learners > 0 { learners } else { samplers };
        let learning = operations / (TRAINING * device.flops * f64::from(devices));
        Step { sampled: drawn, learnt, sampling: drawing + filling, learning }
    }
}

/// Seconds of one device, for paths of a prompt and a reply; weights reach the samplers over their own
/// memory.
pub fn service(shape: &Shape, device: &Device, prompt: u64, reply: u64) -> Service {
    let seen = prompt + reply / 2;
    let of_path = (seen * shape.cache_of_token(2)) as f64 / (DRAWING * device.bandwidth);
    let weights = 2.0 * shape.parameters() as f64;
    Service {
        prompt: shape.forward(prompt / 2) / (PREFILL * device.flops),
        batch: weights / (DRAWING * device.bandwidth),
        sequence: of_path.max(shape.forward(seen) / (PREFILL * device.flops)),
        learn: 3.0 * shape.forward(seen) / (TRAINING * device.flops),
        update: 0.0,
        publish: weights / LINK,
    }
}

/// The assumptions behind these numbers.
pub fn assumptions(device: &Device) -> String {
    format!(
        "assumed: {} with {:.0} TFLOP/s in bf16 and {:.2} TB/s at their peaks; training reaches {:.0} %, prompts {:.0} %,\n\
         drawing {:.0} % of the bandwidth; prompts of a group are computed once; no time for tools, judges or weights on\n\
         their way; the longest attempt of a step is no longer than the others",
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
        let work = Work { prompt: 500, reply: 1000, running: 128, samplers: 4, learners: 4 };
        let step = work.step(&shape, device, 512, (8, 1));
        assert_eq!((step.sampled, step.learnt), (512_000, 512_000 + 64 * 500));
        // A 7B model draws some thousands of tokens a second on one H100 and learns from more.
        let drawn = step.sampled as f64 / step.sampling / 4.0;
        let learnt = step.learnt as f64 / step.learning / 4.0;
        assert!((5_000.0..30_000.0).contains(&drawn), "{drawn}");
        assert!((5_000.0..12_000.0).contains(&learnt), "{learnt}");
        let more = Work { samplers: 8, learners: 8, ..work }.step(&shape, device, 512, (8, 1));
        assert!(more.sampling < 0.6 * step.sampling && more.learning < 0.6 * step.learning);
        assert!(step.seconds(true) < step.seconds(false));
    }
}
