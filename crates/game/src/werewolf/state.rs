//! Position of a match: phases, their requests, and the effect of moves.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::NAME;
use super::role::{Role, Side};
use super::rules::{Rules, TieRule};
use super::texts::Texts;
use crate::options::read_position;
use crate::shuffle::{Purpose, random_index};
use crate::{
    Audience, Choice, Event, GameError, Move, MoveRequest, Next, SeatOutcome, State,
    moves_in_seat_order,
};

/// Phase of a werewolf match. A phase in which no player can act is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Phase {
    Nightfall,
    Guard,
    /// The wolves discuss, in the order of their seats. The value is the number of speeches so far
    /// in this night.
    Discussion(usize),
    WolfVote,
    Heal,
    Poison,
    Seer,
    Dawn,
    LastWords,
    Shot,
    /// Living players make speeches. The next speaker is the first living player from this seat on.
    Speech(usize),
    Vote,
    Over(Option<Side>),
}

/// Complete position of a werewolf match.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Position {
    rules: Rules,
    seed: u64,
    roles: Vec<Role>,
    alive: Vec<bool>,
    phase: Phase,
    /// Number of the current night or day, from 1.
    day: u32,
    /// Whether the current deaths happened by day, so that a night follows.
    by_day: bool,
    /// Number of ties that have been decided at random.
    random_ties: u64,
    /// Player whom the guard protects in the current night. `None` if the guard protects no player.
    protected: Option<usize>,
    /// Player whom the guard protected in the previous night. `None` if the guard protected no
    /// player.
    protected_before: Option<usize>,
    victim: Option<usize>,
    healed: bool,
    poisoned: Option<usize>,
    has_antidote: bool,
    has_poison: bool,
    /// Dead players who have yet to speak their last words, in order.
    speakers: Vec<usize>,
    /// Dead players who may still shoot, in order.
    shooters: Vec<usize>,
}

/// Werewolf match: its position, and the texts in the players' language.
#[derive(Debug, Clone)]
pub(super) struct WerewolfMatch {
    texts: Texts,
    names: Vec<String>,
    position: Position,
    next: Next,
}

impl WerewolfMatch {
    /// Creates a werewolf match before its first night.
    ///
    /// # Errors
    /// Returns [`GameError::Text`] if the texts lack the template for names.
    pub fn new(rules: Rules, seed: u64, roles: Vec<Role>, texts: Texts) -> Result<Self, GameError> {
        let names =
            (0..roles.len()).map(|seat| texts.player_name(seat)).collect::<Result<_, _>>()?;
        let position = Position {
            rules,
            seed,
            alive: vec![true; roles.len()],
            roles,
            phase: Phase::Nightfall,
            day: 1,
            by_day: false,
            random_ties: 0,
            protected: None,
            protected_before: None,
            victim: None,
            healed: false,
            poisoned: None,
            has_antidote: true,
            has_poison: true,
            speakers: Vec::new(),
            shooters: Vec::new(),
        };
        Ok(WerewolfMatch { texts, names, position, next: Next::Over(Vec::new()) })
    }

    /// Advances the match to its first turn. Returns the match with the events before this turn.
    ///
    /// # Errors
    /// Returns [`GameError::Text`] if the texts of the language lack an entry.
    pub fn advance_to_first_turn(mut self) -> Result<(Self, Vec<Event>), GameError> {
        let mut events = Vec::new();
        self.advance(&mut events)?;
        self.next = self.create_turn()?;
        Ok((self, events))
    }

