//! OpenAI's API: chat completions, completions, models.

mod chat;
mod completions;
mod models;
mod sampling;
pub(crate) mod structured;
mod write;

pub(crate) use chat::{ALLOWED_TOOLS, allowed, chat, messages, take_sampling_fields, tools};
pub(crate) use completions::completions;
pub(crate) use models::{model, models};
pub(crate) use sampling::{SamplingFields, check_fields, top_k};
pub(crate) use write::{
    TokenReport, error_body, finish, finite, respond, stop_reason, usage, usage_of, weight_versions,
};
