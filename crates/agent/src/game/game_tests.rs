use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use levade_call::{ApiError, Backend, ChatApi, ChatCompletion, ChatDelta, ChatQuery, ErrorKind};
use levade_conversation::Overflow;
use levade_policy::{FinishReason, Simulator, SimulatorConfig};
use levade_tasks::Task;
use levade_text::testing::{VOCABULARY, tiny_chat};
use levade_text::{Message, Vocabulary};
use levade_tree::{Kind, agent_of};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::roster::{MixtureScope, MixtureSeats, Player};
use crate::teacher::Teacher;
use crate::testing;

type CompletionFn = dyn Fn(usize, &ChatQuery) -> Option<Result<String, ApiError>> + Send + Sync;

/// Chat API whose completion is a function of the call's number and the query. No completion hangs.
struct ScriptedApi {
    completion: Box<CompletionFn>,
    queries: Mutex<Vec<ChatQuery>>,
    running: Arc<AtomicUsize>,
    max_running: Arc<AtomicUsize>,
}

impl ScriptedApi {
    fn new(
        completion: impl Fn(usize, &ChatQuery) -> Option<Result<String, ApiError>>
        + Send
        + Sync
        + 'static,
    ) -> Arc<Self> {
        Arc::new(ScriptedApi {
            completion: Box::new(completion),
            queries: Mutex::default(),
            running: Arc::default(),
            max_running: Arc::default(),
        })
    }
}

impl ChatApi for ScriptedApi {
    fn respond(&self, query: ChatQuery) -> UnboundedReceiver<Result<ChatDelta, ApiError>> {
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        let number = self.queries.lock().unwrap().len();
        let completion = (self.completion)(number, &query);
        self.queries.lock().unwrap().push(query);
        let (running, max) = (Arc::clone(&self.running), Arc::clone(&self.max_running));
        tokio::spawn(async move {
            max.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(1)).await;
            running.fetch_sub(1, Ordering::SeqCst);
            let done = |text: String| {
                ChatDelta::Done(Box::new(ChatCompletion {
                    message: Message::assistant(text),
                    finish: FinishReason::StopId,
                    prompt_tokens: 0,
                    tokens: 1,
                    reasoning_tokens: 0,
                }))
            };
            match completion {
                Some(completion) => drop(sender.send(completion.map(done))),
                None => std::future::pending().await,
            }
        });
        receiver
    }
}

fn last_text(query: &ChatQuery) -> String {
    query.messages.last().unwrap().content.as_str().to_owned()
}

/// Returns the last choice that the format in the prompt permits, with a secret.
fn legal(query: &ChatQuery) -> String {
    let mut texts = query.messages.iter().rev().map(|message| message.content.as_str());
    let text = texts.find(|text| text.contains("Reply with one JSON object")).unwrap();
    let mut completion = json!({"reasoning": "SECRET", "say": "hello"});
    if let Some((_, choices)) = text.rsplit_once("\"move\": ") {
        let choices = choices.trim_end().trim_end_matches('}');
        let last = choices.rsplit(" | ").next().unwrap();
        completion["move"] = serde_json::from_str(last).unwrap();
    }
    completion.to_string()
}

fn api_agent(name: &str, api: Arc<ScriptedApi>) -> Agent {
    let simulator = Arc::new(Simulator::new(SimulatorConfig::default()));
    let player = Player {
        backend: Backend::Messages(api),
        format: None,
        is_trained: false,
        ..testing::player(name, simulator)
    };
    let mut agent = testing::agent(name, player, Vec::new());
    agent.limits.max_turns = 1000;
    agent.limits.max_tokens = 100_000;
    agent
}

const CONTEXT: usize = 1 << 16;

fn simulator() -> Simulator {
    let config = SimulatorConfig { vocabulary: VOCABULARY, context: CONTEXT, ..Default::default() };
    Simulator::new(config)
}

fn simulated_agent(name: &str) -> Agent {
    let player = testing::player(name, Arc::new(simulator()));
    let mut agent = testing::agent(name, Player { context: CONTEXT, ..player }, Vec::new());
    agent.limits.max_turns = 1000;
    agent
}

