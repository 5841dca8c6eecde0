//! Responses that were given, for clients that continue one by its id or refer to its items.
//!
//! Each is kept with what was new in its call and the id of the one before, so that a long conversation takes
//! no more room than its text. Room is bounded: those that nobody has used for longest are forgotten first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use levade_text::Message;
use serde_json::Value;

/// Most responses that are remembered.
const MOST: usize = 4096;
/// Most bytes that they may take together.
const MOST_BYTES: usize = 64 << 20;

/// Who was given a response: a hash of the key that the call bore.
pub(super) type Owner = [u8; 32];

/// A response that was given.
#[derive(Debug)]
pub(super) struct Remembered {
    /// The response that it continues.
    pub previous: Option<String>,
    /// Messages that were new in its call, instructions left out.
    pub input: Vec<Message>,
    /// Items of the input of its call, each with an id.
    pub items: Vec<Value>,
    /// The reply, exactly as it was recorded.
    pub reply: Message,
    /// The response as its client was told it.
    pub body: Value,
}

impl Remembered {
    fn bytes(&self) -> usize {
        let parts = (&self.input, &self.items, &self.reply);
        let messages = serde_json::to_string(&parts).map_or(0, |text| text.len());
        messages + self.body.to_string().len()
    }
}

#[derive(Debug)]
struct Kept {
    response: Arc<Remembered>,
    bytes: usize,
    used: u64,
}

/// Responses by owner and id.
#[derive(Debug)]
pub(crate) struct Memory {
    kept: HashMap<(Owner, String), Kept>,
    /// Keys by the time of their last use.
    uses: BTreeMap<u64, (Owner, String)>,
    clock: u64,
    bytes: usize,
    most: usize,
    most_bytes: usize,
}

impl Default for Memory {
    fn default() -> Self {
        Memory::bounded(MOST, MOST_BYTES)
    }
}

impl Memory {
    fn bounded(most: usize, most_bytes: usize) -> Self {
        let (kept, uses) = (HashMap::new(), BTreeMap::new());
        Memory { kept, uses, clock: 0, bytes: 0, most, most_bytes }
    }

    /// Remembers a response, in place of one with the same id.
    pub(super) fn put(&mut self, owner: Owner, id: String, response: Remembered) {
        let key = (owner, id);
        self.remove(&key);
        let bytes = response.bytes();
        self.clock += 1;
        self.bytes += bytes;
        self.uses.insert(self.clock, key.clone());
        self.kept.insert(key, Kept { response: Arc::new(response), bytes, used: self.clock });
        while (self.kept.len() > self.most || self.bytes > self.most_bytes)
            && let Some((_, oldest)) = self.uses.pop_first()
        {
            self.remove(&oldest);
        }
    }

    /// A response, which then counts as used.
    pub(super) fn get(&mut self, key: &(Owner, String)) -> Option<Arc<Remembered>> {
        let kept = self.kept.get_mut(key)?;
        self.uses.remove(&kept.used);
        self.clock += 1;
        kept.used = self.clock;
        self.uses.insert(self.clock, key.clone());
        Some(Arc::clone(&kept.response))
    }

    /// Forgets a response; whether there was one.
    pub(super) fn remove(&mut self, key: &(Owner, String)) -> bool {
        let Some(kept) = self.kept.remove(key) else { return false };
        self.uses.remove(&kept.used);
        self.bytes -= kept.bytes;
        true
    }

    /// All that was said up to the end of a response.
    ///
    /// # Errors
    /// The id of the response that is not known any more: this one, or one that it continues.
    pub(super) fn history(&mut self, owner: Owner, id: &str) -> Result<Vec<Message>, String> {
        let mut newest_first = Vec::new();
        let mut next = Some(id.to_owned());
        while let Some(id) = next {
            let response = self.get(&(owner, id.clone())).ok_or(id)?;
            next = response.previous.clone();
            newest_first.push(response);
        }
        let said = newest_first.iter().rev();
        Ok(said.flat_map(|response| response.input.iter().chain([&response.reply]).cloned()).collect())
    }
}

