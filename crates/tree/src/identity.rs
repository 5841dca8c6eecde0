//! Names of attempts, derived from their run, their slot in the run and the number of the try.
//!
//! An attempt slot ([`AttemptSlot`]) is a position in a run: purpose, phase, step, group and
//! sample. A slot can have several tries, each of which is an attempt with its own [`AttemptId`]. A
//! try that failed stays in the record as superseded, a try whose process exited as abandoned. Step
//! plans refer to attempts by these names.
//!
//! # Guarantees
//! - **Derived names.** An [`AttemptId`] is a function of run, slot and try, never random. Any
//!   machine that repeats an attempt derives the same name. A run is named after the name and the
//!   seed in its recipe.
//! - **Unique names.** Two attempts of one run have different names.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Purpose for which an attempt is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// The attempt was written by another author, to be imitated.
    Demonstration,
    /// The attempt is sampled, to train on it.
    Train,
    /// The attempt is sampled greedily, as a baseline for other attempts at the same task; never
    /// trained on.
    Baseline,
    /// The attempt is sampled for an evaluation.
    Eval,
    /// The attempt is sampled to improve a prompt: an attempt with the prompt, a critique of it, or
    /// a new version of it.
    Prompt,
    /// The attempt is made by an agent outside of the run, which joined by a session. The run does
    /// not plan, evaluate or count such attempts until a recipe takes a copy of them.
    Session,
}

impl Purpose {
    /// All purposes of attempts.
    pub const ALL: [Purpose; 6] = [
        Purpose::Demonstration,
        Purpose::Train,
        Purpose::Baseline,
        Purpose::Eval,
        Purpose::Prompt,
        Purpose::Session,
    ];

    /// Returns the name under which the purpose is stored.
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Demonstration => "demonstration",
            Purpose::Train => "train",
            Purpose::Baseline => "baseline",
            Purpose::Eval => "eval",
            Purpose::Prompt => "prompt",
            Purpose::Session => "session",
        }
    }

    /// Returns the purpose with the stored name `name`, or `None` if no purpose has this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|p| p.name() == name)
    }
}

/// An attempt slot: the position of an attempt in a run, by purpose, phase, step, task and sample.
/// A slot can have several tries, of which the last counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttemptSlot {
    /// Purpose of the attempt.
    pub purpose: Purpose,
    /// Index of the phase in the recipe, from 0.
    pub phase: u32,
    /// Index of the step within the phase, from 0. For evaluations, the number of steps that were
    /// completed before.
    pub step: u32,
    /// Index of the task within the step, from 0.
    pub group: u32,
    /// Index of the attempt among the samples of this task, from 0.
    pub sample: u32,
}

impl AttemptSlot {
    /// Returns the attempt slot of a session: its numbers are the first 16 bytes of the SHA-256
    /// hash of the session's key, big-endian. The slot does not reveal the key.
    pub fn for_session(key: &str) -> Self {
        let hash = Sha256::digest(key.as_bytes());
        let number = |index: usize| {
            hash[4 * index..4 * index + 4].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
        };
        AttemptSlot {
            purpose: Purpose::Session,
            phase: number(0),
            step: number(1),
            group: number(2),
            sample: number(3),
        }
    }

    /// Returns the short name of the attempt slot, such as `train/1/3/0/2`.
    pub fn name(&self) -> String {
        let AttemptSlot { purpose, phase, step, group, sample } = self;
        format!("{}/{phase}/{step}/{group}/{sample}", purpose.name())
    }

    /// Parses the short name of an attempt slot, such as `train/1/3/0/2`. Returns `None` if `name`
    /// is not a slot's name.
    pub fn parse(name: &str) -> Option<Self> {
        let parts: Vec<&str> = name.split('/').collect();
        let [purpose, phase, step, group, sample] = parts[..] else { return None };
        Some(AttemptSlot {
            purpose: Purpose::parse(purpose)?,
            phase: parse_number(phase)?,
            step: parse_number(step)?,
            group: parse_number(group)?,
            sample: parse_number(sample)?,
        })
    }
}

fn parse_number(text: &str) -> Option<u32> {
    text.parse::<u32>().ok()
}

impl fmt::Display for AttemptSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AttemptSlot { purpose, phase, step, group, sample } = self;
        let purpose = purpose.name();
        write!(f, "attempt {purpose}/phase {phase}/step {step}/group {group}/sample {sample}")
    }
}

/// Name of the agent and of the policy if a recipe does not name them.
pub const DEFAULT: &str = "default";

/// Name of a run, unique among the runs in a store.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunId(pub String);

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Identifier of an attempt: 128 bits, written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AttemptId([u8; 16]);

