//! Sleep of fake servers: what a real server loses, and what crashes it.

use std::sync::{Arc, Mutex};

use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{Behavior, FakeState, Json, ServerApi, die, wait_while_paused};

/// Requests to servers and a learner, in order.
pub type Log = Arc<Mutex<Vec<String>>>;

/// Device memory that a fake has released.
#[derive(Default)]
pub struct ReleasedMemory {
    weights: bool,
    cache: bool,
    /// Whether no weights were loaded since their memory was released.
    is_empty: bool,
    /// Number of samples without weights, and of wake or load calls that would crash a real server.
    pub nonsense: usize,
}

impl ReleasedMemory {
    /// Returns whether the fake occupies any device memory.
    pub fn is_awake(&self) -> bool {
        !(self.weights && self.cache)
    }
}

/// Kills the fake during a response, which breaks the connection.
fn crash(state: &FakeState) -> ! {
    if let Some(task) = state.task.lock().unwrap().take() {
        task.abort();
    }
    // Without a message, because no test has failed.
    std::panic::resume_unwind(Box::new("a fake was killed"))
}

/// Kills a server that accesses released memory, and counts the event.
async fn report_fault(state: &FakeState) -> ! {
    state.life.lock().unwrap().released.nonsense += 1;
    die(state).await
}

/// Waits until a server may sample, and checks that it has weights and memory.
pub async fn check_can_sample(state: &FakeState) {
    wait_while_paused(state).await;
    let (is_torn, is_empty) = {
        let life = state.life.lock().unwrap();
        (life.released.weights || life.released.cache, life.released.is_empty)
    };
    if is_torn {
        report_fault(state).await;
    }
    if is_empty {
        state.life.lock().unwrap().released.nonsense += 1;
    }
}

/// Checks that the memory of the weights is allocated before they are written.
pub async fn check_can_write(state: &FakeState) {
    if state.life.lock().unwrap().released.weights {
        report_fault(state).await;
    }
}

/// Records that all weights were written.
pub fn written(state: &FakeState) {
    state.life.lock().unwrap().released.is_empty = false;
}

fn ok(value: Value) -> Response {
    Json(value).into_response()
}

pub async fn response(
    state: &FakeState,
    behavior: &Behavior,
    uri: &Uri,
    body: &Value,
) -> Option<Response> {
    let sglang = state.api == ServerApi::Sglang;
    let query = uri.query().unwrap_or_default();
    match uri.path() {
        "/health" => Some(ok(json!({}))),
        "/is_sleeping" if !sglang => {
            let life = state.life.lock().unwrap();
            let asleep = life.paused || life.released.weights || life.released.cache;
            Some(ok(json!({ "is_sleeping": asleep })))
        }
        "/server_info" if !sglang => {
            let model = json!({ "enable_sleep_mode": behavior.without != "sleep mode" });
            let lora = match behavior.without {
                "lora" => Value::Null,
                "max loras" => json!({ "max_loras": 1 }),
                _ => json!({ "max_loras": 2 }),
            };
            let transfer = match behavior.without {
                "weight transfer" => Value::Null,
                "gloo" => json!({ "backend": "nccl" }),
                _ => json!({ "backend": "gloo" }),
            };
            let device = if behavior.without.starts_with("GPU") { "cpu" } else { "cuda" };
            let config = json!({
                "model_config": model,
                "lora_config": lora,
                "weight_transfer_config": transfer,
                "device_config": { "device": device },
                "scheduler_config": { "enable_chunked_prefill": behavior.without != "GPU and chunks" },
            });
            Some(ok(json!({ "vllm_config": config })))
        }
        "/sleep" | "/release_memory_occupation" if behavior.rejects_sleep => {
            let error = json!({ "error": { "message": "Memory usage increased after sleeping." } });
            Some((StatusCode::INTERNAL_SERVER_ERROR, Json(error)).into_response())
        }
        "/sleep" | "/release_memory_occupation" if behavior.exits_while_sleeping => crash(state),
        "/wake_up" | "/resume_memory_occupation" if behavior.exits_while_waking => crash(state),
        "/sleep" if !sglang => {
            let mut life = state.life.lock().unwrap();
            life.paused = true;
            if !life.released.weights {
                (life.released.weights, life.released.cache) = (true, true);
                life.released.is_empty = query.contains("level=2");
                life.shift = 1000;
            }
            Some(ok(json!({ "status": "sleeping" })))
        }
        "/wake_up" if !sglang => {
            let mut life = state.life.lock().unwrap();
            life.released.weights &= query != "tags=weights";
            life.released.cache &= query != "tags=kv_cache";
            if !life.released.weights && !life.released.cache {
                life.paused = false;
            }
            Some(ok(json!({ "status": "awake" })))
        }
        "/release_memory_occupation" if sglang => {
            let is_idle = {
                let life = state.life.lock().unwrap();
                life.paused && !life.released.weights && !life.released.cache
            };
            if !is_idle {
                report_fault(state).await;
            }
            let mut life = state.life.lock().unwrap();
            assert_eq!(body["tags"], json!(["kv_cache", "weights"]));
            (life.released.weights, life.released.cache, life.released.is_empty) =
                (true, true, true);
            life.shift = 1000;
            Some(ok(Value::Null))
        }
        "/resume_memory_occupation" if sglang => {
            let was_released = {
                let mut life = state.life.lock().unwrap();
                match body["tags"][0].as_str() {
                    Some("weights") => std::mem::take(&mut life.released.weights),
                    _ => std::mem::take(&mut life.released.cache),
                }
            };
            if !was_released {
                report_fault(state).await;
            }
            Some(ok(Value::Null))
        }
        _ => None,
    }
}
