use proptest::prelude::*;

use super::*;

fn write_vectors(dir: &Path, vectors: &[Vec<f32>]) -> Vectors {
    let dimensions = vectors[0].len();
    let mut writer = VectorWriter::create(dir, dimensions).unwrap();
    vectors.iter().for_each(|vector| writer.add(vector).unwrap());
    let residual = writer.finish().unwrap();
    Vectors::open(dir, vectors.len() as u64, dimensions, residual).unwrap()
}

/// Returns the best rows of a scan in f32, as reference.
fn exact_search(vectors: &[Vec<f32>], query: &[f32], count: usize) -> Vec<(u32, f32)> {
    let bytes =
        |vector: &Vec<f32>| vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let mut all: Vec<(u32, f32)> = vectors
        .iter()
        .enumerate()
        .map(|(row, x)| (row as u32, dot_f32(&bytes(x), query)))
        .collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(count);
    all
}

/// Generates clustered vectors, some of them equal, with differences of very different sizes.
/// Rounding affects their order the most.
fn vectors() -> impl Strategy<Value = Vec<Vec<f32>>> {
    (1usize..40).prop_flat_map(|dimensions| {
        let centre = prop::collection::vec(-1f32..1.0, dimensions);
        let step = (
            0usize..4,
            prop::sample::select(vec![0f32, 1e-6, 1e-3, 1e-2, 1.0]),
            0usize..dimensions,
        );
        let steps = prop::collection::vec(step, 1..300);
        (prop::collection::vec(centre, 4), steps).prop_map(|(centres, steps)| {
            steps
                .into_iter()
                .map(|(at, size, dimension)| {
                    let mut vector = centres[at].clone();
                    vector[dimension] += size;
                    vector
                })
                .collect()
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn search_matches_f32_scan(
        vectors in vectors(), at in any::<prop::sample::Index>(), count in 1usize..20, scale in 1e-4f32..1e3,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let found = write_vectors(folder.path(), &vectors);
        let query: Vec<f32> = vectors[at.index(vectors.len())].iter().map(|x| x * scale).collect();
        let wanted = exact_search(&vectors, &query, count);
        prop_assert_eq!(&found.search(std::slice::from_ref(&query), count, 1).unwrap()[0], &wanted);
        let zero = vec![0.0; query.len()];
        let both = found.search(&[zero.clone(), query], count, 3).unwrap();
        prop_assert_eq!(&both[1], &wanted);
        prop_assert_eq!(&both[0], &exact_search(&vectors, &zero, count));
    }
}

#[test]
fn search_is_independent_of_thread_count() {
    // Enough rows for several threads, with equal rows in the ranges of different threads.
    let width = 64;
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut vectors: Vec<Vec<f32>> =
        (0..70_000).map(|_| (0..width).map(|_| next()).collect()).collect();
    vectors[60_000] = vectors[17].clone();
    vectors[35_000] = vectors[17].clone();
    let dir = tempfile::tempdir().unwrap();
    let found = write_vectors(dir.path(), &vectors);
    for threads in [1, 2, 3, 7] {
        for row in [17, 69_999] {
            let wanted = exact_search(&vectors, &vectors[row], 10);
            assert_eq!(
                found.search(&[vectors[row].clone()], 10, threads).unwrap()[0],
                wanted,
                "{threads}"
            );
        }
    }
}

#[test]
fn search_preserves_order_across_query_chunks() {
    let vectors: Vec<Vec<f32>> =
        (0..40).map(|row| vec![(row as f32).cos(), (row as f32).sin()]).collect();
    let dir = tempfile::tempdir().unwrap();
    let found = write_vectors(dir.path(), &vectors);
    let queries: Vec<Vec<f32>> =
        vectors.iter().cycle().take(2 * MAX_QUERIES_PER_SCAN + 3).cloned().collect();
    let all = found.search(&queries, 3, 2).unwrap();
    assert_eq!(all.len(), queries.len());
    for (query, found) in queries.iter().zip(&all) {
        assert_eq!(*found, exact_search(&vectors, query, 3));
    }
}

#[test]
fn vectors_of_wrong_size_or_nan_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let found = write_vectors(dir.path(), &[vec![1.0, 0.0], vec![0.0, 1.0]]);
    let error = found.search(&[vec![1.0]], 1, 1).unwrap_err().to_string();
    assert!(error.contains("1 numbers, but the vectors of the index have 2"), "{error}");
    assert_eq!(found.search(&[vec![0.0, 2.0]], 9, 4).unwrap()[0], [(1, 2.0), (0, 0.0)]);
    let mut writer = VectorWriter::create(dir.path(), 2).unwrap();
    assert!(writer.add(&[1.0]).is_err());
    assert!(writer.add(&[1.0, f32::NAN]).is_err());
}
