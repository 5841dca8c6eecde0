//! Grades mathematical or numeric answers. Reads JSON lines `{"text": …, "expected": …}` from
//! standard input, and writes one line `{"value": …, "extracted": …, "micros": …}` per input line
//! to standard output. `micros` is the grading time in microseconds.
//!
//! ```sh
//! cargo run --release -p levade-reward --example grade -- \
//!     '{"maths": {"location": "boxed"}}' < answers.jsonl
//! ```
//!
//! The argument is a `maths` or `numeric` scorer with its options, as JSON. The default is `maths`.

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::time::Instant;

use levade_reward::{MathsScorer, ScorerKind};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Line {
    text: String,
    expected: Value,
}

fn main() -> Result<(), Box<dyn Error>> {
    let scorer: ScorerKind = match std::env::args().nth(1) {
        Some(options) => serde_json::from_str(&options)?,
        None => ScorerKind::Maths(MathsScorer::default()),
    };
    let mut out = io::BufWriter::new(io::stdout().lock());
    for (number, line) in io::stdin().lock().lines().enumerate() {
        let line: Line = serde_json::from_str(&line?)
            .map_err(|error| format!("line {}: {error}", number + 1))?;
        let started = Instant::now();
        let score = match &scorer {
            ScorerKind::Maths(scorer) => scorer.grade(&line.text, &line.expected)?,
            ScorerKind::Numeric(scorer) => scorer.grade(&line.text, &line.expected)?,
            other => {
                return Err(format!(
                    "the scorer `{}` is not supported: use maths or numeric",
                    other.name()
                )
                .into());
            }
        };
        let micros = started.elapsed().as_secs_f64() * 1e6;
        let verdict =
            json!({ "value": score.value, "extracted": score.extracted, "micros": micros });
        writeln!(out, "{verdict}")?;
    }
    Ok(())
}
