//! Documents of rollouts. A rollout and all its tries are one document, so that one update changes
//! both.

use levade_store::backend::Failure;
use levade_store::rollouts::state::{RolloutState, TryState};
use levade_store::rollouts::{
    Json, NewRollout, Resources, Rollout, RolloutConfig, RolloutStatus, Span, Try, TryStatus,
    TryUpdate, Worker, WorkerStatus,
};
use mongodb::bson::{Bson, Document, doc};
use serde_json::value::RawValue;

use crate::connection::Result;
use crate::{fields, json};

/// A stored rollout: its document, and the parsed states of its tries.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StoredRollout {
    /// The document of the rollout, as it was read or as it will be written.
    pub document: Document,
    pub state: RolloutState,
    /// States of the tries before the latest one, oldest first.
    pub earlier: Vec<TryState>,
}

fn unknown_name_error(field: &str, name: &str) -> Failure {
    Failure::Corrupt(format!("the field `{field}` has the unknown value `{name}`"))
}

/// Returns the JSON value of a document field, or `None` if the field is missing or null.
pub(super) fn read_json_field(of: &Document, name: &str) -> Result<Option<Json>> {
    let Some(text) = json::read_json(of, name)? else { return Ok(None) };
    let parsed = RawValue::from_string(text);
    let parsed = parsed.map_err(|e| Failure::Corrupt(format!("`{name}` is not JSON: {e}")))?;
    // A missing value is stored as null.
    Ok(Some(parsed).filter(|json| {
        json.get() != "null" || fields::find_value(of, &json::exact_text_field(name)).is_some()
    }))
}

fn parse_config(of: &Document) -> Result<RolloutConfig> {
    let empty = Vec::new();
    let retry_on = of.get_array("retry_condition").unwrap_or(&empty).iter();
    let status = |name: &Bson| {
        let name = name.as_str().unwrap_or_default();
        TryStatus::from_name(name).ok_or_else(|| unknown_name_error("retry_condition", name))
    };
    Ok(RolloutConfig {
        timeout_seconds: fields::read_optional_number(of, "timeout_seconds")?,
        unresponsive_seconds: fields::read_optional_number(of, "unresponsive_seconds")?,
        max_tries: fields::read_integer(of, "max_attempts")?,
        retry_on: retry_on.map(status).collect::<std::result::Result<_, _>>()?,
    })
}

fn to_config_document(config: &RolloutConfig) -> Document {
    let retry_on: Vec<&str> = config.retry_on.iter().map(|status| status.name()).collect();
    doc! {
        "timeout_seconds": config.timeout_seconds,
        "unresponsive_seconds": config.unresponsive_seconds,
        "max_attempts": i64::from(config.max_tries),
        "retry_condition": retry_on,
    }
}

fn try_state(of: &Document) -> Result<TryState> {
    let status = fields::read_text(of, "status")?;
    Ok(TryState {
        id: fields::read_text(of, "id")?,
        number: fields::read_integer(of, "number")?,
        status: TryStatus::from_name(&status)
            .ok_or_else(|| unknown_name_error("status", &status))?,
        worker: fields::read_optional_text(of, "worker")?,
        start_time: fields::read_number(of, "start_time")?,
        end_time: fields::read_optional_number(of, "end_time")?,
        heartbeat: fields::read_optional_number(of, "heartbeat")?,
        ttl: fields::read_optional_number(of, "ttl")?,
        released: fields::read_optional_integer(of, "released")? == Some(1_i64),
    })
}

/// Returns the embedded documents of a rollout's tries, oldest first.
fn tries(of: &Document) -> impl Iterator<Item = &Document> {
    of.get_array("tries").into_iter().flatten().filter_map(Bson::as_document)
}

impl StoredRollout {
    /// Creates a rollout that has no tries yet. Its document is not written yet.
    pub fn new(new: &NewRollout, id: String, resources_id: Option<&str>, now: f64) -> Self {
        let mut document = doc! {
            "_id": &id,
            "rev": 0_i64,
            "queue": &new.queue,
            "priority": i64::from(new.priority),
            "mode": new.mode.as_deref(),
            "resources_id": new.resources_id.as_deref().or(resources_id),
            "start_time": now,
        };
        if let Some(key) = &new.key {
            document.insert("key", key);
        }
        json::write_json(&mut document, "input", new.input.get());
        let metadata = new.metadata.as_ref().map_or("{}", |metadata| metadata.get());
        json::write_json(&mut document, "metadata", metadata);
        let state = RolloutState::new(id, new.config.clone());
        StoredRollout { document, state, earlier: Vec::new() }
    }

