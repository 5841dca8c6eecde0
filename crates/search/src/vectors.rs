//! Stores vectors on disk, and finds the best inner products by an exact scan.
//!
//! Memory-mapped files hold each vector twice: in f32, and as 8-bit codes with one scale. A search
//! scans the codes of all vectors, which are a quarter of the bytes. Then it rescores in f32 the
//! vectors that may be among the best. Let q be a query, x a vector, and q̂ and x̂ their 8-bit
//! quantizations. The error of a product of codes is bounded (Cauchy–Schwarz):
//!
//! |q·x − q̂·x̂| ≤ |q − q̂| |x| + |q̂| |x − x̂|
//!
//! The result is therefore exactly that of a scan in f32, in the same order: higher scores first,
//! and equal scores by row.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::SearchError;
use crate::kernel::{dot_codes, dot_f32};

/// Name of the file that contains the f32 values of the vectors, row by row. The file [`CODES`]
/// contains 8-bit codes row by row, and [`SCALES`] one f32 scale per row.
const VALUES: &str = "vectors.f32";
const CODES: &str = "vectors.i8";
const SCALES: &str = "vectors.scale";
/// Maximum absolute value of an 8-bit code.
const MAX_CODE: f32 = 127.0;
/// Number of rows in a block. All queries scan a block before the next block, so that its codes
/// stay in the cache.
const BLOCK: usize = 128;
/// Minimum work for an additional thread: rows × dimensions × queries, in bytes of codes.
const MIN_WORK_PER_THREAD: usize = 1 << 20;
/// Bound on the rounding error of the f32 inner product, as a fraction of |q| |x|.
const ROUNDING_ERROR: f32 = 1e-5;
/// Maximum number of queries per scan. Each query has a list of candidates on every thread, which
/// takes memory.
const MAX_QUERIES_PER_SCAN: usize = 256;
/// Minimum length of a query's candidate list before candidates below the current threshold are
/// dropped.
const MIN_PRUNED_CANDIDATES: usize = 4096;

/// Writes the vectors of an index and their 8-bit quantizations to files.
pub struct VectorWriter {
    values: BufWriter<File>,
    codes: BufWriter<File>,
    scales: BufWriter<File>,
    dir: PathBuf,
    dimensions: usize,
    residual: f32,
}

impl VectorWriter {
    /// Creates the vector files in `dir`, for vectors with `dimensions` numbers each.
    ///
    /// # Errors
    /// Returns an error if a file cannot be created.
    pub fn create(dir: &Path, dimensions: usize) -> Result<Self, SearchError> {
        let values = create_file(dir, VALUES)?;
        let codes = create_file(dir, CODES)?;
        let scales = create_file(dir, SCALES)?;
        Ok(VectorWriter { values, codes, scales, dir: dir.to_owned(), dimensions, residual: 0.0 })
    }

    /// Appends a vector, which belongs to the next row.
    ///
    /// # Errors
    /// Returns an error if the vector has a different length, a number is not finite, or a file
    /// cannot be written, for example because the disk is full.
    pub fn add(&mut self, vector: &[f32]) -> Result<(), SearchError> {
        if vector.len() != self.dimensions || !vector.iter().all(|x| x.is_finite()) {
            return Err(SearchError::Internal(format!(
                "a vector has {} numbers, some of which may not be finite, but must have {} \
                 finite numbers",
                vector.len(),
                self.dimensions
            )));
        }
        let QuantizedVector { codes, scale, residual } = QuantizedVector::new(vector);
        self.residual = self.residual.max(residual);
        let values: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
        let codes: Vec<u8> = codes.iter().map(|code| *code as i8 as u8).collect();
        self.values
            .write_all(&values)
            .and_then(|()| self.codes.write_all(&codes))
            .and_then(|()| self.scales.write_all(&scale.to_le_bytes()))
            .map_err(SearchError::io_error("write vectors to", &self.dir))
    }

