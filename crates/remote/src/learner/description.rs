//! Facts that a group of learners reports about itself, and the check that they fit the run.

use std::collections::{BTreeMap, BTreeSet};

use levade_policy::PolicyError;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Version of the learner protocol that this build implements.
pub(crate) const PROTOCOL: u32 = 1;

/// Description of a group of learners: processes with a policy, and possibly its reference and
/// critic.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Description {
    /// Version of the learner protocol.
    pub protocol: u32,
    /// Model family, as `model_type` in the model's `config.json`.
    pub model_type: String,
    /// Number of rows of the model's embedding matrix.
    pub vocab_size: usize,
    /// Maximum sequence length of the learner, in tokens.
    pub context: usize,
    /// Number of parameters of the policy. 0 if the group does not report it.
    #[serde(default)]
    pub parameters: u64,
    /// Data type of published weights. `None` if the group does not report it.
    #[serde(default)]
    pub export_dtype: Option<String>,
    /// Parallel layout and numeric environment.
    #[serde(flatten)]
    pub layout: GroupLayout,
    /// Random id of this start of the group's processes. `None` if the group does not report it.
    #[serde(default)]
    pub instance: Option<String>,
    /// Learners of the group, by name.
    pub learners: BTreeMap<String, LearnerDescription>,
}

/// Facts about a group that determine the bits of a run's results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupLayout {
    /// Number of data-parallel ranks, for which micro-batch plans are made.
    pub world_size: u32,
    /// Number of processes of the group. 0 if the group does not report it.
    #[serde(default)]
    pub processes: u32,
    /// Data type of weights and activations.
    #[serde(default)]
    pub dtype: String,
    /// Device on which the group computes, such as `cuda`.
    #[serde(default)]
    pub device: String,
    /// Tensor-parallel size.
    #[serde(default = "default_parallel_size")]
    pub tp: u32,
    /// Context-parallel size.
    #[serde(default = "default_parallel_size")]
    pub cp: u32,
    /// Expert-parallel size.
    #[serde(default = "default_parallel_size")]
    pub ep: u32,
    /// Number of pipeline stages.
    #[serde(default = "default_parallel_size")]
    pub pp: u32,
    /// FSDP settings of the group, which determine how weights are sharded.
    #[serde(default)]
    pub fsdp: Value,
    /// Version of PyTorch that the group uses.
    #[serde(default)]
    pub torch: String,
    /// Version of transformers that the group uses.
    #[serde(default)]
    pub transformers: String,
}

fn default_parallel_size() -> u32 {
    1
}

/// One learner of a group.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
pub struct LearnerDescription {
    /// Version of the weights that the learner published last. `None` if it has published none
    /// since its start.
    #[serde(default)]
    pub version: Option<u64>,
    /// Whether the learner has a value head.
    #[serde(default)]
    pub value_head: bool,
    /// Whether the learner's weights are trained.
    #[serde(default)]
    pub trains: bool,
    /// LoRA adapter that the learner trains. `None` if it trains all weights.
    #[serde(default)]
    pub lora: Option<Adapter>,
}

/// Shape of a LoRA adapter.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Adapter {
    /// Rank of the adapter: the number of rows of A and of columns of B.
    pub rank: usize,
    /// Alpha of the adapter: the numerator of its scale alpha / rank.
    pub alpha: f32,
    /// Names of the projections that have an adapter.
    pub targets: BTreeSet<String>,
}

impl std::fmt::Display for Adapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let targets: Vec<&str> = self.targets.iter().map(String::as_str).collect();
        write!(
            f,
            "an adapter of rank {} and alpha {} on {}",
            self.rank,
            self.alpha,
            targets.join(", ")
        )
    }
}

/// Properties of a run that a group of learners must fit.
#[derive(Debug, Clone, PartialEq)]
pub struct LearnerRequirements {
    /// Model family, as `model_type` in the model's `config.json`.
    pub model_type: String,
    /// Number of rows of the model's embedding matrix.
    pub vocabulary: usize,
    /// Maximum sequence length of the run, in tokens.
    pub context: usize,
    /// Whether the run requires a frozen reference model.
    pub reference: bool,
    /// Whether the run trains a critic.
    pub critic: bool,
    /// LoRA adapter to train. `None` to train all weights.
    pub lora: Option<Adapter>,
    /// Data type in which the run computes, compared with [`GroupLayout::dtype`].
    pub dtype: String,
    /// Data type of the published weights, compared with [`Description::export_dtype`].
    pub export_dtype: String,
}

/// Name of the policy's learner in a group.
pub const POLICY: &str = "policy";
/// Name of the frozen reference model in a group.
pub const REFERENCE: &str = "reference";
/// Name of the critic in a group.
pub const CRITIC: &str = "critic";