fn context(agents: Vec<Agent>, seed: u64) -> AttemptContext {
    let row = Map::from_iter([("seed".to_owned(), json!(seed))]);
    let task = Task { row: row.into(), ..Task::default() };
    AttemptContext { task, ..testing::context(agents) }
}

fn game(name: &str, options: Value, agents: &[(&str, &str)]) -> GameLoop {
    let rules = GameRules::from_built_in_game(name).unwrap();
    let agents = agents.iter().map(|(seat, agent)| ((*seat).to_owned(), (*agent).to_owned()));
    let options = GameOptions {
        agents: agents.collect(),
        illegal_reward: -0.25,
        ..GameOptions::new(rules, options, "default")
    };
    GameLoop { options: options.into() }
}

fn rewards(attempt: &Attempt) -> Vec<(String, f64)> {
    let rewards = attempt.outcome.scorer_inputs["program"]["rewards"].as_array().unwrap();
    let named = rewards.iter().filter_map(|reward| {
        Some((reward["agent"].as_str()?.to_owned(), reward["value"].as_f64()?))
    });
    named.collect()
}

/// Replays the recorded moves, and checks that every position is bit-equal.
fn check_replay(attempt: &Attempt, options: &Value) {
    let record = &attempt.outcome.scorer_inputs["game"];
    let game = levade_game::find(record["name"].as_str().unwrap()).unwrap();
    let mut state = game.start(options, record["seed"].as_u64().unwrap()).unwrap().state;
    let moves: Vec<Vec<(usize, Move)>> = serde_json::from_value(record["moves"].clone()).unwrap();
    let positions = record["positions"].as_array().unwrap();
    assert_eq!(positions.len(), moves.len() + 1);
    for (turn, position) in positions.iter().enumerate() {
        assert_eq!(state.save().to_string(), position.to_string(), "turn {turn}");
        if let Some(moves) = moves.get(turn) {
            state.apply(moves).unwrap();
        }
    }
    assert!(matches!(state.next(), Next::Over(_)));
}

#[tokio::test(start_paused = true)]
async fn match_is_played_to_end_by_legal_moves() {
    let api = ScriptedApi::new(|_, query| Some(Ok(legal(query))));
    let agents = vec![api_agent("default", api.clone()), api_agent("wolf", api.clone())];
    let options = json!({"players": 9, "max_days": 2});
    let game = game("werewolf", options.clone(), &[("wolves", "wolf")]);
    let attempt = game.run(context(agents, 3)).await;
    assert_eq!((attempt.outcome.error.as_deref(), attempt.outcome.finish), (None, Finish::Ended));
    check_replay(&attempt, &options);
    let names: Vec<String> = rewards(&attempt).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), 9);
    assert_eq!(names.iter().filter(|name| agent_of(name) == "wolf").count(), 3);
    assert!(names.iter().enumerate().all(|(i, name)| name.ends_with(&format!("@{}", i + 1))));
    assert_eq!(attempt.outcome.tool_metrics["game/wolf.defaults"], 0.0);
    // The votes of all living players are requested at once.
    assert!(api.max_running.load(Ordering::SeqCst) >= 7);
    // Reasoning stays in the seat's own completions, and statements reach the other seats.
    let queries = api.queries.lock().unwrap();
    let heard = |text: &str| {
        let received = |message: &&Message| message.role == levade_text::Role::User;
        let messages = queries.iter().flat_map(|query| &query.messages).filter(received);
        messages.filter(|message| message.content.as_str().contains(text)).count()
    };
    assert_eq!(heard("SECRET"), 0);
    assert!(heard(": hello") > 0);
}

