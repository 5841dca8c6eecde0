//! Names of agents that play a seat of a game: `AGENT@SEAT`.
//!
//! Conversations, random streams, groups and rewards use the complete name, so that two seats of
//! one agent stay apart. Filters of agents and metrics use [`agent_of`].

/// Separator between the name of an agent and the number of its seat in a game. Names in recipes do
/// not contain it.
pub const SEAT_SEPARATOR: char = '@';

/// Returns the recorded name of an agent in a seat of a game, such as `player@2`.
pub fn seat_name(agent: &str, seat: usize) -> String {
    format!("{agent}{SEAT_SEPARATOR}{seat}")
}

/// Returns the agent's name in the recipe, given the agent's recorded name, which may contain a
/// seat.
pub fn agent_of(recorded: &str) -> &str {
    recorded.split_once(SEAT_SEPARATOR).map_or(recorded, |(agent, _)| agent)
}

/// Splits a recorded name into the agent and the number of its seat, counted from 1. Returns `None`
/// if the name is not one that [`seat_name`] returns.
pub fn parse_seat(recorded: &str) -> Option<(&str, usize)> {
    let (agent, seat) = recorded.split_once(SEAT_SEPARATOR)?;
    let seat = seat.parse::<usize>().ok().filter(|seat| *seat > 0)?;
    (seat_name(agent, seat) == recorded).then_some((agent, seat))
}

/// Returns whether a recorded name contains a seat.
pub fn is_seat(recorded: &str) -> bool {
    recorded.contains(SEAT_SEPARATOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seat_is_stripped_from_agent_name() {
        assert_eq!(agent_of(&seat_name("wolf", 3)), "wolf");
        assert_eq!(agent_of("solver"), "solver");
        assert!(is_seat("wolf@3") && !is_seat("wolf"));
    }

    #[test]
    fn parse_seat_accepts_only_names_of_seats() {
        assert_eq!(parse_seat(&seat_name("wolf", 12)), Some(("wolf", 12)));
        for name in ["wolf", "wolf@", "wolf@0", "wolf@03", "wolf@+3", "wolf@x", "wolf@1@2"] {
            assert_eq!(parse_seat(name), None, "{name}");
        }
    }
}