    /// Flushes the vector files. Returns the maximum Euclidean distance |x − x̂| between a vector
    /// and its 8-bit quantization.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written, for example because the disk is full.
    pub fn finish(mut self) -> Result<f32, SearchError> {
        for file in [&mut self.values, &mut self.codes, &mut self.scales] {
            file.flush().map_err(SearchError::io_error("write vectors to", &self.dir))?;
        }
        Ok(self.residual)
    }
}

fn create_file(dir: &Path, name: &str) -> Result<BufWriter<File>, SearchError> {
    let path = dir.join(name);
    File::create(&path).map_err(SearchError::io_error("create", &path)).map(BufWriter::new)
}

/// The 8-bit quantization x̂ of a vector: x̂ᵢ = scale · cᵢ, with the codes cᵢ.
struct QuantizedVector {
    codes: Vec<i16>,
    scale: f32,
    /// Quantization error |x − x̂|.
    residual: f32,
}

impl QuantizedVector {
    fn new(vector: &[f32]) -> Self {
        let largest = vector.iter().fold(0f32, |max_abs, x| max_abs.max(x.abs()));
        let scale = largest / MAX_CODE;
        // If the vector is zero, or so small that its scale underflows, all codes are 0 and the
        // residual is |x|.
        let inverse = if scale > f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
        let codes: Vec<i16> = vector
            .iter()
            .map(|x| (x * inverse).round().clamp(-MAX_CODE, MAX_CODE) as i16)
            .collect();
        let residual = vector
            .iter()
            .zip(&codes)
            .map(|(x, code)| f64::from(x - scale * f32::from(*code)).powi(2))
            .sum::<f64>()
            .sqrt() as f32;
        QuantizedVector { codes, scale, residual }
    }
}

fn euclidean_norm(vector: &[f32]) -> f32 {
    vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32
}

/// The vectors of an index, open for searching.
pub struct Vectors {
    values: Mmap,
    codes: Mmap,
    scales: Vec<f32>,
    dimensions: usize,
    residual: f32,
    /// Maximum norm |x̂| of the quantized vectors of all rows.
    max_norm: f32,
}

/// A query vector that is prepared for the scan.
struct PreparedQuery<'a> {
    exact: &'a [f32],
    quantised: QuantizedVector,
    /// Bound on the difference between the inner product of the codes and the inner product in f32.
    bound: f32,
}

/// Candidates of a query on one thread: the rows scanned so far that may be among the best.
struct TopCandidates {
    count: usize,
    /// The `count` largest inner products of codes so far, as a heap with the smallest product on
    /// top.
    top: BinaryHeap<Reverse<TotalF32>>,
    /// Candidate rows with their inner products of codes. The list includes every row within twice
    /// the bound of the smallest product in `top`, and rows that were within it when they were
    /// added.
    candidates: Vec<(u32, f32)>,
}

/// An `f32` with a total order.
#[derive(Clone, Copy, PartialEq)]
struct TotalF32(f32);

impl Eq for TotalF32 {}

impl PartialOrd for TotalF32 {
    fn partial_cmp(&self, handle: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(handle))
    }
}

impl Ord for TotalF32 {
    fn cmp(&self, handle: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&handle.0)
    }
}

impl TopCandidates {
    fn new(count: usize) -> Self {
        TopCandidates { count, top: BinaryHeap::with_capacity(count + 1), candidates: Vec::new() }
    }

    /// Returns the minimum inner product of codes with which a row can still be among the best.
    fn min_product(&self, bound: f32) -> f32 {
        match self.top.peek() {
            Some(Reverse(TotalF32(min_product))) if self.top.len() == self.count => {
                min_product - 2.0 * bound
            }
            _ => f32::NEG_INFINITY,
        }
    }

    fn add_candidate(&mut self, row: u32, product: f32, bound: f32) {
        if product < self.min_product(bound) {
            return;
        }
        self.push_top(product);
        self.candidates.push((row, product));
        if self.candidates.len() >= MIN_PRUNED_CANDIDATES.max(4 * self.count)
            && self.candidates.len().is_power_of_two()
        {
            let min_product = self.min_product(bound);
            self.candidates.retain(|(_, product)| *product >= min_product);
        }
    }

