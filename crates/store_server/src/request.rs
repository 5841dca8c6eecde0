//! Parses requests: bodies, query strings, pages and filters.

use axum::extract::Request;
use bytes::Bytes;
use levade_http::service::{read_body, read_json};
use levade_store::rollouts::{
    Json, LogicalOperator, PageRequest, ResourcesFilter, RolloutFilter, RolloutStatus, SortOrder,
    SpanFilter, TextFilter, TrySelector, WorkerFilter, WorkerStatus,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::response::ApiError;

/// Maximum size of a request body, before and after decompression, in bytes.
pub(crate) const MAX_BODY: usize = 64 << 20;

/// Reads the complete body of a request.
pub(crate) async fn read_body_bytes(request: Request) -> Result<Bytes, ApiError> {
    let (parts, body) = request.into_parts();
    Ok(read_body(&parts.headers, body, MAX_BODY).await?)
}

/// Reads the body of a request and parses it as JSON. An empty body is an error.
pub(crate) async fn parse_body<T: DeserializeOwned>(request: Request) -> Result<T, ApiError> {
    parse_json(&read_body_bytes(request).await?)
}

/// Reads the body of a request and parses it as JSON. An empty body is parsed as an empty object.
pub(crate) async fn parse_optional_body<T: DeserializeOwned>(
    request: Request,
) -> Result<T, ApiError> {
    let bytes = read_body_bytes(request).await?;
    parse_json(if bytes.is_empty() { b"{}" } else { &bytes })
}

/// Parses JSON. The error response names the field with the wrong value.
pub(crate) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    if bytes.is_empty() {
        return Err(ApiError::unprocessable("missing", &["body"], "Field required"));
    }
    read_json(bytes).map_err(|malformed| {
        let kind = match () {
            () if serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_err() => "json_invalid",
            () if malformed.message.contains("missing field") => "missing",
            () => "value_error",
        };
        let mut location = vec!["body"];
        location.extend(malformed.field.as_deref());
        ApiError::unprocessable(kind, &location, malformed.message)
    })
}

/// Parses the query string of a request as a JSON object, whose fields are the parameters.
pub(crate) fn parse_query<T: DeserializeOwned>(request: &Request) -> Result<T, ApiError> {
    let mut fields = Map::new();
    let pairs = form_urlencoded::parse(request.uri().query().unwrap_or_default().as_bytes());
    for (name, text) in pairs.into_owned() {
        match name.as_str() {
            "status_in" | "rollout_id_in" | "state_in" | "agent" => {
                let list = fields.entry(name).or_insert_with(|| Value::Array(Vec::new()));
                if let Value::Array(list) = list {
                    list.push(text.into());
                }
            }
            "limit" | "offset" | "after" => {
                let number: i64 = text.parse().map_err(|_| {
                    let message = format!("Input should be a valid integer, not {text:?}");
                    ApiError::unprocessable("int_parsing", &["query", &name], message)
                })?;
                fields.insert(name, number.into());
            }
            _ => drop(fields.insert(name, text.into())),
        }
    }
    parse_json(Value::Object(fields).to_string().as_bytes())
}

/// Deserializes a field that is present: null becomes `Some(None)`. With `#[serde(default)]`, an
/// absent field becomes `None`.
pub(crate) fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// Deserializes a field as raw JSON. The JSON `null` becomes `Some`, too.
pub(crate) fn raw<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Json>, D::Error> {
    Json::deserialize(deserializer).map(Some)
}

/// Returns the value of a field, or an error if the field is null. An absent field returns `None`.
pub(crate) fn reject_null<T>(field: &str, value: Option<Option<T>>) -> Result<Option<T>, ApiError> {
    match value {
        Some(None) => {
            Err(ApiError::bad_request(format!("{field} is invalid; it cannot be a null value.")))
        }
        value => Ok(value.flatten()),
    }
}