    /// Returns the seats of the living players in order.
    fn living_seats(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.names.len()).filter(|seat| self.position.alive[*seat])
    }

    fn living_wolves(&self) -> Vec<usize> {
        self.living_seats()
            .filter(|seat| self.position.roles[*seat].side() == Side::Wolves)
            .collect()
    }

    /// Returns the seat of the living player with a role that at most one player has. Returns
    /// `None` if no living player has the role.
    fn find_living_player(&self, role: Role) -> Option<usize> {
        self.living_seats().find(|seat| self.position.roles[*seat] == role)
    }

    /// Returns the side that has won, or `None` if the match continues.
    fn winning_side(&self) -> Option<Side> {
        let count = |is_counted: &dyn Fn(Role) -> bool| {
            self.living_seats().filter(|seat| is_counted(self.position.roles[*seat])).count()
        };
        let wolves = count(&|role| role.side() == Side::Wolves);
        let wolves_win = if self.position.rules.wins_by_group() {
            count(&|role| role == Role::Villager) == 0 || count(&Role::is_special) == 0
        } else {
            2 * wolves >= self.living_seats().count()
        };
        match wolves {
            0 => Some(Side::Good),
            _ => wolves_win.then_some(Side::Wolves),
        }
    }

    /// Returns the seat of the witch if she can heal the victim of the night, and `None` otherwise.
    fn witch_who_can_heal(&self) -> Option<usize> {
        let Position { rules, victim, has_antidote, .. } = &self.position;
        let witch = self.find_living_player(Role::Witch)?;
        let can_heal = victim.is_some_and(|victim| victim != witch || rules.heals_self());
        (*has_antidote && can_heal).then_some(witch)
    }

    /// Returns the seat of the witch if she can poison a player, and `None` otherwise.
    fn witch_who_can_poison(&self) -> Option<usize> {
        let can_poison = self.position.has_poison && !self.position.healed;
        self.find_living_player(Role::Witch).filter(|_| can_poison)
    }

    /// Advances to the next phase in which a player can act, or to the end of the match.
    fn advance(&mut self, events: &mut Vec<Event>) -> Result<(), GameError> {
        loop {
            if matches!(self.position.phase, Phase::Over(_)) {
                return Ok(());
            }
            if let Some(winner) = self.winning_side() {
                let key = if winner == Side::Wolves { "wolves_win" } else { "good_win" };
                self.announce(events, key, &[])?;
                self.position.phase = Phase::Over(Some(winner));
                return Ok(());
            }
            let next = match self.position.phase {
                Phase::Nightfall if self.position.day > self.position.rules.max_days => {
                    self.announce(events, "nobody_wins", &[])?;
                    Phase::Over(None)
                }
                Phase::Nightfall => {
                    self.announce(events, "night_falls", &[("n", &self.position.day.to_string())])?;
                    Phase::Guard
                }
                Phase::Guard if self.find_living_player(Role::Guard).is_none() => {
                    Phase::Discussion(0)
                }
                Phase::Discussion(_)
                    if self.living_wolves().len() < 2
                        || self.position.rules.discussion_rounds == 0 =>
                {
                    Phase::WolfVote
                }
                Phase::Heal if self.witch_who_can_heal().is_none() => Phase::Poison,
                Phase::Poison if self.witch_who_can_poison().is_none() => Phase::Seer,
                Phase::Seer if self.find_living_player(Role::Seer).is_none() => Phase::Dawn,
                Phase::Dawn => {
                    self.end_night(events)?;
                    Phase::LastWords
                }
                Phase::LastWords if self.position.speakers.is_empty() => Phase::Shot,
                Phase::Shot if self.position.shooters.is_empty() => {
                    if self.position.by_day {
                        self.position.day += 1;
                        Phase::Nightfall
                    } else {
                        Phase::Speech(0)
                    }
                }
                Phase::Speech(from) if self.living_seats().all(|seat| seat < from) => Phase::Vote,
                _ => return Ok(()),
            };
            self.position.phase = next;
        }
    }

    /// Ends the night: applies its deaths, and announces them.
    fn end_night(&mut self, events: &mut Vec<Event>) -> Result<(), GameError> {
        let position = &mut self.position;
        let victim = position.victim.take();
        let poisoned = position.poisoned.take();
        let is_protected = victim.is_some() && position.protected == victim;
        // A victim dies if the guard protects and the witch heals the same player.
        let killed = victim.filter(|_| is_protected == position.healed);
        position.healed = false;
        position.protected_before = position.protected.take();
        position.by_day = false;
        let dead: Vec<usize> = (0..position.alive.len())
            .filter(|seat| killed == Some(*seat) || poisoned == Some(*seat))
            .collect();
        for seat in &dead {
            position.alive[*seat] = false;
        }
        let shoots = |seat: &usize| position.roles[*seat].can_shoot() && poisoned != Some(*seat);
        position.shooters = dead.iter().copied().filter(shoots).collect();
        position.speakers = if position.day == 1 { dead.clone() } else { Vec::new() };
        let names: Vec<&str> = dead.iter().map(|seat| self.names[*seat].as_str()).collect();
        let names = names.join(self.texts.get_text("comma")?);
        let key = if dead.is_empty() { "quiet_night" } else { "day_breaks" };
        let day = self.position.day.to_string();
        self.announce(events, key, &[("n", &day), ("names", &names)])
    }

    /// Adds an event that all players observe. `key` names its text, and `slots` replace the text's
    /// placeholders.
    fn announce(
        &self,
        events: &mut Vec<Event>,
        key: &str,
        slots: &[(&str, &str)],
    ) -> Result<(), GameError> {
        let text = self.texts.fill(key, slots)?;
        events.push(Event { to: Audience::All, from: None, text });
        Ok(())
    }

    /// Adds an event for the statement of a player.
    fn add_statement(
        &self,
        events: &mut Vec<Event>,
        (key, to): (&str, Audience),
        seat: usize,
        text: &str,
    ) -> Result<(), GameError> {
        let text = self.texts.fill(key, &[("name", &self.names[seat]), ("text", text.trim())])?;
        events.push(Event { to, from: Some(seat), text });
        Ok(())
    }

    /// Returns the next turn of the current phase.
    fn create_turn(&self) -> Result<Next, GameError> {
        let Position { phase, roles, rules, victim, protected_before, .. } = &self.position;
        let other_players = |seat: usize| self.living_seats().filter(move |other| *other != seat);
        let none = || Ok::<Value, GameError>(json!(self.texts.get_text("none")?));
        let player_or_none = |seats: &mut dyn Iterator<Item = usize>| {
            let mut legal: Vec<Value> = seats.map(|seat| json!(self.names[seat])).collect();
            legal.push(none()?);
            Ok::<_, GameError>((Choice::OneOf(legal), Move::choice(none()?)))
        };
        let yes_or_no =
            || (Choice::OneOf(vec![json!(true), json!(false)]), Move::choice(json!(false)));
        let request = |seat, kind: &str, slots: &[(&str, &str)], (choice, default)| {
            let prompt = self.texts.fill(&format!("ask_{kind}"), slots)?;
            let has_speech = matches!(kind, "discussion" | "speech" | "last_words");
            Ok::<MoveRequest, GameError>(MoveRequest {
                seat,
                kind: kind.to_owned(),
                prompt,
                has_speech,
                choice,
                default,
            })
        };
        let silence = || (Choice::None, Move::say("…"));
        let mut requests = Vec::new();
        match phase {
            Phase::Nightfall | Phase::Dawn => {}
            Phase::Over(winner) => return Ok(Next::Over(self.create_outcomes(*winner))),
            Phase::Guard => {
                let mut seats = self.living_seats().filter(|seat| *protected_before != Some(*seat));
                let choice = player_or_none(&mut seats)?;
                if let Some(seat) = self.find_living_player(Role::Guard) {
                    requests.push(request(seat, "guard", &[], choice.clone())?);
                }
            }
            Phase::Discussion(spoken) => {
                let wolves = self.living_wolves();
                let seat = wolves[spoken % wolves.len()];
                let (choice, default) = yes_or_no();
                let default = Move { say: "…".to_owned(), ..default };
                requests.push(request(seat, "discussion", &[], (choice, default))?);
            }
            Phase::WolfVote => {
                let mut prey = self.living_seats().filter(|at| roles[*at].side() != Side::Wolves);
                let choice = player_or_none(&mut prey)?;
                for seat in self.living_wolves() {
                    requests.push(request(seat, "wolf_vote", &[], choice.clone())?);
                }
            }
            Phase::Heal => {
                if let Some((seat, victim)) = self.witch_who_can_heal().zip(*victim) {
                    requests.push(request(
                        seat,
                        "heal",
                        &[("name", &self.names[victim])],
                        yes_or_no(),
                    )?);
                }
            }
            Phase::Poison => {
                if let Some(seat) = self.witch_who_can_poison() {
                    requests.push(request(
                        seat,
                        "poison",
                        &[],
                        player_or_none(&mut other_players(seat))?,
                    )?);
                }
            }
            Phase::Seer => {
                if let Some(seat) = self.find_living_player(Role::Seer) {
                    let legal: Vec<Value> =
                        other_players(seat).map(|other| json!(self.names[other])).collect();
                    let default = Move::choice(legal.first().cloned().unwrap_or_default());
                    requests.push(request(seat, "seer", &[], (Choice::OneOf(legal), default))?);
                }
            }
            Phase::LastWords => {
                if let Some(seat) = self.position.speakers.first() {
                    requests.push(request(*seat, "last_words", &[], silence())?);
                }
            }
            Phase::Shot => {
                if let Some(seat) = self.position.shooters.first() {
                    requests.push(request(
                        *seat,
                        "shot",
                        &[],
                        player_or_none(&mut self.living_seats())?,
                    )?);
                }
            }
            Phase::Speech(from) => {
                if let Some(seat) = self.living_seats().find(|seat| seat >= from) {
                    requests.push(request(seat, "speech", &[], silence())?);
                }
            }
            Phase::Vote => {
                for seat in self.living_seats() {
                    requests.push(request(
                        seat,
                        "vote",
                        &[],
                        player_or_none(&mut other_players(seat))?,
                    )?);
                }
            }
        }
        debug_assert!(!requests.is_empty() && rules.players == self.names.len());
        Ok(Next::Requests(requests))
    }

    fn create_outcomes(&self, winner: Option<Side>) -> Vec<SeatOutcome> {
        let flag = |name: &str, value: bool| (name.to_owned(), f64::from(u8::from(value)));
        let outcome = |seat: usize| {
            let side = self.position.roles[seat].side();
            SeatOutcome {
                seat,
                reward: self.position.rules.reward(side, winner),
                parts: vec![
                    flag("won", winner == Some(side)),
                    flag("survived", self.position.alive[seat]),
                ],
                transitions: Vec::new(),
            }
        };
        (0..self.names.len()).map(outcome).collect()
    }

    /// Returns the seat of the player that a choice names. Returns `None` if the choice names no
    /// player.
    fn chosen_player(&self, played: &Move) -> Option<usize> {
        self.names.iter().position(|name| played.choice == name.as_str())
    }

    /// Returns the player with the most votes. If several players have the most votes, `ties`
    /// determines the result. Returns `None` if no player is selected, or if there are no votes.
    fn decide_vote(&mut self, votes: &[Option<usize>], ties: TieRule) -> Option<usize> {
        let count = |seat: usize| votes.iter().filter(|vote| **vote == Some(seat)).count();
        let max_count =
            (0..self.names.len()).map(count).max().filter(|max_count| *max_count > 0)?;
        let leading: Vec<usize> =
            (0..self.names.len()).filter(|seat| count(*seat) == max_count).collect();
        match (&leading[..], ties) {
            ([only], _) => Some(*only),
            (_, TieRule::Nobody) => None,
            (_, TieRule::First) => leading.first().copied(),
            (_, TieRule::Random) => {
                let counter = self.position.random_ties;
                self.position.random_ties += 1;
                let chosen = random_index(self.position.seed, Purpose::Tie, counter, leading.len());
                Some(leading[chosen])
            }
        }
    }

    /// Applies the moves of a turn. Returns the events that the seats observe.
    fn play_turn(&mut self, moves: &[(usize, &Move)]) -> Result<Vec<Event>, GameError> {
        let mut events = Vec::new();
        let votes: Vec<Option<usize>> =
            moves.iter().map(|(_, played)| self.chosen_player(played)).collect();
        let (Some((seat, played)), Some(chosen)) = (moves.first(), votes.first()) else {
            return Ok(events);
        };
        let (seat, chosen) = (*seat, *chosen);
        self.position.phase = match self.position.phase {
            phase @ (Phase::Nightfall | Phase::Dawn | Phase::Over(_)) => phase,
            Phase::Guard => {
                self.position.protected = chosen;
                Phase::Discussion(0)
            }
            Phase::Discussion(spoken) => {
                let wolves = self.living_wolves();
                let to = Audience::Seats(wolves.clone());
                self.add_statement(&mut events, ("wolf_says", to), seat, &played.say)?;
                let spoken = spoken + 1;
                let is_lap_end = spoken.is_multiple_of(wolves.len());
                let laps = spoken / wolves.len();
                let is_agreed = played.choice == true;
                let is_last = laps >= self.position.rules.discussion_rounds as usize;
                if is_lap_end && (is_agreed || is_last) {
                    Phase::WolfVote
                } else {
                    Phase::Discussion(spoken)
                }
            }
            Phase::WolfVote => {
                let victim = self.decide_vote(&votes, self.position.rules.wolf_ties);
                self.position.victim = victim;
                let text = match victim {
                    Some(victim) => {
                        self.texts.fill("wolf_result", &[("name", &self.names[victim])])?
                    }
                    None => self.texts.get_text("wolf_no_result")?.to_owned(),
                };
                let to = Audience::Seats(self.living_wolves());
                events.push(Event { to, from: None, text });
                Phase::Heal
            }
            Phase::Heal => {
                self.position.healed = played.choice == true;
                self.position.has_antidote &= !self.position.healed;
                Phase::Poison
            }
            Phase::Poison => {
                self.position.poisoned = chosen;
                self.position.has_poison &= chosen.is_none();
                Phase::Seer
            }
            Phase::Seer => {
                if let Some(checked) = chosen {
                    let role = self.position.roles[checked];
                    let by_role = self.position.rules.seer_learns_role();
                    let text = self.texts.fill(
                        if by_role { "seer_role" } else { "seer_result" },
                        &[
                            ("name", &self.names[checked]),
                            ("role", self.texts.get_text(role.name())?),
                            ("side", self.texts.get_text(role.side().name())?),
                        ],
                    )?;
                    events.push(Event { to: Audience::Seats(vec![seat]), from: None, text });
                }
                Phase::Dawn
            }
            Phase::LastWords => {
                self.position.speakers.remove(0);
                self.add_statement(&mut events, ("last_words", Audience::All), seat, &played.say)?;
                Phase::LastWords
            }
            Phase::Shot => {
                self.position.shooters.remove(0);
                let shooter = self.names[seat].clone();
                match chosen {
                    None => self.announce(&mut events, "no_shot", &[("name", &shooter)])?,
                    Some(target) => {
                        self.position.alive[target] = false;
                        if self.position.roles[target].can_shoot() {
                            self.position.shooters.push(target);
                        }
                        let slots =
                            [("name", self.names[target].as_str()), ("shooter", shooter.as_str())];
                        self.announce(&mut events, "shot", &slots)?;
                    }
                }
                Phase::Shot
            }
            Phase::Speech(_) => {
                self.add_statement(&mut events, ("says", Audience::All), seat, &played.say)?;
                Phase::Speech(seat + 1)
            }
            Phase::Vote => {
                self.announce_votes(&mut events, moves, &votes)?;
                let exiled = self.decide_vote(&votes, self.position.rules.ties);
                self.position.by_day = true;
                match exiled {
                    None => self.announce(&mut events, "not_exiled", &[])?,
                    Some(exiled) => {
                        self.position.alive[exiled] = false;
                        self.position.speakers = vec![exiled];
                        if self.position.roles[exiled].can_shoot() {
                            self.position.shooters = vec![exiled];
                        }
                        let name = self.names[exiled].clone();
                        self.announce(&mut events, "exiled", &[("name", &name)])?;
                    }
                }
                Phase::LastWords
            }
        };
        self.advance(&mut events)?;
        self.next = self.create_turn()?;
        Ok(events)
    }

    fn announce_votes(
        &self,
        events: &mut Vec<Event>,
        moves: &[(usize, &Move)],
        votes: &[Option<usize>],
    ) -> Result<(), GameError> {
        let none = self.texts.get_text("none")?;
        let vote = |((seat, _), target): (&(usize, &Move), &Option<usize>)| {
            let target = target.map_or(none, |target| self.names[target].as_str());
            self.texts.fill("vote", &[("name", &self.names[*seat]), ("target", target)])
        };
        let votes: Vec<String> = moves.iter().zip(votes).map(vote).collect::<Result<_, _>>()?;
        let votes = votes.join(self.texts.get_text("comma")?);
        self.announce(events, "vote_result", &[("votes", &votes)])
    }
}

impl State for WerewolfMatch {
    fn next(&self) -> Next {
        self.next.clone()
    }

    fn apply(&mut self, moves: &[(usize, Move)]) -> Result<Vec<Event>, GameError> {
        let requests = match &self.next {
            Next::Requests(requests) => requests.clone(),
            Next::Over(_) => Vec::new(),
        };
        let mut after = self.clone();
        let events = after.play_turn(&moves_in_seat_order(&requests, moves)?)?;
        *self = after;
        Ok(events)
    }

    fn save(&self) -> Value {
        json!(self.position)
    }

    fn load(&mut self, position: &Value) -> Result<(), GameError> {
        let position: Position = read_position(NAME, position)?;
        let texts = Texts::new(position.rules.language)?;
        let Position { rules, seed, roles, alive, .. } = position.clone();
        if [roles.len(), alive.len()] != [rules.players; 2] {
            let message = format!("the position does not have {} players", rules.players);
            return Err(GameError::Position { game: NAME.to_owned(), message });
        }
        let mut restored =
            WerewolfMatch { position, ..WerewolfMatch::new(rules, seed, roles, texts)? };
        restored.next = restored.create_turn()?;
        *self = restored;
        Ok(())
    }
}
