//! Writes the graph of an attempt in the language of Graphviz.

use std::fmt::Write as _;

use super::colors::agent_color;
use super::graph::AttemptGraph;

/// Formats the graph of an attempt in the language of Graphviz.
pub fn format_dot(graph: &AttemptGraph) -> String {
    let mut out = String::from(
        "digraph attempt {\n  rankdir=TB;\n  node [shape=box, style=\"rounded,filled\", \
         fontname=\"Helvetica\", fontsize=10, fillcolor=white];\n  edge [color=\"#7a8594\"];\n",
    );
    let card = &graph.attempt;
    let lines = [&[card.title.clone(), card.score.clone()], &card.lines[..]].concat();
    let _ = writeln!(out, "  attempt [label={}, penwidth=2];", format_label(&lines));
    for (index, call) in graph.calls.iter().enumerate() {
        let [shared, new, sampled] = call.tokens;
        let tokens = format!("{shared} + {new} context tokens, {sampled} sampled");
        let mut lines = vec![call.title.clone(), call.versions.clone(), tokens];
        lines.push(call.detail.clone());
        lines.extend(call.lines.iter().cloned());
        lines.retain(|line| !line.is_empty());
        let color = agent_color(call.agent);
        let _ = writeln!(out, "  call{index} [label={}, color=\"{color}\"];", format_label(&lines));
        let parent = call.parent.map_or("attempt".to_owned(), |parent| format!("call{parent}"));
        let style = if call.is_fork { " [style=dashed, label=\"fork\"]" } else { "" };
        let _ = writeln!(out, "  {parent} -> call{index}{style};");
        for (at, tool) in call.tools.iter().enumerate() {
            let lines = [std::slice::from_ref(&tool.title), &tool.lines[..]].concat();
            let color = if tool.is_error { "#c0392b" } else { "#5f8d4e" };
            let _ = writeln!(
                out,
                "  tool{index}_{at} [label={}, shape=note, style=filled, fillcolor=\"#f6f6f1\", \
                 color=\"{color}\"];\n  call{index} -> tool{index}_{at} [arrowhead=none];",
                format_label(&lines)
            );
        }
    }
    out.push_str("}\n");
    out
}

/// Formats lines as a quoted label of Graphviz, aligned to the left.
fn format_label(lines: &[String]) -> String {
    let lines = lines.iter().map(|line| line.replace('\\', "\\\\").replace('"', "\\\"") + "\\l");
    format!("\"{}\"", lines.collect::<String>())
}
