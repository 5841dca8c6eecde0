//! Memory of a process of the learner on PyTorch.

use levade_recipe::{Phase, Recipe, RlKeys, TorchKeys};

use super::shape::Shape;

/// Bytes.
pub type Bytes = u64;

/// Weights that are trained, their gradients and moments are f32.
const F32: u64 = 4;

/// A group of processes, as it will be started.
#[derive(Debug, Clone, PartialEq)]
pub struct Learner {
    /// Processes, one for each device.
    pub processes: u64,
    /// Ranks that share a tensor.
    pub tensor: u64,
    /// Ranks that share a path.
    pub context: u64,
    /// Stages that share the layers.
    pub pipeline: u64,
    /// Bytes of a number that is computed with.
    pub compute: u64,
    /// Whether activations are computed again in the backward pass.
    pub recompute: bool,
    /// Rows of the head at a time.
    pub head_rows: u64,
    /// Packed tokens of a micro-batch.
    pub tokens: u64,
    /// Rank of the adapter that is trained in place of all weights.
    pub lora: Option<u64>,
    /// Whether a frozen reference is held.
    pub reference: bool,
    /// Whether a critic is trained.
    pub critic: bool,
    /// Whether the devices are GPUs.
    pub on_gpu: bool,
}

/// Maximum tokens of a micro-batch that is planned for.
pub const MAX_TOKENS: u64 = 1 << 24;

/// Checks that a learner's keys divide the model.
///
/// # Errors
/// Returns an error that names the key and what it does not divide.
pub fn check_split(keys: &TorchKeys, shape: &Shape) -> Result<(), String> {
    let (tp, ep, pp) = (u64::from(keys.tp), u64::from(keys.ep), u64::from(keys.pp));
    if pp > shape.layers {
        return Err(format!(
            "`cluster.learner.pp` is {pp}, and the model has {} layers: a stage needs one",
            shape.layers
        ));
    }
    for (what, count) in [("heads", shape.heads), ("heads of keys and values", shape.kv_heads())] {
        if !count.is_multiple_of(tp) {
            return Err(format!(
                "`cluster.learner.tp` is {tp}, which does not divide the model's {count} {what}"
            ));
        }
    }
    match shape.experts() {
        _ if ep == 1 => Ok(()),
        None => Err(format!("`cluster.learner.ep` is {ep}, and the model has no experts; leave it out")),
        Some(experts) if !experts.is_multiple_of(ep) => {
            Err(format!("`cluster.learner.ep` is {ep}, which does not divide the model's {experts} experts"))
        }
        Some(_) => Ok(()),
    }
}

/// Rows of the head at a time, from the arguments of the processes.
fn head_rows(args: &[String]) -> u64 {
    let given = args.iter().enumerate().rev().find_map(|(at, arg)| match arg.strip_prefix("--head-rows") {
        Some("") => args.get(at + 1),
        Some(_) => Some(arg),
        None => None,
    });
    let number = |text: &String| text.rsplit('=').next()?.parse().ok();
    given.and_then(number).unwrap_or(512)
}

/// Memory of a device that CUDA's context and NCCL's buffers keep for a process of the learner.
pub const CONTEXT: Bytes = 1800 << 20;

/// Bytes of all purposes.
pub fn total(plan: &[(&str, Bytes)]) -> Bytes {
    plan.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}

/// Purposes of memory that a learner leaves with, where it has its devices by turns.
const MOVED: [&str; 4] =
    ["weights, f32", "gradients and moments, f32", "frozen reference", "critic with its optimiser"];

/// Bytes of a process that move to the host's memory and back.
pub fn moved(plan: &[(&str, Bytes)]) -> Bytes {
    plan.iter().filter(|(purpose, _)| MOVED.contains(purpose)).map(|(_, bytes)| bytes).sum()
}

/// Part of the model that a stage of a pipeline holds.
struct Stage {
    layers: u64,
    /// Parameters of the embedding, the final norm and the head, as far as they are here.
    ends: u64,
    /// Micro-batches that have activations at the same time, at most.
    under_way: u64,
    has_head: bool,
}

impl Learner {
    /// Returns the learner that a recipe starts.
    pub fn of(recipe: &Recipe, keys: &TorchKeys) -> Self {
        let needs = |needs: fn(&RlKeys) -> bool| {
            recipe.phase.iter().any(|phase| matches!(phase, Phase::Rl(keys) if needs(keys)))
        };
        let processes = keys.of_node().saturating_mul(keys.nodes);
        Learner {
            processes: processes.into(),
            tensor: keys.tp.into(),
            context: keys.cp.into(),
            pipeline: keys.pp.into(),
            compute: keys.dtype.bytes() as u64,
            recompute: keys.args.iter().any(|arg| arg == "--checkpoint-activations"),
            head_rows: head_rows(&keys.args),
            tokens: (recipe.engine.micro_batch_tokens as u64).min(MAX_TOKENS),
            lora: recipe.model.lora.as_ref().map(|lora| lora.rank as u64),
            reference: needs(RlKeys::needs_reference),
            critic: needs(RlKeys::needs_critic),
            on_gpu: keys.gpus > 0,
        }
    }

