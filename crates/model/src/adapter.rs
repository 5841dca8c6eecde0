//! Reads the configuration of a LoRA adapter in PEFT's layout and selects the base model's modules
//! that it adapts.
//!
//! Modules are selected as in PEFT: by a suffix of the name, by a regular expression on the full
//! name, or all of them. An adapted module computes W x + scale · B A x. A setting under which it
//! would compute anything else is rejected by its key. [`crate::keys`] handles unknown keys.

use std::path::{Path, PathBuf};

use fancy_regex::Regex;
use serde_json::{Map, Value};

use crate::keys::Keys;
use crate::{ModelConfig, ModelError, placeholder};

/// Advice in errors about adapters that are not plain LoRA.
pub const MERGE: &str = "Levade runs plain LoRA adapters only: merge the adapter into its base \
    with PEFT (merge_and_unload), and use the result";

/// Keys of `adapter_config.json` that do not affect inference: how and with what the adapter was
/// trained, and options of variants that are disabled.
const WITHOUT_EFFECT: [&str; 10] = [
    "auto_mapping",
    "base_model_class",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "task_type",
];

/// Values of `init_lora_weights` that leave the base weights unchanged. The remaining methods
/// (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) modify the base weights.
const BEGINNINGS: [&str; 4] = ["gaussian", "orthogonal", "eva", "mica"];

/// Contents of the `adapter_config.json` of a LoRA adapter.
#[derive(Debug)]
pub struct AdapterConfig {
    path: PathBuf,
    /// Base model: an existing path, or a name on the hub, followed by `@REVISION` if the file sets
    /// a revision. `None` if the file does not name a base.
    pub base: Option<String>,
    /// Default rank of the adapted modules. `rank_pattern` can override it per module, see
    /// [`AdaptedModule::rank`].
    pub rank: usize,
    /// Default numerator of the scale. `alpha_pattern` can override it per module, see
    /// [`AdaptedModule::alpha`].
    pub alpha: f32,
    /// Whether the scale is alpha / √rank (rsLoRA) instead of alpha / rank.
    pub rank_stabilized: bool,
    /// Notes for the user about the contents of the configuration file.
    pub notes: Vec<String>,
    targets: ModuleSelection,
    exclude: Option<ModuleSelection>,
    layers: Option<Vec<usize>>,
    layer_patterns: Vec<Regex>,
    ranks: Vec<(Regex, usize)>,
    alphas: Vec<(Regex, f32)>,
}

/// Linear module of the base model that has a low-rank adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct AdaptedModule {
    /// Full name of the module in the base model, such as `model.layers.0.self_attn.q_proj`.
    pub name: String,
    /// Rank of the adapter: the number of rows of A and of columns of B; from 1 to the base's
    /// hidden size.
    pub rank: usize,
    /// Numerator of the scale alpha / rank; positive and finite.
    pub alpha: f32,
}

/// Rule that selects modules of the base model.
#[derive(Debug)]
enum ModuleSelection {
    /// Modules whose full name, or a suffix of it after a dot, is in the list.
    Names(Vec<String>),
    /// Modules whose full name matches the regular expression.
    Pattern(Regex),
    /// All linear modules except the output head.
    AllLinear,
}

impl AdapterConfig {
    /// File name of an adapter's configuration. A directory with this file contains an adapter.
    pub const FILE: &str = "adapter_config.json";

