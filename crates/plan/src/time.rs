//! Estimates the time of sampling and of training from the peak rates of a device.

use super::devices::Device;
use super::fleet::ServiceTimes;
use super::shape::Shape;

/// Fraction of a device's peak FLOP/s that training reaches, as published for FSDP2 on dense models
/// of 7B and more.
const TRAINING_EFFICIENCY: f64 = 0.38;
/// Fraction of a device's peak FLOP/s that prefill reaches.
const PREFILL_EFFICIENCY: f64 = 0.5;
/// Fraction of a device's peak memory bandwidth that sampling reaches.
const SAMPLING_EFFICIENCY: f64 = 0.6;
/// Rate at which weights are sent to a sampler, in bytes per second. It is the rate of a 100 Gbit/s
/// link.
const NETWORK_BANDWIDTH: f64 = 12.5e9;

/// Transfer rate between a device and host memory, in bytes per second. It is the rate that PCIe
/// 4.0 reaches.
const HOST_BANDWIDTH: f64 = 25e9;

/// Workload of a phase, and the devices that execute it.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Number of context tokens per attempt: the prompt and all tool results.
    pub prompt: u64,
    /// Number of sampled tokens per attempt.
    pub completion_tokens: u64,
    /// Number of sequences that a server runs concurrently.
    pub running: u64,
    /// Number of devices per server (tensor parallelism).
    pub tensor: u32,
    /// Number of sampling servers.
    pub samplers: u32,
    /// Number of devices that only train. 0 if the sampling devices also train.
    pub learners: u32,
    /// Number of pipeline-parallel stages of the learner.
    pub stages: u64,
    /// Number of tokens in one round of micro-batches, which the learner's ranks process in
    /// parallel.
    pub round: u64,
    /// Duration of the device handoffs per step, in seconds. 0 if learner and samplers share no
    /// devices.
    pub handoff_seconds: f64,
}

/// Numbers of sampled and of trained attempts per step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepAttempts {
    /// Number of sampled attempts. It includes attempts that only serve as a baseline for other
    /// attempts, and oversampled attempts beyond the group size.
    pub sampled: u64,
    /// Number of attempts that the learner trains on.
    pub trained: u64,
}

/// How often a training step passes over its attempts, and how it divides them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepPasses {
    /// Number of attempts per task.
    pub group: u64,
    /// Number of optimizer steps per training step, over all epochs.
    pub updates: u64,
    /// Number of passes over all attempts of a step.
    pub epochs: u64,
}

/// Estimates the duration of the two device handoffs of a step, in seconds. The learner offloads
/// `offloaded_bytes` bytes of each device to host memory and loads them back, and the servers load
/// the new weights in bf16.
pub fn handoff_seconds(shape: &Shape, offloaded_bytes: u64) -> f64 {
    2.0 * offloaded_bytes as f64 / HOST_BANDWIDTH
        + 2.0 * shape.parameters() as f64 / NETWORK_BANDWIDTH
}

/// Estimated numbers of tokens and durations of one training step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepEstimate {
    /// Number of sampled tokens.
    pub sampled: u64,
    /// Number of tokens that the learner computes, over all epochs. In each epoch, a prompt counts
    /// once for all attempts of its group.
    pub trained: u64,
    /// Duration of sampling, including prefill, in seconds.
    pub sampling: f64,
    /// Duration of training, in seconds.
    pub learning: f64,
    /// Fraction of `learning` in which a pipeline stage waits for other stages (pipeline bubble).
    pub bubble: f64,
    /// Duration of the device handoffs, in seconds.
    pub handoff_seconds: f64,
}

impl StepEstimate {
    /// Returns the duration of the step in seconds. If sampling and training overlap, it is the
    /// longer of the two durations. Otherwise, it is their sum plus the device handoffs.
    pub fn seconds(&self, overlaps: bool) -> f64 {
        if overlaps {
            self.sampling.max(self.learning)
        } else {
            self.sampling + self.learning + self.handoff_seconds
        }
    }
}

