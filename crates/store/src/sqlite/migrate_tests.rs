//! Tests of the migration of random runs from schema 3.

use levade_tree::{Kind, VersionRun};
use proptest::prelude::*;
use rusqlite::Connection;
use serde_json::json;

use super::*;
use crate::testing::wait;
use crate::{CreditTarget, Sqlite, StepReward, Store};

/// The tables of schema 3.
const TABLES_3: &str = "
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY, purpose TEXT NOT NULL, phase INTEGER NOT NULL, step INTEGER NOT NULL, \
    grp INTEGER NOT NULL,
    sample INTEGER NOT NULL, task TEXT NOT NULL, outcome TEXT NOT NULL, score REAL, reward REAL, \
    earned TEXT NOT NULL,
    status TEXT NOT NULL, sampled_tokens INTEGER NOT NULL, tokens INTEGER NOT NULL,
    UNIQUE (purpose, phase, step, grp, sample)
) STRICT;
CREATE TABLE prompts (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, tokens BLOB NOT NULL) \
STRICT;
CREATE TABLE segments (
    attempt INTEGER NOT NULL REFERENCES attempts (id), id INTEGER NOT NULL, parent INTEGER, kind \
    TEXT NOT NULL,
    agent TEXT NOT NULL, turn INTEGER NOT NULL, temperature REAL NOT NULL, filtered INTEGER NOT \
    NULL,
    prompt INTEGER REFERENCES prompts (id), tokens BLOB, logprobs BLOB NOT NULL, versions BLOB \
    NOT NULL,
    PRIMARY KEY (attempt, id), CHECK ((prompt IS NULL) <> (tokens IS NULL))
) STRICT, WITHOUT ROWID;
CREATE TABLE steps (
    phase INTEGER NOT NULL, step INTEGER NOT NULL, plan TEXT NOT NULL, PRIMARY KEY (phase, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE evals (
    phase INTEGER NOT NULL, step INTEGER NOT NULL, result TEXT NOT NULL, PRIMARY KEY (phase, step)
) STRICT, WITHOUT ROWID;
PRAGMA application_id = 0x44525347;
PRAGMA user_version = 3;
";

/// An attempt in schema 3, with two segments: a prompt and a completion.
#[derive(Debug, Clone)]
struct Old {
    purpose: Purpose,
    slot: [u32; 4],
    prompt: Vec<u32>,
    completion: Vec<(u32, u32)>,
    version: u64,
    reward: Option<f64>,
    numbers: Vec<(f32, u32)>,
    text: String,
}

impl Old {
    fn slot(&self) -> AttemptSlot {
        let [phase, step, group, sample] = self.slot;
        AttemptSlot { purpose: self.purpose, phase, step, group, sample }
    }

    fn outcome(&self) -> Value {
        if self.purpose == Purpose::Demonstration {
            return json!({ "final_text": self.text });
        }
        let outcome =
            Outcome { error: Some(self.text.clone()), turns: 1, ..Outcome::demonstrated("a") };
        serde_json::to_value(outcome).unwrap()
    }

    fn insert(&self, to: &Connection) {
        let [phase, step, group, sample] = self.slot;
        let step_rewards = json!([{ "by": { "turn": 0 }, "reward": 0.5 }]).to_string();
        to.execute(
            "INSERT INTO attempts (purpose, phase, step, grp, sample, task, outcome, score, \
             reward, earned, status,
                 sampled_tokens, tokens)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, NULL, ?8, ?9, 'completed', ?10, ?11)",
            params![
                self.purpose.name(),
                phase,
                step,
                group,
                sample,
                json!({ "text": self.text }).to_string(),
                self.outcome().to_string(),
                self.reward,
                step_rewards,
                self.completion.len() as i64,
                (self.prompt.len() + self.completion.len()) as i64
            ],
        )
        .unwrap();
        let id = to.last_insert_rowid();
        let digest = Sha256::digest(to_bytes(&self.prompt));
        to.execute(
            "INSERT INTO prompts (digest, tokens) VALUES (?1, ?2) ON CONFLICT DO NOTHING",
            params![&digest[..], to_bytes(&self.prompt)],
        )
        .unwrap();
        to.execute(
            "INSERT INTO segments SELECT ?1, 0, NULL, 'given', '', 0, 1.0, 0, id, NULL, x'', x'' \
             FROM prompts WHERE digest = ?2",
            params![id, &digest[..]],
        )
        .unwrap();
        let [tokens, logprobs] = [|r: &(u32, u32)| r.0, |r: &(u32, u32)| r.1]
            .map(|of| to_bytes(&self.completion.iter().map(of).collect::<Vec<_>>()));
        let version =
            [&self.version.to_le_bytes()[..], &(self.completion.len() as u32).to_le_bytes()]
                .concat();
        to.execute(
            "INSERT INTO segments VALUES (?1, 1, 0, 'sampled', 'a', 3, 0.5, 1, NULL, ?2, ?3, ?4)",
            params![id, tokens, logprobs, version],
        )
        .unwrap();
    }

    fn planned_sequence(&self) -> Value {
        let key = serde_json::to_value(self.slot()).unwrap();
        json!({ "attempt": key, "leaf": 1, "advantage": self.numbers, "weight": self.numbers, "returns": self.numbers })
    }
}

