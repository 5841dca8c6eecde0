//! Runs random cases for the guarantee that sampling and training compute the same bits: `parity
//! CASES [SEED]`. The tests run a smaller number of cases.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use levade_engine::testing::parity;

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let cases: u64 = arguments.next().context("the number of cases must be an integer")?.parse()?;
    let seed: u64 = arguments.next().map_or(Ok(1), |seed| seed.parse())?;
    let mut compared = 0;
    let mut different = 0;
    let mut resumed = 0;
    let mut updated = 0;
    let mut hits = 0;
    let mut kinds: BTreeMap<String, u64> = BTreeMap::new();
    for case in 0..cases {
        let outcome =
            parity::run(seed, case).await.with_context(|| format!("case {case} of seed {seed}"))?;
        if outcome.different > 0 {
            println!(
                "{} of {} differ: {}",
                outcome.different, outcome.compared, outcome.description
            );
        }
        compared += outcome.compared;
        different += outcome.different;
        resumed += outcome.resumed;
        updated += outcome.updated;
        hits += outcome.prefix_hits;
        let kind = outcome.description.split(';').nth(1).unwrap_or_default();
        *kinds.entry(kind.split(',').take(3).collect::<Vec<_>>().join(",")).or_default() += 1;
        if (case + 1) % 1000 == 0 {
            println!("{} cases, {compared} log-probabilities, {different} differ", case + 1);
        }
    }
    for (kind, count) in kinds {
        println!("{count:6} cases:{kind}");
    }
    println!(
        "{cases} cases of seed {seed}: {compared} log-probabilities compared, {different} differ; \
         {resumed} requests aborted and resumed, {updated} sampled across an update, {hits} prompt \
         tokens from the cache"
    );
    ensure!(different == 0, "sampling and training differ");
    Ok(())
}