impl Description {
    /// Checks that the group can train the run.
    ///
    /// # Errors
    /// Returns an error that names the first difference, both values and what to change.
    pub fn check(&self, expected: &LearnerRequirements, url: &str) -> Result<(), PolicyError> {
        let reject = |what: String| {
            Err(PolicyError::Invalid(format!("the learner at {url} cannot train this run: {what}")))
        };
        let LearnerRequirements {
            model_type,
            vocabulary,
            context,
            reference,
            critic,
            lora,
            dtype,
            export_dtype,
        } = expected;
        if self.protocol != PROTOCOL {
            return reject(format!(
                "the learner speaks version {} of the protocol, but this build speaks version \
                 {PROTOCOL}; recreate its environment with `levade cluster setup` of this build",
                self.protocol
            ));
        }
        // Multimodal families name their text part separately, with the suffix `_text`.
        let family = self.model_type.strip_suffix("_text").unwrap_or(&self.model_type);
        if family != model_type {
            return reject(format!(
                "the family of its model is {family}, but that of the recipe's model is \
                 {model_type}; start it with the model of `model.source`"
            ));
        }
        if self.vocab_size != *vocabulary {
            return reject(format!(
                "the learner's vocabulary has {} tokens, but that of the recipe's model has \
                 {vocabulary}; start it with the model of `model.source`",
                self.vocab_size
            ));
        }
        if self.context < *context {
            return reject(format!(
                "the learner's context is {} tokens, but `model.context` is {context}; lower \
                 `model.context`, or start the learner with a longer context",
                self.context
            ));
        }
        if self.layout.world_size == 0 {
            return reject("the learner has no ranks that process micro-batches".into());
        }
        let Some(policy) = self.learners.get(POLICY).filter(|policy| policy.trains) else {
            return reject(format!(
                "the service has no learner {POLICY} that trains, only {}",
                self.learner_names()
            ));
        };
        if policy.lora != *lora {
            return reject(format!(
                "the learner trains {}, but the recipe (`model.lora`) requires {}; start it \
                 accordingly, or set the key",
                describe_adapter(&policy.lora),
                describe_adapter(lora)
            ));
        }
        let published = self.export_dtype.as_ref().unwrap_or(export_dtype);
        for (does, key, option, now, wants) in [
            ("computes in", "cluster.learner.dtype", "--dtype", &self.layout.dtype, dtype),
            ("publishes weights in", "engine.precision", "--export-dtype", published, export_dtype),
        ] {
            // A value that the group does not report is not checked.
            if now != wants && !now.is_empty() {
                return reject(format!(
                    "the learner {does} {now}, but `{key}` is {wants}; set the key, or start the \
                     learner with {option} {wants}"
                ));
            }
        }
        if *reference && !self.learners.contains_key(REFERENCE) {
            return reject(format!(
                "a phase has a KL penalty to a reference, but it has no learner {REFERENCE}, only \
                 {}; start it with one",
                self.learner_names()
            ));
        }
        if *critic
            && !self.learners.get(CRITIC).is_some_and(|critic| critic.value_head && critic.trains)
        {
            return reject(format!(
                "a phase trains a critic, but it has no learner {CRITIC} with a value head, only \
                 {}; start it with one",
                self.learner_names()
            ));
        }
        Ok(())
    }

    fn learner_names(&self) -> String {
        self.learners.keys().cloned().collect::<Vec<_>>().join(", ")
    }
}

fn describe_adapter(lora: &Option<Adapter>) -> String {
    lora.as_ref().map_or_else(|| "all weights".into(), Adapter::to_string)
}

impl GroupLayout {
    /// Compares a group with its description `before`, from an earlier start. Describes the
    /// difference that prevents the run from continuing, or returns `None` if there is none.
    pub fn find_incompatibility(&self, before: &Self) -> Option<String> {
        let ranks = |layout: &Self| layout.world_size;
        (ranks(self) != ranks(before)).then(|| {
            format!(
                "the learner has {} data-parallel ranks, but the run started with {}: planned \
                 steps require the same number",
                ranks(self),
                ranks(before)
            )
        })
    }

    /// Compares a group with its description `before`, from an earlier start. Describes the
    /// differences that change the last bits of later results.
    pub fn describe_changes(&self, before: &Self) -> Vec<String> {
        let pairs = comparable_facts(before).into_iter().zip(comparable_facts(self));
        pairs
            .filter(|((_, before), (_, now))| before != now)
            .map(|((name, before), (_, now))| format!("{name} is {now} and was {before}"))
            .collect()
    }
}

