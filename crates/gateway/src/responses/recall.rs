//! Whose memory a call has.

use std::sync::{Arc, PoisonError};

use levade_text::Message;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::memory::{Memory, Owner, Remembered, response_of};
use crate::gateway::Gateway;
use crate::session::Session;

/// The memory that a caller has: of its attempt, or of the gateway under its key.
#[derive(Clone)]
pub(super) struct Recall {
    gateway: Gateway,
    session: Option<Arc<Session>>,
    owner: Owner,
}

impl Recall {
    /// The memory of whoever bears this key.
    pub(super) fn new(gateway: &Gateway, session: Option<Arc<Session>>, key: Option<&str>) -> Self {
        let owner = Sha256::digest(key.unwrap_or_default().as_bytes()).into();
        Recall { gateway: gateway.clone(), session, owner }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Memory) -> T) -> T {
        match &self.session {
            Some(session) => work(&mut session.state().responses),
            None => work(&mut self.gateway.0.responses.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    pub(super) fn put(&self, id: &str, response: Remembered) {
        self.with(|memory| memory.put(self.owner, id.to_owned(), response));
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Remembered>> {
        self.with(|memory| memory.get(&(self.owner, id.to_owned())))
    }

    /// Forgets a response; whether there was one.
    pub(super) fn remove(&self, id: &str) -> bool {
        self.with(|memory| memory.remove(&(self.owner, id.to_owned())))
    }

    /// All that was said up to the end of a response.
    ///
    /// # Errors
    /// The id of the response that is not known any more: this one, or one that it continues.
    pub(super) fn history(&self, id: &str) -> Result<Vec<Message>, String> {
        self.with(|memory| memory.history(self.owner, id))
    }

    /// An item that was put out.
    pub(super) fn item(&self, id: &str) -> Option<Value> {
        let response = self.get(&format!("resp_{}", response_of(id)?))?;
        let items = response.body["output"].as_array()?;
        items.iter().find(|item| item["id"] == id).cloned()
    }
}
