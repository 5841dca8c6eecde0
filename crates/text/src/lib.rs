//! Tokenizers, chat templates and tool-call formats.
