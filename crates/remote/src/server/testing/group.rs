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

use super::{Behaviour, Json, Shared, die, sleep};
use crate::push::{Broadcasts, Meeting, Opened, Opening, Sent};

/// How a learner fails to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SendFault {
    #[default]
    None,
    /// The learner holds other weights by now.
    HasMovedOn,
    /// The learner exits after the servers have joined.
    Dies,
    /// The learner sends nothing until the deadline.
    Hangs,
}

/// A learner that sends the version of its weights.
#[derive(Default)]
pub struct Sender {
    pub fault: Mutex<SendFault>,
    open: tokio::sync::Mutex<Option<(TcpListener, Opening)>>,
    /// Number of sends in progress.
    pub sending: AtomicUsize,
}

#[async_trait]
impl Broadcasts for Sender {
    async fn open_group(&self, opening: &Opening) -> Result<Opened, PolicyError> {
        if *self.fault.lock().unwrap() == SendFault::HasMovedOn {
            return Err(PolicyError::Invalid("does not hold the weights any more".into()));
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        *self.open.lock().await = Some((listener, opening.clone()));
        let meeting = Meeting::Store { address: "127.0.0.1".into(), port };
        Ok(Opened { meeting, names: vec!["w".into()], dtypes: vec!["float32".into()], shapes: vec![vec![2]] })
    }

    async fn send_to(&self, group: &str) -> Result<Sent, PolicyError> {
        let (listener, opening) = self.open.lock().await.take().unwrap();
        assert_eq!(group, opening.group);
        self.sending.fetch_add(1, Ordering::Relaxed);
        let limit = Duration::from_secs_f64(opening.seconds);
        let fault = *self.fault.lock().unwrap();
        let sent = tokio::time::timeout(limit, async {
            let (mut member, _) = listener.accept().await.unwrap();
            match fault {
                SendFault::Dies => return false,
                SendFault::Hangs => std::future::pending().await,
                SendFault::None | SendFault::HasMovedOn => {}
            }
            member.write_u64(opening.version).await.is_ok() && member.read_u8().await.is_ok()
        });
        let sent = sent.await;
        self.sending.fetch_sub(1, Ordering::Relaxed);
        match sent {
            Ok(true) => Ok(Sent { tensors: 1, bytes: 8, seconds: 0.0 }),
            Ok(false) if fault == SendFault::Dies => Err(PolicyError::Stopped("the learner".into())),
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

fn refused(why: &str) -> Response {
    (StatusCode::BAD_REQUEST, Json(json!({ "error": { "message": why } }))).into_response()
}

/// Returns whether weights are being replaced.
pub fn is_half(shared: &Shared) -> bool {
    shared.life.lock().unwrap().membership.updating
}

pub async fn answer(shared: &Shared, behaviour: &Behaviour, path: &str, body: &Value) -> Response {
    match path {
        "/get_world_size" => Json(json!({ "world_size": 1 })).into_response(),
        "/init_weight_transfer_engine" => join(shared, &body["init_info"]).await,
        "/init_weights_update_group" => join(shared, body).await,
        "/start_weight_update" | "/begin_weight_update" => {
            shared.life.lock().unwrap().membership.updating = true;
            ok()
        }
        "/update_weights" => update(shared, behaviour).await,
        "/update_weights_from_distributed" => {
            let answer = update(shared, behaviour).await;
            if answer.status() == StatusCode::OK {
                shared.life.lock().unwrap().weights = body["weight_version"].as_str().unwrap().into();
            }
            answer
        }
        "/finish_weight_update" => {
            let mut life = shared.life.lock().unwrap();
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
            shared.life.lock().unwrap().membership.connection = None;
            ok()
        }
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

async fn join(shared: &Shared, info: &Value) -> Response {
    let port = info["master_port"].as_u64().unwrap() as u16;
    assert_eq!((&info["rank_offset"], &info["world_size"]), (&json!(1), &json!(2)));
    match TcpStream::connect(("127.0.0.1", port)).await {
        Ok(connection) => {
            shared.life.lock().unwrap().membership.connection = Some(connection);
            ok()
        }
        Err(error) => refused(&error.to_string()),
    }
}

async fn update(shared: &Shared, behaviour: &Behaviour) -> Response {
    if behaviour.refuses_weights {
        return refused("shapes differ");
    }
    let Some(mut connection) = shared.life.lock().unwrap().membership.connection.take() else {
        return refused("it has joined no group");
    };
    if behaviour.dies_reading {
        tokio::time::sleep(Duration::from_millis(150)).await;
        drop(connection);
        die(shared).await;
    }
    sleep::may_write(shared).await;
    // Half of the weights have arrived when the learner exits.
    shared.life.lock().unwrap().shift = 77;
    let Ok(version) = connection.read_u64().await else { return refused("the group has ended") };
    let _ = connection.write_u8(1).await;
    sleep::written(shared);
    let mut life = shared.life.lock().unwrap();
    life.shift = if behaviour.keeps_weights { 77 } else { version };
    life.membership.connection = Some(connection);
    // SGLang's weights are complete now.
    if shared.speaks == super::Speaks::Sglang {
        life.membership.updating = false;
    }
    ok()
}
