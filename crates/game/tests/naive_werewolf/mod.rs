//! The rules of werewolf once more, written from their description: plain, slow, in one function.
#![allow(clippy::needless_range_loop, reason = "plain loops over seats are the point")]

use levade_policy::uniform;
use serde_json::{Value, json};

/// Decision of a player.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    pub seat: usize,
    pub kind: String,
    pub choice: Value,
}

/// End of a game.
pub struct Ended {
    pub decisions: Vec<Decision>,
    pub won: Vec<f64>,
    pub survived: Vec<f64>,
    pub winner: &'static str,
}

/// Returns the scripted choice among `n`. The last one (often "none" or "no") is rare, and the
/// players prefer low seats, so that votes are decided.
pub fn pick(seed: u64, seat: usize, count: u64, n: usize) -> usize {
    let u = uniform(seed ^ 0xABCD, seat as u64, count);
    ((u * u * n as f64) as usize).min(n - 1)
}

struct Table {
    seed: u64,
    chinese: bool,
    num_requests: Vec<u64>,
    decisions: Vec<Decision>,
}

impl Table {
    fn name(&self, seat: usize) -> String {
        if self.chinese { format!("{}号", seat + 1) } else { format!("Player{}", seat + 1) }
    }

    fn choose(&mut self, seat: usize, kind: &str, legal: Vec<Value>) -> Value {
        let count = self.num_requests[seat];
        self.num_requests[seat] += 1;
        let choice = match legal.len() {
            0 => Value::Null,
            n => legal[pick(self.seed, seat, count, n)].clone(),
        };
        self.decisions.push(Decision { seat, kind: kind.to_owned(), choice: choice.clone() });
        choice
    }

    /// Chooses one of `seats`, or none if `optional`.
    fn choose_seat(
        &mut self,
        seat: usize,
        kind: &str,
        seats: &[usize],
        optional: bool,
    ) -> Option<usize> {
        let mut legal: Vec<Value> = seats.iter().map(|s| json!(self.name(*s))).collect();
        if optional {
            legal.push(json!(if self.chinese { "无" } else { "none" }));
        }
        let choice = self.choose(seat, kind, legal);
        seats.iter().copied().find(|s| choice == self.name(*s).as_str())
    }

    fn choose_bool(&mut self, seat: usize, kind: &str) -> bool {
        self.choose(seat, kind, vec![json!(true), json!(false)]) == json!(true)
    }
}

