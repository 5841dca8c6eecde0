//! Memory of responses, for clients that continue a response by its id or refer to its items.
//!
//! Each entry contains only the messages that were new in its call, and the id of the response
//! before it. The size of a long conversation is therefore proportional to its text. The memory is
//! bounded and evicts the least recently used responses first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use levade_text::Message;
use serde_json::Value;

/// Maximum number of stored responses.
const MAX_ENTRIES: usize = 4096;
/// Maximum total size of the stored responses, in bytes.
const MAX_BYTES: usize = 64 << 20;

/// SHA-256 hash of the API key that requested a response. A response is visible only under this
/// key.
pub(super) type Owner = [u8; 32];

/// Response that is stored so that later requests can continue it.
#[derive(Debug)]
pub(super) struct StoredResponse {
    /// Id of the response that this response continues. `None` for the start of a conversation.
    pub previous: Option<String>,
    /// Messages that the call added to the conversation, without instructions.
    pub input: Vec<Message>,
    /// Input items of the request, each with an id.
    pub items: Vec<Value>,
    /// Assistant message of the response, exactly as recorded.
    pub message: Message,
    /// Response body as the client received it.
    pub body: Value,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        let parts = (&self.input, &self.items, &self.message);
        let messages = serde_json::to_string(&parts).map_or(0, |text| text.len());
        messages + self.body.to_string().len()
    }
}

#[derive(Debug)]
struct MemoryEntry {
    response: Arc<StoredResponse>,
    bytes: usize,
    used: u64,
}

/// Stored responses by owner and id, with least-recently-used eviction.
#[derive(Debug)]
pub(crate) struct ResponseMemory {
    kept: HashMap<(Owner, String), MemoryEntry>,
    /// Owners and ids of the stored responses, by the logical time of their last use.
    uses: BTreeMap<u64, (Owner, String)>,
    clock: u64,
    bytes: usize,
    max_entries: usize,
    max_bytes: usize,
}

impl Default for ResponseMemory {
    fn default() -> Self {
        ResponseMemory::with_bounds(MAX_ENTRIES, MAX_BYTES)
    }
}

impl ResponseMemory {
    fn with_bounds(max_entries: usize, max_bytes: usize) -> Self {
        let kept = HashMap::new();
        let uses = BTreeMap::new();
        ResponseMemory { kept, uses, clock: 0, bytes: 0, max_entries, max_bytes }
    }

    /// Stores a response. Replaces a response with the same id.
    pub(super) fn put(&mut self, owner: Owner, id: String, response: StoredResponse) {
        let key = (owner, id);
        self.remove(&key);
        let bytes = response.bytes();
        self.clock += 1;
        self.bytes += bytes;
        self.uses.insert(self.clock, key.clone());
        self.kept
            .insert(key, MemoryEntry { response: Arc::new(response), bytes, used: self.clock });
        while (self.kept.len() > self.max_entries || self.bytes > self.max_bytes)
            && let Some((_, oldest)) = self.uses.pop_first()
        {
            self.remove(&oldest);
        }
    }

    /// Returns a stored response and marks it as used.
    pub(super) fn get(&mut self, key: &(Owner, String)) -> Option<Arc<StoredResponse>> {
        let kept = self.kept.get_mut(key)?;
        self.uses.remove(&kept.used);
        self.clock += 1;
        kept.used = self.clock;
        self.uses.insert(self.clock, key.clone());
        Some(Arc::clone(&kept.response))
    }

    /// Removes a stored response. Returns whether the response existed.
    pub(super) fn remove(&mut self, key: &(Owner, String)) -> bool {
        let Some(kept) = self.kept.remove(key) else { return false };
        self.uses.remove(&kept.used);
        self.bytes -= kept.bytes;
        true
    }

    /// Returns the messages of a stored conversation, up to the end of the response `id`.
    ///
    /// # Errors
    /// Returns the id of the missing response if `id`, or a response that it continues, is not in
    /// memory.
    pub(super) fn read_history(&mut self, owner: Owner, id: &str) -> Result<Vec<Message>, String> {
        let mut newest_first = Vec::new();
        let mut next = Some(id.to_owned());
        while let Some(id) = next {
            let response = self.get(&(owner, id.clone())).ok_or(id)?;
            next = response.previous.clone();
            newest_first.push(response);
        }
        let text = newest_first.iter().rev();
        Ok(text
            .flat_map(|response| response.input.iter().chain([&response.message]).cloned())
            .collect())
    }
}