fn to_bytes(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn any_old() -> impl Strategy<Value = Old> {
    let purpose = prop::sample::select(vec![
        Purpose::Demonstration,
        Purpose::Train,
        Purpose::Baseline,
        Purpose::Eval,
    ]);
    let completion = prop::collection::vec((any::<u32>(), any::<u32>()), 1..5);
    let numbers = prop::collection::vec((prop::num::f32::NORMAL, 0u32..9), 0..4);
    (
        purpose,
        any::<[u32; 4]>(),
        prop::collection::vec(0u32..3, 0..3),
        completion,
        any::<u64>(),
        prop::option::of(prop::num::f64::NORMAL),
        numbers,
        ".{0,8}",
    )
        .prop_map(|(purpose, location, prompt, completion, version, reward, numbers, text)| {
            Old { purpose, slot: location, prompt, completion, version, reward, numbers, text }
        })
}

fn bits(numbers: &PerToken) -> Vec<u8> {
    numbers.to_bytes()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// All data of schema 3 is preserved to the bit, both for a reader and for a writer that
    /// resumes the run.
    #[test]
    fn migration_preserves_schema_3_exactly(olds in prop::collection::vec(any_old(), 0..6)) {
        let mut olds = olds;
        let mut seen = std::collections::BTreeSet::new();
        olds.retain(|old| seen.insert(old.slot()));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.db");
        let raw = Connection::open(&file).unwrap();
        raw.execute_batch(TABLES_3).unwrap();
        olds.iter().for_each(|old| old.insert(&raw));
        let paths: Vec<Value> = olds.iter().map(Old::planned_sequence).collect();
        let plan = json!({ "phase": 1, "step": 2, "places": [7], "updates": [{ "micro_batches": [[], paths] }] });
        raw.execute("INSERT INTO steps VALUES (1, 2, ?1)", [plan.to_string()]).unwrap();
        raw.execute("INSERT INTO evals VALUES (0, 0, '{\"mean\":0.5}')", []).unwrap();
        drop(raw);
        let before = std::fs::read(&file).unwrap();

        let reader = wait(Sqlite::open_existing(&file)).unwrap();
        prop_assert_eq!(&std::fs::read(&file).unwrap(), &before);
        let run = reader.run().clone();
        let writer = wait(Sqlite::resume(&file, &RunId("another".into()))).unwrap();
        prop_assert_eq!(writer.run(), &run);
        for store in [&reader, &writer] {
            for old in &olds {
                let found = wait(store.last_try(&old.slot())).unwrap().unwrap();
                prop_assert_eq!(found.id, AttemptId::new(&run, &old.slot(), 0));
                prop_assert_eq!(found.number, 0);
                prop_assert_eq!(&found.task["text"], &old.text);
                prop_assert_eq!(found.reward.map(f64::to_bits), old.reward.map(f64::to_bits));
                prop_assert_eq!(&found.step_rewards, &[StepReward { credit_target: CreditTarget::Turn(0), reward: 0.5 }]);
                if old.purpose == Purpose::Demonstration {
                    prop_assert_eq!(&found.outcome, &Outcome::demonstrated(old.text.as_str()));
                } else {
                    prop_assert_eq!(found.outcome.error.as_ref(), Some(&old.text));
                }
                let [prompt, completion] = found.trajectory.segments() else { panic!() };
                prop_assert_eq!(&prompt.tokens, &old.prompt);
                prop_assert_eq!((completion.kind, completion.parent, completion.after), (Kind::Sampled, Some(SegmentId(0)), None));
                let sampled: Vec<(u32, u32)> =
                    completion.tokens.iter().copied().zip(completion.logprobs.iter().map(|p| p.to_bits())).collect();
                prop_assert_eq!(&sampled, &old.completion);
                let versions = [VersionRun { version: old.version, len: old.completion.len() as u32 }];
                prop_assert_eq!(&completion.versions, &versions);
                prop_assert_eq!((completion.agent.as_str(), completion.policy.as_str(), completion.turn), ("a", "default", 3));
                prop_assert_eq!((completion.temperature, completion.filtered), (0.5, true));
            }
            let plan = wait(store.step_plan(1, 2)).unwrap().unwrap();
            prop_assert_eq!(&plan.group_positions, &[7]);
            let [policy] = &plan.policies[..] else { panic!("{plan:?}") };
            prop_assert_eq!((policy.policy.as_str(), policy.version), ("default", 0));
            let update = &policy.updates[0];
            let batches = update.micro_batches();
            prop_assert_eq!((batches.len(), batches[0].len(), batches[1].len()), (2, 0, olds.len()));
            prop_assert!(update.micro_batch_plan.check(update.sequences.len(), 1).is_ok());
            prop_assert_eq!(update.critic_plan.as_ref(), (!olds.is_empty()).then_some(&update.micro_batch_plan));
            for (path, old) in batches[1].iter().zip(&olds) {
                prop_assert_eq!(path.attempt, AttemptId::new(&run, &old.slot(), 0));
                let want = bits(&PerToken::from_runs(old.numbers.clone()));
                let returns = path.returns.as_ref().map(bits);
                prop_assert_eq!((bits(&path.advantage), bits(&path.weight), returns), (want.clone(), want.clone(), Some(want)));
                prop_assert_eq!(&path.values, &None);
            }
            prop_assert_eq!(wait(store.evals()).unwrap().len(), 1);
        }
        // Recording an equal attempt again is still a no-op.
        for old in &olds {
            let stored = wait(writer.last_try(&old.slot())).unwrap().unwrap();
            prop_assert_eq!(wait(writer.record_attempt(&stored)).unwrap(), crate::WriteOutcome::AlreadyRecorded);
        }
        drop(writer);
        prop_assert_eq!(wait(wait(Sqlite::open(&file, &run)).unwrap().planned_steps()).unwrap(), [(1, 2)]);
    }
}

/// If a plan cannot be parsed, the file keeps schema 3 and all its rows.
#[test]
fn failed_migration_leaves_file_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.db");
    let raw = Connection::open(&file).unwrap();
    raw.execute_batch(TABLES_3).unwrap();
    raw.execute("INSERT INTO steps VALUES (0, 0, '{}')", []).unwrap();
    drop(raw);
    let error = wait(Sqlite::open(&file, &RunId("x".into()))).unwrap_err().to_string();
    assert!(error.contains("run.db") && error.contains("a plan cannot be read"), "{error}");
    let raw = Connection::open(&file).unwrap();
    assert_eq!(read_identity(&raw).unwrap().1, 3);
    let kept: i64 = raw.query_row("SELECT count(*) FROM steps", [], |row| row.get(0)).unwrap();
    assert_eq!(kept, 1);
}

