//! Test helpers that write small models to disk, implemented directly from the definitions of the
//! formats.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use levade_model::{AttentionPattern, Family, ModelConfig, ModelFiles, Rope, RopeScaling, Windows};
use serde_json::{Value, json};

/// Returns a model with 2 layers, 4 heads and 2 key and value heads of width 8. Its attention
/// pattern is the one that GGUF files of the family imply, because they cannot represent another.
pub fn tiny(family: Family) -> ModelConfig {
    let config = ModelConfig {
        family,
        hidden: 32,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        intermediate: 64,
        vocabulary: 10,
        context: 128,
        norm_epsilon: 1e-5,
        rope: Rope { theta: 10_000.0, scaling: RopeScaling::None },
        tied: family != Family::Qwen3,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        pattern: AttentionPattern::default(),
        query_scalar: None,
        bos: Some(1),
        eos: vec![2],
        pad: None,
    };
    let mut config = config.with_family(family);
    if matches!(family.traits().windows, Windows::Every | Windows::AllExceptEveryNth(_)) {
        config.pattern =
            AttentionPattern { window: Some(24), windowed: [0, 1].into(), ..config.pattern };
    }
    config.query_scalar = config.query_scalar.map(|_| config.head_dim as f32);
    config
}

/// Returns pseudo-random weights by Hugging Face name, in the range −2 to 2. Every value is a
/// multiple of 1/64, so that it is exact in f16 and bf16.
pub fn weights(config: &ModelConfig) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut next = 0u32;
    let mut value = || {
        next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // An 8-bit integer divided by 64: exact in bf16.
        ((next >> 24) as f32 - 128.0) / 64.0
    };
    config
        .parameters()
        .into_iter()
        .map(|parameter| {
            let values = (0..parameter.shape.iter().product()).map(|_| value()).collect();
            (parameter.name, (parameter.shape, values))
        })
        .collect()
}

/// Encodes numbers in a safetensors type, little-endian.
pub fn encode(dtype: &str, values: &[f32]) -> Vec<u8> {
    let each =
        |encode: &dyn Fn(f32) -> Vec<u8>| values.iter().flat_map(|&value| encode(value)).collect();
    match dtype {
        "F32" => each(&|value| value.to_le_bytes().to_vec()),
        "F64" => each(&|value| f64::from(value).to_le_bytes().to_vec()),
        "F16" => each(&|value| half::f16::from_f32(value).to_le_bytes().to_vec()),
        "BF16" => each(&|value| half::bf16::from_f32(value).to_le_bytes().to_vec()),
        other => panic!("no encoder for {other}"),
    }
}

