//! Estimates the memory of one process of the PyTorch learner.

use levade_recipe::{Phase, Recipe, RlKeys, TorchKeys};

use super::shape::Shape;

/// Amount of memory, in bytes.
pub type Bytes = u64;

/// Size of an f32 in bytes. Trained weights, their gradients and the optimizer moments are f32.
const F32: u64 = 4;

/// Layout and settings of the learner's process group that determine its memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Learner {
    /// Number of learner processes, one per device.
    pub processes: u64,
    /// Tensor-parallel size: number of ranks that split a tensor. 1 disables tensor parallelism.
    pub tensor: u64,
    /// Context-parallel size: number of ranks that split a sequence. 1 disables context
    /// parallelism.
    pub context: u64,
    /// Pipeline-parallel size: number of stages that split the layers. 1 disables pipeline
    /// parallelism.
    pub pipeline: u64,
    /// Size of a number in the compute dtype, in bytes: 2 for bf16, 4 for f32.
    pub compute: u64,
    /// Whether the backward pass recomputes activations (activation checkpointing).
    pub recompute: bool,
    /// Number of rows for which the output head computes logits at a time.
    pub head_rows: u64,
    /// Maximum number of packed tokens per micro-batch.
    pub tokens: u64,
    /// Rank of the LoRA adapter. `None` if all weights are trained.
    pub lora: Option<u64>,
    /// Whether the learner also holds a frozen reference model.
    pub reference: bool,
    /// Whether the learner also trains a critic model.
    pub critic: bool,
    /// Whether the devices are GPUs.
    pub on_gpu: bool,
}

/// Maximum number of tokens per micro-batch in a memory estimate. Larger values are clamped.
pub const MAX_TOKENS: u64 = 1 << 24;

/// Checks that the model can be split as the learner's parallelism keys `tp`, `ep` and `pp`
/// require.
///
/// # Errors
/// Returns a message with the key and its value in these cases: the model has fewer layers than
/// pipeline stages, the key does not divide the number of heads or experts, or `ep` is above 1 for
/// a model without experts.
pub fn check_split(keys: &TorchKeys, shape: &Shape) -> Result<(), String> {
    let tp = u64::from(keys.tp);
    let ep = u64::from(keys.ep);
    let pp = u64::from(keys.pp);
    if pp > shape.layers {
        return Err(format!(
            "`cluster.learner.pp` is {pp}, but the model has {} layers; lower the key, because \
             every stage needs a layer",
            shape.layers
        ));
    }
    for (what, count) in [("heads", shape.heads), ("key-value heads", shape.kv_heads())] {
        if !count.is_multiple_of(tp) {
            return Err(format!(
                "`cluster.learner.tp` is {tp}, but must divide the model's {count} {what}"
            ));
        }
    }
    match shape.experts() {
        _ if ep == 1 => Ok(()),
        None => {
            Err(format!("`cluster.learner.ep` is {ep}, but the model has no experts; set it to 1"))
        }
        Some(experts) if !experts.is_multiple_of(ep) => Err(format!(
            "`cluster.learner.ep` is {ep}, but must divide the model's {experts} experts"
        )),
        Some(_) => Ok(()),
    }
}

/// Returns the value of the last `--head-rows` in the learner's arguments, or the default of 512.
fn head_rows_argument(args: &[String]) -> u64 {
    let value =
        args.iter().enumerate().rev().find_map(|(at, arg)| match arg.strip_prefix("--head-rows") {
            Some("") => args.get(at + 1),
            Some(_) => Some(arg),
            None => None,
        });
    value.and_then(|text| text.rsplit('=').next()?.parse().ok()).unwrap_or(512)
}

/// Device memory that the CUDA context and NCCL buffers take in each learner process, in bytes. The
/// value is assumed, not measured.
pub const CUDA_CONTEXT_BYTES: Bytes = 1800 << 20;

/// Returns the total number of bytes in a memory plan, saturating. A plan lists bytes by purpose.
pub fn total_bytes(plan: &[(&str, Bytes)]) -> Bytes {
    plan.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}