impl AttemptId {
    /// Returns the identifier of try `number`, from 0, of an attempt slot in a run: the first 16
    /// bytes of a SHA-256 hash of run, slot and number.
    pub fn new(run: &RunId, slot: &AttemptSlot, number: u32) -> Self {
        let AttemptSlot { purpose, phase, step, group, sample } = *slot;
        let mut hash = Sha256::new();
        // 0xFF cannot occur in UTF-8 text. As a terminator, it keeps different lists of parts
        // distinct.
        for text in [run.0.as_str(), purpose.name()] {
            hash.update(text.as_bytes());
            hash.update([0xFF]);
        }
        for part in [phase, step, group, sample, number] {
            hash.update(part.to_le_bytes());
        }
        let mut id = [0; 16];
        id.copy_from_slice(&hash.finalize()[..16]);
        AttemptId(id)
    }

    /// Returns the 16 bytes of the attempt's identifier.
    pub fn bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Creates an attempt's identifier from its 16 bytes.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        AttemptId(bytes)
    }
}

impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AttemptId({self})")
    }
}

/// Error for a text that is not an attempt's identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an attempt id, which has 32 hexadecimal digits")]
pub struct InvalidAttemptId(String);

impl FromStr for AttemptId {
    type Err = InvalidAttemptId;

    fn from_str(text: &str) -> Result<Self, InvalidAttemptId> {
        let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| is_hex);
        number
            .map(|number| AttemptId(number.to_be_bytes()))
            .ok_or_else(|| InvalidAttemptId(text.to_owned()))
    }
}

impl TryFrom<String> for AttemptId {
    type Error = InvalidAttemptId;

    fn try_from(text: String) -> Result<Self, InvalidAttemptId> {
        text.parse()
    }
}

impl From<AttemptId> for String {
    fn from(id: AttemptId) -> Self {
        id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const SLOT: AttemptSlot =
        AttemptSlot { purpose: Purpose::Train, phase: 1, step: 2, group: 3, sample: 4 };

    #[test]
    fn attempt_id_depends_on_every_part() {
        let run = RunId("a".into());
        let mut names = BTreeSet::from([AttemptId::new(&run, &SLOT, 0)]);
        let other_slots = [
            AttemptSlot { purpose: Purpose::Eval, ..SLOT },
            AttemptSlot { phase: 2, ..SLOT },
            AttemptSlot { step: 3, ..SLOT },
            AttemptSlot { group: 4, ..SLOT },
            AttemptSlot { sample: 5, ..SLOT },
        ];
        names.extend(other_slots.iter().map(|slot| AttemptId::new(&run, slot, 0)));
        names.insert(AttemptId::new(&run, &SLOT, 1));
        names.insert(AttemptId::new(&RunId("b".into()), &SLOT, 0));
        // A part does not run into the next one.
        names.insert(AttemptId::new(&RunId("atrain".into()), &SLOT, 0));
        assert_eq!(names.len(), 9);
        assert_eq!(AttemptId::new(&run, &SLOT, 0), AttemptId::new(&run.clone(), &SLOT, 0));
    }

    /// Recorded runs depend on these bits.
    #[test]
    fn attempt_id_matches_recorded_runs() {
        let id = AttemptId::new(&RunId("calculator".into()), &SLOT, 0);
        assert_eq!(id.to_string(), "7b131eedbe37650c46fd984ae93101f7");
    }

    /// The numbers are those of `printf %s sk-1 | sha256sum`.
    #[test]
    fn session_slot_is_hash_of_key() {
        let slot = AttemptSlot::for_session("sk-1");
        assert_eq!(slot.purpose, Purpose::Session);
        let numbers = [slot.phase, slot.step, slot.group, slot.sample];
        assert_eq!(
            numbers.map(|n| format!("{n:08x}")).concat(),
            "0f2c10bf3d128c719c6bfa4ecbae94b7"
        );
        assert_eq!(AttemptSlot::parse(&slot.name()), Some(slot));
    }

    #[test]
    fn attempt_slot_name_round_trips() {
        assert_eq!(SLOT.name(), "train/1/2/3/4");
        assert_eq!(AttemptSlot::parse("train/1/2/3/4"), Some(SLOT));
        for text in ["", "train/1/2/3", "tran/1/2/3/4", "train/1/2/3/-4", "train/1/2/3/4/5"] {
            assert_eq!(AttemptSlot::parse(text), None, "{text}");
        }
    }

    #[test]
    fn attempt_id_round_trips_through_text() {
        let id = AttemptId::from_bytes(*b"\x00\x01\xfe\xffabcdefghijkl");
        assert_eq!(id.to_string(), "0001feff6162636465666768696a6b6c");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(AttemptId::try_from(String::from(id)), Ok(id));
        let bad = [
            "",
            "0001feff6162636465666768696a6b6",
            "+001feff6162636465666768696a6b6c",
            "g001feff6162636465666768696a6b6c",
        ];
        for text in bad {
            assert_eq!(text.parse::<AttemptId>(), Err(InvalidAttemptId(text.into())));
        }
    }

    #[test]
    fn purpose_names_are_unique() {
        for purpose in Purpose::ALL {
            assert_eq!(Purpose::parse(purpose.name()), Some(purpose));
        }
        assert_eq!(Purpose::parse("other"), None);
    }
}
