//! Rules of a run that differ between builds.

use serde::{Deserialize, Serialize};

/// Rules of a run that earlier builds did not have. `origin.json` records the rules with which a
/// run started, so that a resumed run keeps them. The default is the behavior of builds that
/// recorded no rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Rules {
    /// Whether a prompt phase starts from the prompt that earlier phases found. If false, the phase
    /// starts from the prompt of the recipe.
    pub chained_prompts: bool,
    /// Whether an attempt is excluded from a policy's samples if only other policies acted in it.
    /// If false, the attempt is a sample, unless another policy was selected for an agent.
    #[serde(rename = "only_acting")]
    pub requires_acting: bool,
}

impl Rules {
    /// The rules of new runs.
    pub const CURRENT: Self = Rules { chained_prompts: true, requires_acting: true };
}
