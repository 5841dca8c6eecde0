//! Tests of external samplers and learners in recipes.

use levade_rl::correction::Bound;

use super::super::cluster::CorrectionDefault;
use super::super::rl::ProximalPolicy;
use super::super::{Override, Phase, Recipe, RlKeys};

const SMALL: &str = "[run]\nname = 'x'\n[model]\nsource = 'm'\n[[tasks]]\nkind = 'arithmetic'\n\
                     [[phase]]\nkind = 'rl'\n\
                     steps = 1\ngroups = 1\ngroup_size = 2\nlearning_rate = 1e-5\n";

fn load(text: &str, overrides: &[&str]) -> Result<Recipe, String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("recipe.toml");
    std::fs::write(&file, text).unwrap();
    let overrides: Vec<Override> = overrides.iter().map(|text| text.parse().unwrap()).collect();
    Recipe::load(&file, &overrides).map_err(|error| error.to_string())
}

fn rl(recipe: &Recipe) -> RlKeys {
    match &recipe.phase[0] {
        Phase::Rl(keys) => (**keys).clone(),
        Phase::Sft(_) | Phase::Prompt(_) => panic!(),
    }
}

#[test]
fn external_samplers_round_trip_and_set_correction() {
    let started = "cluster.samplers={kind='vllm', start=true, count=2, python='env/bin/python', args=['--x']}";
    let recipe = load(SMALL, &[started]).unwrap();
    let keys = recipe.cluster.samplers.as_ref().unwrap().servers();
    assert!(keys.python.is_absolute() && keys.python.ends_with("env/bin/python"));
    assert_eq!(rl(&recipe).correction, CorrectionDefault::Tis.correction());
    assert_eq!(rl(&recipe).proximal, ProximalPolicy::Recompute);
    let text = recipe.to_toml().unwrap();
    assert_eq!(load(&text, &[]).unwrap(), recipe);
    // On other machines it is the same run; with another treatment of completions in flight it is
    // not.
    let difference = |change: &str| load(&text, &[change]).unwrap().difference(&recipe).unwrap();
    assert_eq!(difference("cluster.samplers={kind='vllm', urls=['http://h:1'], count=1}"), None);
    // Both transfers deliver the same bits.
    let learner = "cluster.learner={kind='torch', start=true}";
    let by_dir = load(&text, &[learner]).unwrap();
    let by_group = load(&text, &[learner, "cluster.samplers.weights=group"]).unwrap();
    assert_eq!(by_group.difference(&by_dir).unwrap(), None);
    assert_eq!(
        difference("cluster.samplers.in_flight=keep").unwrap().key,
        "cluster.samplers.in_flight"
    );
    // Keys that a phase sets are kept.
    let plain = load(SMALL, &[started, "phase.0.proximal=interpolate"]).unwrap();
    assert_eq!(rl(&plain).correction, None);
    let none = load(SMALL, &[started, "cluster.samplers.correction=none"]).unwrap();
    assert_eq!((rl(&none).correction, rl(&none).proximal), (None, ProximalPolicy::Behavior));
    let mask = load(SMALL, &[started, "cluster.samplers.correction=icepop"]).unwrap();
    assert!(matches!(rl(&mask).correction.unwrap().bound, Bound::Mask { .. }));
    assert_eq!(rl(&load(SMALL, &[]).unwrap()).correction, None);
}

#[test]
fn correction_default_depends_on_learner_precision() {
    let learner =
        |dtype: &str| format!("cluster.learner={{kind='torch', start=true, dtype='{dtype}'}}");
    let bf16 = load(SMALL, &[&learner("bf16")]).unwrap();
    assert_eq!(rl(&bf16).correction, CorrectionDefault::Tis.correction());
    assert!(bf16.numerics_note().unwrap().contains("clamped to at most 2"));
    let f32 = load(SMALL, &[&learner("f32")]).unwrap();
    assert_eq!((rl(&f32).correction, f32.numerics_note()), (None, None));
    let own = load(SMALL, &[&learner("bf16"), "phase.0.proximal=recompute"]).unwrap();
    assert_eq!(rl(&own).correction, None);
    assert!(
        own.numerics_note().unwrap().contains("clamped to at most 5"),
        "the phase's own bound is told"
    );
    let mask = "cluster.samplers={kind='vllm', start=true, correction='icepop'}";
    assert!(load(SMALL, &[mask]).unwrap().numerics_note().unwrap().contains("outside of 0.5 to 5"));
}

