//! Rules of a run that differ between builds.

use serde::{Deserialize, Serialize};

/// Rules that earlier builds did not have. `origin.json` records the rules with which a run
/// started, so that a resumed run keeps them. The default rules are the rules of builds that
/// recorded none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Rules {
    /// Whether a prompt phase starts from the prompt that earlier phases left. Otherwise, it starts
    /// from the prompt of the recipe.
    pub chained_prompts: bool,
    /// Whether an attempt is no sample of a policy if only other policies acted in it. If false,
    /// such an attempt is a sample, unless another policy was selected for an agent.
    #[serde(rename = "only_acting")]
    pub requires_acting: bool,
}

impl Rules {
    /// The rules of new runs.
    pub const CURRENT: Self = Rules { chained_prompts: true, requires_acting: true };
}
