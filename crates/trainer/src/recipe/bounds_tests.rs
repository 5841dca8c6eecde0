//! Tests of values that would train the wrong way or nothing, or that no machine can hold.

use super::*;

/// Every recipe is refused, with these words.
fn refused(cases: &[(&[&str], &str)]) {
    for (overrides, want) in cases {
        let error = load(SMALL, overrides).unwrap_err();
        assert!(error.contains(want), "{overrides:?}\n  gave: {error}\n  want: {want}");
    }
}

/// With a negative length a phase of demonstrations would climb its loss.
#[test]
fn averages_of_all_phases_are_checked() {
    let length = |phase: usize, length: &str| {
        let change = format!("phase.{phase}.normaliser={{kind='rollout_sum_over', length={length}}}");
        load(SMALL, &[&change]).unwrap_err()
    };
    for phase in [0, 1] {
        for (given, shown) in [("-30", "-30"), ("0", "0"), ("nan", "NaN"), ("1e-39", "0.000")] {
            let error = length(phase, given);
            let want = format!("`phase.{phase}.normaliser.length` is {shown}");
            assert!(error.contains(&want), "{given}: {error}");
        }
    }
    assert!(length(0, "1e-39").contains("in single precision"));
}
