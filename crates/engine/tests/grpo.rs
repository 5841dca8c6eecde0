//! Tests that the example `grpo` learns its task.

#[allow(dead_code)]
#[path = "../examples/grpo.rs"]
mod grpo;

#[tokio::test]
async fn grpo_example_learns_its_task_with_three_seeds() {
    for seed in 1..=3 {
        let (first, last) = grpo::train(seed, |_, _| {}).await.unwrap();
        assert!((0.1..0.3).contains(&first) && last >= 0.9, "seed {seed}: {first} → {last}");
    }
}