    /// Reads the configuration of the adapter in the directory `dir`.
    ///
    /// # Errors
    /// Returns an error if the file is missing or damaged, or if it sets more than plain LoRA.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join(Self::FILE);
        let contents = std::fs::read(&path).map_err(ModelError::io_error("read", &path))?;
        placeholder::reject_placeholder(&path, &contents)?;
        let object: Map<String, Value> = serde_json::from_slice(&contents).map_err(|error| {
            ModelError::damaged(&path, format!("the contents are not a JSON object: {error}"))
        })?;
        let keys = Keys::new(&path, "", &object);
        if keys.require("peft_type", keys.text("peft_type")?)? != "LORA" {
            return Err(keys.unsupported("peft_type", MERGE));
        }
        keys.reject("bias", MERGE)?;
        if let Some(way) = keys.get("init_lora_weights")
            && !way.is_boolean()
            && !way
                .as_str()
                .is_some_and(|way| BEGINNINGS.iter().any(|known| way.eq_ignore_ascii_case(known)))
        {
            return Err(keys.unsupported("init_lora_weights", MERGE));
        }
        let revision = keys.text("revision")?;
        let base =
            keys.text("base_model_name_or_path")?.filter(|base| !base.is_empty()).map(|base| {
                match revision {
                    Some(revision) if !Path::new(base).exists() => format!("{base}@{revision}"),
                    _ => base.to_owned(),
                }
            });
        let targets = parse_selection(&keys, "target_modules")?;
        let layers = keys.read(
            "layers_to_transform",
            "a layer index or a list of them",
            |value| match value {
                Value::Array(list) => list.iter().map(parse_index).collect(),
                one => parse_index(one).map(|one| vec![one]),
            },
        )?;
        let patterns = keys
            .read("layers_pattern", "a string or a list of strings", parse_texts)?
            .unwrap_or_default();
        let layer_patterns = patterns.iter().map(|pattern| {
            compile_regex(
                &keys,
                "layers_pattern",
                &format!(r"^(?:.*?\.)?(?:{pattern})\.(?P<index>\d+)\."),
            )
        });
        let config = Self {
            base,
            rank: keys.required_size("r")?,
            alpha: keys.required_float("lora_alpha")?,
            rank_stabilized: keys.flag("use_rslora", false)?,
            targets: keys.require("target_modules", targets)?,
            exclude: parse_selection(&keys, "exclude_modules")?,
            layers: layers.filter(|layers| !layers.is_empty()),
            layer_patterns: layer_patterns.collect::<Result<_, _>>()?,
            ranks: compile_patterns(&keys, "rank_pattern", "an integer ≥ 0", parse_index)?,
            alphas: compile_patterns(&keys, "alpha_pattern", "a number", |value| {
                value.as_f64().map(|alpha| alpha as f32)
            })?,
            notes: keys.check_unread(
                |key| {
                    WITHOUT_EFFECT.contains(&key)
                        || key.starts_with(['_'])
                        || key.starts_with("unsloth")
                },
                MERGE,
            )?,
            path: path.clone(),
        };
        Ok(config)
    }

    /// Returns the path of the `adapter_config.json` that was read.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the modules of `base` that the adapter adapts, in the order of
    /// [`ModelConfig::parameters`].
    ///
    /// # Errors
    /// Returns an error if
    /// - the adapter matches no module of `base`,
    /// - it names the embedding or the output head, which Levade does not adapt,
    /// - a rank is 0 or exceeds the hidden size, or an alpha is not positive and finite.
    pub fn modules(&self, base: &ModelConfig) -> Result<Vec<AdaptedModule>, ModelError> {
        let unsupported = |what: String| Err(ModelError::unsupported(&self.path, what, MERGE));
        let outer_modules = ["model.embed_tokens", "lm_head"];
        let is_all = matches!(self.targets, ModuleSelection::AllLinear);
        if let Some(other) = outer_modules.iter().find(|name| !is_all && self.is_adapted(name)) {
            return unsupported(format!("target_modules includes {other}"));
        }
        let parameters = base.parameters();
        let names = parameters.iter().filter(|parameter| parameter.shape.len() == 2);
        let names = names.filter_map(|parameter| parameter.name.strip_suffix(".weight"));
        let mut modules = Vec::new();
        for name in names.filter(|name| !outer_modules.contains(name) && self.is_adapted(name)) {
            let rank = find_value(&self.ranks, name).unwrap_or(self.rank);
            let alpha = find_value(&self.alphas, name).unwrap_or(self.alpha);
            if rank == 0 || rank > base.hidden {
                return unsupported(format!(
                    "the rank on {name} is {rank}; it must be between 1 and {}, the model's hidden \
                     size",
                    base.hidden
                ));
            }
            if !(alpha > 0.0 && alpha.is_finite()) {
                return unsupported(format!(
                    "lora_alpha on {name} is {alpha}; it must be more than 0"
                ));
            }
            modules.push(AdaptedModule { name: name.to_owned(), rank, alpha });
        }
        if modules.is_empty() {
            return Err(ModelError::unsupported(
                &self.path,
                "target_modules matches no module of the base model".to_owned(),
                "the adapter was trained on another base model: specify that model",
            ));
        }
        Ok(modules)
    }

    /// Returns whether the adapter adapts the module `name`. Decides like PEFT's
    /// `check_target_module_exists`.
    fn is_adapted(&self, name: &str) -> bool {
        if self.exclude.as_ref().is_some_and(|exclude| exclude.selects(name)) {
            return false;
        }
        if !self.targets.selects(name) {
            return false;
        }
        match (&self.targets, &self.layers) {
            // Full names and regular expressions select their layers themselves.
            (ModuleSelection::Names(names), Some(layers))
                if !names.iter().any(|known| known == name) =>
            {
                self.block_index(name).is_some_and(|layer| layers.contains(&layer))
            }
            _ => true,
        }
    }

    /// Returns the index of the block that contains the module `name`, or `None` if the name has no
    /// index.
    fn block_index(&self, name: &str) -> Option<usize> {
        if self.layer_patterns.is_empty() {
            // The first number in a name is the index in the list of blocks, as in
            // `model.layers.3.…`.
            return name.split('.').skip(2).find_map(|part| part.parse().ok());
        }
        let captures =
            self.layer_patterns.iter().find_map(|pattern| pattern.captures(name).ok().flatten())?;
        captures.name("index")?.as_str().parse().ok()
    }
}

