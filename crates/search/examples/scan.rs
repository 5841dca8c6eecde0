//! Measures the throughput of searches, for `bench/search.py`.
//!
//! - `scan bm25 FOLDER QUERIES THREADS` prints the queries per second of the index in `FOLDER`.
//!   `QUERIES` is a JSONL file with a `question` per line.
//! - `scan vectors COUNT DIMENSIONS THREADS` generates random vectors, and prints the times of
//!   writing them, of a single query and of a batch of 32 queries.

use std::path::Path;
use std::time::Instant;

use levade_search::{Index, VectorWriter, Vectors};
use serde_json::{Value, json};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["bm25", dir, queries, threads] => bm25(dir, queries, threads.parse()?),
        ["vectors", count, dimensions, threads] => {
            vectors(count.parse()?, dimensions.parse()?, threads.parse()?)
        }
        _ => Err("usage: scan bm25 FOLDER QUERIES THREADS | scan vectors COUNT DIMENSIONS THREADS"
            .into()),
    }
}

fn bm25(dir: &str, queries: &str, threads: usize) -> Result<(), Error> {
    let index = Index::open(Path::new(dir), false)?;
    let queries = std::fs::read_to_string(queries)?
        .lines()
        .map(|line| -> Result<String, Error> {
            let row: Value = serde_json::from_str(line)?;
            Ok(row["question"].as_str().unwrap_or_default().to_owned())
        })
        .collect::<Result<Vec<_>, _>>()?;
    index.bm25(&queries, 3, threads)?;
    let mut rates = Vec::new();
    for _ in 0..5 {
        let started = Instant::now();
        for found in index.bm25(&queries, 3, threads)? {
            index.hits(&found)?;
        }
        rates.push(queries.len() as f64 / started.elapsed().as_secs_f64());
    }
    rates.sort_by(f64::total_cmp);
    println!("{}", json!({ "queries": queries.len(), "per_second": rates }));
    Ok(())
}

/// A deterministic generator of random vectors of length 1. The field is the state.
struct RandomVectors(u64);

impl RandomVectors {
    /// Returns an approximately normal number: the sum of four uniform numbers from splitmix64.
    fn number(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (0..4).map(|part| ((z >> (16 * part)) & 0xffff) as f32 / 65536.0 - 0.5).sum()
    }

    fn vector(&mut self, dimensions: usize) -> Vec<f32> {
        let raw: Vec<f32> = (0..dimensions).map(|_| self.number()).collect();
        let norm = raw.iter().map(|x| x * x).sum::<f32>().sqrt();
        raw.iter().map(|x| x / norm).collect()
    }
}

fn vectors(count: usize, dimensions: usize, threads: usize) -> Result<(), Error> {
    let mut made_up = RandomVectors(1);
    let dir = std::env::temp_dir().join(format!("levade-scan-{}", std::process::id()));
    std::fs::create_dir(&dir)?;
    let mut writer = VectorWriter::create(&dir, dimensions)?;
    let started = Instant::now();
    for _ in 0..count {
        writer.add(&made_up.vector(dimensions))?;
    }
    let residual = writer.finish()?;
    let written = started.elapsed().as_secs_f64();
    let found = Vectors::open(&dir, count as u64, dimensions, residual)?;
    let queries: Vec<Vec<f32>> = (0..32).map(|_| made_up.vector(dimensions)).collect();
    let all = found.search(&queries, 10, threads)?;
    let mut one = Vec::new();
    for (query, wanted) in queries.iter().zip(&all) {
        let started = Instant::now();
        let single = found.search(std::slice::from_ref(query), 10, threads)?;
        one.push(started.elapsed().as_secs_f64() * 1e3);
        assert_eq!(&single[0], wanted);
    }
    one.sort_by(f64::total_cmp);
    let started = Instant::now();
    found.search(&queries, 10, threads)?;
    let batch = started.elapsed().as_secs_f64() * 1e3;
    let line = json!({
        "vectors": count, "dimensions": dimensions, "written_s": written, "one_ms": one[one.len() / 2],
        "one_worst_ms": one[one.len() - 1], "batch_of_32_ms": batch,
    });
    println!("{line}");
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}