impl Workload {
    /// Estimates the tokens and the duration of a step that samples and trains on `attempts`.
    pub fn estimate_step(
        &self,
        shape: &Shape,
        device: &Device,
        attempts: StepAttempts,
        passes: StepPasses,
    ) -> StepEstimate {
        let Workload {
            prompt,
            completion_tokens,
            running,
            tensor,
            samplers,
            learners,
            stages,
            round,
            handoff_seconds,
        } = *self;
        let samplers = samplers.max(1);
        let running = running.max(1);
        let tensor = f64::from(tensor.max(1));
        let seen = prompt + completion_tokens / 2;
        let flops = tensor * device.flops;
        let bandwidth = tensor * device.bandwidth;
        // A decoding pass reads the weights once for all running sequences, and the KV cache of
        // each sequence.
        let cache = running as f64 * seen as f64 * shape.kv_cache_bytes_per_token(2) as f64;
        let read = 2.0 * shape.parameters() as f64 + cache;
        let computed = running as f64 * shape.forward_flops(seen) / (PREFILL_EFFICIENCY * flops);
        let row_seconds = (read / (SAMPLING_EFFICIENCY * bandwidth)).max(computed);
        let sampled_tokens = attempts.sampled.saturating_mul(completion_tokens);
        let generation =
            sampled_tokens as f64 / (running as f64 / row_seconds) / f64::from(samplers);
        let prompts = attempts.trained.div_ceil(passes.group.max(1)).saturating_mul(prompt);
        let filling = prompts as f64 * shape.forward_flops(prompt / 2)
            / (PREFILL_EFFICIENCY * flops)
            / f64::from(samplers);
        let trained = attempts
            .trained
            .saturating_mul(completion_tokens)
            .saturating_add(prompts)
            .saturating_mul(passes.epochs.max(1));
        // Forward and backward: three times the operations of a forward pass.
        let operations = 3.0 * trained as f64 * shape.forward_flops(seen);
        let devices = if learners > 0 { f64::from(learners) } else { f64::from(samplers) * tensor };
        // The pipeline bubble: the first stage is idle while the last one finishes its
        // micro-batches, and the last one is idle until the first micro-batch arrives.
        let rounds = (trained / passes.updates.max(1)).div_ceil(round.max(1)).max(1) as f64;
        let bubble = stages.saturating_sub(1) as f64;
        let bubble = bubble / (rounds + bubble);
        let learning = operations / (TRAINING_EFFICIENCY * device.flops * devices) / (1.0 - bubble);
        StepEstimate {
            sampled: sampled_tokens,
            trained,
            sampling: generation + filling,
            learning,
            bubble,
            handoff_seconds,
        }
    }
}

/// Estimates the service times of one device, for the simulation of a fleet. Sequences have
/// `prompt` context tokens and `completion_tokens` sampled tokens. `tensor` is the number of
/// devices per server. `handoff_seconds` is the duration of device handoffs per step. If it is 0,
/// weights are sent over the network instead.
pub fn estimate_service_times(
    shape: &Shape,
    device: &Device,
    (prompt, completion_tokens): (u64, u64),
    tensor: u32,
    handoff_seconds: f64,
) -> ServiceTimes {
    let seen = prompt + completion_tokens / 2;
    let sequence_seconds = seen as f64 * shape.kv_cache_bytes_per_token(2) as f64
        / (SAMPLING_EFFICIENCY * device.bandwidth);
    let weights = 2.0 * shape.parameters() as f64;
    ServiceTimes {
        prompt: shape.forward_flops(prompt / 2) / (PREFILL_EFFICIENCY * device.flops),
        batch: weights / (SAMPLING_EFFICIENCY * device.bandwidth * f64::from(tensor.max(1))),
        sequence: sequence_seconds
            .max(shape.forward_flops(seen) / (PREFILL_EFFICIENCY * device.flops)),
        learn: 3.0 * shape.forward_flops(seen) / (TRAINING_EFFICIENCY * device.flops),
        update: 0.0,
        publish: if handoff_seconds > 0.0 { handoff_seconds } else { weights / NETWORK_BANDWIDTH },
    }
}

