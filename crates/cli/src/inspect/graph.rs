//! The tree of an attempt as a graph: cards for the attempt, its model calls and its tool calls.
//!
//! This module decides the contents of the cards; `dot` and `svg` write them.

use std::fmt::Write as _;

use levade_store::Attempt;
use levade_traces::{CallNode, CallTree, ToolNode};
use levade_tree::{Kind, TimeInterval};

/// Maximum number of characters of a line in a card.
pub const LINE_CHARS: usize = 46;
/// Maximum number of lines of a text in a card.
const TEXT_LINES: usize = 4;
/// Maximum number of characters of a name in a card's title.
const NAME_CHARS: usize = 24;

/// Output format of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// An SVG picture, which any browser shows.
    Svg,
    /// A text in the language of Graphviz.
    Dot,
}

/// Graph of an attempt: a card for the attempt, and a card for each model call.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptGraph {
    pub attempt: AttemptCard,
    /// Names of the agents. The index of a name determines the color of the agent.
    pub agents: Vec<String>,
    /// Cards of the model calls. Each card follows the card of the call that it continues.
    pub calls: Vec<CallCard>,
}

/// Card that describes an attempt in the graph.
#[derive(Debug, Clone, PartialEq)]
pub struct AttemptCard {
    /// Name of the attempt slot.
    pub title: String,
    /// Score and reward of the attempt.
    pub score: String,
    /// Additional lines: the components of the score, the finish reason and the counts of the
    /// attempt, its question, and its error.
    pub lines: Vec<String>,
}

/// Card of a model call in a graph.
#[derive(Debug, Clone, PartialEq)]
pub struct CallCard {
    /// Index of the agent that made the call.
    pub agent: usize,
    /// Name of the agent and number of the turn; `chat API` replaces the turn if a chat API
    /// answered.
    pub title: String,
    /// Weight versions that sampled the completion, such as `weights 2 → 3`. Empty for a chat API.
    pub versions: String,
    /// Index of the call that this call continues. `None` if the call starts a conversation.
    pub parent: Option<usize>,
    pub is_fork: bool,
    /// Whether a step can train on the completion.
    pub is_target: bool,
    /// Numbers of tokens: prompt tokens that an earlier call contains, new prompt tokens, and
    /// completion tokens.
    pub tokens: [usize; 3],
    /// Temperature, duration and finish reason of the call, and the reason for a mask.
    pub detail: String,
    /// First lines of the reasoning and the content of the completion.
    pub lines: Vec<String>,
    pub tools: Vec<ToolCard>,
}

/// Card of a tool call in a graph.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCard {
    /// Name of the tool and duration of the call.
    pub title: String,
    /// Arguments of the call, and the first lines of its result.
    pub lines: Vec<String>,
    pub is_error: bool,
}

impl AttemptGraph {
    /// Creates the graph of an attempt from its tree of calls.
    pub fn new(attempt: &Attempt, tree: &CallTree) -> Self {
        let agents: Vec<String> = tree.agents().into_iter().map(str::to_owned).collect();
        let calls =
            tree.calls.iter().map(|call| create_call_card(call, attempt, &agents)).collect();
        AttemptGraph { attempt: create_attempt_card(attempt), agents, calls }
    }

    /// Returns the indices of the calls that continue the call at `parent`. If `parent` is `None`,
    /// returns the calls that start a conversation.
    pub fn children(&self, parent: Option<usize>) -> impl Iterator<Item = usize> {
        (0..self.calls.len()).filter(move |index| self.calls[*index].parent == parent)
    }
}

fn create_attempt_card(attempt: &Attempt) -> AttemptCard {
    let outcome = &attempt.outcome;
    let components = outcome.components.iter();
    let components: Vec<String> = components
        .map(|component| format!("{} {}", component.name, format_rounded(component.value)))
        .collect();
    let score =
        attempt.score.map_or("no score".into(), |score| format!("score {}", format_rounded(score)));
    let reward = attempt.reward.map(|reward| format!(" · reward {}", format_rounded(reward)));
    let finish = serde_json::to_value(outcome.finish).ok();
    let finish = finish.and_then(|finish| finish.as_str().map(str::to_owned));
    let mut lines = Vec::new();
    if components.len() > 1 {
        lines.extend(wrap_text(&components.join(", ")));
    }
    lines.extend(wrap_text(&format!(
        "{} · {} turns · {} sampled tokens · {} tool calls",
        finish.unwrap_or_default(),
        outcome.turns,
        outcome.sampled_tokens,
        outcome.calls.total()
    )));
    lines.extend(wrap_text(attempt.task["question"].as_str().unwrap_or_default()));
    lines.extend(outcome.error.iter().flat_map(|error| wrap_text(&format!("error: {error}"))));
    AttemptCard { title: attempt.slot.name(), score: score + &reward.unwrap_or_default(), lines }
}

