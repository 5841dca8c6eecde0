//! Builds responses: JSON bodies, and error bodies in the format of Agent Lightning's server.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use levade_http::Rejection;
use levade_store::Code;
use levade_store::rollouts::RolloutError;
use serde::Serialize;
use serde_json::{Value, json};

/// An error response with a JSON body in the format of FastAPI: `{"detail": …}`.
#[derive(Debug)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    pub body: Value,
}

impl ApiError {
    /// Creates an error response from an HTTP status and a text.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        ApiError { status, body: json!({ "detail": detail.into() }) }
    }

    /// Creates an error response for an argument that has the right type but a forbidden value.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, detail)
    }

    /// Creates an error response for a field of the wrong type. `location` is the path of the field
    /// in the request.
    pub fn unprocessable(kind: &str, location: &[&str], message: impl Into<String>) -> Self {
        let detail = json!([{ "type": kind, "loc": location, "msg": message.into() }]);
        ApiError { status: StatusCode::UNPROCESSABLE_ENTITY, body: json!({ "detail": detail }) }
    }
}

impl From<Rejection> for ApiError {
    fn from(rejection: Rejection) -> Self {
        ApiError::new(rejection.status, rejection.message)
    }
}

impl From<RolloutError> for ApiError {
    fn from(error: RolloutError) -> Self {
        let status = match error.code() {
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::Conflict => StatusCode::CONFLICT,
            Code::Invalid => StatusCode::BAD_REQUEST,
            Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Code::Full => StatusCode::INSUFFICIENT_STORAGE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        if status.is_server_error() {
            tracing::error!(%error, "cannot answer a request");
        }
        ApiError::new(status, error.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, self.body.to_string());
        if self.status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Result of a route handler.
pub(crate) type RouteResult = Result<Response, ApiError>;

/// Returns a response with status 200 and a JSON body.
pub(crate) fn ok_response(value: &impl Serialize) -> RouteResult {
    with_status(StatusCode::OK, value)
}

/// Returns a response with status 201 and a JSON body.
pub(crate) fn created_response(value: &impl Serialize) -> RouteResult {
    with_status(StatusCode::CREATED, value)
}

fn with_status(status: StatusCode, value: &impl Serialize) -> RouteResult {
    match serde_json::to_string(value) {
        Ok(text) => Ok(json_response(status, text)),
        Err(error) => Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

/// Returns a response whose body is already JSON.
pub(crate) fn json_response(status: StatusCode, text: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], text).into_response()
}
