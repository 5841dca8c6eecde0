//! Draws the graph of an attempt as SVG: one file without scripts, fonts or links.
//!
//! Time runs downward. A call stands below the call that it continues, and its tool calls stand
//! between the two. Forks and further conversations stand to the right.

use std::fmt::Write as _;

use super::colors::agent_color;
use super::graph::{AttemptCard, AttemptGraph, CallCard, LINE_CHARS, ToolCard};

/// Width of a character of the fixed-width font at font size 11, in pixels.
const CHAR: f64 = 6.65;
const LINE: f64 = 15.0;
const PADDING: f64 = 10.0;
/// Width of each card, in pixels.
const WIDTH: f64 = LINE_CHARS as f64 * CHAR + 2.0 * PADDING + 14.0;
/// Height of the colored title of a card, in pixels.
const TITLE: f64 = 24.0;
/// Horizontal space between two cards, in pixels.
const GAP_X: f64 = 28.0;
/// Vertical space between two cards, in pixels.
const GAP_Y: f64 = 26.0;
const MARGIN: f64 = 24.0;

/// Formats the graph of an attempt as an SVG document.
pub fn format_svg(graph: &AttemptGraph) -> String {
    let mut writer = SvgWriter { graph, shapes: String::new(), edges: String::new(), bottom: 0.0 };
    let roots: Vec<usize> = graph.children(None).collect();
    let width = writer.row_width(&roots).max(WIDTH);
    let legend = if graph.agents.len() > 1 { 26.0 } else { 0.0 };
    writer.draw_legend(legend);
    let top = MARGIN + legend;
    let height = attempt_height(&graph.attempt);
    writer.draw_attempt(&graph.attempt, top, height);
    writer.draw_row(&roots, MARGIN, top + height + GAP_Y, (MARGIN + WIDTH / 2.0, top + height));
    let (width, height) = (width + 2.0 * MARGIN, writer.bottom.max(top + height) + MARGIN);
    let SvgWriter { shapes, edges, .. } = writer;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"Helvetica, Arial, sans-serif\" \
         font-size=\"12\">\n<title>{}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fbfbf9\"/>\n{edges}{shapes}</svg>\n",
        escape_xml(&graph.attempt.title)
    )
}

/// Writer of an SVG document. Edges lie below the cards.
struct SvgWriter<'a> {
    graph: &'a AttemptGraph,
    shapes: String,
    edges: String,
    /// Vertical position of the lower end of the lowest card, in pixels.
    bottom: f64,
}

