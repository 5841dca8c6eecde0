use levade_policy::{Simulator, SimulatorConfig};

use super::*;
use crate::testing;

fn mixture(name: &str, trained: &[bool], index: usize) -> Agent {
    let player = |(index, is_trained): (usize, &bool)| {
        let sampler = Arc::new(Simulator::new(SimulatorConfig::default()));
        Player { is_trained: *is_trained, ..testing::player(&index.to_string(), sampler) }
    };
    let players: Vec<Player> = trained.iter().enumerate().map(player).collect();
    let agent = testing::agent(name, players[0].clone(), Vec::new());
    Agent { players, picker: Some(Arc::new(move |_, _, _| index)), ..agent }
}

#[test]
fn player_of_own_agent_is_trained_in_evaluations() {
    let played = |is_evaluation, trained: &[bool]| -> Vec<String> {
        let player = |index| {
            let context = testing::context(vec![mixture("own", trained, index)]);
            let context = AttemptContext { is_evaluation, ..context };
            context.select_player(context.find_own_agent().unwrap()).unwrap().policy.clone()
        };
        (0..trained.len()).map(player).collect()
    };
    let trained = [false, true, false, true];
    assert_eq!(played(false, &trained), ["0", "1", "2", "3"]);
    assert_eq!(played(true, &trained), ["1", "1", "1", "3"]);
    assert_eq!(played(true, &[false, false]), ["0", "1"]);
}

#[test]
fn player_of_other_agent_follows_mixture_in_evaluations() {
    let agents = vec![mixture("own", &[true], 0), mixture("other", &[false, true], 0)];
    let context = AttemptContext { is_evaluation: true, ..testing::context(agents) };
    let other = context.roster.find("other").unwrap();
    assert_eq!(context.select_player(other).unwrap().policy, "0");
}

#[test]
fn untrained_sampling_is_fixed_only_in_tool_loop() {
    let context = testing::context(vec![mixture("own", &[false], 0)]);
    let party = |caller| {
        let casting = PartyBuilder::new(&context, caller).unwrap();
        let own = context.find_own_agent().unwrap();
        casting.create_party(own, context.select_player(own).unwrap()).unwrap()
    };
    let fixed = SamplingParams { max_tokens: context.limits.max_tokens, ..context.params.clone() };
    assert_eq!(party(CallerKind::ToolLoop).sampling, SamplingRule::Fixed(fixed));
    let of_client = SamplingParams { max_tokens: 4096, ..SamplingParams::default() };
    assert_eq!(party(CallerKind::Program).sampling, SamplingRule::Default(of_client));
    assert_eq!(party(CallerKind::ToolLoop).limits.context, usize::MAX);
    assert_eq!(party(CallerKind::Program).limits.context, 4096);
}

#[test]
fn missing_agent_and_player_are_named_in_errors() {
    let agent = mixture("own", &[true], 3);
    let context = AttemptContext { agent: "solver".into(), ..testing::context(vec![agent]) };
    assert_eq!(
        context.find_own_agent().map(|_| ()).unwrap_err(),
        "there is no agent \"solver\"; available agents: own"
    );
    let why = context.select_player(&context.roster.agents()[0]).map(|_| ()).unwrap_err();
    assert_eq!(why, "the mixture of the agent \"own\" has no policy at index 3");
}

#[test]
fn trained_program_agents_have_own_sampling_and_limits() {
    let own = mixture("own", &[true], 0);
    let mut other = mixture("other", &[true], 0);
    other.limits.max_tokens = 50;
    other.samples = Arc::new(|params| SamplingParams { temperature: 0.25, ..params });
    let context = AttemptContext { has_own_sampling: true, ..testing::context(vec![own, other]) };
    let fixed = |context: &AttemptContext, index: usize| {
        let agent = &context.roster.agents()[index];
        let casting = PartyBuilder::new(context, CallerKind::Program).unwrap();
        let party = casting.create_party(agent, context.select_player(agent).unwrap()).unwrap();
        let params = party.fixed_params().unwrap();
        (params.temperature, params.max_tokens)
    };
    assert_eq!((fixed(&context, 0), fixed(&context, 1)), ((0.9, 1000), (0.25, 50)));
    // Evaluations use the same sampling parameters for all agents, and can limit the attempt's own
    // agent.
    let mut context = AttemptContext { has_own_sampling: false, ..context };
    context.limits.max_tokens = 10;
    assert_eq!((fixed(&context, 0), fixed(&context, 1)), ((0.9, 10), (0.9, 50)));
}
