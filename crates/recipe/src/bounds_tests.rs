//! Tests of values that would train in the wrong direction, train nothing, or exceed the memory of
//! any machine.

use super::*;

/// Asserts that every case is rejected with an error that contains its text.
fn assert_rejected(cases: &[(&[&str], &str)]) {
    for (overrides, want) in cases {
        let error = load(SMALL, overrides).unwrap_err();
        assert!(error.contains(want), "{overrides:?}\n  gave: {error}\n  want: {want}");
    }
}

/// With a negative length, a phase of demonstrations would maximize its loss.
#[test]
fn normalizer_length_is_checked_in_all_phases() {
    for phase in [0, 1] {
        for (length, shown) in [("-30", "-30"), ("0", "0"), ("nan", "NaN"), ("1e-39", "0.000")] {
            let change =
                format!("phase.{phase}.normalizer={{kind='rollout_sum_over', length={length}}}");
            let error = load(SMALL, &[&change]).unwrap_err();
            let want = format!("`phase.{phase}.normalizer.length` is {shown}");
            assert!(error.contains(&want), "{length}: {error}");
            let is_tiny = length == "1e-39";
            assert!(!is_tiny || error.contains("in single precision"), "{error}");
        }
    }
}

/// A phase without training targets would otherwise end without an error.
#[test]
fn phase_without_training_targets_is_rejected() {
    assert_rejected(&[
        (
            &["agent.train=false"],
            "`agent.train` is false, but must be true for at least one agent: otherwise phase 0",
        ),
        (
            &[
                "policy={a={kind='trained'}, b={kind='trained'}}",
                "agent.policy=a",
                "phase.1.policies=['b']",
            ],
            "`phase.1.policies` is b, but must be a list with a policy of a trained agent, one of \
             `a`",
        ),
        (
            &["agent.browser={train=false}", "phase.1.only.agents=['browser']"],
            "`phase.1.only.agents` is browser, but must be a list with an agent that this phase \
             trains, one of `default`",
        ),
        (
            &["phase.1.only.reward_from=nan"],
            "`phase.1.only.reward_from` is NaN, but must be a finite number",
        ),
        (
            &["phase.1.only.reward_to=-inf"],
            "`phase.1.only.reward_to` is -inf, but must be a finite number",
        ),
        (
            &["phase.1.advantage={kind='group', success=nan}"],
            "`phase.1.advantage.success` is NaN, but must be a number",
        ),
    ]);
    let other_overrides =
        ["agent.browser={train=false}", "phase.1.only.agents=['browser', 'default']"];
    load(SMALL, &other_overrides).unwrap();
    // There is nothing to train, and no phase that would train.
    load(SMALL, &["phase=[]", "agent.train=false"]).unwrap();
}

/// Larger counts would exhaust memory, overflow a sum, or never finish.
#[test]
fn counts_above_limits_are_rejected() {
    assert_rejected(&[
        (
            &["phase.0.epochs=2147483648"],
            "`phase.0.epochs` is 2147483648, but must be so few that all phases have at most \
             1000000000 steps",
        ),
        (
            &["phase.1.steps=4294967295"],
            "`phase.1.steps` is 4294967295, but must be so few that all phases have",
        ),
        (&["phase.1.steps=999999996"], "`phase.1.steps` is 999999996, but must be so few"),
        (
            &["phase.0.demonstrations=16777217"],
            "`phase.0.demonstrations` is 16777217, but must be at most 16777216",
        ),
        (
            &["phase.0.source={field='replies', tasks=16777217}"],
            "`phase.0.source.tasks` is 16777217, but must be at most 16777216",
        ),
        (
            &["phase.1.group_size=9223372036854775807"],
            "`phase.1.group_size` is 9223372036854775807, but must be so small that groups × \
             (group_size + oversample",
        ),
        (&["phase.1.groups=4000000"], "`phase.1.groups` is 4000000, but must be so small"),
        (&["phase.1.oversample=4000000"], "`phase.1.oversample` is 4000000, but must be so small"),
        (
            &["phase.1.staleness=4294967295"],
            "`phase.1.staleness` is 4294967295, but must be so small",
        ),
        (&["eval.tasks=16777217"], "`eval.tasks` is 16777217, but must be at most 16777216"),
        (
            &["eval.unseen_wordings=16777217"],
            "`eval.unseen_wordings` is 16777217, but must be at most",
        ),
        (
            &["eval.temperature=1", "eval.samples=4294967295"],
            "`eval.samples` is 4294967295, but must be at most 16777216 / (eval.tasks + \
             eval.unseen_wordings), which is 83886",
        ),
        (
            &["tasks.0.train=4294967295"],
            "`tasks.0.train` is 4294967295, but must be at most 268435456",
        ),
    ]);
    load(SMALL, &["phase.1.steps=999999995", "phase.1.groups=1000000", "eval.tasks=16777216"])
        .unwrap();
    assert_eq!(load(SMALL, &["phase.0.epochs=3"]).unwrap().phase[0].steps(), 15);
}

/// A step of 32 attempts changes β by a fifth of 32 over the horizon.
#[test]
fn adaptive_kl_horizon_rejects_too_small_values() {
    for horizon in ["6.4", "0", "-1", "nan", "inf"] {
        let error = load(SMALL, &[&adaptive_kl(horizon)]).unwrap_err();
        assert!(error.contains("`phase.1.kl.adaptive.horizon` is"), "{error}");
        assert!(error.contains("more than a fifth of groups × group_size, 6.4"), "{error}");
    }
    load(SMALL, &[&adaptive_kl("6.5")]).unwrap();
}

