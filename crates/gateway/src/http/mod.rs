//! The HTTP layer: paths, keys, request bodies, and responses.

mod incoming;
mod response;
mod serve;

pub(crate) use incoming::{IncomingRequest, find_query_field, or_default, parse_json_body};
pub(crate) use response::{
    ApiDialect, CollectedCompletion, EventMerger, error_response, format_frame, gather_all,
    json_response, merge_all, write_response,
};
pub use serve::{build_router, serve};
