//! Stores spans, and the sequence numbers that order them within a rollout.

use std::collections::{BTreeMap, BTreeSet};

use levade_store::rollouts::{NewSpan, SpanOutcome};
use mongodb::bson::oid::ObjectId;
use mongodb::bson::{Document, doc};
use mongodb::options::ReturnDocument;

use super::MongoRollouts;
use super::documents::StoredRollout;
use crate::connection::{Result, collect_documents, is_duplicate};
use crate::{fields, json};

/// Maximum sequence number of a span. A larger number is replaced by this one.
const MAX_NUMBER: u64 = i64::MAX as u64;

/// Key of the try that a span belongs to: rollout id and try id.
type TryKey<'a> = (&'a str, &'a str);

impl MongoRollouts {
    /// Stores spans, and records a progress report for each of their tries. Returns one outcome for
    /// each span.
    pub(super) async fn insert_spans(&self, spans: &[NewSpan]) -> Result<Vec<SpanOutcome>> {
        let tries = self.find_known_tries(spans).await?;
        let mut stored = self.find_stored_spans(spans).await?;
        let mut outcomes = Vec::with_capacity(spans.len());
        let mut needed: BTreeMap<&str, (u64, usize)> = BTreeMap::new();
        for span in spans {
            let (floor, missing) = needed.entry(&span.rollout_id).or_default();
            // An explicit number counts as issued, even if its span is rejected.
            *floor = (*floor).max(span.number.unwrap_or(0).min(MAX_NUMBER));
            let key = (span.rollout_id.clone(), span.try_id.clone(), span.span_id.clone());
            outcomes.push(match tries.get(span.rollout_id.as_str()) {
                None => SpanOutcome::UnknownRollout,
                Some(tries) if !tries.contains(&span.try_id) => SpanOutcome::UnknownTry,
                Some(_) if !stored.insert(key) => SpanOutcome::Duplicate,
                Some(_) => {
                    *missing += usize::from(span.number.is_none());
                    SpanOutcome::Stored(0)
                }
            });
        }
        let mut next = BTreeMap::new();
        for (rollout, (floor, missing)) in needed {
            next.insert(rollout, self.reserve_above(rollout, floor, missing as u64).await?);
        }
        let mut documents = Vec::new();
        for (index, span) in spans.iter().enumerate() {
            if outcomes[index] != SpanOutcome::Stored(0) {
                continue;
            }
            let number = match (span.number, next.get_mut(span.rollout_id.as_str())) {
                (Some(number), _) => number.min(MAX_NUMBER),
                (None, Some(next)) => std::mem::replace(next, next.saturating_add(1)),
                (None, None) => 1,
            };
            outcomes[index] = SpanOutcome::Stored(number);
            documents.push((index, to_document(span, number)));
        }
        self.write_spans(documents, &mut outcomes).await?;
        self.report_spans(spans, &outcomes).await?;
        Ok(outcomes)
    }

    /// Returns the ids of all tries of the rollouts that `spans` name, keyed by rollout id.
    async fn find_known_tries(
        &self,
        spans: &[NewSpan],
    ) -> Result<BTreeMap<String, BTreeSet<String>>> {
        let ids: BTreeSet<&str> = spans.iter().map(|span| span.rollout_id.as_str()).collect();
        let ids: Vec<&str> = ids.into_iter().collect();
        let rollouts = self.collection("rollouts");
        let found = collect_documents(rollouts.find(doc! { "_id": { "$in": ids } }).await?).await?;
        found
            .into_iter()
            .map(|document| {
                let StoredRollout { state, earlier, .. } = StoredRollout::parse(document)?;
                Ok((state.id, earlier.into_iter().chain(state.latest).map(|of| of.id).collect()))
            })
            .collect()
    }