/// Plays a game with scripted players.
pub fn play(options: &Value, seed: u64) -> Ended {
    let n = options["players"].as_u64().unwrap() as usize;
    let mut roles: Vec<&str> = match n {
        7 => "wolf wolf villager villager villager seer witch",
        9 => "wolf wolf wolf villager villager villager seer witch hunter",
        _ => "wolf wolf wolf king villager villager villager villager seer witch hunter guard",
    }
    .split(' ')
    .collect();
    for (step, last) in (1..n).rev().enumerate() {
        assert_eq!(step + last, n - 1);
        let u = uniform(seed, 0x61 << 56, last as u64);
        roles.swap((u * (last + 1) as f64) as usize, last);
    }
    let text = |key: &str, default: &str| options[key].as_str().unwrap_or(default).to_owned();
    let (ties, wolf_ties) = (text("ties", "nobody"), text("wolf_ties", "nobody"));
    let rounds = options["discussion_rounds"].as_u64().unwrap_or(3);
    let max_days = options["max_days"].as_u64().unwrap_or(30);
    let self_heal = options["self_heal"].as_bool().unwrap_or(n == 7);
    let chinese = options["language"] == "zh";
    let mut table = Table { seed, chinese, num_requests: vec![0; n], decisions: Vec::new() };
    let is_wolf: Vec<bool> = roles.iter().map(|role| *role == "wolf" || *role == "king").collect();

    let mut alive = vec![true; n];
    let mut antidote = true;
    let mut poison = true;
    let mut guarded_before: Option<usize> = None;
    let mut chance = 0;
    let mut over: Option<&'static str> = None;
    let mut day = 0;

    let judge = |alive: &[bool]| -> Option<&'static str> {
        let mut wolves = 0;
        let mut villagers = 0;
        let mut gods = 0;
        for seat in 0..n {
            if alive[seat] {
                if is_wolf[seat] {
                    wolves += 1;
                } else if roles[seat] == "villager" {
                    villagers += 1;
                } else {
                    gods += 1;
                }
            }
        }
        if wolves == 0 {
            return Some("good");
        }
        let lost = if n == 12 { villagers == 0 || gods == 0 } else { wolves >= villagers + gods };
        if lost { Some("wolves") } else { None }
    };
    let mut decide = |votes: &[Option<usize>], ties: &str| -> Option<usize> {
        let mut best: Vec<usize> = Vec::new();
        let mut max_votes = 1;
        for seat in 0..n {
            let mut got = 0;
            for vote in votes {
                if *vote == Some(seat) {
                    got += 1;
                }
            }
            if got > max_votes {
                max_votes = got;
                best = vec![seat];
            } else if got == max_votes {
                best.push(seat);
            }
        }
        if best.len() < 2 || ties == "first" {
            return best.first().copied();
        }
        if ties == "nobody" {
            return None;
        }
        let u = uniform(seed, 0x62 << 56, chance);
        chance += 1;
        Some(best[(u * best.len() as f64) as usize])
    };

    'game: while over.is_none() {
        day += 1;
        if day > max_days {
            break;
        }
        let living: Vec<usize> = (0..n).filter(|s| alive[*s]).collect();
        let wolves: Vec<usize> = living.iter().copied().filter(|s| is_wolf[*s]).collect();
        let who = |role: &str| living.iter().copied().find(|s| roles[*s] == role);

        // Night.
        let mut guarded = None;
        if let Some(guard) = who("guard") {
            let allowed: Vec<usize> =
                living.iter().copied().filter(|s| Some(*s) != guarded_before).collect();
            guarded = table.choose_seat(guard, "guard", &allowed, true);
        }
        guarded_before = guarded;
        if wolves.len() > 1 {
            for _ in 0..rounds {
                let mut agreed = false;
                for wolf in &wolves {
                    agreed = table.choose_bool(*wolf, "discussion");
                }
                if agreed {
                    break;
                }
            }
        }
        let prey: Vec<usize> = living.iter().copied().filter(|s| !is_wolf[*s]).collect();
        let mut votes = Vec::new();
        for wolf in &wolves {
            votes.push(table.choose_seat(*wolf, "wolf_vote", &prey, true));
        }
        let victim = decide(&votes, &wolf_ties);
        let mut healed = false;
        let mut poisoned = None;
        if let Some(witch) = who("witch") {
            if antidote && victim.is_some() && (victim != Some(witch) || self_heal) {
                healed = table.choose_bool(witch, "heal");
                if healed {
                    antidote = false;
                }
            }
            if poison && !healed {
                let targets: Vec<usize> = living.iter().copied().filter(|s| *s != witch).collect();
                poisoned = table.choose_seat(witch, "poison", &targets, true);
                if poisoned.is_some() {
                    poison = false;
                }
            }
        }
        if let Some(seer) = who("seer") {
            let targets: Vec<usize> = living.iter().copied().filter(|s| *s != seer).collect();
            table.choose_seat(seer, "seer", &targets, false);
        }

        // Dawn.
        let mut dead = Vec::new();
        for seat in 0..n {
            let shields = u8::from(guarded == Some(seat)) + u8::from(healed);
            let bitten = victim == Some(seat) && shields != 1;
            if bitten || poisoned == Some(seat) {
                alive[seat] = false;
                dead.push(seat);
            }
        }
        over = judge(&alive);
        if over.is_some() {
            break;
        }
        if day == 1 {
            for seat in &dead {
                table.choose(*seat, "last_words", vec![]);
            }
        }
        let may_shoot = |seat: usize| roles[seat] == "hunter" || roles[seat] == "king";
        let mut guns: std::collections::VecDeque<usize> =
            dead.into_iter().filter(|s| may_shoot(*s) && poisoned != Some(*s)).collect();
        while let Some(gun) = guns.pop_front() {
            let targets: Vec<usize> = (0..n).filter(|s| alive[*s]).collect();
            if let Some(hit) = table.choose_seat(gun, "shot", &targets, true) {
                alive[hit] = false;
                if may_shoot(hit) {
                    guns.push_back(hit);
                }
                over = judge(&alive);
                if over.is_some() {
                    break 'game;
                }
            }
        }

        // Day.
        let living: Vec<usize> = (0..n).filter(|s| alive[*s]).collect();
        for seat in &living {
            table.choose(*seat, "speech", vec![]);
        }
        let mut votes = Vec::new();
        for seat in &living {
            let targets: Vec<usize> = living.iter().copied().filter(|s| s != seat).collect();
            votes.push(table.choose_seat(*seat, "vote", &targets, true));
        }
        if let Some(exiled) = decide(&votes, &ties) {
            alive[exiled] = false;
            over = judge(&alive);
            if over.is_some() {
                break;
            }
            table.choose(exiled, "last_words", vec![]);
            let mut guns: std::collections::VecDeque<usize> =
                [exiled].into_iter().filter(|s| may_shoot(*s)).collect();
            while let Some(gun) = guns.pop_front() {
                let targets: Vec<usize> = (0..n).filter(|s| alive[*s]).collect();
                if let Some(hit) = table.choose_seat(gun, "shot", &targets, true) {
                    alive[hit] = false;
                    if may_shoot(hit) {
                        guns.push_back(hit);
                    }
                    over = judge(&alive);
                    if over.is_some() {
                        break 'game;
                    }
                }
            }
        }
    }
    let winner = over.unwrap_or("nobody");
    let won = (0..n)
        .map(|s| if (if is_wolf[s] { "wolves" } else { "good" }) == winner { 1.0 } else { 0.0 });
    Ended {
        won: won.collect(),
        survived: alive.iter().map(|alive| if *alive { 1.0 } else { 0.0 }).collect(),
        decisions: table.decisions,
        winner,
    }
}
