//! Model files: configuration, safetensors, GGUF, and where they come from.