fn comparable_facts(layout: &GroupLayout) -> [(&'static str, String); 10] {
    let GroupLayout { processes, dtype, device, tp, cp, ep, pp, fsdp, torch, transformers, .. } =
        layout.clone();
    [
        ("processes", processes.to_string()),
        ("dtype", dtype),
        ("device", device),
        ("tp", tp.to_string()),
        ("cp", cp.to_string()),
        ("ep", ep.to_string()),
        ("pp", pp.to_string()),
        ("fsdp", fsdp.to_string()),
        ("torch", torch),
        ("transformers", transformers),
    ]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    pub fn described() -> Value {
        json!({
            "protocol": 1, "model_type": "llama", "vocab_size": 64, "context": 128, "parameters": 7,
            "dtype": "f32", "export_dtype": "f32", "device": "cpu", "world_size": 2, "processes": 2, "fsdp": true, "tp": 1, "cp": 1,
            "ep": 1, "pp": 1, "torch": "2.15.0", "transformers": "5.24.0", "later": "fields are \
                                                                                     fine",
            "learners": {
                "policy": { "version": null, "value_head": false, "trains": true, "lora": null },
                "reference": { "version": null, "value_head": false, "trains": false, "lora": null },
            },
        })
    }

    fn expected() -> LearnerRequirements {
        LearnerRequirements {
            model_type: "llama".into(),
            vocabulary: 64,
            context: 128,
            reference: true,
            critic: false,
            lora: None,
            dtype: "f32".into(),
            export_dtype: "f32".into(),
        }
    }

    #[test]
    fn check_names_difference_between_learner_and_run() {
        assert_eq!(check_changed("", described(), &expected()), Ok(()));
        assert_eq!(check_changed("/model_type", json!("llama_text"), &expected()), Ok(()));
        for (key, value, want) in [
            ("/protocol", json!(2), "version 2 of the protocol, but this build speaks version 1"),
            ("/model_type", json!("qwen2"), "is qwen2, but that of the recipe's model is llama"),
            ("/vocab_size", json!(65), "has 65 tokens, but that of the recipe's model has 64"),
            (
                "/context",
                json!(100),
                "the learner's context is 100 tokens, but `model.context` is 128",
            ),
            ("/world_size", json!(0), "no ranks"),
            (
                "/learners/policy/trains",
                json!(false),
                "no learner policy that trains, only policy, reference",
            ),
            (
                "/learners/policy/lora",
                json!({ "rank": 8, "alpha": 16.0, "targets": ["q_proj", "v_proj"] }),
                "trains an adapter of rank 8 and alpha 16 on q_proj, v_proj, but \
                 the recipe (`model.lora`) requires all weights",
            ),
            (
                "/dtype",
                json!("bf16"),
                "computes in bf16, but `cluster.learner.dtype` is f32; set the key, or start",
            ),
            (
                "/export_dtype",
                json!("bf16"),
                "publishes weights in bf16, but `engine.precision` is f32",
            ),
            (
                "/learners",
                json!({ "policy": { "trains": true } }),
                "no learner reference, only policy",
            ),
        ] {
            let error = check_changed(key, value, &expected()).unwrap_err();
            assert!(error.contains(want), "{error}");
        }
        let critic =
            check_changed("", described(), &LearnerRequirements { critic: true, ..expected() })
                .unwrap_err();
        assert!(critic.contains("no learner critic with a value head"), "{critic}");
        let other = LearnerRequirements { lora: Some(adapter(8)), ..expected() };
        let lora_json = json!({ "rank": 4, "alpha": 16.0, "targets": ["q_proj"] });
        let error = check_changed("/learners/policy/lora", lora_json.clone(), &other).unwrap_err();
        assert!(
            error
                .contains("on q_proj, but the recipe (`model.lora`) requires an adapter of rank 8"),
            "{error}"
        );
        assert_eq!(
            check_changed(
                "/learners/policy/lora",
                lora_json,
                &LearnerRequirements { lora: Some(adapter(4)), ..expected() }
            ),
            Ok(())
        );
    }

    fn check_changed(
        key: &str,
        value: Value,
        expected: &LearnerRequirements,
    ) -> Result<(), String> {
        let mut described = described();
        if let Some(field) = described.pointer_mut(key) {
            *field = value;
        }
        let description: Description = serde_json::from_value(described).unwrap();
        description.check(expected, "u").map_err(|error| error.to_string())
    }

    fn adapter(rank: usize) -> Adapter {
        Adapter { rank, alpha: 16.0, targets: ["q_proj".to_owned()].into() }
    }

    #[test]
    fn changed_rank_count_is_incompatible() {
        let layout: GroupLayout = serde_json::from_value(described()).unwrap();
        let more = GroupLayout { world_size: 4, ..layout.clone() };
        assert!(
            more.find_incompatibility(&layout)
                .unwrap()
                .contains("has 4 data-parallel ranks, but the run started with 2")
        );
        let newer = GroupLayout { torch: "2.16".into(), dtype: "bf16".into(), ..layout.clone() };
        assert_eq!(newer.find_incompatibility(&layout), None);
        assert_eq!(
            newer.describe_changes(&layout),
            ["dtype is bf16 and was f32", "torch is 2.16 and was 2.15.0"]
        );
        let text = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<GroupLayout>(&text).unwrap(), layout);
    }
}