impl SvgWriter<'_> {
    /// Computes the width of a call with its tool calls and all calls below it, in pixels.
    fn call_width(&self, call: usize) -> f64 {
        let tools = self.graph.calls[call].tools.len().max(1) as f64;
        let own = tools * WIDTH + (tools - 1.0) * GAP_X;
        own.max(self.row_width(&self.graph.children(Some(call)).collect::<Vec<_>>()))
    }

    /// Computes the width of a row of calls, in pixels.
    fn row_width(&self, calls: &[usize]) -> f64 {
        let widths = calls.iter().map(|call| self.call_width(*call) + GAP_X);
        (widths.sum::<f64>() - GAP_X).max(0.0)
    }

    /// Draws a row of calls whose left end is at `x`, with edges from the point `from`.
    fn draw_row(&mut self, calls: &[usize], x: f64, y: f64, from: (f64, f64)) {
        let mut x = x;
        for &call in calls {
            let card = &self.graph.calls[call];
            self.draw_edge(from, (x + WIDTH / 2.0, y), card.is_fork);
            self.draw_tree(call, x, y);
            x += self.call_width(call) + GAP_X;
        }
    }

    /// Draws a call, its tool calls, and the calls that continue it.
    fn draw_tree(&mut self, call: usize, x: f64, y: f64) {
        let graph = self.graph;
        let card = &graph.calls[call];
        let height = call_height(card);
        self.draw_call(card, x, y, height);
        let mut end = y + height;
        if !card.tools.is_empty() {
            let top = end + GAP_Y;
            let tallest = card.tools.iter().map(tool_height).fold(0.0, f64::max);
            let center = (x + WIDTH / 2.0, end);
            for (index, tool) in card.tools.iter().enumerate() {
                let x = x + index as f64 * (WIDTH + GAP_X);
                self.draw_edge(center, (x + WIDTH / 2.0, top), false);
                self.draw_tool(tool, x, top);
            }
            end = top + tallest;
        }
        let children: Vec<usize> = graph.children(Some(call)).collect();
        self.draw_row(&children, x, end + GAP_Y, (x + WIDTH / 2.0, end));
    }

    fn draw_edge(&mut self, from: (f64, f64), to: (f64, f64), is_fork: bool) {
        let ((x0, y0), (x1, y1)) = (from, to);
        let middle = (y0 + y1) / 2.0;
        let dashes = if is_fork { " stroke-dasharray=\"5 4\"" } else { "" };
        let _ = writeln!(
            self.edges,
            "<path d=\"M{x0:.1} {y0:.1} C{x0:.1} {middle:.1} {x1:.1} {middle:.1} {x1:.1} \
             {y1:.1}\" fill=\"none\" stroke=\"#8a94a3\" stroke-width=\"1.6\"{dashes}/>"
        );
        if is_fork {
            self.write_text((x1 + 8.0, y1 - 7.0), "fork", "fill=\"#6b7480\" font-size=\"11\"");
        }
    }

    fn draw_legend(&mut self, height: f64) {
        let mut x = MARGIN;
        for (index, agent) in self.graph.agents.iter().enumerate().filter(|_| height > 0.0) {
            let color = agent_color(index);
            let _ = writeln!(
                self.shapes,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" rx=\"3\" \
                 fill=\"{color}\"/>",
                MARGIN - 4.0
            );
            self.write_text((x + 18.0, MARGIN + 6.0), agent, "fill=\"#333b45\"");
            x += 40.0 + agent.chars().count() as f64 * 7.0;
        }
    }

    fn draw_attempt(&mut self, card: &AttemptCard, y: f64, height: f64) {
        let x = MARGIN;
        self.draw_box((x, y), height, "#333b45", "#ffffff", 2.0);
        self.write_text(
            (x + PADDING, y + 20.0),
            &card.title,
            "font-weight=\"bold\" fill=\"#222831\"",
        );
        self.write_text((x + PADDING, y + 38.0), &card.score, "fill=\"#222831\"");
        self.draw_lines(&card.lines, x, y + 56.0);
    }

    fn draw_call(&mut self, card: &CallCard, x: f64, y: f64, height: f64) {
        let color = agent_color(card.agent);
        self.draw_box((x, y), height, color, "#ffffff", 1.4);
        let right = x + WIDTH;
        let bottom = y + TITLE;
        let _ = writeln!(
            self.shapes,
            "<path d=\"M{x:.1} {bottom:.1} V{:.1} a7 7 0 0 1 7 -7 H{:.1} a7 7 0 0 1 7 7 \
             V{bottom:.1} Z\" fill=\"{color}\"/>",
            y + 7.0,
            right - 7.0
        );
        let white = "fill=\"#ffffff\" font-weight=\"bold\"";
        self.write_text((x + PADDING, y + 16.5), &card.title, white);
        let anchor = "fill=\"#ffffff\" text-anchor=\"end\" font-size=\"11\"";
        self.write_text((right - PADDING, y + 16.0), &card.versions, anchor);
        let [shared, new, sampled] = card.tokens;
        let total = (shared + new + sampled).max(1) as f64;
        let full = WIDTH - 2.0 * PADDING;
        let mut start = x + PADDING;
        let sampled_color = if card.is_target { color } else { "#b9b3a4" };
        for (tokens, fill) in [(shared, "#e3e6ea"), (new, "#b4bdc9"), (sampled, sampled_color)] {
            let width = full * tokens as f64 / total;
            let _ = writeln!(
                self.shapes,
                "<rect x=\"{start:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"6\" \
                 fill=\"{fill}\"/>",
                y + TITLE + 8.0
            );
            start += width;
        }
        let gray = "fill=\"#55606d\" font-size=\"11\"";
        let tokens = format!("{shared} + {new} context · {sampled} sampled tokens");
        self.write_text((x + PADDING, y + TITLE + 28.0), &tokens, gray);
        self.write_text((x + PADDING, y + TITLE + 43.0), &card.detail, gray);
        self.draw_lines(&card.lines, x, y + TITLE + 61.0);
    }

    fn draw_tool(&mut self, card: &ToolCard, x: f64, y: f64) {
        let (color, fill) =
            if card.is_error { ("#c0392b", "#fdf1ef") } else { ("#5f8d4e", "#f2f7ef") };
        self.draw_box((x, y), tool_height(card), color, fill, 1.2);
        let title = format!("font-weight=\"bold\" fill=\"{color}\"");
        self.write_text((x + PADDING, y + 18.0), &card.title, &title);
        self.draw_lines(&card.lines, x, y + 36.0);
    }

    fn draw_box(&mut self, at: (f64, f64), height: f64, stroke: &str, fill: &str, width: f64) {
        let (x, y) = at;
        self.bottom = self.bottom.max(y + height);
        let _ = writeln!(
            self.shapes,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{WIDTH:.1}\" height=\"{height:.1}\" \
             rx=\"7\" fill=\"{fill}\" stroke=\"{stroke}\" stroke-width=\"{width}\"/>"
        );
    }

    /// Draws lines of text in a fixed-width font.
    fn draw_lines(&mut self, lines: &[String], x: f64, y: f64) {
        let style = "font-family=\"DejaVu Sans Mono, Menlo, Consolas, monospace\" \
                     font-size=\"11\" fill=\"#222831\" xml:space=\"preserve\"";
        for (index, line) in lines.iter().enumerate() {
            self.write_text((x + PADDING, y + index as f64 * LINE), line, style);
        }
    }

    fn write_text(&mut self, (x, y): (f64, f64), text: &str, style: &str) {
        if !text.is_empty() {
            let text = escape_xml(text);
            let _ = writeln!(self.shapes, "<text x=\"{x:.1}\" y=\"{y:.1}\" {style}>{text}</text>");
        }
    }
}

fn attempt_height(card: &AttemptCard) -> f64 {
    52.0 + card.lines.len() as f64 * LINE
}

fn call_height(card: &CallCard) -> f64 {
    TITLE + 52.0 + card.lines.len() as f64 * LINE + if card.lines.is_empty() { 0.0 } else { 6.0 }
}

fn tool_height(card: &ToolCard) -> f64 {
    28.0 + card.lines.len() as f64 * LINE + if card.lines.is_empty() { 0.0 } else { 4.0 }
}

/// Escapes the special characters of a text for XML.
fn escape_xml(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '&' => "&amp;".to_owned(),
            '<' => "&lt;".to_owned(),
            '>' => "&gt;".to_owned(),
            '"' => "&quot;".to_owned(),
            c if c.is_control() => " ".to_owned(),
            c => c.to_string(),
        })
        .collect()
}
