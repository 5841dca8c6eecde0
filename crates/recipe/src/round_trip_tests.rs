//! Tests that recipes are written and read back unchanged.

use super::*;

#[test]
fn recipe_round_trips_through_toml() {
    let recipe = load(SMALL, &["phase.1.clip_high=0.28"]).unwrap();
    let Phase::Rl(grpo) = &recipe.phase[1] else { panic!() };
    assert_eq!((grpo.clip_low, grpo.clip_high, grpo.optimizer.warmup), (None, Some(0.28), 2));
    assert_eq!(recipe.run.folder, std::env::current_dir().unwrap().join("runs/small"));
    let text = recipe.to_toml().unwrap();
    assert!(text.contains("clip_high = 0.28\n"), "{text}");
    assert!(text.contains("kind = \"rl\""), "{text}");
    let again = load(&text, &[]).unwrap();
    assert_eq!(again, recipe);
    assert_eq!(again.to_toml().unwrap(), text);
}

#[test]
fn resolved_recipe_omits_skipped_phases() {
    let complete = load(SMALL, &["phase.1.steps=7"]).unwrap();
    // Overrides count phases as in the file, whether or not phases are skipped.
    let rest = load(SMALL, &["run.skip_phases=1", "phase.1.steps=7"]).unwrap();
    assert_eq!(rest.phase, complete.phase[1..]);
    assert_eq!(load(&rest.to_toml().unwrap(), &[]).unwrap(), rest, "nothing more is skipped");
    let wrong = load(SMALL, &["run.skip_phases=1", "phase.1.steps=0"]).unwrap_err();
    assert!(wrong.contains("`phase.1.steps` is 0"), "{wrong}");
}

