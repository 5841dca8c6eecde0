//! Properties that every format has.

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::reader::{Reader, Tags};
use crate::thought::Thoughts;

/// Reads a whole reply of a model without thoughts.
pub(crate) fn read(format: CallFormat, text: &str, tools: &[ToolSpec]) -> Parsed {
    let tags = Tags::new(&Thoughts::default(), format.syntax());
    Parsed::of(Reader::read(&tags, text, false, tools).0)
}

/// Any value.
pub(crate) fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::vec((any::<String>(), inner), 0..4)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}
