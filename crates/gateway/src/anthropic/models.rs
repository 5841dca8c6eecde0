//! The endpoint `/v1/models` in Anthropic's format, for clients that send `anthropic-version`.

use axum::extract::{RawQuery, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::endpoints::build_response;
use crate::gateway::Gateway;
use crate::gateway::Model;
use crate::http::{IncomingRequest, find_query_field};
use crate::info;
use levade_call::ApiError;

/// Default and maximum number of models on a page of the model list, as in Anthropic's API.
const PAGE: (usize, usize) = (20, 1000);

fn describe_model(model: &Model) -> Value {
    json!({
        "type": "model",
        "id": model.party.model,
        "display_name": model.party.model,
        "created_at": format_date(model.created),
    })
}

/// Formats a Unix timestamp in seconds as an RFC 3339 date. The algorithm is `civil_from_days`
/// (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms").
fn format_date(seconds: u64) -> String {
    let days = seconds / 86_400 + 719_468;
    let second = seconds % 86_400;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let hour = second / 3600;
    let minute = second / 60 % 60;
    let second = second % 60;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Returns the page of the model list that the query parameters `limit`, `after_id` and `before_id`
/// select, in Anthropic's format.
fn select_page(models: &[Value], query: &str) -> Result<Value, ApiError> {
    let limit = find_query_field(query, "limit").map_or(Ok(PAGE.0), |text| {
        let limit = text.parse().ok().filter(|limit| (1..=PAGE.1).contains(limit));
        limit.ok_or_else(|| {
            ApiError::field("limit", format!("limit is {text:?}, but must be in 1..={}", PAGE.1))
        })
    })?;
    let find = |id: &str| models.iter().position(|model| model["id"] == id);
    let after = find_query_field(query, "after_id").and_then(find).map_or(0, |at| at + 1);
    let before =
        find_query_field(query, "before_id").and_then(find).unwrap_or(models.len()).max(after);
    let window = &models[after..before];
    let backwards = find_query_field(query, "before_id").is_some();
    let shown = if backwards {
        &window[window.len().saturating_sub(limit)..]
    } else {
        &window[..window.len().min(limit)]
    };
    Ok(json!({
        "data": shown,
        "has_more": shown.len() < window.len(),
        "first_id": id_or_null(shown.first()),
        "last_id": id_or_null(shown.last()),
    }))
}

fn id_or_null(model: Option<&Value>) -> Value {
    model.map_or(Value::Null, |model| model["id"].clone())
}

/// Handles `GET /v1/models`.
pub(crate) async fn list_models(
    State(gateway): State<Gateway>,
    RawQuery(query): RawQuery,
    incoming: IncomingRequest,
) -> Response {
    let found = incoming.into_call().and_then(|(caller, _)| {
        let models: Vec<Value> =
            info::callable_models(&gateway, &caller).iter().map(describe_model).collect();
        select_page(&models, query.as_deref().unwrap_or_default())
    });
    build_response(&gateway, found)
}

/// Handles `GET /v1/models/NAME`.
pub(crate) async fn get_model(
    State(gateway): State<Gateway>,
    incoming: IncomingRequest,
) -> Response {
    let name = incoming.path_param("model");
    let found = incoming.into_call().and_then(|(caller, _)| {
        let known = info::callable_models(&gateway, &caller)
            .into_iter()
            .find(|model| model.party.model == name);
        known.map_or_else(|| gateway.find_model(&name), Ok).map(|model| describe_model(&model))
    });
    build_response(&gateway, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_date_matches_known_timestamps() {
        for (seconds, want) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_795_738_402, "2026-11-27T00:13:22Z"),
        ] {
            assert_eq!(format_date(seconds), want);
        }
    }

    #[test]
    fn format_date_increments_daily_for_eight_centuries() {
        let mut year = 1970;
        let mut month = 1;
        let mut day = 1;
        for days in 0..2 * 146_097_u64 {
            assert_eq!(
                format_date(days * 86_400 + 3_661),
                format!("{year:04}-{month:02}-{day:02}T01:01:01Z")
            );
            let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let length = match month {
                2 => 28 + u64::from(is_leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            day += 1;
            if day > length {
                (month, day) = (month + 1, 1);
            }
            if month > 12 {
                (year, month) = (year + 1, 1);
            }
        }
    }

    #[test]
    fn model_page_follows_ids_and_limits() {
        let models: Vec<Value> =
            ["a", "b", "c", "d"].iter().map(|id| json!({ "id": id })).collect();
        let ids = |query: &str| {
            let page = select_page(&models, query).unwrap();
            let ids: Vec<&str> = page["data"]
                .as_array()
                .unwrap()
                .iter()
                .map(|m| m["id"].as_str().unwrap())
                .collect();
            assert_eq!(page["first_id"].as_str(), ids.first().copied());
            assert_eq!(page["last_id"].as_str(), ids.last().copied());
            (ids.concat(), page["has_more"] == true)
        };
        assert_eq!(ids(""), ("abcd".into(), false));
        assert_eq!(ids("limit=2"), ("ab".into(), true));
        assert_eq!(ids("limit=2&after_id=b"), ("cd".into(), false));
        assert_eq!(ids("limit=1&before_id=d"), ("c".into(), true));
        assert_eq!(ids("after_id=d"), (String::new(), false));
        for wrong in ["limit=0", "limit=x", "limit=1001"] {
            assert_eq!(select_page(&models, wrong).unwrap_err().param.as_deref(), Some("limit"));
        }
    }
}
