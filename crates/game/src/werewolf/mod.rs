//! Werewolf for 7, 9 or 12 players, in English or Chinese.
//!
//! Each night, the guard protects a player, the wolves discuss and vote for a victim, the witch may
//! heal the victim or poison a player, and the seer checks a player. At dawn the deaths are
//! announced. Each day, all players speak in order and then vote simultaneously. The player with
//! the most votes is exiled. A hunter or wolf king who dies may shoot. The game is won as soon as
//! one side has lost.
//!
//! # Variants
//! - **7 players**: 2 wolves, 3 villagers, seer, witch. The witch can heal herself.
//! - **9 players**: 3 wolves, 3 villagers, seer, witch, hunter. The seer learns the exact role.
//! - **12 players**: 3 wolves, wolf king, 4 villagers, seer, witch, hunter, guard. The wolves win
//!   if all villagers or all special roles are dead.
//!
//! Out of scope: the election of a sheriff, and wolves who reveal themselves to end the day.

mod role;
mod rules;
mod state;
mod texts;

use serde_json::Value;

use crate::{Game, GameError, Seat, Start, read_options, shuffle};

use role::{Role, Side};
use rules::Rules;
use state::WerewolfMatch;
use texts::Texts;

const NAME: &str = "werewolf";

/// The game werewolf. The seed determines the roles. `docs/games.md` describes the options.
pub struct Werewolf;

impl Game for Werewolf {
    fn name(&self) -> &'static str {
        NAME
    }

    fn start(&self, options: &Value, seed: u64) -> Result<Start, GameError> {
        let rules: Rules = read_options(NAME, options)?;
        let mut roles = rules.roles()?;
        shuffle(seed, &mut roles);
        let texts = Texts::new(rules.language)?;
        let players = roles.len();
        let names: Vec<String> =
            (0..players).map(|seat| texts.player_name(seat)).collect::<Result<_, _>>()?;
        let seat = |index: usize| {
            let role = roles[index];
            Ok(Seat {
                index,
                name: names[index].clone(),
                role: role.name().to_owned(),
                side: role.side().name().to_owned(),
                instructions: format_instructions(&texts, &rules, &names, &roles, index)?,
            })
        };
        let seats = (0..players).map(seat).collect::<Result<_, GameError>>()?;
        let state = WerewolfMatch::new(rules, seed, roles, texts)?;
        let (state, events) = state.advance_to_first_turn()?;
        Ok(Start { seats, events, state: Box::new(state) })
    }
}

/// Returns the instructions of one seat: the rules, the role and guidance.
fn format_instructions(
    texts: &Texts,
    rules: &Rules,
    names: &[String],
    roles: &[Role],
    seat: usize,
) -> Result<String, GameError> {
    let role = roles[seat];
    let wolves = (0..names.len()).filter(|i| roles[*i].side() == Side::Wolves && *i != seat);
    let partners: Vec<&str> = wolves.map(|i| names[i].as_str()).collect();
    let partners = partners.join(texts.get_text("comma")?);
    let counts = rules.role_counts();
    let counts: Vec<String> = counts
        .iter()
        .map(|(role, count)| {
            texts.fill(
                "role_count",
                &[("role", texts.get_text(role.name())?), ("n", &count.to_string())],
            )
        })
        .collect::<Result<_, _>>()?;
    let mut parts = vec![
        texts.fill(
            "rules",
            &[
                ("players", &names.join(texts.get_text("comma")?)),
                ("roles", &counts.join(texts.get_text("comma")?)),
            ],
        )?,
        texts
            .get_text(if rules.wins_by_group() { "win_by_group" } else { "win_by_parity" })?
            .to_owned(),
        texts
            .fill("identity", &[("name", &names[seat]), ("role", texts.get_text(role.name())?)])?,
        texts.get_text(&format!("{}_guide", role.name()))?.to_owned(),
    ];
    if role.side() == Side::Wolves {
        parts.push(texts.fill("partners", &[("partners", &partners)])?);
    }
    if role == Role::Witch {
        parts.push(
            texts
                .get_text(if rules.heals_self() { "heals_self" } else { "heals_others" })?
                .to_owned(),
        );
    }
    parts.push(texts.get_text("notes")?.to_owned());
    Ok(parts.join("\n\n"))
}
