//! Checks arguments of servers and of a learner's processes: they must not repeat flags that the
//! run sets.

use super::RecipeError;
use super::check::Checker;
use super::cluster::{SamplersKeys, TorchKeys};

/// A command-line flag that recipes must not pass, because the run sets it, and a hint at what to
/// do instead.
type ReservedFlag = (&'static str, &'static str);

/// Flags of inference servers that set their address and model.
const SERVER_FLAGS: [ReservedFlag; 3] = [
    (
        "--host",
        "the run chooses it; start the server yourself and name it in `cluster.samplers.urls`",
    ),
    (
        "--port",
        "the run chooses it; start the server yourself and name it in `cluster.samplers.urls`",
    ),
    ("--model", "servers start with the weights of `model.source`"),
];
const VLLM_FLAGS: [ReservedFlag; 1] =
    [("--served-model-name", "the run sets it; start the server yourself and name it in `urls`")];
const SGLANG_FLAGS: [ReservedFlag; 1] =
    [("--model-path", "servers start with the weights of `model.source`")];

/// Flags of `levade_torch` for which the recipe has keys, or which the run sets.
const TORCH_FLAGS: [ReservedFlag; 22] = [
    (
        "--host",
        "the run connects to the group on this machine; start the group yourself and name it in \
         `cluster.learner.url`",
    ),
    ("--port", "the run chooses it"),
    ("--collective-seconds", "set `cluster.learner.call_seconds`"),
    ("--model", "set `model.source`"),
    ("--reference", "a phase with `kl` sets it"),
    ("--critic", "a phase whose advantages need values sets it"),
    ("--run-root", "set `run.folder`"),
    ("--token-env", "the run generates its own token"),
    ("--token-file", "the run generates its own token"),
    ("--port-file", "the run chooses it"),
    ("--device", "set `cluster.learner.gpus`"),
    ("--dtype", "set `cluster.learner.dtype`"),
    ("--export-dtype", "set `engine.precision`"),
    ("--threads", "set `cluster.learner.threads`"),
    ("--tp", "set `cluster.learner.tp`"),
    ("--cp", "set `cluster.learner.cp`"),
    ("--ep", "set `cluster.learner.ep`"),
    ("--pp", "set `cluster.learner.pp`"),
    ("--lora-rank", "set `model.lora.rank`"),
    ("--lora-alpha", "set `model.lora.alpha`"),
    ("--lora-targets", "set `model.lora.targets`"),
    ("--lora-seed", "set `run.seed`"),
];

impl Checker<'_> {
    /// Checks the additional arguments of the inference servers that the run starts.
    pub(super) fn check_server_args(&self, samplers: &SamplersKeys) -> Result<(), RecipeError> {
        let kind_flags = match samplers {
            SamplersKeys::Vllm(_) => VLLM_FLAGS,
            SamplersKeys::Sglang(_) => SGLANG_FLAGS,
        };
        self.check_args(
            "cluster.samplers.args",
            &samplers.servers().args,
            SERVER_FLAGS.iter().chain(&kind_flags),
        )
    }

    /// Checks the additional arguments of the learner's processes.
    pub(super) fn check_learner_args(&self, keys: &TorchKeys) -> Result<(), RecipeError> {
        self.check_args("cluster.learner.args", &keys.args, TORCH_FLAGS.iter())
    }

    fn check_args<'a>(
        &self,
        key: &str,
        args: &[String],
        reserved: impl Iterator<Item = &'a ReservedFlag> + Clone,
    ) -> Result<(), RecipeError> {
        for (i, arg) in args.iter().enumerate() {
            let flag = arg.split('=').next().unwrap_or_default();
            let known = reserved.clone().find(|(reserved, _)| *reserved == flag);
            let remedy = known.map_or("", |(_, remedy)| remedy);
            let range = format!("another flag than {flag}: {remedy}");
            self.check(known.is_none(), format!("{key}.{i}"), format!("\"{arg}\""), range)?;
        }
        Ok(())
    }
}