#[tokio::test]
async fn illegal_move_gets_reason_and_penalty() {
    let api = ScriptedApi::new(|number, query| {
        Some(Ok(if number == 0 { r#"{"move": 99}"#.to_owned() } else { legal(query) }))
    });
    let game = game("tic_tac_toe", Value::Null, &[]);
    let attempt = game.run(context(vec![api_agent("default", api.clone())], 1)).await;
    assert_eq!(attempt.outcome.error, None);
    let metrics = &attempt.outcome.tool_metrics;
    assert_eq!((metrics["game/default.illegal"], metrics["game/default.defaults"]), (1.0, 0.0));
    let moves = metrics["game/default.moves"];
    assert_eq!(metrics["game/default.legal"], moves / (moves + 1.0));
    assert_eq!(metrics["game/default.no_default"], 1.0);
    let rewards_of_seats = ["game/seat.1.reward", "game/seat.2.reward"].map(|name| metrics[name]);
    assert_eq!(rewards_of_seats[0], -rewards_of_seats[1]);
    assert!(rewards(&attempt).contains(&("default@1".to_owned(), -0.25)));
    let retry_message = last_text(&api.queries.lock().unwrap()[1]);
    assert!(
        retry_message.contains("99") && retry_message.contains("one of: 1, 2"),
        "{retry_message}"
    );
}

/// Moves are scored after the same conversations as in a match.
#[tokio::test]
async fn scored_conversations_match_those_of_matches() {
    let api = ScriptedApi::new(|number, _| {
        Some(Ok(format!("{{\"move\": \"{}\"}}", ["check", "bet", "call"][number])))
    });
    let agent = api_agent("default", api.clone());
    let mut game = game("kuhn", Value::Null, &[]);
    let options = GameOptions {
        agents: Default::default(),
        systems: [("default".to_owned(), format!("Play well. {INSTRUCTIONS}"))].into(),
        has_reasoning: false,
        ..GameOptions::new(GameRules::from_built_in_game("kuhn").unwrap(), Value::Null, "default")
    };
    game.options = options.into();
    let attempt = game.run(context(vec![agent.clone()], 2)).await;
    assert_eq!(attempt.outcome.error, None);
    let tree = levade_game::GameTree::new(&levade_game::Kuhn, &Value::Null, 100).unwrap();
    let queries = api.queries.lock().unwrap();
    assert_eq!(queries.len(), 3);
    for (query, seat) in queries.iter().zip([0, 1, 0]) {
        let same = (0..tree.information_sets().len()).filter(|set| {
            let path = tree.path(*set);
            let seated = (&agent, &agent.players[0]);
            probabilities::build_conversation(&game.options, &tree, &path, seated) == query.messages
        });
        let same: Vec<usize> = same.collect();
        assert_eq!(same.len(), 1, "{:?}", query.messages);
        assert_eq!(tree.information_sets()[same[0]].seat, seat);
        assert!(!last_text(query).contains("reasoning"), "{}", last_text(query));
    }
}

/// A player that always bets and calls beats one that folds, in every seat and with all cards.
#[tokio::test]
async fn versus_scores_contestant_by_rewards_of_its_seats() {
    let contestant = |name: &str, moves: [&'static str; 2]| {
        let completion = move |query: &ChatQuery| {
            let can = |choice: &&&str| last_text(query).contains(**choice);
            let choice = moves.iter().find(can).copied().unwrap();
            format!("{{\"move\": {choice}}}")
        };
        let api = ScriptedApi::new(move |_, query| Some(Ok(completion(query))));
        let agents = [("default".to_owned(), api_agent("default", api))].into();
        Contestant { name: name.to_owned(), agents }
    };
    let bold = contestant("bold", ["\"bet\"", "\"call\""]);
    let timid = contestant("timid", ["\"check\"", "\"fold\""]);
    let game = game("kuhn", Value::Null, &[]);
    let params = levade_policy::SamplingParams::default();
    let play = async |contestants: [&Contestant; 2], side: &str, seed: u64| {
        let seeds = MatchSeeds { game: seed, sampling: 1, stream: seed };
        play_versus(&game.options, contestants, side, seeds, &params).await
    };
    for seed in 0..4 {
        for side in ["Player1", "Player2"] {
            assert_eq!(play([&bold, &timid], side, seed).await, Ok(1.0), "{side} {seed}");
            assert_eq!(play([&timid, &bold], side, seed).await, Ok(0.0), "{side} {seed}");
        }
    }
    let error = play([&bold, &timid], "nobody", 1).await.unwrap_err();
    assert!(error.contains("\"nobody\""), "{error}");
}

#[tokio::test]
async fn chat_api_cannot_score_moves() {
    let agent = api_agent("default", ScriptedApi::new(|_, _| None));
    let tree = levade_game::GameTree::new(&levade_game::Kuhn, &Value::Null, 100).unwrap();
    let game = game("kuhn", Value::Null, &[]);
    let seated = (&agent, &agent.players[0]);
    let error =
        compute_move_probabilities(&game.options, &tree, &[0], seated, 1.0).await.unwrap_err();
    assert!(error.contains("default") && error.contains("chat API"), "{error}");
}

/// A policy that writes endless nonsense plays default moves. The record separates two seats of one
/// agent.
#[tokio::test]
async fn unparsable_completions_play_default_moves() {
    let options = json!({"players": 7, "max_days": 3});
    let game = game("werewolf", options.clone(), &[("wolves", "wolf")]);
    let agents = || vec![simulated_agent("default"), simulated_agent("wolf")];
    let attempt = game.run(context(agents(), 5)).await;
    assert_eq!((attempt.outcome.error.as_deref(), attempt.outcome.finish), (None, Finish::Ended));
    check_replay(&attempt, &options);
    let metrics = &attempt.outcome.tool_metrics;
    assert!(metrics["game/wolf.defaults"] > 0.0);
    assert_eq!(metrics["game/wolf.defaults"], metrics["game/wolf.moves"]);
    let seats: std::collections::BTreeSet<&str> = attempt
        .trajectory
        .segments()
        .iter()
        .filter(|segment| segment.kind == Kind::Sampled)
        .map(|segment| segment.agent.as_str())
        .collect();
    assert_eq!(seats.iter().filter(|name| agent_of(name) == "wolf").count(), 2, "{seats:?}");
    assert_eq!(attempt.outcome.cast.len(), 7);
    // The attempt does not depend on the order in which completions arrive.
    let again = game.run(context(agents(), 5)).await;
    assert_eq!(again.outcome.scorer_inputs["game"], attempt.outcome.scorer_inputs["game"]);
}

/// A policy that writes nonsense makes only legal moves if its replies are constrained. Replies of
/// a trained policy stay free, so that its tokens are training targets.
#[tokio::test]
async fn constrained_completions_of_untrained_policies_are_legal() {
    let play = async |constrained: bool, is_trained: bool| {
        let vocabulary = Vocabulary::new(tiny_chat().unwrap().tokenizer());
        let simulator = simulator().with_grammars(Arc::new(vocabulary));
        let mut agent = simulated_agent("default");
        agent.players[0].is_trained = is_trained;
        agent.players[0].backend = Backend::Tokens(Arc::new(simulator));
        let mut game = game("kuhn", Value::Null, &[]);
        let options = (*game.options).clone();
        game.options =
            GameOptions { constrained, has_reasoning: false, retries: 0, ..options }.into();
        let attempt = game.run(context(vec![agent], 1)).await;
        assert_eq!(attempt.outcome.error, None);
        let segments = attempt.trajectory.segments().iter();
        let filtered = segments.filter(|segment| segment.filtered).count();
        (attempt.outcome.tool_metrics["game/default.illegal"], filtered)
    };
    let (illegal, filtered) = play(true, false).await;
    assert!(illegal == 0.0 && filtered >= 2, "{illegal} {filtered}");
    for (constrained, is_trained) in [(false, false), (true, true)] {
        let (illegal, filtered) = play(constrained, is_trained).await;
        assert!(illegal >= 2.0 && filtered == 0, "{constrained} {is_trained}: {illegal}");
    }
}

#[tokio::test]
async fn failing_policy_fails_attempt_and_names_seat() {
    let api = ScriptedApi::new(|number, query| {
        let error = ApiError::new(ErrorKind::Unavailable, "429: slow down");
        Some(if number == 2 { Err(error) } else { Ok(legal(query)) })
    });
    let game = game("tic_tac_toe", Value::Null, &[]);
    let attempt = game.run(context(vec![api_agent("default", api)], 1)).await;
    let error = attempt.outcome.error.unwrap();
    assert!(error.contains("default@1") && error.contains("429: slow down"), "{error}");
    assert_eq!(attempt.outcome.finish, Finish::Failed);
    assert!(!attempt.outcome.scorer_inputs.contains_key("program"), "a failed match has no reward");
}

#[tokio::test(start_paused = true)]
async fn silent_player_fails_attempt_within_deadline() {
    let api = ScriptedApi::new(|number, query| (number < 3).then(|| Ok(legal(query))));
    let game = game("tic_tac_toe", Value::Null, &[]);
    let mut agent = api_agent("default", api);
    agent.limits.completion_timeout = Duration::from_secs(1000);
    let mut context = context(vec![agent], 1);
    context.limits.completion_timeout = Duration::from_secs(1000);
    context.limits.attempt_timeout = Duration::from_secs(30);
    let attempt = game.run(context).await;
    let error = attempt.outcome.error.unwrap();
    assert!(error.contains("within 30s") && error.contains("default@2 (mark)"), "{error}");
}

#[tokio::test]
async fn seat_without_agent_is_reported() {
    let game = game("werewolf", Value::Null, &[("wolves", "nobody")]);
    let attempt = game.run(context(vec![simulated_agent("default")], 1)).await;
    let error = attempt.outcome.error.unwrap();
    assert!(error.contains("\"nobody\""), "{error}");
}

/// The rules of the recipe `nim` are a Python program, which gets one request per turn.
#[tokio::test]
async fn match_is_played_by_rules_of_worker_program() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/nim");
    let game = |command: &[&str], options: Value| {
        let launch = levade_process::Launch {
            dir: dir.into(),
            ..levade_process::Launch::new(command.iter().copied())
        };
        let timeout = Duration::from_secs(30);
        let workers = GameWorkers::new("nim", &Default::default(), launch, 2, timeout);
        let rules = GameRules::Workers(workers.into());
        GameLoop { options: GameOptions::new(rules, options, "default").into() }
    };
    let run = async |command: &[&str], options: Value| {
        let api = ScriptedApi::new(|_, query| Some(Ok(legal(query))));
        game(command, options).run(context(vec![api_agent("default", api)], 4)).await
    };
    // A check starts the rules without a policy.
    let task = context(vec![simulated_agent("default")], 4).task;
    let seats = game(&["python3", "game.py"], json!({})).dry_start(&task).await.unwrap();
    assert_eq!(seats.iter().map(|seat| &*seat.role).collect::<Vec<_>>(), ["first", "second"]);
    let error = game(&["no-such-program"], json!({})).dry_start(&task).await.unwrap_err();
    assert!(error.contains("the game nim: "), "{error}");
    let error = game(&["python3", "game.py"], json!({})).dry_start(&Task::default()).await;
    assert!(error.unwrap_err().contains("no `seed`"));
    let attempt = run(&["python3", "game.py"], json!({"stones": 7})).await;
    assert_eq!((attempt.outcome.error.as_deref(), attempt.outcome.finish), (None, Finish::Ended));
    // Both seats take as many as possible: 3, 3 and 1.
    let record = &attempt.outcome.scorer_inputs["game"];
    assert_eq!(record["moves"].as_array().unwrap().len(), 3);
    assert_eq!(record["positions"][3]["stones"], 0);
    assert_eq!(rewards(&attempt), [("default@1".to_owned(), 1.0), ("default@2".to_owned(), -1.0)]);
    // The attempt fails if the program fails, exits, or is not a game.
    for (command, options, why) in [
        (&["python3", "game.py"][..], json!({"stones": "many"}), "the game nim: "),
        (&["python3", "-c", "raise SystemExit('no rules')"], json!({}), "no rules"),
        (&["no-such-program"], json!({}), "the game nim: "),
    ] {
        let outcome = run(command, options).await.outcome;
        let error = outcome.error.unwrap();
        assert!(error.contains(why), "{command:?}: {error}");
        assert_eq!(outcome.finish, Finish::Failed);
    }
}

/// Mixtures are selected for each seat or for all, and with the scope `group` for a group.
#[tokio::test]
async fn mixture_is_selected_per_seat_and_scope() {
    let picker = |seed: u64, stream: u64, role: &str| {
        ((seed + stream) as usize + role.len() + usize::from(role.ends_with('1'))) % 2
    };
    let run = async |scope: MixtureScope, seats: MixtureSeats, stream: u64| {
        let mut agent = simulated_agent("default");
        let mut other = agent.players[0].clone();
        other.policy = "other".to_owned();
        agent.players.push(other);
        agent.picker = Some(Arc::new(picker));
        agent.mixture = scope;
        agent.mixture_seats = seats;
        let context = AttemptContext { stream, group_stream: 4, ..context(vec![agent], 1) };
        game("kuhn", Value::Null, &[]).run(context).await.outcome.cast
    };
    let by_seat = async |scope, stream| run(scope, MixtureSeats::Each, stream).await;
    let first = by_seat(MixtureScope::Attempt, 1).await;
    assert_ne!(first["default@1"], first["default@2"]);
    assert_ne!(first, by_seat(MixtureScope::Attempt, 2).await);
    assert_eq!(by_seat(MixtureScope::Group, 1).await, by_seat(MixtureScope::Group, 2).await);
    let together = run(MixtureScope::Attempt, MixtureSeats::Together, 1).await;
    assert_eq!(together["default@1"], together["default@2"]);
    assert_ne!(together, run(MixtureScope::Attempt, MixtureSeats::Together, 2).await);
}

#[tokio::test]
async fn policy_prompts_replace_those_of_agent_and_game() {
    let play = async |policy: &str| {
        let api = ScriptedApi::new(|_, query| Some(Ok(legal(query))));
        let (system, format) =
            (format!("Bluff. {INSTRUCTIONS}"), format!("ONLY. {DEFAULT_FORMAT}"));
        let prompts = PolicyPrompts { system: Some(system), format: Some(format) };
        let game = with_options(game("kuhn", Value::Null, &[]), |options| {
            let key = ("default".to_owned(), policy.to_owned());
            options.policy_prompts = [(key, prompts)].into();
        });
        let attempt = game.run(context(vec![api_agent("default", api.clone())], 1)).await;
        assert_eq!(attempt.outcome.error, None);
        let queries = api.queries.lock().unwrap();
        let system = queries[0].messages[0].content.as_str();
        assert!(system.contains("Kuhn"), "{system}");
        (system.starts_with("Bluff. "), last_text(&queries[0]).contains("ONLY. "))
    };
    assert_eq!(play("default").await, (true, true));
    assert_eq!(play("other").await, (false, false));
}

#[test]
fn summaries_are_recorded_by_seat() {
    let mut agent = simulated_agent("wolf");
    agent.players[0].context_policy.budget.overflow = Overflow::Summarize;
    let context = testing::context(vec![agent]);
    let parties = PartyBuilder::new(&context, CallerKind::ToolLoop).unwrap();
    let agent = context.find_own_agent().unwrap();
    for seat in [1, 2] {
        let party = parties.create_party(agent, &agent.players[0]).unwrap().in_seat(seat);
        let summarizer = party.summarizer.unwrap().party.agent.clone();
        assert_eq!(party.agent, format!("wolf@{seat}"));
        assert_eq!(summarizer, format!("wolf.summary@{seat}"));
    }
}

/// Returns the loop of a game with changed options.
fn with_options(game: GameLoop, change: impl FnOnce(&mut GameOptions)) -> GameLoop {
    let mut options = (*game.options).clone();
    change(&mut options);
    GameLoop { options: options.into() }
}

#[tokio::test]
async fn every_retry_precedes_default_move() {
    let api = ScriptedApi::new(|_, _| Some(Ok("nonsense".to_owned())));
    let game = with_options(game("kuhn", Value::Null, &[]), |options| {
        options.retries = 3;
        options.default_reward = -0.5;
    });
    let attempt = game.run(context(vec![api_agent("default", api.clone())], 1)).await;
    assert_eq!(attempt.outcome.error, None);
    // Both players check by default.
    let metric = |name: &str| attempt.outcome.tool_metrics[&format!("game/default.{name}")];
    assert_eq!((metric("moves"), metric("defaults"), metric("illegal")), (2.0, 2.0, 8.0));
    assert_eq!((metric("legal"), metric("no_default")), (0.0, 0.0));
    let queries = api.queries.lock().unwrap();
    assert_eq!(queries.len(), 8);
    let notices = queries.iter().filter(|query| last_text(query).contains("no legal move")).count();
    assert_eq!(notices, 6, "a player who gets a default move is not asked again");
    let rewards = rewards(&attempt);
    let of = |value: f64| rewards.iter().filter(|(_, reward)| *reward == value).count();
    assert_eq!((of(-0.25), of(-0.5)), (8, 2), "{rewards:?}");
}

#[tokio::test]
async fn move_tokens_limit_each_completion() {
    let longest = async |move_tokens: usize| {
        let game = with_options(game("kuhn", Value::Null, &[]), |options| {
            options.move_tokens = move_tokens;
            options.retries = 0;
        });
        let attempt = game.run(context(vec![simulated_agent("default")], 1)).await;
        let segments = attempt.trajectory.segments().iter();
        let lengths = segments.filter(|s| s.kind == Kind::Sampled).map(|s| s.tokens.len());
        lengths.max().unwrap()
    };
    assert_eq!(longest(5).await, 5);
    assert!(longest(0).await > 5, "0 is no limit");
}

/// Rules of a game with one seat, which rewards its two moves.
const TRANSITIONS: &str = r#"
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    done = len(request["apply"]) + request["state"] if "apply" in request else 0
    ask = {"seat": 0, "kind": "go", "prompt": "Go.", "choice": {"one_of": [1]}, "default": {"move": 1}}
    over = [{"seat": 0, "reward": 1.0, "transitions": [[0, 0.25], [1, -0.75]]}]
    answer = {"attempt": request["attempt"], "events": [], "state": done}
    answer["next"] = {"over": over} if done == 2 else {"ask": [ask]}
    if "start" in request:
        answer["seats"] = [{"index": 0, "name": "One", "role": "r", "side": "s", "instructions": ""}]
    print(json.dumps(answer), flush=True)
"#;

#[tokio::test]
async fn transition_rewards_of_program_reach_its_moves() {
    let launch = levade_process::Launch::new(["python3", "-c", TRANSITIONS]);
    let timeout = Duration::from_secs(30);
    let workers = GameWorkers::new("steps", &Default::default(), launch, 1, timeout);
    let options = GameOptions {
        retries: 0,
        move_tokens: 4,
        ..GameOptions::new(GameRules::Workers(workers.into()), Value::Null, "default")
    };
    let game = GameLoop { options: options.into() };
    let attempt = game.run(context(vec![simulated_agent("default")], 1)).await;
    assert_eq!(attempt.outcome.error, None);
    let rewards = attempt.outcome.scorer_inputs["program"]["rewards"].as_array().unwrap();
    let of_turns: Vec<(u64, f64)> = rewards
        .iter()
        .filter_map(|reward| Some((reward["turn"].as_u64()?, reward["value"].as_f64()?)))
        .collect();
    let sampled: Vec<u64> = attempt
        .trajectory
        .segments()
        .iter()
        .filter(|segment| segment.kind == Kind::Sampled)
        .map(|segment| u64::from(segment.turn))
        .collect();
    let [first, second] = sampled[..] else { panic!("{sampled:?}") };
    for want in [(first, 0.25), (second, -0.75), (first, -0.1), (second, -0.1)] {
        assert!(of_turns.contains(&want), "{want:?}: {of_turns:?}");
    }
    assert!(rewards.contains(&json!({"agent": "default@1", "value": 1.0})));
}

/// A teacher plays all seats, and its completions are demonstrations of the policies of the seats.
#[tokio::test]
async fn teacher_demonstrates_moves_of_all_seats() {
    let api = ScriptedApi::new(|_, query| Some(Ok(legal(query))));
    let agents = vec![simulated_agent("default"), simulated_agent("wolf")];
    let context = AttemptContext { teacher: Some(Teacher::Api(api.clone())), ..context(agents, 3) };
    let game = game("werewolf", json!({"max_days": 1}), &[("wolves", "wolf")]);
    assert!(game.can_be_taught(context.find_own_agent().unwrap()));
    let attempt = game.run(context).await;
    assert_eq!(attempt.outcome.error, None);
    assert_eq!(attempt.outcome.tool_metrics["game/default.no_default"], 1.0);
    let segments = attempt.trajectory.segments();
    let demonstrated: Vec<_> = segments.iter().filter(|s| s.kind != Kind::Context).collect();
    assert!(demonstrated.iter().all(|segment| segment.kind == Kind::Demonstrated));
    assert_eq!(demonstrated.len(), api.queries.lock().unwrap().len());
    let policies: std::collections::BTreeSet<&str> =
        demonstrated.iter().map(|segment| segment.policy.as_str()).collect();
    assert_eq!(policies.into_iter().collect::<Vec<_>>(), ["default", "wolf"]);
    assert!(demonstrated.iter().all(|segment| agent_of(&segment.agent) == segment.policy));
}
