//! Checks arguments of servers and of a learner's processes: they must not repeat flags that the
//! run sets.

use super::RecipeError;
use super::check::Checker;
use super::cluster::{SamplersKeys, TorchKeys};

/// A flag that the run sets, and what to do instead of passing it.
type Owned = (&'static str, &'static str);

/// Flags for the address of a server and for its model.
const OF_SERVERS: [Owned; 3] = [
    ("--host", "the run chooses it; start the server yourself and name it in `cluster.samplers.urls`"),
    ("--port", "the run chooses it; start the server yourself and name it in `cluster.samplers.urls`"),
    ("--model", "servers begin with the weights of `model.source`"),
];
const OF_VLLM: [Owned; 1] =
    [("--served-model-name", "the run gives it; start the server yourself and name it in `urls`")];
const OF_SGLANG: [Owned; 1] = [("--model-path", "servers begin with the weights of `model.source`")];

/// Options of `levade_torch` that keys of the recipe set.
const OF_TORCH: [Owned; 22] = [
    (
        "--host",
        "the run talks to it on this machine; start the group yourself and name it in `cluster.learner.url`",
    ),
    ("--port", "the run chooses it"),
    ("--collective-seconds", "set `cluster.learner.call_seconds`"),
    ("--model", "set `model.source`"),
    ("--reference", "a phase with `kl` brings it"),
    ("--critic", "a phase whose advantages need values brings it"),
    ("--run-root", "set `run.folder`"),
    ("--token-env", "the run makes a token of its own"),
    ("--token-file", "the run makes a token of its own"),
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
    /// Checks arguments of servers that the run starts.
    pub(super) fn args_of_servers(&self, samplers: &SamplersKeys) -> Result<(), RecipeError> {
        let of_kind = match samplers {
            SamplersKeys::Vllm(_) => OF_VLLM,
            SamplersKeys::Sglang(_) => OF_SGLANG,
        };
        self.args("cluster.samplers.args", &samplers.servers().args, OF_SERVERS.iter().chain(&of_kind))
    }

    /// Checks arguments of a learner's processes.
    pub(super) fn args_of_learner(&self, keys: &TorchKeys) -> Result<(), RecipeError> {
        self.args("cluster.learner.args", &keys.args, OF_TORCH.iter())
    }

    fn args<'a>(
        &self,
        key: &str,
        args: &[String],
        owned: impl Iterator<Item = &'a Owned> + Clone,
    ) -> Result<(), RecipeError> {
        for (i, arg) in args.iter().enumerate() {
            let flag = arg.split('=').next().unwrap_or_default();
            let known = owned.clone().find(|(owned, _)| *owned == flag);
            let way = known.map_or("", |(_, way)| way);
            let range = format!("another flag than {flag}: {way}");
            self.check(known.is_none(), format!("{key}.{i}"), format!("\"{arg}\""), range)?;
        }
        Ok(())
    }
}
