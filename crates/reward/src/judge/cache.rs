//! A cache of the judge's verdicts.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

/// A bounded cache of a judge's verdicts by prompt, which removes the oldest entries first. Each
/// scorer has its own cache, because the key contains neither the model nor the sampling
/// parameters.
#[derive(Debug)]
pub(super) struct Cache<T> {
    max_entries: usize,
    entries: Mutex<CacheEntries<T>>,
}

#[derive(Debug)]
struct CacheEntries<T> {
    by_prompt: HashMap<String, T>,
    order: VecDeque<String>,
    bytes: usize,
}

/// Maximum total size of the prompts in the cache, in bytes.
const BYTES: usize = 64 << 20;

impl<T: Clone> Cache<T> {
    pub fn new(max_entries: usize) -> Self {
        let entries = CacheEntries { by_prompt: HashMap::new(), order: VecDeque::new(), bytes: 0 };
        Cache { max_entries, entries: Mutex::new(entries) }
    }

    pub fn get(&self, prompt: &str) -> Option<T> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).by_prompt.get(prompt).cloned()
    }

    pub fn put(&self, prompt: String, verdict: T) {
        if self.max_entries == 0 {
            return;
        }
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.by_prompt.insert(prompt.clone(), verdict).is_none() {
            entries.bytes += prompt.len();
            entries.order.push_back(prompt);
        }
        while entries.order.len() > self.max_entries || entries.bytes > BYTES {
            let Some(oldest) = entries.order.pop_front() else { break };
            entries.bytes -= oldest.len();
            entries.by_prompt.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_evicts_oldest_prompts_beyond_limits() {
        let cache = Cache::new(2);
        for (number, prompt) in ["a", "b", "a", "c"].into_iter().enumerate() {
            cache.put(prompt.into(), number);
        }
        assert_eq!((cache.get("a"), cache.get("b"), cache.get("c")), (None, Some(1), Some(3)));
        let large = Cache::new(10);
        large.put("x".repeat(BYTES), 1);
        large.put("y".into(), 2);
        assert_eq!((large.get(&"x".repeat(BYTES)), large.get("y")), (None, Some(2)));
        let none = Cache::new(0);
        none.put("a".into(), 1);
        assert_eq!(none.get("a"), None);
    }
}
