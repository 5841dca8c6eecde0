//! Fake process groups for weights: a group is a TCP connection, and weights are a version number.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use levade_policy::PolicyError;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{Behavior, FakeState, Json, die, sleep};
use crate::push::{BroadcastWeights, GroupInfo, GroupSpec, RendezvousInfo, SendReport};

/// How a learner fails to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SendFault {
    #[default]
    None,
    /// The learner holds other weights by now.
    HasMovedOn,
    /// The learner exits after the servers have joined.
    Exits,
    /// The learner sends nothing until the deadline.
    Hangs,
}

/// A learner that sends the version of its weights.
#[derive(Default)]
pub struct Sender {
    pub fault: Mutex<SendFault>,
    open: tokio::sync::Mutex<Option<(TcpListener, GroupSpec)>>,
    /// Number of sends in progress.
    pub sending: AtomicUsize,
}

#[async_trait]
impl BroadcastWeights for Sender {
    async fn open_group(&self, opening: &GroupSpec) -> Result<GroupInfo, PolicyError> {
        if *self.fault.lock().unwrap() == SendFault::HasMovedOn {
            return Err(PolicyError::Invalid("does not hold the weights any more".into()));
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        *self.open.lock().await = Some((listener, opening.clone()));
        let rendezvous = RendezvousInfo::Store { address: "127.0.0.1".into(), port };
        Ok(GroupInfo {
            rendezvous,
            names: vec!["w".into()],
            dtypes: vec!["float32".into()],
            shapes: vec![vec![2]],
        })
    }

    async fn send_to(&self, group: &str) -> Result<SendReport, PolicyError> {
        let (listener, opening) = self.open.lock().await.take().unwrap();
        assert_eq!(group, opening.group);
        self.sending.fetch_add(1, Ordering::Relaxed);
        let limit = Duration::from_secs_f64(opening.seconds);
        let fault = *self.fault.lock().unwrap();
        let sent = tokio::time::timeout(limit, async {
            let (mut peer, _) = listener.accept().await.unwrap();
            match fault {
                SendFault::Exits => return false,
                SendFault::Hangs => std::future::pending().await,
                SendFault::None | SendFault::HasMovedOn => {}
            }
            peer.write_u64(opening.version).await.is_ok() && peer.read_u8().await.is_ok()
        });
        let sent = sent.await;
        self.sending.fetch_sub(1, Ordering::Relaxed);
        match sent {
            Ok(true) => Ok(SendReport { tensors: 1, bytes: 8, seconds: 0.0 }),
            Ok(false) if fault == SendFault::Exits => {
                Err(PolicyError::Stopped("the learner".into()))
            }
            Ok(false) => Err(PolicyError::Invalid("a process of the server is gone".into())),
            Err(_) => Err(PolicyError::Invalid("a process of the server is late".into())),
        }
    }
}

/// Membership of a fake server in a group.
#[derive(Default)]
pub struct Membership {
    connection: Option<TcpStream>,
    /// Whether weights are being replaced, so that the server must not sample.
    updating: bool,
}

fn ok() -> Response {
    Json(json!({ "success": true })).into_response()
}

fn error_response(why: &str) -> Response {
    (StatusCode::BAD_REQUEST, Json(json!({ "error": { "message": why } }))).into_response()
}

/// Returns whether weights are being replaced.
pub fn is_half(state: &FakeState) -> bool {
    state.life.lock().unwrap().membership.updating
}

pub async fn response(
    state: &FakeState,
    behavior: &Behavior,
    path: &str,
    body: &Value,
) -> Response {
    match path {
        "/get_world_size" => Json(json!({ "world_size": 1 })).into_response(),
        "/init_weight_transfer_engine" => join(state, &body["init_info"]).await,
        "/init_weights_update_group" => join(state, body).await,
        "/start_weight_update" | "/begin_weight_update" => {
            state.life.lock().unwrap().membership.updating = true;
            ok()
        }
        "/update_weights" => update(state, behavior).await,
        "/update_weights_from_distributed" => {
            let response = update(state, behavior).await;
            if response.status() == StatusCode::OK {
                state.life.lock().unwrap().weights =
                    body["weight_version"].as_str().unwrap().into();
            }
            response
        }
        "/finish_weight_update" => {
            let mut life = state.life.lock().unwrap();
            // Without a label, this call ends a failed update, and the weights stay incomplete.
            if let Some(label) = body["weight_version"].as_str() {
                life.weights = label.into();
                life.membership.updating = false;
            }
            ok()
        }
        "/end_weight_update" => {
            // Incomplete weights stay incomplete.
            ok()
        }
        "/shutdown_weight_transfer_engine" | "/destroy_weights_update_group" => {
            state.life.lock().unwrap().membership.connection = None;
            ok()
        }
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn join(state: &FakeState, info: &Value) -> Response {
    let port = info["master_port"].as_u64().unwrap() as u16;
    assert_eq!((&info["rank_offset"], &info["world_size"]), (&json!(1), &json!(2)));
    match TcpStream::connect(("127.0.0.1", port)).await {
        Ok(connection) => {
            state.life.lock().unwrap().membership.connection = Some(connection);
            ok()
        }
        Err(error) => error_response(&error.to_string()),
    }
}

async fn update(state: &FakeState, behavior: &Behavior) -> Response {
    if behavior.rejects_weights {
        return error_response("shapes differ");
    }
    let Some(mut connection) = state.life.lock().unwrap().membership.connection.take() else {
        return error_response("it has joined no group");
    };
    if behavior.exits_while_reading {
        tokio::time::sleep(Duration::from_millis(150)).await;
        drop(connection);
        die(state).await;
    }
    sleep::check_can_write(state).await;
    // Half of the weights have arrived when the learner exits.
    state.life.lock().unwrap().shift = 77;
    let Ok(version) = connection.read_u64().await else {
        return error_response("the group has ended");
    };
    let _ = connection.write_u8(1).await;
    sleep::written(state);
    let mut life = state.life.lock().unwrap();
    life.shift = if behavior.keeps_weights { 77 } else { version };
    life.membership.connection = Some(connection);
    // SGLang's weights are complete now.
    if state.api == super::ServerApi::Sglang {
        life.membership.updating = false;
    }
    ok()
}