fn create_call_card(call: &CallNode, attempt: &Attempt, agents: &[String]) -> CallCard {
    let agent = agents.iter().position(|agent| *agent == call.agent).unwrap_or_default();
    let versions: Vec<String> = call.versions.iter().map(u64::to_string).collect();
    let segments = attempt.trajectory.segments();
    let completion = call.completion.and_then(|id| segments.get(id.0 as usize));
    let mut detail = Vec::new();
    if completion.is_some_and(|segment| segment.kind == Kind::Demonstrated) {
        detail.push("demonstrated".to_owned());
    }
    detail.extend(call.temperature.map(|temperature| format!("temperature {temperature}")));
    detail.extend(call.interval.map(format_duration));
    if call.finish != "tool_call" {
        detail.push(call.finish.to_owned());
    }
    let reason = completion.and_then(|segment| segment.mask_reason());
    detail.extend(reason.map(|reason| format!("masked: {reason}")));
    let mut lines = Vec::new();
    if !call.reasoning.is_empty() {
        lines.extend(wrap_text(&format!("reasoning: {}", call.reasoning)));
    }
    lines.extend(wrap_text(&call.content));
    CallCard {
        agent,
        title: match call.turn {
            Some(turn) => format!("{} · turn {turn}", shorten_name(&call.agent, NAME_CHARS)),
            None => format!("{} · chat API", shorten_name(&call.agent, NAME_CHARS)),
        },
        versions: match versions[..] {
            [] => String::new(),
            _ => format!("weights {}", versions.join(" → ")),
        },
        parent: call.parent,
        is_fork: call.is_fork,
        is_target: completion.is_some_and(|segment| segment.is_target()),
        tokens: [call.prompt_tokens - call.new_tokens, call.new_tokens, call.tokens],
        detail: detail.join(" · "),
        lines,
        tools: call.tools.iter().map(create_tool_card).collect(),
    }
}

fn create_tool_card(tool: &ToolNode) -> ToolCard {
    let name = if tool.name.is_empty() { "unreadable call" } else { &tool.name };
    let mut title = shorten_name(name, NAME_CHARS);
    if let Some(interval) = tool.interval {
        let _ = write!(title, " · {}", format_duration(interval));
    }
    let mut lines = wrap_text(&tool.arguments);
    lines.truncate(2);
    let result = tool.result.as_deref().unwrap_or_default();
    let arrow = |(index, line): (usize, String)| {
        if index == 0 { format!("→ {line}") } else { line }
    };
    lines.extend(wrap_text(result.trim()).into_iter().enumerate().map(arrow));
    ToolCard { title, lines, is_error: tool.is_error() }
}

/// Formats a number with at most three decimals.
fn format_rounded(value: f64) -> String {
    format!("{}", (value * 1000.0).round() / 1000.0)
}

fn format_duration(interval: TimeInterval) -> String {
    match interval.duration as f64 / 1e9 {
        seconds if seconds < 1.0 => format!("{:.0} ms", 1000.0 * seconds),
        seconds => format!("{seconds:.1} s"),
    }
}

/// Returns the first `max_chars` characters of a name. An ellipsis replaces the rest of a longer
/// name.
fn shorten_name(name: &str, max_chars: usize) -> String {
    match name.char_indices().nth(max_chars) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}

/// Divides a text into lines of at most [`LINE_CHARS`] characters, and returns the first lines. A
/// word that is longer than a line is divided.
fn wrap_text(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let visible: String =
        text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect();
    for paragraph in visible.lines().filter(|line| !line.trim().is_empty()) {
        let mut line = String::new();
        for word in paragraph.split_whitespace() {
            let mut rest = word;
            while !rest.is_empty() {
                let used = line.chars().count();
                let space = usize::from(used > 0);
                let length = rest.chars().count();
                if used + space + length <= LINE_CHARS {
                    line.extend((space > 0).then_some(' '));
                    line.push_str(rest);
                    break;
                }
                if used == 0 {
                    let end = rest.char_indices().nth(LINE_CHARS).map_or(rest.len(), |(at, _)| at);
                    lines.push(rest[..end].to_owned());
                    rest = &rest[end..];
                } else {
                    lines.push(std::mem::take(&mut line));
                }
            }
        }
        if !line.is_empty() {
            lines.push(line);
        }
        if lines.len() > TEXT_LINES {
            break;
        }
    }
    if lines.len() > TEXT_LINES {
        lines.truncate(TEXT_LINES);
        if let Some(last) = lines.last_mut() {
            *last = last.chars().take(LINE_CHARS - 1).collect();
            last.push('…');
        }
    }
    lines
}

#[cfg(test)]
#[path = "graph_tests.rs"]
mod tests;
