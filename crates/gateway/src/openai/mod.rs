//! OpenAI's API: chat completions, completions, models.

mod chat;
mod completions;
mod models;
mod sampling;
pub(crate) mod structured;
mod write;

pub(crate) use chat::{
    ALLOWED_TOOLS, create_chat_completion, parse_messages, parse_tools, retain_allowed_tools,
    take_sampling_fields,
};
pub(crate) use completions::create_completion;
pub(crate) use models::{get_model, list_models};
pub(crate) use sampling::{SamplingFields, check_fields, validate_top_k};
pub(crate) use write::{
    TokenReport, build_response, build_usage, clamp_logprob, error_body, sum_usage,
    to_finish_reason, to_stop_reason, weight_version_spans,
};
