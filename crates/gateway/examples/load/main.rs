//! Measures the overhead of the gateway, over samplers that take almost no time. Each command
//! prints one line of JSON:
//!
//! ```sh
//! load serve ADDRESS [PACE]            # a gateway on one thread; PACE: ms per token
//! load calls ADDRESS CONNECTIONS SECONDS [stream]  # sequential chat completions
//! load streams ADDRESS NUMBER PID            # concurrent streams, and the server's memory
//! load sampler NUMBER                        # only the sampler, without a gateway
//! load turns TURNS ROUNDS                    # an early and a late turn of a session, without HTTP
//! ```
//!
//! `bench/gateway.py` runs these commands, and runs another gateway for comparison.

mod client;
#[path = "../../src/scripted.rs"]
mod scripted;

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use levade_call::{Backend, Input, Party, PartyLimits, SamplingRule};
use levade_conversation::{Format, Options as History};
use levade_gateway::{
    Call, CallPattern, Caller, Gateway, GatewayOptions, Model, Route, SessionOptions,
};
use levade_policy::{SampleRequest, Sampler, SamplingParams, Simulator, SimulatorConfig};
use levade_text::Message;
use levade_text::testing::{IM_END, VOCABULARY, tiny_chat};
use serde_json::{Value, json};

/// Maximum number of tokens of a completion.
const COMPLETION_TOKENS: usize = 16;
/// Maximum number of tokens of a prompt and its completion together.
const CONTEXT: usize = 1 << 20;
/// Name of the model.
const MODEL: &str = "tiny";
/// Timeout for one completion.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Result of a command.
pub type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let found = match arguments[..] {
        ["serve", address] => return serve_gateway(address, Arc::new(simulator())).await,
        ["serve", address, pace] => {
            let pace = Duration::from_millis(pace.parse()?);
            return serve_gateway(address, Arc::new(script().paced(pace))).await;
        }
        ["calls", address, connections, seconds] => {
            client::calls(
                address,
                connections.parse()?,
                Duration::from_secs_f64(seconds.parse()?),
                false,
            )
            .await?
        }
        ["calls", address, connections, seconds, "stream"] => {
            client::calls(
                address,
                connections.parse()?,
                Duration::from_secs_f64(seconds.parse()?),
                true,
            )
            .await?
        }
        ["streams", address, number, pid] => {
            client::streams(address, number.parse()?, pid.parse()?).await?
        }
        ["sampler", number] => measure_sequential(number.parse()?).await?,
        ["turns", turns, rounds] => session(turns.parse()?, rounds.parse()?).await?,
        _ => {
            return Err(format!(
                "{arguments:?} is not a command; the comment at the top of main.rs lists the \
                 commands"
            )
            .into());
        }
    };
    println!("{found}");
    Ok(())
}

/// Creates a simulator whose completions are random bytes, sampled within microseconds.
fn simulator() -> Simulator {
    let config = SimulatorConfig {
        vocabulary: VOCABULARY,
        context: CONTEXT,
        rows: 64,
        ..Default::default()
    };
    Simulator::new(config)
}

/// Creates a sampler that returns the same [`COMPLETION_TOKENS`] tokens for every prompt.
fn script() -> scripted::ScriptedSampler {
    scripted::ScriptedSampler::new(&["Fifteen letters"], IM_END)
}

/// Creates a model named [`MODEL`].
fn model(sampler: Arc<dyn Sampler>) -> Result<Model> {
    let party = Party::new(
        MODEL,
        Backend::Tokens(sampler),
        Some(Arc::new(Format::new(Arc::new(tiny_chat()?), History::default()))),
        PartyLimits { context: CONTEXT, timeout: TIMEOUT },
        SamplingRule::Default(SamplingParams {
            max_tokens: COMPLETION_TOKENS,
            ..SamplingParams::default()
        }),
    );
    Ok(Model { party: Arc::new(party), created: 0 })
}

async fn serve_gateway(address: &str, sampler: Arc<dyn Sampler>) -> Result<()> {
    let options =
        GatewayOptions { running: 1 << 14, permit_timeout: TIMEOUT, ..GatewayOptions::default() };
    let gateway = Gateway::new(vec![model(sampler)?], options);
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("{}", json!({ "address": listener.local_addr()?.to_string() }));
    let stop = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    Ok(levade_gateway::serve(&gateway, listener, stop).await?)
}

