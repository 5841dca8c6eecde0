//! Sleep of fake servers: what a real server loses, and what crashes it.

use std::sync::{Arc, Mutex};

use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{Behaviour, Json, Shared, Speaks, die, wait_while_paused};

/// Requests to servers and a learner, in order.
pub type Log = Arc<Mutex<Vec<String>>>;

/// Device memory that a fake has released.
#[derive(Default)]
pub struct Given {
    weights: bool,
    cache: bool,
    /// Whether no weights were loaded since their memory was released.
    is_empty: bool,
    /// Number of samples without weights, and of wake or load calls that would crash a real server.
    pub nonsense: usize,
}

impl Given {
    /// Returns whether the fake occupies any device memory.
    pub fn is_awake(&self) -> bool {
        !(self.weights && self.cache)
    }
}

/// Kills the fake during a response, which breaks the connection.
fn crash(shared: &Shared) -> ! {
    if let Some(task) = shared.task.lock().unwrap().take() {
        task.abort();
    }
    // Without a message, because no test has failed.
    std::panic::resume_unwind(Box::new("a fake was killed"))
}

/// Kills a server that accesses released memory, and counts the event.
async fn faults(shared: &Shared) -> ! {
    shared.life.lock().unwrap().given.nonsense += 1;
    die(shared).await
}

/// Waits until a server may sample, and checks that it has weights and memory.
pub async fn may_draw(shared: &Shared) {
    wait_while_paused(shared).await;
    let (is_torn, is_empty) = {
        let life = shared.life.lock().unwrap();
        (life.given.weights || life.given.cache, life.given.is_empty)
    };
    if is_torn {
        faults(shared).await;
    }
    if is_empty {
        shared.life.lock().unwrap().given.nonsense += 1;
    }
}

/// Checks that the memory of the weights is allocated before they are written.
pub async fn may_write(shared: &Shared) {
    if shared.life.lock().unwrap().given.weights {
        faults(shared).await;
    }
}

/// Records that all weights were written.
pub fn written(shared: &Shared) {
    shared.life.lock().unwrap().given.is_empty = false;
}

fn ok(value: Value) -> Response {
    Json(value).into_response()
}

pub async fn answer(shared: &Shared, behaviour: &Behaviour, uri: &Uri, body: &Value) -> Option<Response> {
    let sglang = shared.speaks == Speaks::Sglang;
    let query = uri.query().unwrap_or_default();
    match uri.path() {
        "/health" => Some(ok(json!({}))),
        "/is_sleeping" if !sglang => {
            let life = shared.life.lock().unwrap();
            let asleep = life.paused || life.given.weights || life.given.cache;
            Some(ok(json!({ "is_sleeping": asleep })))
        }
        "/server_info" if !sglang => {
            let model = json!({ "enable_sleep_mode": behaviour.without != "sleep mode" });
            let lora = match behaviour.without {
                "lora" => Value::Null,
                "max loras" => json!({ "max_loras": 1 }),
                _ => json!({ "max_loras": 2 }),
            };
            let transfer = match behaviour.without {
                "weight transfer" => Value::Null,
                "gloo" => json!({ "backend": "nccl" }),
                _ => json!({ "backend": "gloo" }),
            };
            let device = if behaviour.without.starts_with("GPU") { "cpu" } else { "cuda" };
            let config = json!({
                "model_config": model,
                "lora_config": lora,
                "weight_transfer_config": transfer,
                "device_config": { "device": device },
                "scheduler_config": { "enable_chunked_prefill": behaviour.without != "GPU and chunks" },
            });
            Some(ok(json!({ "vllm_config": config })))
        }
        "/sleep" | "/release_memory_occupation" if behaviour.refuses_sleep => {
            let error = json!({ "error": { "message": "Memory usage increased after sleeping." } });
            Some((StatusCode::INTERNAL_SERVER_ERROR, Json(error)).into_response())
        }
        "/sleep" | "/release_memory_occupation" if behaviour.dies_sleeping => crash(shared),
        "/wake_up" | "/resume_memory_occupation" if behaviour.dies_waking => crash(shared),
        "/sleep" if !sglang => {
            let mut life = shared.life.lock().unwrap();
            life.paused = true;
            if !life.given.weights {
                (life.given.weights, life.given.cache) = (true, true);
                life.given.is_empty = query.contains("level=2");
                life.shift = 1000;
            }
            Some(ok(json!({ "status": "sleeping" })))
        }
        "/wake_up" if !sglang => {
            let mut life = shared.life.lock().unwrap();
            life.given.weights &= query != "tags=weights";
            life.given.cache &= query != "tags=kv_cache";
            if !life.given.weights && !life.given.cache {
                life.paused = false;
            }
            Some(ok(json!({ "status": "awake" })))
        }
        "/release_memory_occupation" if sglang => {
            let idle = {
                let life = shared.life.lock().unwrap();
                life.paused && !life.given.weights && !life.given.cache
            };
            if !idle {
                faults(shared).await;
            }
            let mut life = shared.life.lock().unwrap();
            assert_eq!(body["tags"], json!(["kv_cache", "weights"]));
            (life.given.weights, life.given.cache, life.given.is_empty) = (true, true, true);
            life.shift = 1000;
            Some(ok(Value::Null))
        }
        "/resume_memory_occupation" if sglang => {
            let was_given = {
                let mut life = shared.life.lock().unwrap();
                match body["tags"][0].as_str() {
                    Some("weights") => std::mem::take(&mut life.given.weights),
                    _ => std::mem::take(&mut life.given.cache),
                }
            };
            if !was_given {
                faults(shared).await;
            }
            Some(ok(Value::Null))
        }
        _ => None,
    }
}