    /// Parses the document of a rollout, which contains its tries.
    pub fn parse(document: Document) -> Result<Self> {
        let status = fields::read_text(&document, "status")?;
        let config = parse_config(document.get_document("config").unwrap_or(&Document::new()))?;
        let mut earlier: Vec<TryState> = tries(&document).map(try_state).collect::<Result<_>>()?;
        let state = RolloutState {
            status: RolloutStatus::from_name(&status)
                .ok_or_else(|| unknown_name_error("status", &status))?,
            end_time: fields::read_optional_number(&document, "end_time")?,
            started: earlier.len() as u32,
            released: earlier.iter().filter(|of| of.released).count() as u32,
            latest: earlier.pop(),
            is_changed: false,
            ..RolloutState::new(fields::read_text(&document, "_id")?, config)
        };
        Ok(StoredRollout { document, state, earlier })
    }

    /// Copies the states of the rollout and its tries into the document.
    pub fn save_state(&mut self) {
        let StoredRollout { document, state, earlier } = self;
        let metadata: Vec<Document> = tries(document)
            .map(|of| of.iter().filter(|(name, _)| name.starts_with("metadata")))
            .map(|fields| fields.map(|(name, value)| (name.clone(), value.clone())).collect())
            .collect();
        let mut metadata = metadata.into_iter();
        let try_document = |of: &TryState| {
            let mut document = doc! {
                "id": &of.id,
                "number": i64::from(of.number),
                "status": of.status.name(),
                "worker": of.worker.as_deref(),
                "start_time": of.start_time,
                "end_time": of.end_time,
                "heartbeat": of.heartbeat,
                "ttl": of.ttl,
                "released": of.released,
            };
            document.extend(metadata.next().unwrap_or_default());
            Bson::Document(document)
        };
        let tries: Vec<Bson> = earlier.iter().chain(&state.latest).map(try_document).collect();
        document.insert("status", state.status.name());
        document.insert("queued", i32::from(state.status.is_queued()));
        document.insert("config", to_config_document(&state.config));
        document.insert("end_time", state.end_time);
        document.insert("tries", tries);
        if !state.status.is_active() {
            document.remove("lease_key");
        }
        // The index of timeouts does not contain documents without this field.
        match state.expires() {
            Some(expires) => document.insert("expires", expires),
            None => document.remove("expires"),
        };
    }

    /// Replaces the metadata of the try at `index` in the document. The caller must have called
    /// [`save_state`](Self::save_state) before.
    pub fn set_try_metadata(&mut self, index: usize, metadata: &Json) {
        let tries = self.document.get_array_mut("tries").ok();
        if let Some(Bson::Document(of)) = tries.and_then(|tries| tries.get_mut(index)) {
            for (name, value) in json::to_fields("metadata", Some(metadata.get())) {
                of.insert(name, value);
            }
        }
    }

    /// Returns the index of the try with the id `id`, or `None` if the rollout has no such try.
    pub fn find_try(&self, id: &str) -> Option<usize> {
        self.earlier.iter().chain(&self.state.latest).position(|of| of.id == id)
    }

    /// Returns the state of the try at `index`, or `None` if there is no such try.
    pub fn try_state(&self, index: usize) -> Option<&TryState> {
        self.earlier.iter().chain(&self.state.latest).nth(index)
    }

    /// Starts a try with the id `id`, which becomes the latest try.
    pub fn start_try(&mut self, id: String, worker: Option<&str>, ttl: Option<f64>, now: f64) {
        self.earlier.extend(self.state.start_try(id, worker, ttl, now));
        self.save_state();
    }

    /// Records a progress report of the try at `index`.
    pub fn report(&mut self, index: usize, now: f64) {
        match self.earlier.get_mut(index) {
            Some(of) => drop(of.report(now)),
            None => self.state.report(now),
        }
        self.save_state();
    }