/// Returns the messages of a prompt of 200 tokens, since [`tiny_chat`] has one token per byte.
/// Prompts with different numbers differ.
pub fn messages(number: usize) -> [Message; 2] {
    const TASK: &str = "A train leaves at noon and takes three hours for the way; another leaves \
                        at one, by the same way, and takes two. When and where do they meet?";
    [Message::system("Think, then answer."), Message::user(format!("{number:06}. {TASK}"))]
}

/// Measures the sampler without a gateway, with the prompts of [`client::calls`].
async fn measure_sequential(number: usize) -> Result<Value> {
    let sampler = simulator();
    let chat = tiny_chat()?;
    let mut times = Vec::new();
    let mut tokens = 0;
    let mut prompts = 0;
    for at in 0..number {
        let prompt = chat.prompt(&messages(at), &[])?;
        prompts += prompt.len();
        let params = SamplingParams {
            max_tokens: COMPLETION_TOKENS,
            stop_ids: chat.stop_ids().to_vec(),
            ..SamplingParams::default()
        };
        let request = SampleRequest { seed: at as u64, prompt, params, ..SampleRequest::default() };
        let started = Instant::now();
        tokens += sampler.sample(request).await?.collect(TIMEOUT).await?.tokens.len();
        times.push(started.elapsed());
    }
    let prompt = prompts as f64 / number as f64;
    let completion = tokens as f64 / number as f64;
    Ok(
        json!({ "p50_ms": quantile(&mut times, 0.5), "prompt_tokens": prompt, "reply_tokens": completion }),
    )
}

/// Runs sessions of `turns` turns, each of which adds 200 tokens to the prompt. Measures the time
/// of a turn from its call to its recorded completion.
async fn session(turns: usize, rounds: usize) -> Result<Value> {
    let model = model(Arc::new(script()))?;
    let gateway = Gateway::new(vec![model.clone()], GatewayOptions::default());
    let mut times = vec![Vec::with_capacity(rounds); turns];
    let mut prompt = 0;
    let mut paths = 0;
    for round in 0..rounds {
        let party = Arc::new(Party { agent: "default".into(), ..(*model.party).clone() });
        let attempt = format!("a{round}");
        let session = gateway.open_session(SessionOptions {
            rollout: "r".into(),
            recorder: gateway.new_recorder(&attempt, (1, round as u64), (u32::MAX, usize::MAX)),
            attempt,
            routes: vec![Route { party, pattern: CallPattern::default() }],
            rewards: false,
        });
        let caller = Caller { session: Some(Arc::clone(&session)), ..Caller::default() };
        let mut history: Vec<Message> = messages(0).into();
        for (turn, times) in times.iter_mut().enumerate() {
            let call = Call::new(MODEL, Input::Messages(history.clone()));
            let started = Instant::now();
            let reader = gateway.call(&caller, call).await?;
            prompt = reader.head().prompt.len();
            let end = reader.completion().await?;
            times.push(started.elapsed());
            history.push(end.message);
            history.extend(messages(turn + 1).into_iter().skip(1));
        }
        let (recorded, _) = session.close(TIMEOUT).await;
        gateway.forget_session(&session);
        let continued = recorded.counts.continued as usize;
        if continued + 1 != turns {
            return Err(
                format!("only {continued} of {turns} turns continued the previous turn").into()
            );
        }
        paths += recorded.trajectory.leaves().len();
    }
    let mut of = |turn: usize| quantile(&mut times[turn - 1], 0.5);
    let second = of(2);
    let middle = of(turns.div_ceil(2));
    let last = of(turns);
    Ok(json!({
        "turns": turns, "rounds": rounds, "prompt_tokens": prompt, "paths": paths,
        "second_ms": second, "middle_ms": middle, "last_ms": last, "ratio": last / second,
    }))
}

/// Returns a quantile of durations, in milliseconds.
pub fn quantile(times: &mut [Duration], fraction: f64) -> f64 {
    times.sort_unstable();
    let at = (times.len() as f64 * fraction) as usize;
    times
        .get(at.min(times.len().saturating_sub(1)))
        .map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}