impl ModuleSelection {
    /// Returns whether the rule selects the module with the full name `name`.
    fn selects(&self, name: &str) -> bool {
        match self {
            Self::Names(ends) => ends.iter().any(|end| {
                name.strip_suffix(end.as_str())
                    .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            }),
            Self::Pattern(pattern) => pattern.is_match(name).unwrap_or(false),
            Self::AllLinear => true,
        }
    }
}

/// Parses a selection rule from the value of `key`. Returns `None` if the key is absent or its list
/// is empty.
fn parse_selection(keys: &Keys, key: &str) -> Result<Option<ModuleSelection>, ModelError> {
    let Some(value) = keys.get(key) else { return Ok(None) };
    if let Some(text) = value.as_str() {
        if text.eq_ignore_ascii_case("all-linear") {
            return Ok(Some(ModuleSelection::AllLinear));
        }
        return compile_regex(keys, key, &format!(r"\A(?:{text})\z"))
            .map(|pattern| Some(ModuleSelection::Pattern(pattern)));
    }
    let names = keys.read(key, "a string or a list of strings", parse_texts)?;
    Ok(names.filter(|names| !names.is_empty()).map(ModuleSelection::Names))
}

/// Compiles a regular expression in Python's syntax; `key` names its origin in the error.
fn compile_regex(keys: &Keys, key: &str, pattern: &str) -> Result<Regex, ModelError> {
    let way_out = "list the module names instead";
    Regex::new(pattern).map_err(|error| {
        ModelError::unsupported(
            keys.path,
            format!("{key} is not a regular expression that Levade can parse: {error}"),
            way_out,
        )
    })
}

/// Converts a JSON string, or a JSON list of strings, to a list. Returns `None` for any other JSON
/// value.
fn parse_texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::Array(list) => list.iter().map(|text| text.as_str().map(str::to_owned)).collect(),
        one => one.as_str().map(|one| vec![one.to_owned()]),
    }
}

fn parse_index(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|index| index.try_into().ok())
}

/// Parses the patterns in `rank_pattern` or `alpha_pattern`, with their values. A pattern must
/// match a full module name, or a suffix of the name that follows a dot.
fn compile_patterns<T>(
    keys: &Keys,
    key: &str,
    wanted: &str,
    convert: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<(Regex, T)>, ModelError> {
    let mut patterns = Vec::new();
    for (pattern, value) in keys.object(key)?.into_iter().flatten() {
        let value = convert(value).ok_or_else(|| {
            ModelError::config(
                keys.path,
                format!("{key} has {pattern} = {value}; it must be {wanted}"),
            )
        })?;
        patterns.push((compile_regex(keys, key, &format!(r"\A(?:.*\.)?(?:{pattern})\z"))?, value));
    }
    Ok(patterns)
}

/// Returns the value of the first pattern that matches the module `name`, or `None` if no pattern
/// matches.
fn find_value<T: Copy>(patterns: &[(Regex, T)], name: &str) -> Option<T> {
    patterns
        .iter()
        .find(|(pattern, _)| pattern.is_match(name).unwrap_or(false))
        .map(|(_, value)| *value)
}

#[cfg(test)]
mod tests;