/// Purposes in a memory plan whose memory a colocated learner offloads when it hands its devices to
/// the sampler.
const OFFLOADED: [&str; 4] =
    ["weights, f32", "gradients and moments, f32", "frozen reference", "critic with its optimizer"];

/// Returns the number of bytes per learner process that a device handoff offloads to host memory
/// and loads back.
pub fn offloaded_bytes(plan: &[(&str, Bytes)]) -> Bytes {
    plan.iter().filter(|(purpose, _)| OFFLOADED.contains(purpose)).map(|(_, bytes)| bytes).sum()
}

/// The part of the model that is on one pipeline stage.
struct PipelineStage {
    layers: u64,
    /// Number of parameters of the embedding, the final norm and the output head that are on this
    /// stage.
    edge_parameters: u64,
    /// Maximum number of micro-batches that have activations at the same time.
    in_flight: u64,
    has_head: bool,
}

impl Learner {
    /// Describes the learner that `recipe` starts. `keys` are its keys in `[cluster.learner]`.
    pub fn new(recipe: &Recipe, keys: &TorchKeys) -> Self {
        let needs = |needs: fn(&RlKeys) -> bool| {
            recipe.phase.iter().any(|phase| matches!(phase, Phase::Rl(keys) if needs(keys)))
        };
        let processes = keys.processes_per_node().saturating_mul(keys.nodes);
        Learner {
            processes: processes.into(),
            tensor: keys.tp.into(),
            context: keys.cp.into(),
            pipeline: keys.pp.into(),
            compute: keys.dtype.bytes() as u64,
            recompute: keys.args.iter().any(|arg| arg == "--checkpoint-activations"),
            head_rows: head_rows_argument(&keys.args),
            tokens: (recipe.engine.micro_batch_tokens as u64).min(MAX_TOKENS),
            lora: recipe.model.lora.as_ref().map(|lora| lora.rank as u64),
            reference: needs(RlKeys::needs_reference),
            critic: needs(RlKeys::needs_critic),
            on_gpu: keys.gpus > 0,
        }
    }

    /// Returns the memory of one learner process in bytes, by purpose. If the model is split into
    /// pipeline stages, this is a process of the stage that needs the most memory.
    pub fn plan_memory(&self, shape: &Shape) -> Vec<(&'static str, Bytes)> {
        let stages =
            self.edge_stages(shape).into_iter().map(|stage| self.plan_stage(shape, &stage));
        stages.max_by_key(|plan| total_bytes(plan)).unwrap_or_default()
    }

    /// Returns the pipeline stages that can need the most memory. The first stage gets the
    /// remainder of the layers and has the most micro-batches in flight. The last stage has the
    /// output head.
    fn edge_stages(&self, shape: &Shape) -> Vec<PipelineStage> {
        let stages = self.pipeline;
        let embedding = shape.vocabulary * shape.hidden;
        if stages == 1 {
            return vec![PipelineStage {
                layers: shape.layers,
                edge_parameters: shape.parameters_outside_layers(),
                in_flight: 1,
                has_head: true,
            }];
        }
        let first = shape.layers.div_ceil(stages);
        vec![
            PipelineStage {
                layers: first,
                edge_parameters: embedding,
                in_flight: stages,
                has_head: false,
            },
            PipelineStage {
                layers: shape.layers / stages,
                edge_parameters: embedding + shape.hidden,
                in_flight: 1,
                has_head: true,
            },
        ]
    }