/// Returns the bytes of a safetensors file with these tensors (name, type, shape, bytes).
pub fn safetensors(tensors: &[(String, &str, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, dtype, shape, bytes) in tensors {
        let entry = json!({
            "dtype": dtype, "shape": shape, "data_offsets": [data.len(), data.len() + bytes.len()],
        });
        header.insert(name.clone(), entry);
        data.extend_from_slice(bytes);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    file
}

/// Writes a model directory in Hugging Face format. All weights have the type `dtype`, and are
/// split into `shards` files.
pub fn write_dir(dir: &Path, config: &ModelConfig, dtype: &str, shards: usize) {
    std::fs::create_dir_all(dir).unwrap();
    std::fs::write(dir.join("config.json"), config.to_hf_json().to_string()).unwrap();
    let tensors: Vec<_> = weights(config)
        .into_iter()
        .map(|(name, (shape, values))| (name, dtype, shape, encode(dtype, &values)))
        .collect();
    if shards == 1 {
        std::fs::write(dir.join("model.safetensors"), safetensors(&tensors)).unwrap();
        return;
    }
    let mut map = serde_json::Map::new();
    for (index, part) in tensors.chunks(tensors.len().div_ceil(shards)).enumerate() {
        let file = format!("model-{:05}-of-{shards:05}.safetensors", index + 1);
        std::fs::write(dir.join(&file), safetensors(part)).unwrap();
        map.extend(part.iter().map(|(name, ..)| (name.clone(), json!(file))));
    }
    let index = json!({ "metadata": {}, "weight_map": map });
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// A metadata value of a GGUF file, with its stored type.
#[derive(Clone, Debug)]
pub enum Meta {
    U32(u32),
    U64(u64),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
}

/// A tensor of a GGUF file: its shape in Hugging Face order, its type number, and its bytes.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub kind: u32,
    pub bytes: Vec<u8>,
}

/// The contents of a GGUF file, which tests modify before they write it.
#[derive(Clone, Debug)]
pub struct Gguf {
    pub magic: [u8; 4],
    pub version: u32,
    pub alignment: usize,
    pub metadata: Vec<(String, Meta)>,
    pub tensors: Vec<GgufTensor>,
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Gguf {
    pub fn set(&mut self, key: &str, value: Meta) {
        self.metadata.retain(|(found, _)| found != key);
        self.metadata.push((key.into(), value));
    }

    pub fn unset(&mut self, key: &str) {
        self.metadata.retain(|(found, _)| found != key);
    }

    pub fn tensor(&mut self, name: &str) -> &mut GgufTensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_text(&mut out, key);
            let mut put = |kind: u32, bytes: &[u8]| {
                out.extend(kind.to_le_bytes());
                out.extend(bytes);
            };
            match value {
                Meta::U32(value) => put(4, &value.to_le_bytes()),
                Meta::I32(value) => put(5, &value.to_le_bytes()),
                Meta::F32(value) => put(6, &value.to_le_bytes()),
                Meta::Bool(value) => put(7, &[u8::from(*value)]),
                Meta::U64(value) => put(10, &value.to_le_bytes()),
                Meta::Text(text) => {
                    put(8, &[]);
                    put_text(&mut out, text);
                }
                Meta::Texts(texts) => {
                    put(9, &8u32.to_le_bytes());
                    out.extend((texts.len() as u64).to_le_bytes());
                    texts.iter().for_each(|text| put_text(&mut out, text));
                }
                Meta::I32s(values) => {
                    put(9, &5u32.to_le_bytes());
                    out.extend((values.len() as u64).to_le_bytes());
                    out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                }
            }
        }
        let mut offset = 0usize;
        for tensor in &self.tensors {
            put_text(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|&size| out.extend((size as u64).to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes.len()).next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&tensor.bytes);
        }
        out
    }

    pub fn write(&self, dir: &Path) -> PathBuf {
        let path = dir.join("model.gguf");
        std::fs::write(&path, self.bytes()).unwrap();
        path
    }
}

/// Interleaves the two halves of each head's rows, as converters to the `llama` architecture do.
fn interleave(values: &[f32], heads: usize, head_dim: usize) -> Vec<f32> {
    let columns = values.len() / (heads * head_dim);
    let mut out = Vec::new();
    for head in 0..heads {
        for i in 0..head_dim / 2 {
            for half in 0..2 {
                let row = head * head_dim + half * (head_dim / 2) + i;
                out.extend_from_slice(&values[row * columns..][..columns]);
            }
        }
    }
    out
}

/// Returns a GGUF file with the [`weights`] of `config` in f32, and its metadata.
pub fn gguf(config: &ModelConfig) -> Gguf {
    let own = config.family.traits().gguf.as_ref();
    let architecture = own.map_or("llama", |gguf| gguf.architecture);
    let mut metadata = vec![("general.architecture".to_string(), text(architecture))];
    for (key, value) in [
        ("block_count", config.layers),
        ("embedding_length", config.hidden),
        ("feed_forward_length", config.intermediate),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("context_length", config.context),
    ] {
        metadata.push((format!("{architecture}.{key}"), Meta::U32(value as u32)));
    }
    let epsilon = format!("{architecture}.attention.layer_norm_rms_epsilon");
    metadata.push((epsilon, Meta::F32(config.norm_epsilon)));
    metadata.push((format!("{architecture}.rope.freq_base"), Meta::F32(config.rope.theta)));
    if let Some(window) = config.pattern.window {
        metadata
            .push((format!("{architecture}.attention.sliding_window"), Meta::U32(window as u32)));
    }
    let tokens = (0..config.vocabulary).map(|id| format!("t{id}")).collect();
    let types = (0..config.vocabulary).map(|id| if id < 3 { 3 } else { 1 }).collect();
    metadata.extend([
        ("tokenizer.ggml.model".into(), text("gpt2")),
        ("tokenizer.ggml.pre".into(), text("qwen2")),
        ("tokenizer.ggml.tokens".into(), Meta::Texts(tokens)),
        ("tokenizer.ggml.token_type".into(), Meta::I32s(types)),
        ("tokenizer.ggml.merges".into(), Meta::Texts(vec!["t 1".into()])),
        ("tokenizer.ggml.bos_token_id".into(), Meta::U32(1)),
        ("tokenizer.ggml.eos_token_id".into(), Meta::U32(2)),
        ("tokenizer.chat_template".into(), text("{{ messages }}")),
    ]);
    let tensors = weights(config)
        .into_iter()
        .map(|(name, (shape, values))| {
            let heads = match () {
                () if name.contains("q_proj") => config.heads,
                () if name.contains("k_proj") => config.kv_heads,
                () => 0,
            };
            let values = match () {
                () if heads > 0 && own.is_some_and(|gguf| gguf.interleaved) => {
                    interleave(&values, heads, config.head_dim)
                }
                () if name.ends_with("norm.weight") => {
                    values.iter().map(|w| w + config.norm_offset()).collect()
                }
                () => values,
            };
            GgufTensor {
                name: gguf_name(config, &name),
                shape,
                kind: 0,
                bytes: encode("F32", &values),
            }
        })
        .collect();
    Gguf { magic: *b"GGUF", version: 3, alignment: 32, metadata, tensors }
}

fn text(text: &str) -> Meta {
    Meta::Text(text.into())
}

fn gguf_name(config: &ModelConfig, name: &str) -> String {
    let after_attention = if config.has_post_norms() { "post_attention_norm" } else { "ffn_norm" };
    name.replace("model.layers.", "blk.")
        .replace("self_attn.q_proj", "attn_q")
        .replace("self_attn.k_proj", "attn_k")
        .replace("self_attn.v_proj", "attn_v")
        .replace("self_attn.o_proj", "attn_output")
        .replace("self_attn.q_norm", "attn_q_norm")
        .replace("self_attn.k_norm", "attn_k_norm")
        .replace("mlp.gate_proj", "ffn_gate")
        .replace("mlp.up_proj", "ffn_up")
        .replace("mlp.down_proj", "ffn_down")
        .replace("input_layernorm", "attn_norm")
        .replace("post_attention_layernorm", after_attention)
        .replace("pre_feedforward_layernorm", "ffn_norm")
        .replace("post_feedforward_layernorm", "post_ffw_norm")
        .replace("model.embed_tokens", "token_embd")
        .replace("model.norm", "output_norm")
        .replace("lm_head", "output")
}

/// Opens an invalid model and returns the error message. Panics if the model opens, or if the
/// message has 1000 bytes or more, or more than 6 lines.
pub fn open_error(path: &Path) -> String {
    let message = match ModelFiles::open(path) {
        Ok(_) => panic!("it opens"),
        Err(error) => error.to_string(),
    };
    assert!(message.len() < 1000 && message.lines().count() <= 6, "more than a screen:\n{message}");
    message
}

/// Asserts that a message contains all of these parts.
pub fn assert_all(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "no {part:?} in:\n{message}");
    }
}