/// Id of an item: what it is, the call whose reply it belongs to, its place.
pub(super) fn item_id(kind: &str, call: &str, place: usize) -> String {
    format!("{kind}_{call}_{place}")
}

/// The call whose reply an item belongs to, by the item's id; `None` for ids of another form.
pub(super) fn response_of(item: &str) -> Option<&str> {
    let (_, rest) = item.split_once('_')?;
    let (call, place) = rest.rsplit_once('_')?;
    (!place.is_empty() && place.bytes().all(|byte| byte.is_ascii_digit())).then_some(call)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn response(previous: Option<&str>, said: &str) -> Remembered {
        Remembered {
            previous: previous.map(str::to_owned),
            input: vec![Message::user(format!("{said}?"))],
            items: Vec::new(),
            reply: Message::assistant(said),
            body: json!({}),
        }
    }

    fn said(history: Vec<Message>) -> Vec<String> {
        history.iter().map(|message| message.content.as_str().to_owned()).collect()
    }

    #[test]
    fn a_history_goes_back_to_its_beginning_for_its_owner_alone() {
        let mut memory = Memory::default();
        let (one, other) = ([1; 32], [2; 32]);
        memory.put(one, "a".into(), response(None, "a"));
        memory.put(one, "b".into(), response(Some("a"), "b"));
        memory.put(one, "c".into(), response(Some("a"), "c"));
        assert_eq!(said(memory.history(one, "b").unwrap()), ["a?", "a", "b?", "b"]);
        assert_eq!(said(memory.history(one, "c").unwrap()), ["a?", "a", "c?", "c"]);
        assert_eq!(memory.history(other, "b"), Err("b".into()));
        assert!(memory.get(&(other, "a".into())).is_none() && !memory.remove(&(other, "a".into())));
        assert!(memory.remove(&(one, "a".into())));
        assert_eq!(memory.history(one, "c"), Err("a".into()));
    }

    #[test]
    fn the_least_recently_used_are_forgotten_first() {
        let owner = [0; 32];
        let mut memory = Memory::bounded(3, usize::MAX);
        let known = |memory: &Memory| {
            let mut ids: Vec<&str> = memory.kept.keys().map(|(_, id)| id.as_str()).collect();
            ids.sort_unstable();
            ids.concat()
        };
        for id in ["a", "b", "c"] {
            memory.put(owner, id.into(), response(None, id));
        }
        memory.get(&(owner, "a".into())).unwrap();
        memory.put(owner, "d".into(), response(Some("a"), "d"));
        assert_eq!(known(&memory), "acd");
        // A conversation that goes on keeps all of its past.
        memory.history(owner, "d").unwrap();
        memory.put(owner, "e".into(), response(None, "e"));
        assert_eq!(known(&memory), "ade");
        // Once more under the same id takes no more room.
        let bytes = memory.bytes;
        memory.put(owner, "e".into(), response(None, "e"));
        assert_eq!((memory.bytes, memory.uses.len()), (bytes, 3));

        let size = response(None, "a").bytes();
        let mut memory = Memory::bounded(usize::MAX, 2 * size);
        for id in ["a", "b", "c"] {
            memory.put(owner, id.into(), response(None, id));
        }
        assert_eq!((known(&memory).as_str(), memory.bytes), ("bc", 2 * size));
        memory.put(owner, "d".into(), response(None, &"x".repeat(size)));
        assert_eq!((known(&memory).as_str(), memory.bytes, memory.uses.len()), ("", 0, 0));
    }

    #[test]
    fn ids_of_items_name_their_call() {
        assert_eq!(response_of(&item_id("rs", "5f0a", 12)), Some("5f0a"));
        for foreign in ["msg_bb9d55bf-5e9a", "rs", "", "rs_", "rs__", "fc_a_b"] {
            assert_eq!(response_of(foreign), None, "{foreign}");
        }
    }
}