/// Describes the assumptions behind the estimates, for the user. `is_colocated` states whether
/// sampling and training use the same devices.
pub fn describe_assumptions(device: &Device, is_colocated: bool, stages: u64) -> String {
    let handoff_text = if is_colocated {
        format!(
            " or judges; {:.0} GB/s to the host's memory and {:.1} GB/s of weights",
            HOST_BANDWIDTH / 1e9,
            NETWORK_BANDWIDTH / 1e9
        )
    } else {
        ", judges or weight transfers".to_owned()
    };
    let stages = if stages > 1 { "; pipeline stages take equally long" } else { "" };
    format!(
        "assumed: {} with {:.0} TFLOP/s in bf16 and {:.2} TB/s at their peaks; training reaches \
         {:.0} %, prompts {:.0} %,\n\
         sampling {:.0} % of the bandwidth; prompts of a group are computed once; no time for \
         tools{handoff_text};\n\
         the longest attempt of a step is no longer than the others{stages}",
        device.name,
        device.flops / 1e12,
        device.bandwidth / 1e12,
        100.0 * TRAINING_EFFICIENCY,
        100.0 * PREFILL_EFFICIENCY,
        100.0 * SAMPLING_EFFICIENCY
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_estimates_scale_with_devices_and_tokens() {
        let text = r#"{"hidden_size":3584,"num_hidden_layers":28,"num_attention_heads":28,
            "num_key_value_heads":4,"intermediate_size":18944,"vocab_size":152064}"#;
        let shape = Shape::parse(text).unwrap();
        let device = Device::by_name("h100").unwrap();
        let work = Workload {
            prompt: 500,
            completion_tokens: 1000,
            running: 128,
            tensor: 1,
            samplers: 4,
            learners: 4,
            stages: 1,
            round: 4 * 8192,
            handoff_seconds: 0.0,
        };
        let passes = StepPasses { group: 8, updates: 1, epochs: 1 };
        let attempts = StepAttempts { sampled: 512, trained: 512 };
        let step = work.estimate_step(&shape, device, attempts, passes);
        assert_eq!((step.sampled, step.trained), (512_000, 512_000 + 64 * 500));
        // Per second, one H100 samples 5 to 30 thousand tokens of a 7B model and trains on 5 to 12
        // thousand.
        let sampling_rate = step.sampled as f64 / step.sampling / 4.0;
        let training_rate = step.trained as f64 / step.learning / 4.0;
        assert!((5_000.0..30_000.0).contains(&sampling_rate), "{sampling_rate}");
        assert!((5_000.0..12_000.0).contains(&training_rate), "{training_rate}");
        let more = Workload { samplers: 8, learners: 8, ..work.clone() }
            .estimate_step(&shape, device, attempts, passes);
        assert!(more.sampling < 0.6 * step.sampling && more.learning < 0.6 * step.learning);
        assert!(step.seconds(true) < step.seconds(false));
        let oversampled =
            work.estimate_step(&shape, device, StepAttempts { sampled: 640, ..attempts }, passes);
        assert_eq!(
            (oversampled.sampled, oversampled.trained, oversampled.learning),
            (640_000, step.trained, step.learning)
        );
        assert!(oversampled.sampling > 1.1 * step.sampling);
        // One server of two devices has the bandwidth of two servers, but reads the weights only
        // once.
        let tensor_parallel = Workload { tensor: 2, samplers: 2, running: 256, ..work.clone() };
        let tensor_parallel = tensor_parallel.estimate_step(&shape, device, attempts, passes);
        assert!(
            tensor_parallel.sampling <= step.sampling
                && tensor_parallel.sampling > 0.5 * step.sampling
        );
        // 544 k tokens are 17 rounds of 32 k: with 4 stages, each works in 17 of 20 time slots.
        let staged = |updates| {
            let passes = StepPasses { updates, ..passes };
            Workload { stages: 4, ..work.clone() }.estimate_step(&shape, device, attempts, passes)
        };
        assert!((staged(1).bubble - 3.0 / 20.0).abs() < 1e-9, "{}", staged(1).bubble);
        assert!((staged(1).learning / step.learning - 20.0 / 17.0).abs() < 1e-9);
        assert!(staged(8).bubble > 0.4, "fewer micro-batches fill it less");
        // With handoffs, a step takes sampling, training and handoffs one after another.
        let with_handoff = Workload { handoff_seconds: handoff_seconds(&shape, 14 << 30), ..work }
            .estimate_step(&shape, device, attempts, passes);
        assert!(
            (with_handoff.seconds(false) - step.seconds(false) - with_handoff.handoff_seconds)
                .abs()
                < 1e-9
        );
        assert!(
            (2.0..4.0).contains(&with_handoff.handoff_seconds),
            "{}",
            with_handoff.handoff_seconds
        );
    }
}