#[test]
fn context_policy_is_set_per_agent() {
    let overrides = [
        "agent.context={kind='summarize', keep=3, agent='short'}",
        "agent.short={context='drop_oldest', max_context_tokens=900}",
    ];
    let recipe = load(SMALL, &overrides).unwrap();
    assert_eq!(load(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
    let names: Vec<&str> = recipe.agents().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["default", "short"]);
    let own = recipe.agent.context_policy(8000);
    assert_eq!((own.budget.keep, own.summarizer_name("default")), (3, "short".to_owned()));
    let short = recipe.agent_named("short").unwrap().context_policy(8000);
    assert_eq!(
        (short.budget.max_tokens, short.budget.keep, short.is_summarizing()),
        (900, 2, false)
    );
    // Summaries are not training targets unless the recipe trains them.
    let untrained = recipe.untrained_agents();
    assert!(untrained.contains(&"default.summary".to_owned()), "{untrained:?}");
    let trains = load(SMALL, &["agent.context={kind='summarize', train=true}"]).unwrap();
    assert_eq!(trains.untrained_agents(), Vec::<String>::new());
    let program = ["agent.kind='program'", "agent.command=['true']", "agent.tools=[]"];
    assert_eq!(
        load(SMALL, &program).unwrap().untrained_agents(),
        ["default.summary", "default.probe"]
    );
}

#[test]
fn tool_descriptions_and_prompt_target_round_trip() {
    let other = ["agent.writer={tools=[], tool_descriptions={}}"];
    let recipe = load(include_str!("testing/prompt.toml"), &other).unwrap();
    assert_eq!(load(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
    let Phase::Prompt(keys) = &recipe.phase[0] else { panic!() };
    let parameter = "expression".to_owned();
    let target = ToolTarget { name: "calculator".into(), parameter };
    assert_eq!(keys.target, PromptTarget::Tool(target));
    let described = |agent: &str| recipe.agent_named(agent).unwrap().tool_descriptions.clone();
    assert_eq!(described("default")["calculator"].description.as_deref(), Some("Computes."));
    assert!(described("writer").is_empty());
    // An agent gets the descriptions of [agent]. Without tools, they would have no effect.
    let inherited = ["agent.writer={tools=[]}"];
    let error = load(include_str!("testing/prompt.toml"), &inherited).unwrap_err();
    assert!(error.contains("`agent.writer.tool_descriptions.calculator` is set"), "{error}");
}

#[test]
fn policy_mixtures_and_teachers_round_trip() {
    let overrides = [
        "policy.default={kind='trained'}",
        "policy.other={kind='frozen'}",
        "policy.teacher={kind='external', base_urls=['http://a/v1', 'http://b/v1'], model='m'}",
        "agent.policy=[{name='default', weight=0.8}, {name='other', weight=0.2}]",
        "phase.0.source={policy='teacher', min_score=0.5}",
    ];
    let recipe = load(SMALL, &overrides).unwrap();
    let text = recipe.to_toml().unwrap();
    assert_eq!(load(&text, &[]).unwrap(), recipe, "{text}");
    assert_eq!(recipe.policy_names(&recipe.agent), ["default", "other"]);
    assert_eq!(recipe.phase[0].teacher(), Some("teacher"));
    let PolicyKeys::External(keys) = &recipe.policy["teacher"] else { panic!() };
    assert_eq!(keys.urls().collect::<Vec<_>>(), ["http://a/v1", "http://b/v1"]);
}

#[test]
fn several_scorers_round_trip() {
    let several = "reward={unscored=0.5, scorers=[\
         {name='right', kind='numeric', extract='boxed', when={source='arithmetic', data_source=['b', 'c']}}, \
         {name='form', kind='command', command=['true'], weight=0.25, weights={length=-0.5}, unscored='defer'}]}";
    let recipe = load(SMALL, &[several]).unwrap();
    let [answer_scorer, format_scorer] = &recipe.reward.scorers[..] else { panic!() };
    assert_eq!(
        (answer_scorer.name.as_str(), answer_scorer.weight, answer_scorer.unscored),
        ("right", 1.0, None)
    );
    let fields: Vec<(&str, Vec<String>)> =
        answer_scorer.when.fields().map(|(name, values)| (name, values.to_vec())).collect();
    assert_eq!(
        fields,
        [("source", vec!["arithmetic".into()]), ("data_source", vec!["b".into(), "c".into()])]
    );
    assert_eq!(
        (format_scorer.weight, format_scorer.weights["length"], format_scorer.unscored),
        (0.25, -0.5, Some(UnscoredEffect::Defer))
    );
    assert_eq!(
        (format_scorer.scorer.name(), recipe.reward.unscored),
        ("command", UnscoredEffect::Value(0.5))
    );
    let text = recipe.to_toml().unwrap();
    assert!(text.contains("[[reward.scorers]]") && !text.contains("[reward.scorer]"), "{text}");
    assert_eq!(load(&text, &[]).unwrap(), recipe);
    // A run can be resumed with another treatment of a scorer that is permanently unavailable.
    let dropped =
        load(&text, &["reward.scorers.1.unscored=drop", "reward.timeout_seconds=9"]).unwrap();
    assert_eq!(dropped.difference(&recipe).unwrap(), None);
    let heavier = load(&text, &["reward.scorers.1.weight=0.5"]).unwrap();
    assert_eq!(heavier.difference(&recipe).unwrap().unwrap().key, "reward.scorers.1.weight");
}

#[test]
fn tools_round_trip_through_toml() {
    let tools = "tool=['calculator', \
                 {kind='calculator', name='sums', at_once=3, max_tokens=9, truncate='left'}]";
    let recipe = load(SMALL, &[tools]).unwrap();
    let [plain, sums] = &recipe.tool[..] else { panic!() };
    assert_eq!((plain.name(), plain.parallel, plain.seconds), ("calculator", true, None));
    assert_eq!((sums.name(), sums.at_once, sums.max_tokens), ("sums", Some(3), Some(9)));
    let text = recipe.to_toml().unwrap();
    assert!(text.contains("[[tool]]") && !text.contains("options"), "{text}");
    assert_eq!(load(&text, &[]).unwrap(), recipe);
    let slower = load(&text, &["tool.1.at_once=1", "tool.1.seconds=3"]).unwrap();
    assert_eq!(slower.difference(&recipe).unwrap(), None);
    let longer = load(&text, &["tool.1.max_tokens=10"]).unwrap();
    assert_eq!(longer.difference(&recipe).unwrap().unwrap().key, "tool.1.max_tokens");
}

#[test]
fn external_learner_round_trips() {
    let learner =
        "cluster.learner={kind='torch', start=true, processes=2, python='env/bin/python'}";
    let recipe = load(SMALL, &[learner]).unwrap();
    let Some(LearnerKeys::Torch(keys)) = &recipe.cluster.learner else { panic!() };
    assert!(keys.python.is_absolute() && keys.python.ends_with("env/bin/python"));
    let text = recipe.to_toml().unwrap();
    assert!(text.contains("[cluster.learner]\nkind = \"torch\""), "{text}");
    assert_eq!(load(&text, &[]).unwrap(), recipe);
    let plain = load(SMALL, &[]).unwrap();
    assert!(!plain.to_toml().unwrap().contains("cluster"));
    let difference = |change: &str| load(&text, &[change]).unwrap().difference(&recipe).unwrap();
    assert_eq!(difference("cluster.learner.restarts=9"), None);
    assert_eq!(difference("cluster.learner.environment=['A']"), None);
    let more = difference("cluster.learner.processes=4").unwrap();
    assert_eq!(more.to_string(), "`cluster.learner.processes` is 4 now and was 2");
    assert_eq!(recipe.difference(&plain).unwrap().unwrap().key, "cluster");
}

#[test]
fn old_names_load_like_new_names() {
    let samplers = "cluster.samplers={kind='vllm', urls=['http://a']";
    let policies = "policy.default={kind='trained'}\0policy.other={kind='frozen'}";
    let mixed = |key: &str| {
        format!("agent.policy=[{{name='default', {key}=1}}, {{name='other', {key}=2}}]")
    };
    let correction = |level: &str, normalize: &str, over: &str| {
        format!(
            "phase.1.proximal='recompute'\0phase.1.correction={{level='{level}', {normalize}=true, bound={{kind='clamp', high=2.0}}}}\0\
             phase.1.rejection=[{{statistic='ratio', over='{over}', high=9.0}}]"
        )
    };
    let pairs: &[(&str, &str)] = &[
        ("agent.reply_seconds=9", "agent.completion_seconds=9"),
        (
            "agent.tool_delay=2\0agent.tool_delay_least=1",
            "agent.tool_delay=2\0agent.min_tool_delay=1",
        ),
        ("agent.replies=strict", "agent.completion_matching=strict"),
        ("agent.context={kind='summarise'}", "agent.context={kind='summarize'}"),
        (&format!("{policies}\0{}", mixed("share")), &format!("{policies}\0{}", mixed("weight"))),
        ("reward.unscored=park", "reward.unscored=defer"),
        ("reward.outage_seconds=9", "reward.timeout_seconds=9"),
        (
            "tool=[{kind='calculator', outage='retry'}]",
            "tool=[{kind='calculator', on_failure='retry'}]",
        ),
        (
            "reward.scorer={kind='form', least_chars=1, most_chars=2}",
            "reward.scorer={kind='format', min_chars=1, max_chars=2}",
        ),
        (
            "reward.scorer={kind='answer', place='tag', most_tags=2}",
            "reward.scorer={kind='answer', location='tag', max_tags=2}",
        ),
        (
            "reward.scorer={kind='maths', place='boxed'}",
            "reward.scorer={kind='maths', location='boxed'}",
        ),
        (
            "reward.scorer={kind='code', value='share', most_tests=3}",
            "reward.scorer={kind='code', value='fraction', max_tests=3}",
        ),
        ("phase.1.spare=1", "phase.1.oversample=1"),
        ("phase.1.uniform_groups=drop", "phase.1.zero_variance_groups=drop"),
        ("phase.1.high_entropy_share=0.2", "phase.1.high_entropy_fraction=0.2"),
        ("phase.1.proximal=behaviour", "phase.1.proximal=behavior"),
        (
            "phase.1.overlong={kind='penalise', buffer=2}",
            "phase.1.overlong={kind='penalize', buffer=2}",
        ),
        (
            "phase.1.advantage={kind='group', compare='others'}",
            "phase.1.advantage={kind='group', compare='leave_one_out'}",
        ),
        (
            "phase.1.advantage={kind='gdpo', weights=[1.0, 0.5, 0.5], recentre=true}",
            "phase.1.advantage={kind='gdpo', weights=[1.0, 0.5, 0.5], recenter=true}",
        ),
        (
            "phase.1.loss={kind='kl_cov', coefficient=1.0, share=0.1}",
            "phase.1.loss={kind='kl_cov', coefficient=1.0, fraction=0.1}",
        ),
        (
            &correction("path", "normalise", "path_sum"),
            &correction("sequence", "normalize", "sequence_sum"),
        ),
        (
            &format!("{samplers}, adopt_seconds=9, answer_seconds=8}}"),
            &format!("{samplers}, update_seconds=9, response_seconds=8}}"),
        ),
    ];
    let old = SMALL.replace("optimizer", "optimiser").replace("normalizer", "normaliser");
    assert_ne!(old, SMALL);
    assert_eq!(load(&old, &[]).unwrap(), load(SMALL, &[]).unwrap());
    for (old, new) in pairs {
        let overrides = |text: &&str| load(SMALL, &text.split('\0').collect::<Vec<_>>());
        let recipe = overrides(new).unwrap();
        assert_eq!(overrides(old).unwrap(), recipe, "{old}");
        assert_eq!(overrides(&&*format!("{old}\0{new}")).unwrap(), recipe, "{old}, then {new}");
        assert_eq!(overrides(&&*format!("{new}\0{old}")).unwrap(), recipe, "{new}, then {old}");
        // A stored recipe contains the new names, and no old run is thereby another one.
        assert_eq!(load(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe, "{new}");
    }
}