/// Schema 5 only adds a table, so a file of schema 4 keeps all its rows, and its attempts can be
/// withdrawn.
#[test]
fn migration_from_schema_4_adds_withdrawals_and_keeps_rows() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.db");
    let run = RunId("x".into());
    let slot = AttemptSlot { purpose: Purpose::Train, phase: 0, step: 1, group: 2, sample: 3 };
    let start =
        crate::AttemptStart { id: AttemptId::new(&run, &slot, 0), slot, number: 0, task: json!(1) };
    let status = crate::Status::Failed;
    let attempt = crate::Attempt { status, ..crate::Attempt::from_start(&start) };
    let store = wait(Sqlite::open(&file, &run)).unwrap();
    wait(store.record_attempt(&attempt)).unwrap();
    drop(store);
    let raw = Connection::open(&file).unwrap();
    raw.execute_batch("DROP TABLE withdrawals; PRAGMA user_version = 4").unwrap();
    drop(raw);
    let reader = wait(Sqlite::open_existing(&file)).unwrap();
    assert_eq!(wait(reader.attempt(&attempt.id)).unwrap(), Some(attempt.clone()));
    assert_eq!(wait(reader.withdrawals()).unwrap(), []);
    drop(reader);
    assert_eq!(
        read_identity(&Connection::open(&file).unwrap()).unwrap().1,
        4,
        "a reader changes nothing"
    );
    let writer = wait(Sqlite::resume(&file, &run)).unwrap();
    assert_eq!(wait(writer.attempt(&attempt.id)).unwrap(), Some(attempt.clone()));
    let request = crate::WithdrawRequest { attempts: vec![attempt.id], ..Default::default() };
    assert_eq!(wait(writer.withdraw(&request)).unwrap().len(), 1);
    assert_eq!(read_identity(&Connection::open(&file).unwrap()).unwrap().1, SCHEMA_VERSION);
}
