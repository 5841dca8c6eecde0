//! Tests of recipes with a game.

use super::*;

const GAME: &str = include_str!("testing/game.toml");

#[test]
fn game_round_trips_and_builds_loop() {
    let recipe = load(GAME, &[]).unwrap();
    assert_eq!(load(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
    let built = recipe.game_loop(|_, _| panic!("werewolf is built in")).unwrap();
    let options = &built.options;
    assert_eq!((options.rules.name(), options.other.as_deref()), ("werewolf", Some("default")));
    assert_eq!(options.systems.keys().collect::<Vec<_>>(), ["good"]);
    assert_eq!((options.illegal_reward, options.default_reward), (-0.5, -0.1));
    // A recipe without a game has no table of it.
    assert!(!load(SMALL, &[]).unwrap().to_toml().unwrap().contains("[game]"));
}

#[test]
fn prompts_of_policies_need_game_and_slots() {
    let own = |prompts: &str| {
        format!(
            "agent.good.policy=[{{name='wolf', weight=0.5, {prompts}}}, {{name='api', weight=0.5}}, \
             {{name='past', weight=1}}]"
        )
    };
    let bold = own("system='{instructions} Be bold.', format='JSON: {format}'");
    let recipe = load(GAME, &[&bold, "agent.good.mixture_seats='together'"]).unwrap();
    assert_eq!(load(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
    let built = recipe.game_loop(|_, _| panic!("werewolf is built in")).unwrap();
    assert_eq!(built.options.policy_prompts.len(), 1);
    let prompts = &built.options.policy_prompts[&("good".to_owned(), "wolf".to_owned())];
    assert_eq!(prompts.system.as_deref(), Some("{instructions} Be bold."));
    assert_eq!(prompts.format.as_deref(), Some("JSON: {format}"));
    for (key, slot) in [("system", "{instructions}"), ("format", "{format}")] {
        let error = load(GAME, &[&own(&format!("{key}='Be bold.'"))]).unwrap_err();
        let key = format!("`agent.good.policy.0.{key}`");
        assert!(error.contains(&key) && error.contains(slot), "{error}");
    }
    for change in [
        "agent.mixture_seats='together'",
        "agent.policy=[{name='default', weight=1, format='{format}'}]",
    ] {
        let error = load(SMALL, &[change]).unwrap_err();
        assert!(error.contains("left out for an agent that plays no game"), "{error}");
    }
}

#[test]
fn seeds_of_training_and_evaluation_are_separate() {
    let keys = SeedKeys { train: 20, agent: String::new() };
    let seed = |task: &levade_tasks::Task| task.row["seed"].as_u64().unwrap();
    assert_eq!(
        keys.training_tasks().iter().map(seed).collect::<Vec<_>>(),
        (0..20).collect::<Vec<_>>()
    );
    let held_out = |split| keys.held_out_tasks(split, 5).iter().map(seed).collect::<Vec<_>>();
    assert!(held_out(1).iter().all(|seed| *seed > u64::from(u32::MAX)));
    assert!(held_out(1).iter().all(|seed| !held_out(2).contains(seed)));
}

#[test]
fn game_errors_name_key_and_choices() {
    for (change, wants) in [
        ("game.name='chess'", &["`game`", "chess", "werewolf"][..]),
        ("game.options.players=8", &["`game`", "7, 9 or 12"]),
        ("game.agents.wolfs='good'", &["`game.agents.wolfs`", "`wolves`", "`seer`"]),
        ("game.agents.seer='nobody'", &["`game.agents.seer`", "`good`"]),
        ("game.format='Reply.'", &["`game.format`", "{format}"]),
        ("game.seconds=0.0", &["`game.seconds`"]),
        ("reward.of='wolves'", &["`reward.of`", "`good`"]),
        ("agent.kind='tools'", &["`agent.kind`", "\"game\""]),
        ("agent.good.system='Be brief.'", &["`agent.good.system`", "{instructions}"]),
        (
            "agent.context={kind='summarize', train=true}",
            &["`agent.context.train` is true", "the reward of a seat"],
        ),
        ("tasks.0={kind='arithmetic'}", &["`tasks`", "\"seeds\""]),
        ("phase.0.group_size=1", &["`phase.0.group_size`", "at least 2"]),
        ("agent.policy='api'", &["`agent.policy`"]),
        ("policy.past.of='api'", &["`policy.past.of` is \"api\"", "a trained policy", "`wolf`"]),
        ("policy.past.keep=65", &["`policy.past.keep` is 65", "at most 64", "in memory"]),
        ("policy.past.every=0", &["`policy.past.every` is 0"]),
        ("policy.past.draw='oldest'", &["`policy.past.draw`", "`uniform`", "`hardest`"]),
        ("cluster.samplers={kind='vllm'}", &["`policy.past.kind`", "`cluster.samplers`"]),
    ] {
        let error = load(GAME, &[change]).unwrap_err();
        assert!(wants.iter().all(|want| error.contains(want)), "{change}: {error}");
    }
    // A seat is compared with itself, whatever the estimator.
    let single_attempt =
        ["phase.0.group_size=1", "phase.0.advantage={kind='reinforce_plus_plus', gamma=1.0}"];
    let error = load(GAME, &single_attempt).unwrap_err();
    assert!(error.contains("the same seat"), "{error}");
    // An opponent of another policy can be constrained, but no trained policy can.
    let trained = ["game.constrained=true", "agent.good={policy='wolf'}"];
    let error = load(GAME, &trained).unwrap_err();
    assert!(error.contains("`game.constrained`") && error.contains("never trained"), "{error}");
    assert!(load(GAME, &trained[..1]).unwrap().game.constrained);
    // Names of agents cannot contain the separator of seats.
    let seat = ["agent={kind='game', policy='wolf', 'wolf@3'={}}", "game.agents={}"];
    let error = load(GAME, &seat).unwrap_err();
    assert!(error.contains("letters, digits, - and _"), "{error}");
}

#[test]
fn loss_of_phase_has_its_bounds_penalty_and_bonus() {
    let loss = |changes: &[&str]| {
        let recipe = load(GAME, changes).unwrap();
        let Phase::Rl(keys) = &recipe.phase[0] else { panic!() };
        (keys.loss(), keys.learning_rate)
    };
    let (plain, rate) = loss(&["phase.0.clip_low=0.1", "phase.0.clip_high=0.3"]);
    assert_eq!((plain, rate), (levade_rl::Loss::clip(0.1, 0.3), 1e-5));
    let kl = "phase.0.kl={estimator='k3', coefficient=0.02}";
    let (full, rate) = loss(&[kl, "phase.0.entropy=0.01", "phase.0.learning_rate=1e-6"]);
    assert_eq!((full.kl.unwrap().coefficient, full.entropy, rate), (0.02, 0.01, 1e-6));
}