#[test]
fn invalid_samplers_are_rejected_by_key() {
    for (change, want) in [
        (
            "cluster.samplers={kind='vlm'}",
            "`cluster.samplers.kind` is \"vlm\", but must be one of `vllm`",
        ),
        ("cluster.samplers={kind='vllm'}", "`cluster.samplers.start` is false, but must be true"),
        (
            "cluster.samplers={kind='vllm', start=true, urls=['http://h']}",
            "`cluster.samplers.start` is true",
        ),
        (
            "cluster.samplers={kind='sglang', urls=['h:1']}",
            "`cluster.samplers.urls.0` is \"h:1\", but must be",
        ),
        (
            "cluster.samplers={kind='vllm', urls=['http://me:secret@h']}",
            "is an address with a user name, but must be",
        ),
        (
            "cluster.samplers={kind='vllm', urls=['http://h', 'http://h']}",
            "`cluster.samplers.urls.1`",
        ),
        (
            "cluster.samplers={kind='vllm', start=true, weights='group'}",
            "`cluster.samplers.weights` is \"group\", but must be \"folder\"; or set a \
             `cluster.learner` of kind \"torch\"",
        ),
        (
            "cluster.samplers={kind='vllm', start=true, weights='wire'}",
            "`cluster.samplers.weights`",
        ),
        ("cluster.samplers={kind='vllm', start=true, count=0}", "`cluster.samplers.count` is 0"),
        (
            "cluster.samplers={kind='vllm', start=true, tolerance=0}",
            "`cluster.samplers.tolerance` is 0",
        ),
        (
            "cluster.samplers={kind='vllm', start=true, args=['--dtype', 'auto', '--port=9000']}",
            "`cluster.samplers.args.2` is \"--port=9000\", but must be another flag than --port: \
             the run chooses it",
        ),
        (
            "cluster.samplers={kind='sglang', start=true, args=['--model-path', 'other']}",
            "`cluster.samplers.args.0` is \"--model-path\", but must be another flag than \
             --model-path: servers start",
        ),
        (
            "cluster.learner={kind='torch', start=true, args=['--host', 'localhost']}",
            "`cluster.learner.args.0` is \"--host\", but must be another flag than --host",
        ),
        (
            "cluster.samplers={kind='vllm', start=true, count=99999}",
            "`cluster.samplers.count` is 99999",
        ),
        (
            "cluster.samplers={kind='vllm', start=true, gpu=1}",
            "unknown key `cluster.samplers.gpu`; did you mean `gpus`?",
        ),
    ] {
        let error = load(SMALL, &[change]).unwrap_err();
        assert!(
            error.contains(want) && !error.contains("secret"),
            "{change}\n  gave: {error}\n  want: {want}"
        );
    }
}

#[test]
fn servers_with_gpu_learner_require_gpu_count() {
    let learner = "cluster.learner={kind='torch', start=true, gpus=2}";
    let samplers = |gpus: u32| format!("cluster.samplers={{kind='vllm', start=true, gpus={gpus}}}");
    let error = load(SMALL, &[learner, &samplers(0)]).unwrap_err();
    assert!(
        error.contains("`cluster.samplers.gpus` is 0, but must be at least 1 with a learner"),
        "{error}"
    );
    load(SMALL, &[learner, &samplers(1)]).unwrap();
    load(SMALL, &[learner, &samplers(0), "cluster.placement=colocated"]).unwrap();
    load(SMALL, &[learner, "cluster.samplers={kind='vllm', urls=['http://h']}"]).unwrap();
}

#[test]
fn adapters_reject_tensor_and_expert_parallelism() {
    let learner =
        |keys: &str| format!("cluster.learner={{kind='torch', start=true, processes=2, {keys}}}");
    let lora = "model.lora={rank=4}";
    for (keys, want) in
        [("tp=2", "`cluster.learner.tp` is 2"), ("ep=2", "`cluster.learner.ep` is 2")]
    {
        let error = load(SMALL, &[lora, &learner(keys)]).unwrap_err();
        assert!(
            error.contains(&format!("{want}, but must be 1 if an adapter is trained")),
            "{error}"
        );
        load(SMALL, &[&learner(keys)]).unwrap();
    }
    load(SMALL, &[lora, &learner("cp=2")]).unwrap();
}

#[test]
fn colocated_placement_requires_servers_and_torch_learner() {
    let colocated = "cluster.placement=colocated";
    let learner = "cluster.learner={kind='torch', start=true}";
    let samplers = "cluster.samplers={kind='vllm', start=true}";
    let recipe = load(SMALL, &[learner, samplers, colocated]).unwrap();
    let text = recipe.to_toml().unwrap();
    assert!(text.contains("placement = \"colocated\""), "{text}");
    assert_eq!(load(&text, &[]).unwrap(), recipe);
    // The run is the same under either placement.
    let disaggregated = load(SMALL, &[learner, samplers]).unwrap();
    assert_eq!(recipe.difference(&disaggregated).unwrap(), None);
    assert_eq!(
        load(SMALL, &["cluster.placement=disaggregated"]).unwrap(),
        load(SMALL, &[]).unwrap()
    );
    for (changes, want) in [
        (
            &[][..],
            "`cluster.placement` is \"colocated\", but must be \"disaggregated\"; or set a \
             `cluster.learner`",
        ),
        (
            &[samplers],
            "`cluster.placement` is \"colocated\", but must be \"disaggregated\"; or set a \
             `cluster.learner`",
        ),
        (
            &[learner],
            "`cluster.placement` is \"colocated\", but must be \"disaggregated\"; or set \
             `cluster.samplers`",
        ),
        (
            &[learner, samplers, "phase.0.staleness=1"],
            "`phase.0.staleness` is 1, but must be 0 with `cluster.placement` \"colocated\": \
             attempts cannot run ahead",
        ),
        (
            &[learner, samplers, "cluster.samplers.in_flight=keep"],
            "`cluster.samplers.in_flight` is \"keep\", but must be \"recompute\" with \
             `cluster.placement`",
        ),
        (
            &[learner, "cluster.samplers={kind='sglang', urls_file='servers'}"],
            "but must be left out with `cluster.placement` \"colocated\": a server that joins",
        ),
        (
            &[learner, samplers, "model.lora={rank=8}"],
            "but must be \"disaggregated\" if an adapter is trained (`model.lora`)",
        ),
        (
            &["cluster.placement=hybrid"],
            "`cluster.placement` is \"hybrid\", but must be one of `apart`, `disaggregated`",
        ),
    ] {
        let mut all = changes.to_vec();
        if !changes.iter().any(|change| change.contains("hybrid")) {
            all.push(colocated);
        }
        let error = load(SMALL, &all).unwrap_err();
        assert!(error.contains(want), "{changes:?}\n  gave: {error}\n  want: {want}");
    }
}
