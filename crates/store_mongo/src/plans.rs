//! The write-ahead ledger: the recorded plan of each training step.
//!
//! The sequences of a plan are documents that contain the plan's digest. They are written before
//! the document of the step, which contains the same digest. So a plan is complete if the document
//! of its step exists. Sequences that a killed trainer left behind are never read.

use std::str::FromStr;

use levade_store::backend::{Failure, StepPlanHeader, indexed_sequences, push_sequence};
use levade_store::{PerToken, PlannedSequence, StepPlan};
use levade_tree::{AttemptId, SegmentId};
use mongodb::bson::{Document, doc};
use sha2::{Digest, Sha256};

use crate::attempts::json_text;
use crate::connection::{Connection, Result, collect_documents, insert_missing};
use crate::segments::to_hex;
use crate::{fields, json};

/// Maximum number of sequences in one insert request.
const BATCH: usize = 256;

/// Returns the id of the document of a training step.
pub(crate) fn step_id(phase: u32, step: u32) -> String {
    format!("{phase}/{step}")
}

/// Writes the sequences of a step plan, and returns the document of its step, which is not written
/// yet.
pub(crate) async fn write_sequences(connection: &Connection, plan: &StepPlan) -> Result<Document> {
    let StepPlan { phase, step, .. } = *plan;
    let header = serde_json::to_string(&StepPlanHeader::from(plan))
        .map_err(|error| Failure::Unstorable(error.to_string()))?;
    let mut documents = Vec::new();
    let mut hash = Sha256::new();
    hash.update(&header);
    for (index, (policy, update, sequence)) in indexed_sequences(plan).enumerate() {
        let column = |values: &PerToken| fields::to_binary(values.to_bytes());
        let document = doc! {
            "phase": i64::from(phase),
            "step": i64::from(step),
            "index": index as i64,
            "policy": i64::from(policy),
            "update": i64::from(update),
            "attempt": sequence.attempt.to_string(),
            "leaf": i64::from(sequence.leaf.0),
            "advantage": column(&sequence.advantage),
            "weight": column(&sequence.weight),
            "returns": sequence.returns.as_ref().map(column),
            "values": sequence.values.as_ref().map(column),
        };
        hash.update(document.to_string());
        documents.push(document);
    }
    let digest = to_hex(&hash.finalize()[..8]);
    let sequences = connection.collection("planned_sequences");
    let mut head = doc! {
        "_id": step_id(phase, step),
        "phase": i64::from(phase),
        "step": i64::from(step),
        "plan": &digest,
        "sequences": documents.len() as i64,
    };
    json::write_json(&mut head, "header", &header);
    for (index, document) in documents.iter_mut().enumerate() {
        document.insert("_id", format!("{phase}/{step}/{digest}/{index}"));
        document.insert("plan", &digest);
    }
    for batch in documents.chunks(BATCH) {
        insert_missing(&sequences, batch.to_vec()).await?;
    }
    Ok(head)
}

/// Reads a step plan from the document of its step and the documents of its sequences.
pub(crate) async fn read_plan(connection: &Connection, head: &Document) -> Result<StepPlan> {
    let [phase, step] = [fields::read_integer(head, "phase")?, fields::read_integer(head, "step")?];
    let header: StepPlanHeader = serde_json::from_str(&json_text(head, "header")?)
        .map_err(|error| Failure::Corrupt(format!("the header cannot be read: {error}")))?;
    let mut plan = header.into_plan(phase, step);
    let filter = doc! {
        "phase": i64::from(phase),
        "step": i64::from(step),
        "plan": fields::read_text(head, "plan")?,
    };
    let sequences = connection.collection("planned_sequences");
    let found = sequences.find(filter).sort(doc! { "index": 1 }).await?;
    let documents = collect_documents(found).await?;
    if documents.len() != fields::read_integer::<usize>(head, "sequences")? {
        return Err(Failure::Corrupt("a sequence of the plan is missing".to_owned()).into());
    }
    for document in &documents {
        let corrupt = |what: &str| Failure::Corrupt(format!("a sequence of the plan: {what}"));
        let column = |name: &str| {
            let bytes = fields::read_bytes(document, name)?;
            PerToken::from_bytes(bytes).ok_or_else(|| corrupt("a list of numbers is truncated"))
        };
        let optional =
            |name: &str| fields::find_value(document, name).map(|_| column(name)).transpose();
        let index: (u32, u32) =
            (fields::read_integer(document, "policy")?, fields::read_integer(document, "update")?);
        let attempt = fields::read_text(document, "attempt")?;
        let sequence = PlannedSequence {
            attempt: AttemptId::from_str(&attempt).map_err(|error| corrupt(&error.to_string()))?,
            leaf: SegmentId(fields::read_integer(document, "leaf")?),
            advantage: column("advantage")?,
            weight: column("weight")?,
            returns: optional("returns")?,
            values: optional("values")?,
        };
        push_sequence(&mut plan, index, sequence).map_err(Failure::Corrupt)?;
    }
    Ok(plan)
}