/// Returns an override that sets a KL penalty with an adaptive coefficient.
fn adaptive_kl(horizon: &str) -> String {
    let adaptive = format!("adaptive={{target=0.1, horizon={horizon}}}");
    format!("phase.1.kl={{estimator='k1', coefficient=0.1, apply_to='reward', {adaptive}}}")
}

/// A directory of this name would not be below `runs`.
#[test]
fn run_name_rejects_paths() {
    for (name, shown) in [
        ("../../../tmp/x", "\"../../../tmp/x\""),
        ("/tmp/x", "\"/tmp/x\""),
        ("..", "\"..\""),
        ("'a\\\\b'", "\"a\\\\\\\\b\""),
        ("\"a\\nb\"", "\"a\\nb\""),
    ] {
        let change = format!("run.name={name}");
        let error = load(SMALL, &[&change]).unwrap_err();
        assert!(
            error.contains(&format!("`run.name` is {shown}, but must be a name without slashes")),
            "{error}"
        );
        // If the directory is set, the name is not used as a path.
        load(SMALL, &[&change, "run.folder=here"]).unwrap();
    }
    load(SMALL, &["run.name=a..b: 3"]).unwrap();
}

#[test]
fn late_failures_are_rejected_at_load() {
    assert_rejected(&[
        (
            &["metrics.mlflow=nonsense"],
            "`metrics.mlflow` is \"nonsense\", but must be an address with http:// or https://",
        ),
        (&["metrics.mlflow=ftp://x"], "`metrics.mlflow` is \"ftp://x\""),
        (
            &["metrics.traces.otlp=collector:4318"],
            "`metrics.traces.otlp` is \"collector:4318\", but must be an address with http:// or \
             https://, or \"mlflow\"",
        ),
        (
            &["metrics.traces.otlp=mlflow"],
            "`metrics.traces.otlp` is \"mlflow\", but must be set together with metrics.mlflow",
        ),
        (
            &["phase.1.overlong={kind='penalize', buffer=257}"],
            "`phase.1.overlong.buffer` is 257, but must be at least 1, and at most \
             agent.max_tokens, 256",
        ),
    ]);
    load(SMALL, &["metrics.mlflow=http://127.0.0.1:5000"]).unwrap();
    load(SMALL, &["metrics.mlflow=http://127.0.0.1:5000", "metrics.traces.otlp=mlflow"]).unwrap();
    load(SMALL, &["phase.1.overlong={kind='penalize', buffer=256}"]).unwrap();
}

/// A scorer for tasks of an unknown source would silently score nothing.
#[test]
fn scorers_with_unknown_sources_are_rejected() {
    let recipe = |name: &str| {
        let scorers = format!(
            "reward={{scorers=[{{name='a', kind='maths', when={{source={name}}}}}, {{name='b', \
             kind='numeric'}}]}}"
        );
        let tasks =
            "tasks=[{kind='file', path='data/gsm8k.jsonl.gz', held_out=1}, {kind='arithmetic'}]";
        load(SMALL, &[tasks, &scorers]).map(|_| ())
    };
    for known in ["'gsm8k'", "'gsm8k.jsonl.gz'", "'arithmetic'", "['gsm8k', 'arithmetic']"] {
        recipe(known).unwrap_or_else(|error| panic!("{known}: {error}"));
    }
    for (unknown, nearest) in [
        ("'gsm8k.jsonl'", "; did you mean \"gsm8k.jsonl.gz\"?"),
        ("'gsm8'", "; did you mean \"gsm8k\"?"),
        ("['arithmetic', 'arithmetics']", "; did you mean \"arithmetic\"?"),
        ("'data/gsm8k.jsonl.gz'", "; did you mean \"gsm8k.jsonl.gz\"?"),
        ("'xyz'", "the sources are gsm8k, arithmetic"),
    ] {
        let error = recipe(unknown).unwrap_err();
        assert!(
            error.contains("`reward.scorers.0.when.source` is ") && error.contains(nearest),
            "{error}"
        );
        assert!(error.contains("the sources are gsm8k, arithmetic"), "{error}");
    }
}

#[test]
fn penalty_coefficients_must_be_finite_and_in_range() {
    for (value, shown) in [("0", "0"), ("-1", "-1"), ("inf", "inf"), ("nan", "NaN")] {
        let change =
            format!("phase.1.kl={{estimator='k1', coefficient={value}, apply_to='reward'}}");
        let want =
            format!("`phase.1.kl.coefficient` is {shown}, but must be finite and more than 0");
        assert_rejected(&[(&[&change], &want)]);
    }
    for (value, shown) in [("-1", "-1"), ("inf", "inf"), ("nan", "NaN")] {
        let change = format!("phase.1.overlong={{kind='penalize', buffer=2, factor={value}}}");
        let want =
            format!("`phase.1.overlong.factor` is {shown}, but must be finite and at least 0");
        assert_rejected(&[(&[&change], &want)]);
    }
    load(SMALL, &["phase.1.kl.coefficient=1e-9"]).unwrap();
    load(SMALL, &["phase.1.overlong={kind='penalize', buffer=2, factor=0}"]).unwrap();
}