    /// Bytes of a process by purpose, of the stage that takes the most.
    pub fn plan(&self, shape: &Shape) -> Vec<(&'static str, Bytes)> {
        let total = |plan: &Vec<(&'static str, Bytes)>| total(plan);
        let stages = self.ends(shape).into_iter().map(|stage| self.plan_stage(shape, &stage));
        stages.max_by_key(total).unwrap_or_default()
    }

    /// The stages that can take the most: the first, which has layers that are left over and the most
    /// micro-batches under way, and the last, which has the head.
    fn ends(&self, shape: &Shape) -> Vec<Stage> {
        let (stages, embedding) = (self.pipeline, shape.vocabulary * shape.hidden);
        if stages == 1 {
            return vec![Stage { layers: shape.layers, ends: shape.ends(), under_way: 1, has_head: true }];
        }
        let first = shape.layers.div_ceil(stages);
        vec![
            Stage { layers: first, ends: embedding, under_way: stages, has_head: false },
            Stage {
                layers: shape.layers / stages,
                ends: embedding + shape.hidden,
                under_way: 1,
                has_head: true,
            },
        ]
    }

    fn plan_stage(&self, shape: &Shape, stage: &Stage) -> Vec<(&'static str, Bytes)> {
        let Learner { tensor, context, compute, .. } = *self;
        let Stage { layers, ends, under_way, has_head } = *stage;
        let ranks = (self.processes / self.pipeline).max(1);
        let parameters = layers * shape.block() + ends;
        let share = |bytes: u64| bytes.div_ceil(ranks);
        let adapter = self.lora.map(|rank| {
            let block = 2 * (shape.hidden + shape.queries()) + 2 * (shape.hidden + shape.keys());
            let wide = 3 * (shape.hidden + shape.wide());
            layers * rank * (block + wide)
        });
        // What is learnt has a gradient and two moments; an adapter is whole on every rank.
        let (learnt, whole) = match adapter {
            Some(adapter) => (3 * F32 * adapter + F32 * adapter, true),
            None => (3 * F32 * parameters, false),
        };
        let optimiser = if whole { learnt } else { share(learnt) };
        // What is sharded is gathered block by block; the ends stay gathered. Each has its weights and their
        // gradient.
        let gathered = match ranks / tensor {
            1 if compute == F32 => 0,
            _ => 2 * compute * (ends + shape.block()).div_ceil(tensor),
        };
        let rows = self.tokens.div_ceil(context);
        let kept = if self.recompute { 1 } else { under_way * layers };
        let inputs = if self.recompute { under_way * layers } else { 0 };
        // Of a block PyTorch keeps: both norms' inputs (in f32, and as they are), queries, keys and values
        // before and after their rotation, attention, and four of the feed-forward part.
        let of_block = 6 * shape.hidden + 2 * shape.queries() + 4 * shape.keys() + shape.queries();
        let of_block = of_block + 4 * shape.wide() / tensor;
        // Products of what nobody has are no numbers of bytes: they end at the largest.
        let product = |factors: &[u64]| factors.iter().map(|factor| *factor as f64).product::<f64>() as Bytes;
        let activations = product(&[compute, rows, kept, of_block])
            .saturating_add(product(&[compute, rows, inputs, shape.hidden]))
            .saturating_add(product(&[F32, 2, kept, rows, shape.hidden]));
        let mask = if self.on_gpu { 0 } else { product(&[under_way, 1 + compute, rows, self.tokens]) };
        let head = if has_head { product(&[4, F32, self.head_rows.min(rows), shape.vocabulary]) } else { 0 };
        let frozen = if self.reference { share(compute * parameters) } else { 0 };
        let critic = if self.critic { share(4 * F32 * parameters) } else { 0 };
        // Measured: PyTorch with transformers, gloo and what its allocator keeps (`bench/plan_memory.py`).
        // Assumed: CUDA's context with NCCL's buffers.
        let runtime = if self.on_gpu { CONTEXT } else { 1000 << 20 };
        vec![
            ("weights, f32", share(F32 * parameters)),
            ("gradients and moments, f32", optimiser),
            ("blocks as they are gathered", gathered),
            ("activations", activations.saturating_add(mask)),
            ("logits", head),
            ("frozen reference", frozen),
            ("critic with its optimiser", critic),
            ("PyTorch itself", runtime),
        ]
    }
}

/// GiB, with a digit that tells.
pub fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        let text = r#"{"hidden_size":3584,"num_hidden_layers":28,"num_attention_heads":28,
            "num_key_value_heads":4,"intermediate_size":18944,"vocab_size":152064}"#;
        Shape::read(text).unwrap()
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
        learner.plan(&shape()).iter().map(|(_, bytes)| bytes).sum()
    }

    #[test]
    fn what_shares_takes_less() {
        let one = total(&Learner { processes: 1, ..learner() });
        let eight = total(&learner());
        // 16 bytes for each parameter, shared by eight.
        assert!((one - eight) as f64 > 0.8 * 14.0 * 7.6e9, "{one} {eight}");
        assert!(total(&Learner { recompute: false, ..learner() }) > eight + (20 << 30));
        assert!(total(&Learner { tokens: 16384, ..learner() }) > eight);
        assert!(total(&Learner { lora: Some(16), ..learner() }) < eight);
        // 2 bytes for each parameter of a frozen copy and 16 of a critic, shared likewise.
        let more = total(&Learner { reference: true, critic: true, ..learner() }) - eight;
        assert!(more.abs_diff(shape().parameters() * 18 / 8) < 8, "{more}");
        assert_eq!(head_rows(&["--head-rows".into(), "64".into()]), 64);
        assert_eq!(head_rows(&["--head-rows".into()]), 512);
        assert_eq!(head_rows(&["--head-rows=64".into(), "--x".into()]), 64);
    }

    #[test]
    fn a_learner_leaves_with_all_but_what_it_works_with() {
        let plan = learner().plan(&shape());
        let share = moved(&plan) as f64 * 8.0 / shape().parameters() as f64;
        assert!((share - 16.0).abs() < 1e-3, "16 bytes a parameter: {share}");
    }

    #[test]
    fn a_stage_holds_its_layers_and_the_end_where_it_is() {
        let shape = shape();
        let staged = Learner { pipeline: 4, ..learner() };
        let weights = |learner: &Learner| learner.plan(&shape)[0].1;
        // Two processes share a stage of 7 layers, with the embedding or the head.
        let end = shape.vocabulary * shape.hidden;
        let stage = 4 * (7 * shape.block() + end) / 2;
        assert!(weights(&staged).abs_diff(stage) <= 2 * shape.hidden, "{} {stage}", weights(&staged));
        // Layers that are left over fall to the first stages: 6, 6, 6, 5 and 5 of 28.
        let five = Learner { processes: 5, pipeline: 5, head_rows: 1, ..learner() };
        assert_eq!(weights(&five), 4 * (6 * shape.block() + end));
        // The first stage has activations of as many micro-batches as there are stages.
        let kept = |pipeline: u64| {
            let plan = Learner { processes: pipeline, pipeline, recompute: false, head_rows: 1, ..learner() };
            plan.plan(&shape)[3].1 as f64
        };
        assert!((kept(4) / kept(1) - 1.0).abs() < 1e-6, "{} {}", kept(4), kept(1));
    }

    #[test]
    fn a_model_that_cannot_be_shared_out_is_told_by_the_key() {
        let shape = |experts: &str| {
            let text = format!(
                r#"{{"hidden_size":64,"num_hidden_layers":2,"num_attention_heads":8,"num_key_value_heads":4,
                "intermediate_size":128,"vocab_size":7{experts}}}"#
            );
            Shape::read(&text).unwrap()
        };
        let (dense, mixed) = (shape(""), shape(r#","num_experts":6,"num_experts_per_tok":2"#));
        let keys = |tp, ep, pp| TorchKeys { tp, ep, pp, ..TorchKeys::default() };
        assert_eq!(check_split(&keys(4, 1, 2), &dense), Ok(()));
        assert_eq!(check_split(&keys(1, 3, 1), &mixed), Ok(()));
        for (keys, shape, want) in [
            (
                keys(8, 1, 1),
                &dense,
                "`cluster.learner.tp` is 8, which does not divide the model's 4 heads of keys",
            ),
            (keys(3, 1, 1), &dense, "`cluster.learner.tp` is 3, which does not divide the model's 8 heads"),
            (keys(1, 1, 3), &dense, "`cluster.learner.pp` is 3, and the model has 2 layers"),
            (keys(1, 2, 1), &dense, "`cluster.learner.ep` is 2, and the model has no experts"),
            (keys(1, 4, 1), &mixed, "`cluster.learner.ep` is 4, which does not divide the model's 6 experts"),
        ] {
            let why = check_split(&keys, shape).unwrap_err();
            assert!(why.contains(want), "{why}");
        }
    }
}
