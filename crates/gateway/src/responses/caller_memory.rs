//! Selection of the memory for a caller's responses.

use std::sync::{Arc, PoisonError};

use levade_text::Message;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::memory::{Owner, ResponseMemory, StoredResponse, call_id_of_item};
use crate::gateway::Gateway;
use crate::session::Session;

/// Stored responses that are visible to a caller: the responses of the caller's attempt, or the
/// gateway's responses under the caller's key.
#[derive(Clone)]
pub(super) struct CallerMemory {
    gateway: Gateway,
    session: Option<Arc<Session>>,
    owner: Owner,
}

impl CallerMemory {
    /// Creates a view of the stored responses for the caller with the API key `key`.
    pub(super) fn new(gateway: &Gateway, session: Option<Arc<Session>>, key: Option<&str>) -> Self {
        let owner = Sha256::digest(key.unwrap_or_default().as_bytes()).into();
        CallerMemory { gateway: gateway.clone(), session, owner }
    }

    fn with<T>(&self, work: impl FnOnce(&mut ResponseMemory) -> T) -> T {
        match &self.session {
            Some(session) => work(&mut session.lock_state().responses),
            None => {
                work(&mut self.gateway.0.responses.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    pub(super) fn put(&self, id: &str, response: StoredResponse) {
        self.with(|memory| memory.put(self.owner, id.to_owned(), response));
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<StoredResponse>> {
        self.with(|memory| memory.get(&(self.owner, id.to_owned())))
    }

    /// Removes the stored response `id`. Returns whether it existed.
    pub(super) fn remove(&self, id: &str) -> bool {
        self.with(|memory| memory.remove(&(self.owner, id.to_owned())))
    }

    /// Returns the messages of a stored conversation, up to the end of the response `id`.
    ///
    /// # Errors
    /// Returns the id of the missing response if `id`, or a response that it continues, is not in
    /// memory.
    pub(super) fn read_history(&self, id: &str) -> Result<Vec<Message>, String> {
        self.with(|memory| memory.read_history(self.owner, id))
    }

    /// Returns the output item `id` of a stored response, or `None` if it is not in memory.
    pub(super) fn find_item(&self, id: &str) -> Option<Value> {
        let response = self.get(&format!("resp_{}", call_id_of_item(id)?))?;
        let items = response.body["output"].as_array()?;
        items.iter().find(|item| item["id"] == id).cloned()
    }
}
