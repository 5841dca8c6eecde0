//! Lists whose items are one table in a file and two when typed: keys that all have, and the options of a
//! kind.

use toml::{Table, Value};

use super::read::{Joined, KIND};

/// Puts the options of each item into a table of their own.
pub(super) fn take(items: &mut [Value], joined: &Joined) {
    for item in items {
        // A kind alone, all of whose options are defaults.
        if let Value::String(kind) = item {
            let kind = Value::String(std::mem::take(kind));
            *item = Value::Table(Table::from_iter([(joined.options.to_owned(), kind)]));
            continue;
        }
        let Value::Table(keys) = item else { continue };
        let is_own = |(key, _): &(String, Value)| joined.own.contains(&key.as_str());
        let (own, options): (Vec<_>, Vec<_>) = std::mem::take(keys).into_iter().partition(is_own);
        *keys = own.into_iter().collect();
        keys.insert(joined.options.into(), Value::Table(options.into_iter().collect()));
    }
}

/// The mirror image of [`take`].
pub(super) fn put(items: &mut [Value], joined: &Joined) {
    for keys in items.iter_mut().filter_map(Value::as_table_mut) {
        match keys.remove(joined.options) {
            Some(Value::Table(options)) => keys.extend(options),
            Some(kind) => drop(keys.insert(KIND.into(), kind)),
            None => {}
        }
    }
}
