//! Colors of agents in graphs.

/// Dark background colors of the cards of agents. White text on them is legible.
const COLORS: [&str; 8] =
    ["#2f6db5", "#b8621b", "#3a7d44", "#8245a5", "#b03a5b", "#0f7c80", "#7a6420", "#4d5866"];

/// Returns the color of the agent with this index.
pub fn agent_color(agent: usize) -> &'static str {
    COLORS[agent % COLORS.len()]
}
