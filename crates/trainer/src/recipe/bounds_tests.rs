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

/// A phase that has no targets would end as if all had gone well.
#[test]
fn a_phase_trains_something() {
    refused(&[
        (&["agent.train=false"], "`agent.train` is false, but must be true for one agent at least: phase 0"),
        (
            &[
                "policy={a={kind='trained'}, b={kind='trained'}}",
                "agent.policy=a",
                "phase.1.policies=['b']",
            ],
            "`phase.1.policies` is b, but must be policies of which one plays an agent that is trained, one of `a`",
        ),
        (
            &["agent.browser={train=false}", "phase.1.only.agents=['browser']"],
            "`phase.1.only.agents` is browser, but must be agents of which one is trained in this phase, one of \
             `default`",
        ),
        (&["phase.1.only.reward_from=nan"], "`phase.1.only.reward_from` is NaN, but must be a finite number"),
        (&["phase.1.only.reward_to=-inf"], "`phase.1.only.reward_to` is -inf, but must be a finite number"),
        (
            &["phase.1.advantage={kind='group', success=nan}"],
            "`phase.1.advantage.success` is NaN, but must be a number",
        ),
    ]);
    let others = ["agent.browser={train=false}", "phase.1.only.agents=['browser', 'default']"];
    load(SMALL, &others).unwrap();
    // Nothing to train, and nothing that would.
    load(SMALL, &["phase=[]", "agent.train=false"]).unwrap();
}