/// Returns an error if the JSON value of the field `field` is not an object.
pub(crate) fn check_is_object(field: &str, value: &Json) -> Result<(), ApiError> {
    if !value.get().starts_with('{') {
        return Err(ApiError::unprocessable(
            "dict_type",
            &["body", field],
            "Input should be a valid dictionary",
        ));
    }
    Ok(())
}

/// Pagination parameters of a request: page limits and sort order.
#[derive(Debug, Clone)]
pub(crate) struct Paging {
    /// Maximum number of items on the page. -1 sets no limit.
    pub limit: i64,
    pub offset: i64,
    /// Name of the field to sort by: `None` if the request does not set the field, `Some(None)` if
    /// the request sets it to null.
    sort_by: Option<Option<String>>,
    sort_order: SortOrder,
}

impl Paging {
    /// Converts the parameters to a [`PageRequest`]. `sort_by` is the field to sort by if the
    /// request sets none.
    pub fn page(&self, sort_by: Option<&str>) -> Result<PageRequest, ApiError> {
        if self.limit == 0 || self.limit < -1 {
            return Err(ApiError::bad_request("Limit must be greater than 0 or -1 for no limit"));
        }
        let offset = u64::try_from(self.offset)
            .map_err(|_| ApiError::bad_request("Offset must be greater than or equal to 0"))?;
        Ok(PageRequest {
            limit: u64::try_from(self.limit).ok(),
            offset,
            sort_by: self.sort_by.clone().unwrap_or_else(|| sort_by.map(str::to_owned)),
            order: self.sort_order,
        })
    }
}