    fn push_top(&mut self, product: f32) {
        self.top.push(Reverse(TotalF32(product)));
        if self.top.len() > self.count {
            self.top.pop();
        }
    }
}

impl Vectors {
    /// Opens the vectors in `dir`: `rows` vectors of `dimensions` numbers. `residual` is the
    /// maximum distance between a vector and its 8-bit quantization, as [`VectorWriter::finish`]
    /// returned it.
    ///
    /// # Errors
    /// Returns an error if a file is missing or has an unexpected size, `dimensions` is 0 or
    /// `residual` is not finite.
    pub fn open(
        dir: &Path,
        rows: u64,
        dimensions: usize,
        residual: f32,
    ) -> Result<Self, SearchError> {
        if dimensions == 0 || !residual.is_finite() {
            let why = format!("its vectors have {dimensions} numbers and a residual of {residual}");
            return Err(SearchError::damaged_error(dir, why));
        }
        let values = map_file(dir, rows, VALUES, 4 * dimensions)?;
        let codes = map_file(dir, rows, CODES, dimensions)?;
        let scales = map_file(dir, rows, SCALES, 4)?;
        let scales: Vec<f32> =
            scales.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        // The bound |x̂| ≤ scale · 127 · √d would be coarse, so the exact norms are computed in one
        // pass over the codes.
        let max_norm = scales.iter().zip(codes.chunks_exact(dimensions)).fold(
            0f32,
            |max_norm_so_far, (scale, codes)| {
                let sum: i64 = codes.iter().map(|code| i64::from(*code as i8).pow(2)).sum();
                max_norm_so_far.max(scale * (sum as f32).sqrt())
            },
        );
        Ok(Vectors { values, codes, scales, dimensions, residual, max_norm })
    }

    /// Returns the number of dimensions of each vector.
    pub fn dimensions(&self) -> usize {
        self.dimensions
    }

    /// Returns the rows and inner products of the `count` best vectors for each query, the best
    /// first. Uses at most `threads` threads.
    ///
    /// # Errors
    /// Returns an error if a query has a different number of dimensions.
    pub fn search(
        &self,
        queries: &[Vec<f32>],
        count: usize,
        threads: usize,
    ) -> Result<Vec<Vec<(u32, f32)>>, SearchError> {
        let wrong = queries.iter().find(|query| query.len() != self.dimensions);
        if let Some(query) = wrong {
            return Err(SearchError::Query(format!(
                "the vector of a query has {} numbers, but the vectors of the index have {}: the \
                 query was embedded by another model",
                query.len(),
                self.dimensions
            )));
        }
        let count = count.min(self.scales.len());
        if count == 0 {
            return Ok(vec![Vec::new(); queries.len()]);
        }
        let mut found = Vec::with_capacity(queries.len());
        for some in queries.chunks(MAX_QUERIES_PER_SCAN) {
            found.extend(self.scan_batch(some, count, threads)?);
        }
        Ok(found)
    }

