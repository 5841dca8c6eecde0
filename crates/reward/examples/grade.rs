//! Grades mathematical answers: from standard input lines of JSON, `{"text": …, "expected": …}`, to standard
//! output one line each, `{"value": …, "extracted": …, "micros": …}`.
//!
//! ```sh
//! cargo run --release -p dressage-reward --example grade -- '{"place": "boxed"}' < answers.jsonl
//! ```
//!
//! The argument has options of the scorer, as JSON.

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::time::Instant;

use dressage_reward::MathsScorer;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Line {
    text: String,
    expected: Value,
}

fn main() -> Result<(), Box<dyn Error>> {
    let scorer: MathsScorer = match std::env::args().nth(1) {
        Some(options) => serde_json::from_str(&options)?,
        None => MathsScorer::default(),
    };
    let mut out = io::BufWriter::new(io::stdout().lock());
    for (number, line) in io::stdin().lock().lines().enumerate() {
        let line: Line =
            serde_json::from_str(&line?).map_err(|error| format!("line {}: {error}", number + 1))?;
        let begun = Instant::now();
        let score = scorer.grade(&line.text, &line.expected)?;
        let micros = begun.elapsed().as_secs_f64() * 1e6;
        let said = json!({ "value": score.value, "extracted": score.extracted, "micros": micros });
        writeln!(out, "{said}")?;
    }
    Ok(())
}
