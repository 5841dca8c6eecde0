//! Named agents: `[agent.NAME]` contains the keys that differ from `[agent]`.
//!
//! In a file, `[agent]` and the named agents are one table, and the keys of `[agent]` apply to
//! every agent. The types separate the keys of `[agent]` from the named agents, each of which has
//! all keys.

use toml::{Table, Value};

use super::read::AGENTS;

const AGENT: &str = "agent";

/// Keys of `[agent]` that are tables. No agent can have one of these names, because `[agent.NAME]`
/// would be ambiguous.
const TABLES: [&str; 5] = ["context", "match", "sampling", "tool_descriptions", "variables"];

/// Moves the named agents out of `[agent]` into a separate table. Each agent inherits the keys of
/// `[agent]` that it does not set.
pub(super) fn split_named_agents(table: &mut Table) {
    let Some(Value::Table(agent)) = table.get_mut(AGENT) else { return };
    let is_agent =
        |(key, value): &(String, Value)| value.is_table() && !TABLES.contains(&key.as_str());
    let (named, own): (Vec<_>, Vec<_>) = std::mem::take(agent).into_iter().partition(is_agent);
    *agent = own.into_iter().collect();
    let named: Table = named
        .into_iter()
        .map(|(name, value)| {
            let mut keys = agent.clone();
            if let Value::Table(own_keys) = value {
                keys.extend(own_keys);
            }
            (name, Value::Table(keys))
        })
        .collect();
    table.insert(AGENTS.into(), Value::Table(named));
}

/// Moves the named agents back into `[agent]`. This is the inverse of [`split_named_agents`].
pub(super) fn join_named_agents(table: &mut Table) {
    let Some(Value::Table(named)) = table.remove(AGENTS) else { return };
    if let Some(Value::Table(agent)) = table.get_mut(AGENT) {
        agent.extend(named);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_agents_inherit_shared_keys() {
        let text = "[agent]\nmax_turns = 3\nsystem = 'all'\nvariables = { a = 1 }\n[agent.x]\n\
                    system = 'x'\n[agent.y]";
        let mut table: Table = text.parse().unwrap();
        let before = table.clone();
        split_named_agents(&mut table);
        let want: Table = "[agent]\nmax_turns = 3\nsystem = 'all'\nvariables = { a = 1 }\n\
             ['$agents'.x]\nmax_turns = 3\nsystem = 'x'\nvariables = { a = 1 }\n\
             ['$agents'.y]\nmax_turns = 3\nsystem = 'all'\nvariables = { a = 1 }"
            .parse()
            .unwrap();
        assert_eq!(table, want);
        join_named_agents(&mut table);
        assert_eq!(table["agent"]["x"]["system"], before["agent"]["x"]["system"]);
        let again = table.clone();
        split_named_agents(&mut table);
        assert_eq!(table, want);
        join_named_agents(&mut table);
        assert_eq!(table, again);
    }
}