    /// Returns the rows and inner products for all `queries` after one scan over the vectors.
    fn scan_batch(
        &self,
        queries: &[Vec<f32>],
        count: usize,
        threads: usize,
    ) -> Result<Vec<Vec<(u32, f32)>>, SearchError> {
        let queries: Vec<PreparedQuery> =
            queries.iter().map(|query| self.prepare_query(query)).collect();
        let rows = self.scales.len();
        let work = rows.saturating_mul(self.dimensions).saturating_mul(queries.len());
        let threads = threads.min(work / MIN_WORK_PER_THREAD).clamp(1, rows);
        let fraction = rows.div_ceil(threads);
        let parts =
            std::thread::scope(|scope| {
                let handles: Vec<_> = (1..threads)
                    .map(|thread| rows.min(thread * fraction)..rows.min((thread + 1) * fraction))
                    .map(|range| scope.spawn(|| self.scan_rows(&queries, range, count)))
                    .collect();
                let mut parts = vec![self.scan_rows(&queries, 0..fraction.min(rows), count)];
                for handle in handles {
                    let part = handle.join();
                    parts.push(part.map_err(|_| {
                        SearchError::Internal("a thread of the scan panicked".into())
                    })?);
                }
                Ok::<_, SearchError>(parts)
            })?;
        let mut merged: Vec<TopCandidates> =
            queries.iter().map(|_| TopCandidates::new(count)).collect();
        for (all, part) in parts.into_iter().flat_map(|part| part.into_iter().enumerate()) {
            let merged = &mut merged[all];
            part.top.iter().for_each(|Reverse(TotalF32(product))| merged.push_top(*product));
            merged.candidates.extend(part.candidates);
        }
        Ok(queries
            .iter()
            .zip(merged)
            .map(|(query, candidates)| self.rescore_candidates(query, candidates))
            .collect())
    }

    fn prepare_query<'a>(&self, exact: &'a [f32]) -> PreparedQuery<'a> {
        let quantised = QuantizedVector::new(exact);
        let length = euclidean_norm(exact);
        let rounded = euclidean_norm(exact) + quantised.residual;
        let max_norm = self.max_norm + self.residual;
        let bound = quantised.residual * max_norm
            + rounded * self.residual
            + ROUNDING_ERROR * length * max_norm;
        PreparedQuery { exact, quantised, bound }
    }

    /// Scans the codes of the rows in `rows`, and returns the candidates of each query.
    fn scan_rows(
        &self,
        queries: &[PreparedQuery],
        rows: Range<usize>,
        count: usize,
    ) -> Vec<TopCandidates> {
        let mut candidates: Vec<TopCandidates> =
            queries.iter().map(|_| TopCandidates::new(count)).collect();
        let width = self.dimensions;
        for block in rows.clone().step_by(BLOCK) {
            let block = block..rows.end.min(block + BLOCK);
            for (query, candidates) in queries.iter().zip(&mut candidates) {
                for row in block.clone() {
                    let codes = &self.codes[row * width..][..width];
                    let product = dot_codes(codes, &query.quantised.codes) as f32;
                    candidates.add_candidate(
                        row as u32,
                        product * self.scales[row] * query.quantised.scale,
                        query.bound,
                    );
                }
            }
        }
        candidates
    }

    /// Computes the f32 inner products of the candidate rows, and returns the best rows, the best
    /// first.
    fn rescore_candidates(
        &self,
        query: &PreparedQuery,
        candidates: TopCandidates,
    ) -> Vec<(u32, f32)> {
        let min_product = candidates.min_product(query.bound);
        let width = 4 * self.dimensions;
        let kept = candidates.candidates.iter().filter(|(_, product)| *product >= min_product);
        let mut scored: Vec<(u32, f32)> = kept
            .map(|(row, _)| {
                (*row, dot_f32(&self.values[*row as usize * width..][..width], query.exact))
            })
            .collect();
        scored.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        scored.truncate(candidates.count);
        scored
    }
}

fn map_file(dir: &Path, rows: u64, name: &str, width: usize) -> Result<Mmap, SearchError> {
    let path = dir.join(name);
    let file = File::open(&path).map_err(SearchError::io_error("open", &path))?;
    // SAFETY: the map is read-only, and Levade never writes to a file of an index in place.
    // If another program truncates the file meanwhile, this process ends with a bus error,
    // like any program that maps its files.
    let bytes = unsafe { Mmap::map(&file) }.map_err(SearchError::io_error("map", &path))?;
    let wanted = rows.checked_mul(width as u64);
    if wanted == Some(bytes.len() as u64) {
        Ok(bytes)
    } else {
        let found = bytes.len();
        Err(SearchError::damaged_error(
            &path,
            format!("the file has {found} bytes, not {rows} × {width}"),
        ))
    }
}

#[cfg(test)]
#[path = "vectors_tests.rs"]
mod tests;