    /// Returns the keys (rollout id, try id, span id) of the spans that are stored already.
    async fn find_stored_spans(
        &self,
        spans: &[NewSpan],
    ) -> Result<BTreeSet<(String, String, String)>> {
        let mut by_try: BTreeMap<TryKey<'_>, Vec<&str>> = BTreeMap::new();
        for span in spans {
            by_try.entry((&span.rollout_id, &span.try_id)).or_default().push(&span.span_id);
        }
        let mut stored = BTreeSet::new();
        for ((rollout, of), ids) in by_try {
            let filter = doc! { "rollout": rollout, "try": of, "span_id": { "$in": ids } };
            let known = self.collection("spans");
            let known = known.find(filter).projection(doc! { "span_id": 1 }).await?;
            for span in collect_documents(known).await? {
                stored.insert((
                    rollout.to_owned(),
                    of.to_owned(),
                    fields::read_text(&span, "span_id")?,
                ));
            }
        }
        Ok(stored)
    }

    /// Inserts the documents of spans. Each document comes with the index of its span in
    /// `outcomes`, which is updated.
    async fn write_spans(
        &self,
        documents: Vec<(usize, Document)>,
        outcomes: &mut [SpanOutcome],
    ) -> Result<()> {
        if documents.is_empty() {
            return Ok(());
        }
        let spans = self.collection("spans");
        let all = documents.iter().map(|(_, document)| document);
        match spans.insert_many(all).ordered(false).await {
            Err(error) if is_duplicate(&error) => {}
            inserted => return inserted.map(drop).map_err(Into::into),
        }
        // Another call has stored one of the spans in the meantime.
        for (index, document) in documents {
            let id = doc! { "_id": document.get_object_id("_id").ok() };
            if spans.find_one(id).await?.is_none() {
                match spans.insert_one(document).await {
                    Err(error) if is_duplicate(&error) => outcomes[index] = SpanOutcome::Duplicate,
                    inserted => drop(inserted?),
                }
            }
        }
        Ok(())
    }

    /// Records a progress report for each try for which a span was stored.
    async fn report_spans(&self, spans: &[NewSpan], outcomes: &[SpanOutcome]) -> Result<()> {
        let reports: BTreeSet<TryKey<'_>> = spans
            .iter()
            .zip(outcomes)
            .filter(|(_, outcome)| matches!(outcome, SpanOutcome::Stored(_)))
            .map(|(span, _)| (span.rollout_id.as_str(), span.try_id.as_str()))
            .collect();
        for (rollout, id) in reports {
            self.update(rollout, |of, now| {
                if let Some(index) = of.find_try(id) {
                    of.report(index, now);
                }
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    /// Reserves `count` consecutive sequence numbers of a rollout, above `floor` and above all
    /// reserved numbers. Returns the first number, or 0 if `count` is 0.
    pub(super) async fn reserve_above(&self, rollout: &str, floor: u64, count: u64) -> Result<u64> {
        let [floor_number, count_number] =
            [floor, count].map(|number| i64::try_from(number).unwrap_or(i64::MAX));
        if floor > 0 {
            self.update_counter(rollout, doc! { "$max": { "last": floor_number } }).await?;
        }
        if count == 0 {
            return Ok(0);
        }
        let last = self.update_counter(rollout, doc! { "$inc": { "last": count_number } }).await?;
        Ok(fields::read_integer::<u64>(&last, "last")? + 1 - count)
    }

    /// Applies an update to the counter of a rollout's span numbers, which is created if necessary,
    /// and returns the counter's document.
    async fn update_counter(&self, rollout: &str, change: Document) -> Result<Document> {
        let numbers = self.collection("span_numbers");
        loop {
            let changed = numbers
                .find_one_and_update(doc! { "_id": rollout }, change.clone())
                .upsert(true)
                .return_document(ReturnDocument::After);
            match changed.await {
                // Two concurrent calls can both try to create the counter.
                Err(error) if is_duplicate(&error) => {}
                changed => return Ok(changed?.unwrap_or_default()),
            }
        }
    }
}

/// Creates the document of a span with the sequence number `number`.
fn to_document(span: &NewSpan, number: u64) -> Document {
    let mut document = doc! {
        // Ids are in the order of creation.
        "_id": ObjectId::new(),
        "rollout": &span.rollout_id,
        "try": &span.try_id,
        "number": number.min(MAX_NUMBER) as i64,
        "trace_id": &span.trace_id,
        "span_id": &span.span_id,
        "parent_id": span.parent_id.as_deref(),
        "name": &span.name,
        "start_time": span.start_time,
        "end_time": span.end_time,
    };
    json::write_json(&mut document, "body", span.body.get());
    document
}