    /// Replaces fields of the try at `index`. Returns whether the record of the try's worker must
    /// be updated as well.
    pub fn update_try(&mut self, index: usize, update: &TryUpdate, now: f64) -> bool {
        let needs_sync = match self.earlier.get_mut(index) {
            Some(of) => of.update(update, now),
            None => self.state.update_latest(update, now),
        };
        self.save_state();
        if let Some(metadata) = &update.metadata {
            self.set_try_metadata(index, metadata);
        }
        needs_sync
    }

    /// Returns the index of the latest try, or `None` if no try has started.
    pub fn latest_index(&self) -> Option<usize> {
        self.state.latest.as_ref().map(|_| self.earlier.len())
    }

    /// Returns the try at `index` as a [`Try`], or `None` if there is no such try.
    pub fn try_at(&self, index: usize) -> Result<Option<Try>> {
        let Some(of) = self.try_state(index) else { return Ok(None) };
        let document = tries(&self.document).nth(index);
        let metadata =
            document.map(|document| read_json_field(document, "metadata")).transpose()?;
        Ok(Some(Try {
            rollout_id: self.state.id.clone(),
            id: of.id.clone(),
            number: of.number,
            start_time: of.start_time,
            end_time: of.end_time,
            status: of.status,
            worker_id: of.worker.clone(),
            last_heartbeat_time: of.heartbeat,
            metadata: metadata.flatten(),
        }))
    }

    /// Returns all tries of the rollout, oldest first.
    pub fn tries(&self) -> Result<Vec<Try>> {
        let tries = (0..self.state.started as usize).map(|index| self.try_at(index).transpose());
        tries.flatten().collect()
    }

    /// Returns the rollout as a [`Rollout`], with its latest try.
    pub fn to_rollout(&self) -> Result<Rollout> {
        let StoredRollout { document, state, .. } = self;
        Ok(Rollout {
            id: state.id.clone(),
            input: match read_json_field(document, "input")? {
                Some(input) => input,
                None if document.contains_key("input") => RawValue::NULL.to_owned(),
                None => {
                    return Err(Failure::Corrupt("the field `input` is missing".to_owned()).into());
                }
            },
            start_time: fields::read_number(document, "start_time")?,
            end_time: state.end_time,
            mode: fields::read_optional_text(document, "mode")?,
            resources_id: fields::read_optional_text(document, "resources_id")?,
            status: state.status,
            config: state.config.clone(),
            metadata: read_json_field(document, "metadata")?,
            queue: fields::read_text(document, "queue")?,
            priority: fields::read_integer(document, "priority")?,
            key: fields::read_optional_text(document, "key")?,
            changed: fields::read_integer(document, "changed")?,
            latest_try: self.try_at(self.earlier.len())?,
        })
    }
}

/// Parses a version of resources from its document.
pub(super) fn parse_resources(of: &Document) -> Result<Resources> {
    Ok(Resources {
        id: fields::read_text(of, "id")?,
        create_time: fields::read_number(of, "create_time")?,
        update_time: fields::read_number(of, "update_time")?,
        version: fields::read_integer(of, "version")?,
        value: read_json_field(of, "value")?.unwrap_or_else(|| RawValue::NULL.to_owned()),
    })
}

/// Parses the document of a worker.
pub(super) fn parse_worker(of: &Document) -> Result<Worker> {
    let status = fields::read_text(of, "status")?;
    Ok(Worker {
        id: fields::read_text(of, "_id")?,
        status: WorkerStatus::from_name(&status)
            .ok_or_else(|| unknown_name_error("status", &status))?,
        heartbeat_stats: read_json_field(of, "stats")?,
        last_heartbeat_time: fields::read_optional_number(of, "heartbeat")?,
        last_dequeue_time: fields::read_optional_number(of, "dequeue")?,
        last_busy_time: fields::read_optional_number(of, "busy")?,
        last_idle_time: fields::read_optional_number(of, "idle")?,
        current_rollout_id: fields::read_optional_text(of, "current_rollout")?,
        current_try_id: fields::read_optional_text(of, "current_try")?,
    })
}

/// Parses the document of a span.
pub(super) fn parse_span(of: &Document) -> Result<Span> {
    Ok(Span {
        rollout_id: fields::read_text(of, "rollout")?,
        try_id: fields::read_text(of, "try")?,
        number: fields::read_integer(of, "number")?,
        body: read_json_field(of, "body")?.unwrap_or_else(|| RawValue::NULL.to_owned()),
    })
}
