//! Serves a model that returns scripted texts, so that clients can be tried without a model:
//!
//! ```sh
//! cargo run -p levade-gateway --example scripted -- 127.0.0.1:8123 'Hello.' '<think>Hm</think>Hi.'
//! ```
//!
//! Each call gets the next text. After the last text, the sampler starts again with the first. Tool
//! calls use the tags of Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Calls with
//! the printed key belong to one attempt. When the server is interrupted, it prints the origin of
//! each of their prompts.

#[path = "../src/scripted.rs"]
mod scripted;

use std::sync::Arc;
use std::time::Duration;

use levade_call::{Backend, Party, PartyLimits, SamplingRule};
use levade_conversation::{Format, Options as History};
use levade_gateway::{CallPattern, Gateway, GatewayOptions, Model, Route, SessionOptions, serve};
use levade_policy::SamplingParams;
use levade_text::testing::{IM_END, tiny_chat};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address =
        arguments.next().ok_or("expected an address and the texts that the model returns")?;
    let texts: Vec<String> = arguments.collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let party = Party::new(
        "scripted",
        Backend::Tokens(Arc::new(
            scripted::ScriptedSampler::new(&texts, IM_END).paced(Duration::from_millis(1)),
        )),
        Some(Arc::new(Format::new(Arc::new(tiny_chat()?), History::default()))),
        PartyLimits { context: 1 << 20, timeout: Duration::from_secs(60) },
        SamplingRule::Default(SamplingParams { max_tokens: 4096, ..SamplingParams::default() }),
    );
    let model = Model { party: Arc::new(party.clone()), created: 0 };
    let gateway = Gateway::new(vec![model], GatewayOptions::default());
    let party = Arc::new(Party { agent: "default".into(), ..party });
    let session = gateway.open_session(SessionOptions {
        rollout: "tried".into(),
        attempt: "tried".into(),
        routes: vec![Route { party, pattern: CallPattern::default() }],
        recorder: gateway.new_recorder("tried", (0, 0), (u32::MAX, usize::MAX)),
        rewards: false,
    });
    let listener = tokio::net::TcpListener::bind(&address).await?;
    println!("http://{} {}", listener.local_addr()?, session.key());
    let stop = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    serve(&gateway, listener, stop).await?;
    let (recorded, _) = session.close(Duration::from_secs(1)).await;
    for call in &recorded.calls {
        println!("{:?}: {} tokens, then {}", call.origin, call.prompt, call.tokens);
    }
    println!("counts: {:?}", recorded.counts);
    println!("drift: {:?}", recorded.drift);
    println!("refused: {:?}", recorded.rejected);
    println!("unknown: {:?}", gateway.unknown_fields());
    Ok(())
}
