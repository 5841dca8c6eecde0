//! Sampling and training compute the same bits in random cases. `examples/parity.rs` runs any
//! number of cases.

use levade_engine::testing::parity;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sampling_and_training_match_in_random_cases() {
    let mut compared = 0;
    let mut resumed = 0;
    let mut updated = 0;
    let mut hits = 0;
    for case in 0..150 {
        let outcome = parity::run(7, case).await.unwrap();
        assert_eq!(outcome.different, 0, "of {}: {}", outcome.compared, outcome.description);
        compared += outcome.compared;
        resumed += outcome.resumed;
        updated += outcome.updated;
        hits += outcome.prefix_hits;
    }
    assert!(
        compared > 5000 && resumed > 5 && updated > 5 && hits > 1000,
        "{compared} {resumed} {updated} {hits}"
    );
}