    fn plan_stage(&self, shape: &Shape, stage: &PipelineStage) -> Vec<(&'static str, Bytes)> {
        let Learner { tensor, context, compute, .. } = *self;
        let PipelineStage { layers, edge_parameters: ends, in_flight, has_head } = *stage;
        let ranks = (self.processes / self.pipeline).max(1);
        let parameters = layers * shape.layer_parameters() + ends;
        let shard = |bytes: u64| bytes.div_ceil(ranks);
        let adapter = self.lora.map(|rank| {
            let block =
                2 * (shape.hidden + shape.query_width()) + 2 * (shape.hidden + shape.key_width());
            let wide = 3 * (shape.hidden + shape.active_width());
            layers * rank * (block + wide)
        });
        // Trained weights have a gradient and two moments. An adapter is replicated on every rank.
        let (trainable_bytes, is_unsharded) = match adapter {
            Some(adapter) => (3 * F32 * adapter + F32 * adapter, true),
            None => (3 * F32 * parameters, false),
        };
        let optimizer = if is_unsharded { trainable_bytes } else { shard(trainable_bytes) };
        // Sharded weights are gathered block by block; the embedding, final norm and head stay
        // gathered. Each gathered part has its weights and their gradient.
        let gathered = match ranks / tensor {
            1 if compute == F32 => 0,
            _ => 2 * compute * (ends + shape.layer_parameters()).div_ceil(tensor),
        };
        let rows = self.tokens.div_ceil(context);
        let live_blocks = if self.recompute { 1 } else { in_flight * layers };
        let checkpointed_blocks = if self.recompute { in_flight * layers } else { 0 };
        // Per block, PyTorch keeps the inputs of both norms (in f32 and in the compute dtype), the
        // queries, keys and values before and after RoPE, the attention output, and four tensors of
        // the feed-forward part.
        let block_width = 6 * shape.hidden
            + 2 * shape.query_width()
            + 4 * shape.key_width()
            + shape.query_width();
        let block_width = block_width + 4 * shape.active_width() / tensor;
        let activations = saturating_product(&[compute, rows, live_blocks, block_width])
            .saturating_add(saturating_product(&[compute, rows, checkpointed_blocks, shape.hidden]))
            .saturating_add(saturating_product(&[F32, 2, live_blocks, rows, shape.hidden]));
        let mask = if self.on_gpu {
            0
        } else {
            saturating_product(&[in_flight, 1 + compute, rows, self.tokens])
        };
        let head = if has_head {
            saturating_product(&[4, F32, self.head_rows.min(rows), shape.vocabulary])
        } else {
            0
        };
        let frozen = if self.reference { shard(compute * parameters) } else { 0 };
        let critic = if self.critic { shard(4 * F32 * parameters) } else { 0 };
        // On CPUs, measured by `bench/plan_memory.py`: PyTorch with transformers, gloo and the
        // memory that the allocator keeps. On GPUs, assumed: the CUDA context with NCCL buffers.
        let runtime = if self.on_gpu { CUDA_CONTEXT_BYTES } else { 1000 << 20 };
        vec![
            ("weights, f32", shard(F32 * parameters)),
            ("gradients and moments, f32", optimizer),
            ("gathered blocks", gathered),
            ("activations", activations.saturating_add(mask)),
            ("logits", head),
            ("frozen reference", frozen),
            ("critic with its optimizer", critic),
            ("PyTorch itself", runtime),
        ]
    }
}

/// Returns the product of `factors`. It saturates if absurdly large recipe keys would make it
/// exceed a u64.
fn saturating_product(factors: &[u64]) -> Bytes {
    factors.iter().map(|factor| *factor as f64).product::<f64>() as Bytes
}