/// Creates the id of an output item from its kind, the id of the model call that created it, and
/// its index in the output.
pub(super) fn format_item_id(kind: &str, call: &str, index: usize) -> String {
    format!("{kind}_{call}_{index}")
}

/// Returns the id of the model call that an item's id contains, or `None` if the id has another
/// format.
pub(super) fn call_id_of_item(item: &str) -> Option<&str> {
    let (_, rest) = item.split_once('_')?;
    let (call, index) = rest.rsplit_once('_')?;
    (!index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit())).then_some(call)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn response(previous: Option<&str>, text: &str) -> StoredResponse {
        StoredResponse {
            previous: previous.map(str::to_owned),
            input: vec![Message::user(format!("{text}?"))],
            items: Vec::new(),
            message: Message::assistant(text),
            body: json!({}),
        }
    }

    fn joined_contents(history: Vec<Message>) -> Vec<String> {
        history.iter().map(|message| message.content.as_str().to_owned()).collect()
    }

    #[test]
    fn history_is_complete_and_visible_only_to_owner() {
        let mut memory = ResponseMemory::default();
        let one = [1; 32];
        let other = [2; 32];
        memory.put(one, "a".into(), response(None, "a"));
        memory.put(one, "b".into(), response(Some("a"), "b"));
        memory.put(one, "c".into(), response(Some("a"), "c"));
        assert_eq!(joined_contents(memory.read_history(one, "b").unwrap()), ["a?", "a", "b?", "b"]);
        assert_eq!(joined_contents(memory.read_history(one, "c").unwrap()), ["a?", "a", "c?", "c"]);
        assert_eq!(memory.read_history(other, "b"), Err("b".into()));
        assert!(memory.get(&(other, "a".into())).is_none() && !memory.remove(&(other, "a".into())));
        assert!(memory.remove(&(one, "a".into())));
        assert_eq!(memory.read_history(one, "c"), Err("a".into()));
    }

    #[test]
    fn least_recently_used_responses_are_evicted_first() {
        let owner = [0; 32];
        let mut memory = ResponseMemory::with_bounds(3, usize::MAX);
        for id in ["a", "b", "c"] {
            memory.put(owner, id.into(), response(None, id));
        }
        memory.get(&(owner, "a".into())).unwrap();
        memory.put(owner, "d".into(), response(Some("a"), "d"));
        assert_eq!(known_ids(&memory), "acd");
        // Reading a history marks all of its responses as used.
        memory.read_history(owner, "d").unwrap();
        memory.put(owner, "e".into(), response(None, "e"));
        assert_eq!(known_ids(&memory), "ade");
        // Storing an equal response under the same id does not change the size.
        let bytes = memory.bytes;
        memory.put(owner, "e".into(), response(None, "e"));
        assert_eq!((memory.bytes, memory.uses.len()), (bytes, 3));

        let size = response(None, "a").bytes();
        let mut memory = ResponseMemory::with_bounds(usize::MAX, 2 * size);
        for id in ["a", "b", "c"] {
            memory.put(owner, id.into(), response(None, id));
        }
        assert_eq!((known_ids(&memory).as_str(), memory.bytes), ("bc", 2 * size));
        memory.put(owner, "d".into(), response(None, &"x".repeat(size)));
        assert_eq!((known_ids(&memory).as_str(), memory.bytes, memory.uses.len()), ("", 0, 0));
    }

    fn known_ids(memory: &ResponseMemory) -> String {
        let mut ids: Vec<&str> = memory.kept.keys().map(|(_, id)| id.as_str()).collect();
        ids.sort_unstable();
        ids.concat()
    }

    #[test]
    fn item_ids_contain_call_id() {
        assert_eq!(call_id_of_item(&format_item_id("rs", "5f0a", 12)), Some("5f0a"));
        for foreign in ["msg_bb9d55bf-5e9a", "rs", "", "rs_", "rs__", "fc_a_b"] {
            assert_eq!(call_id_of_item(foreign), None, "{foreign}");
        }
    }
}