/// Generates the type of a query: its own fields, and the fields of [`Paging`].
/// (`#[serde(flatten)]` would accept no integers with digits of arbitrary precision.)
macro_rules! paged {
    ($(#[$meta:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Deserialize)]
        pub(crate) struct $name {
            $(#[serde(default)] pub $field: $type,)*
            #[serde(default = "no_limit")]
            pub limit: i64,
            #[serde(default)]
            pub offset: i64,
            #[serde(default, deserialize_with = "present")]
            sort_by: Option<Option<String>>,
            #[serde(default)]
            sort_order: SortOrder,
        }

        impl $name {
            /// Names of all query parameters of this type.
            pub const FIELDS: &'static [&'static str] =
                &[$(stringify!($field),)* "limit", "offset", "sort_by", "sort_order"];

            /// Returns the pagination parameters: page limits and sort order.
            pub fn paging(&self) -> Paging {
                let Self { limit, offset, sort_by, sort_order, .. } = self;
                Paging { limit: *limit, offset: *offset, sort_by: sort_by.clone(), sort_order: *sort_order }
            }
        }
    };
}

fn no_limit() -> i64 {
    -1
}

paged! {
    /// Query parameters that select rollouts.
    RolloutsQuery {
        status_in: Option<Vec<RolloutStatus>>,
        rollout_id_in: Option<Vec<String>>,
        rollout_id_contains: Option<String>,
        filter_logic: LogicalOperator,
    }
}

impl RolloutsQuery {
    pub fn filter(self) -> RolloutFilter {
        RolloutFilter {
            status_in: self.status_in,
            id_in: self.rollout_id_in,
            id_contains: self.rollout_id_contains,
            logic: self.filter_logic,
        }
    }
}

paged! {
    /// Query parameters that select tries of a rollout.
    TriesQuery {}
}

paged! {
    /// Query parameters that select workers.
    WorkersQuery {
        status_in: Option<Vec<WorkerStatus>>,
        worker_id_contains: Option<String>,
        filter_logic: LogicalOperator,
    }
}

impl WorkersQuery {
    pub fn filter(self) -> WorkerFilter {
        WorkerFilter {
            status_in: self.status_in,
            id_contains: self.worker_id_contains,
            logic: self.filter_logic,
        }
    }
}

paged! {
    /// Query parameters that select resources.
    ResourcesQuery {
        resources_id: Option<String>,
        resources_id_contains: Option<String>,
    }
}

impl ResourcesQuery {
    pub fn filter(self) -> ResourcesFilter {
        ResourcesFilter {
            id: self.resources_id,
            id_contains: self.resources_id_contains,
            // Clients of Agent Lightning cannot parse announcements of runs.
            without_announcements: true,
        }
    }
}

paged! {
    /// Query parameters that select spans of a rollout.
    SpansQuery {
        rollout_id: Option<String>,
        attempt_id: Option<String>,
        trace_id: Option<String>,
        trace_id_contains: Option<String>,
        span_id: Option<String>,
        span_id_contains: Option<String>,
        parent_id: Option<String>,
        parent_id_contains: Option<String>,
        name: Option<String>,
        name_contains: Option<String>,
        filter_logic: LogicalOperator,
    }
}

impl SpansQuery {
    /// Converts the query parameters to a filter.
    ///
    /// # Errors
    /// Returns an error if the request names no rollout.
    pub fn filter(self) -> Result<SpanFilter, ApiError> {
        let missing = || ApiError::unprocessable("missing", &["rollout_id"], "Field required");
        let text = |exact, contains| TextFilter { exact, contains };
        Ok(SpanFilter {
            rollout_id: self.rollout_id.ok_or_else(missing)?,
            try_name: self.attempt_id.map(parse_try_selector),
            trace_id: text(self.trace_id, self.trace_id_contains),
            span_id: text(self.span_id, self.span_id_contains),
            parent_id: text(self.parent_id, self.parent_id_contains),
            name: text(self.name, self.name_contains),
            logic: self.filter_logic,
        })
    }
}

/// Converts the id of a try, or the text `latest`, to a selector of a try.
pub(crate) fn parse_try_selector(text: String) -> TrySelector {
    if text == "latest" { TrySelector::Latest } else { TrySelector::Id(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_parameters_keep_malformed_percent_sequences() {
        for (text, expected) in [
            ("a%20b+c", "a b c"),
            ("%C3%A9", "é"),
            ("%", "%"),
            ("%zz%4", "%zz%4"),
            ("%c3%a9%41", "éA"),
        ] {
            let uri = format!("/rollouts?rollout_id_contains={text}");
            let request = Request::builder().uri(uri).body(axum::body::Body::empty()).unwrap();
            let query: RolloutsQuery = parse_query(&request).unwrap();
            assert_eq!(query.rollout_id_contains.as_deref(), Some(expected));
        }
    }

    #[test]
    fn query_parameters_parse_like_equal_json_body() {
        let uri = "/rollouts?status_in=failed&status_in=running&limit=3&sort_by=mode&sort_order=desc&rollout_id_contains=1";
        let request = Request::builder().uri(uri).body(axum::body::Body::empty()).unwrap();
        let query: RolloutsQuery = parse_query(&request).unwrap();
        let page = query.paging().page(None).unwrap();
        assert_eq!(
            (page.limit, page.sort_by.as_deref(), page.order),
            (Some(3), Some("mode"), SortOrder::Desc)
        );
        let filter = query.filter();
        assert_eq!(filter.status_in.unwrap(), [RolloutStatus::Failed, RolloutStatus::Running]);
        assert_eq!(filter.id_contains.as_deref(), Some("1"));
    }

    fn page(body: &str) -> Result<PageRequest, ApiError> {
        parse_json::<TriesQuery>(body.as_bytes()).unwrap().paging().page(Some("sequence_id"))
    }

    #[test]
    fn null_sort_field_differs_from_absent_sort_field() {
        assert_eq!(page("{}").unwrap().sort_by.as_deref(), Some("sequence_id"));
        assert_eq!(page("{\"sort_by\": null}").unwrap().sort_by, None);
        for wrong in ["{\"limit\": 0}", "{\"limit\": -2}", "{\"offset\": -1}"] {
            assert_eq!(page(wrong).unwrap_err().status, 400);
        }
    }
}
