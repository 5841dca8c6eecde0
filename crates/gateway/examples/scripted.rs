//! Serves a model that says given texts, so that clients can be tried without a model:
//!
//! ```sh
//! cargo run -p levade-gateway --example scripted -- 127.0.0.1:8123 'Hello.' '<think>Hm</think>Yes.'
//! ```
//!
//! Each call is answered with the next text, and the first again after the last. Tools are called in the tags
//! of Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Calls with the key that is printed
//! belong to one attempt; once the server is interrupted, it prints how each of their prompts came about.

#[path = "../src/scripted.rs"]
mod scripted;

use std::sync::Arc;
use std::time::Duration;

use levade_conversation::{Format, Options as History};
use levade_gateway::{
    Backend, Gateway, Model, Options, Route, RouteContext, SessionLimits, SessionOptions, TokenModel, When,
    serve,
};
use levade_policy::SamplingParams;
use levade_text::testing::{IM_END, tiny_chat};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().ok_or("give an address, and the texts to say")?;
    let texts: Vec<String> = arguments.collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let model = Model {
        name: "scripted".into(),
        policy: "scripted".into(),
        backend: Backend::Tokens(TokenModel {
            sampler: Arc::new(scripted::Scripted::new(&texts, IM_END).paced(Duration::from_millis(1))),
            format: Arc::new(Format::new(Arc::new(tiny_chat()?), History::default())),
            context: 1 << 20,
            sampling: SamplingParams { max_tokens: 4096, ..SamplingParams::default() },
        }),
        created: 0,
    };
    let gateway = Gateway::new(vec![model.clone()], Options::default());
    let route = Route {
        agent: "default".into(),
        model: Arc::new(model),
        when: When::default(),
        fixed: None,
        context: RouteContext::NONE,
    };
    let session = gateway.open(SessionOptions {
        rollout: "tried".into(),
        attempt: "tried".into(),
        seed: 0,
        stream: 0,
        routes: vec![route],
        limits: SessionLimits { calls: u32::MAX, tokens: usize::MAX, reply: Duration::from_secs(60) },
        rewards: false,
    });
    let listener = tokio::net::TcpListener::bind(&address).await?;
    println!("http://{} {}", listener.local_addr()?, session.key());
    let stop = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    serve(&gateway, listener, stop).await?;
    let recorded = session.close(Duration::from_secs(1)).await;
    for call in &recorded.calls {
        println!("{:?}: {} tokens, then {}", call.origin, call.prompt, call.tokens);
    }
    println!("counts: {:?}", recorded.counts);
    println!("drift: {:?}", recorded.drift);
    println!("refused: {:?}", recorded.refused);
    println!("unknown: {:?}", gateway.unknown_fields());
    Ok(())
}
