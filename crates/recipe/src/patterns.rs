//! Finds values of a recipe by patterns of their keys.

use toml::{Table, Value};

use super::read::KIND;

/// Calls `visit` with every value whose key matches a pattern, and with that key.
///
/// A part of a pattern is a key, or `*` for any key and any item of a list. `NAME:KIND` matches
/// only tables of that kind.
pub(super) fn visit_matches(
    table: &mut Table,
    pattern: &str,
    visit: &mut dyn FnMut(&str, &mut Value),
) {
    let parts: Vec<&str> = pattern.split('.').collect();
    table.iter_mut().for_each(|(key, value)| visit_value("", key, value, &parts, visit));
}

fn visit_value(
    outer: &str,
    key: &str,
    value: &mut Value,
    parts: &[&str],
    visit: &mut dyn FnMut(&str, &mut Value),
) {
    let Some((part, rest)) = parts.split_first() else { return };
    let (name, kind) = part.split_once(':').unwrap_or((part, ""));
    let is_kind = kind.is_empty() || value.get(KIND).and_then(Value::as_str) == Some(kind);
    if !is_kind || (name != "*" && name != key) {
        return;
    }
    let path = if outer.is_empty() { key.to_owned() } else { format!("{outer}.{key}") };
    match value {
        value if rest.is_empty() => visit(&path, value),
        Value::Table(table) => {
            table.iter_mut().for_each(|(key, value)| visit_value(&path, key, value, rest, visit));
        }
        Value::Array(items) => {
            items
                .iter_mut()
                .enumerate()
                .for_each(|(i, value)| visit_value(&path, &i.to_string(), value, rest, visit));
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visit_matches_visits_keys_items_and_kinds() {
        let mut table: Table =
            "a.b = 1\na.c.b = 2\n[[d]]\nkind = 'x'\ne = 3\n[[d]]\nkind = 'y'\ne = 4\nf = [5, 6]"
                .parse()
                .unwrap();
        let mut found = |pattern: &str| {
            let mut found = Vec::new();
            visit_matches(&mut table, pattern, &mut |key, value| {
                found.push(format!("{key}={value}"))
            });
            found
        };
        assert_eq!(found("a.b"), ["a.b=1"]);
        assert_eq!(found("a.*.b"), ["a.c.b=2"]);
        assert_eq!(found("d.*.e"), ["d.0.e=3", "d.1.e=4"]);
        assert_eq!(found("d.*:y.e"), ["d.1.e=4"]);
        assert_eq!(found("d.*.f.*"), ["d.1.f.0=5", "d.1.f.1=6"]);
        assert!(found("a.x").is_empty() && found("d.*:z.e").is_empty());
    }
}
