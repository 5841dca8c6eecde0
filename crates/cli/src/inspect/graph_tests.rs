use levade_traces::TimeSource;

use super::super::dot::format_dot;
use super::super::svg::format_svg;
use super::*;

fn call(agent: usize, parent: Option<usize>, tools: usize) -> CallCard {
    let tool =
        ToolCard { title: "add <b>".into(), lines: vec!["→ \"5\"".into()], is_error: false };
    CallCard {
        agent,
        title: "solver · turn 0".into(),
        versions: "weights 2 → 3".into(),
        parent,
        is_fork: false,
        is_target: true,
        tokens: [10, 5, 7],
        detail: "temperature 1".into(),
        lines: vec!["a & b".into()],
        tools: vec![tool; tools],
    }
}

fn graph(calls: Vec<CallCard>) -> AttemptGraph {
    let attempt = AttemptCard {
        title: "train/0/0/0/0".into(),
        score: "score 1".into(),
        lines: vec!["What is 2 + 3?".into()],
    };
    AttemptGraph { attempt, agents: vec!["solver".into(), "critic".into()], calls }
}

/// Returns the rectangles of cards: x, y, width and height.
fn cards(svg: &str) -> Vec<[f64; 4]> {
    let rects = svg.lines().filter(|line| line.starts_with("<rect") && line.contains("rx=\"7\""));
    rects.map(|line| ["x", "y", "width", "height"].map(|name| attribute(line, name))).collect()
}

/// Returns a number in an element.
fn attribute(element: &str, name: &str) -> f64 {
    let (_, rest) = element.split_once(&format!(" {name}=\"")).unwrap();
    rest.split('"').next().unwrap().parse().unwrap()
}

#[test]
fn cards_never_overlap_and_fit_the_picture() {
    // A fork with two tool calls beside a continuation, a helper's conversation beside both.
    let graph = graph(vec![
        call(0, None, 3),
        call(0, Some(0), 1),
        call(0, Some(0), 2),
        call(1, None, 0),
        call(1, Some(3), 2),
        call(0, Some(1), 0),
    ]);
    let svg = format_svg(&graph);
    let cards = cards(&svg);
    assert_eq!(cards.len(), 1 + 6 + 8);
    let size = svg.split("viewBox=\"0 0 ").nth(1).unwrap().split('"').next().unwrap();
    let (width, height) = size.split_once(' ').unwrap();
    let [width, height] = [width, height].map(|number| number.parse::<f64>().unwrap());
    for (at, [x, y, w, h]) in cards.iter().enumerate() {
        assert!(x + w <= width && y + h <= height, "{at}");
        for [x1, y1, w1, h1] in &cards[..at] {
            let is_separate = x + w <= *x1 || x1 + w1 <= *x || y + h <= *y1 || y1 + h1 <= *y;
            assert!(is_separate, "cards at {x} {y} and {x1} {y1}");
        }
    }
}

#[test]
fn text_is_escaped_in_both_formats() {
    let fork = CallCard { is_fork: true, ..call(1, Some(0), 0) };
    let graph = graph(vec![call(0, None, 1), fork]);
    let picture = format_svg(&graph);
    assert!(picture.contains("add &lt;b&gt;") && picture.contains("a &amp; b"), "{picture}");
    assert!(picture.contains("stroke-dasharray"));
    let text = format_dot(&graph);
    assert!(text.contains("→ \\\"5\\\"\\l"), "{text}");
    assert!(text.contains("call0 -> call1 [style=dashed, label=\"fork\"];"), "{text}");
    assert!(text.contains("call0 -> tool0_0 [arrowhead=none];"), "{text}");
}

#[test]
fn wrap_divides_words_and_keeps_first_lines() {
    assert_eq!(wrap_text("a b\n\nc\td"), ["a b", "c d"]);
    let long = "x".repeat(LINE_CHARS + 3);
    assert_eq!(wrap_text(&format!("ab {long}")), ["ab", &long[..LINE_CHARS], "xxx"]);
    let lines = wrap_text(&"word ".repeat(200));
    assert_eq!(lines.len(), TEXT_LINES);
    assert!(lines[TEXT_LINES - 1].ends_with('…'));
    assert!(lines.iter().all(|line| line.chars().count() <= LINE_CHARS));
}

#[test]
fn tool_card_shows_error_and_duration() {
    let tool = ToolNode {
        id: "c".into(),
        name: "run".into(),
        arguments: "{}".into(),
        result: Some("Error: no".into()),
        status: None,
        interval: Some(TimeInterval { start: 0, duration: 1_500_000_000 }),
        time: TimeSource::Measured,
    };
    let card = create_tool_card(&tool);
    assert_eq!((card.title.as_str(), card.is_error), ("run · 1.5 s", true));
    assert_eq!(card.lines, ["{}", "→ Error: no"]);
}