/// Formats a number of bytes in GiB with two decimals.
pub fn format_gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        let text = r#"{"hidden_size":3584,"num_hidden_layers":28,"num_attention_heads":28,
            "num_key_value_heads":4,"intermediate_size":18944,"vocab_size":152064}"#;
        Shape::parse(text).unwrap()
    }

    fn learner() -> Learner {
        Learner {
            processes: 8,
            tensor: 1,
            context: 1,
            pipeline: 1,
            compute: 2,
            recompute: true,
            head_rows: 512,
            tokens: 8192,
            lora: None,
            reference: false,
            critic: false,
            on_gpu: true,
        }
    }

    fn total(learner: &Learner) -> u64 {
        learner.plan_memory(&shape()).iter().map(|(_, bytes)| bytes).sum()
    }

    #[test]
    fn sharding_and_adapters_reduce_memory() {
        let one = total(&Learner { processes: 1, ..learner() });
        let eight = total(&learner());
        // 16 bytes per parameter, sharded over eight processes.
        assert!((one - eight) as f64 > 0.8 * 14.0 * 7.6e9, "{one} {eight}");
        assert!(total(&Learner { recompute: false, ..learner() }) > eight + (20 << 30));
        assert!(total(&Learner { tokens: 16384, ..learner() }) > eight);
        assert!(total(&Learner { lora: Some(16), ..learner() }) < eight);
        // 2 bytes per parameter of the reference model and 16 of the critic, sharded likewise.
        let more = total(&Learner { reference: true, critic: true, ..learner() }) - eight;
        assert!(more.abs_diff(shape().parameters() * 18 / 8) < 8, "{more}");
        assert_eq!(head_rows_argument(&["--head-rows".into(), "64".into()]), 64);
        assert_eq!(head_rows_argument(&["--head-rows".into()]), 512);
        assert_eq!(head_rows_argument(&["--head-rows=64".into(), "--x".into()]), 64);
    }

    #[test]
    fn offloaded_bytes_are_16_per_parameter() {
        let plan = learner().plan_memory(&shape());
        let bytes_per_parameter = offloaded_bytes(&plan) as f64 * 8.0 / shape().parameters() as f64;
        assert!(
            (bytes_per_parameter - 16.0).abs() < 1e-3,
            "16 bytes a parameter: {bytes_per_parameter}"
        );
    }

    #[test]
    fn pipeline_stage_holds_its_layers_and_ends() {
        let shape = shape();
        let staged = Learner { pipeline: 4, ..learner() };
        let weights = |learner: &Learner| learner.plan_memory(&shape)[0].1;
        // Two processes shard a stage of 7 layers, which also has the embedding or the head.
        let end = shape.vocabulary * shape.hidden;
        let stage = 4 * (7 * shape.layer_parameters() + end) / 2;
        assert!(
            weights(&staged).abs_diff(stage) <= 2 * shape.hidden,
            "{} {stage}",
            weights(&staged)
        );
        // The first stages get the remainder of the layers: 28 are split into 6, 6, 6, 5 and 5.
        let five = Learner { processes: 5, pipeline: 5, head_rows: 1, ..learner() };
        assert_eq!(weights(&five), 4 * (6 * shape.layer_parameters() + end));
        // The first stage holds activations of one micro-batch per stage.
        let activations = |pipeline: u64| {
            let plan = Learner {
                processes: pipeline,
                pipeline,
                recompute: false,
                head_rows: 1,
                ..learner()
            };
            plan.plan_memory(&shape)[3].1 as f64
        };
        assert!(
            (activations(4) / activations(1) - 1.0).abs() < 1e-6,
            "{} {}",
            activations(4),
            activations(1)
        );
    }

    #[test]
    fn check_split_names_key_that_does_not_divide() {
        let dense = shape_with("");
        let mixed = shape_with(r#","num_experts":6,"num_experts_per_tok":2"#);
        assert_eq!(check_split(&torch_keys(4, 1, 2), &dense), Ok(()));
        assert_eq!(check_split(&torch_keys(1, 3, 1), &mixed), Ok(()));
        for (keys, shape, want) in [
            (
                torch_keys(8, 1, 1),
                &dense,
                "`cluster.learner.tp` is 8, but must divide the model's 4 key-value heads",
            ),
            (
                torch_keys(3, 1, 1),
                &dense,
                "`cluster.learner.tp` is 3, but must divide the model's 8 heads",
            ),
            (torch_keys(1, 1, 3), &dense, "`cluster.learner.pp` is 3, but the model has 2 layers"),
            (
                torch_keys(1, 2, 1),
                &dense,
                "`cluster.learner.ep` is 2, but the model has no experts",
            ),
            (
                torch_keys(1, 4, 1),
                &mixed,
                "`cluster.learner.ep` is 4, but must divide the model's 6 experts",
            ),
        ] {
            let why = check_split(&keys, shape).unwrap_err();
            assert!(why.contains(want), "{why}");
        }
    }

    fn shape_with(experts: &str) -> Shape {
        let text = format!(
            r#"{{"hidden_size":64,"num_hidden_layers":2,"num_attention_heads":8,"num_key_value_heads":4,
                "intermediate_size":128,"vocab_size":7{experts}}}"#
        );
        Shape::parse(&text).unwrap()
    }

    fn torch_keys(tp: u32, ep: u32, pp: u32) -> TorchKeys {
        TorchKeys { tp, ep, pp, ..TorchKeys::default() }
    }
}
