//! Encoders of the BERT family, which embed texts as vectors for retrieval.
//!
//! Token, position and type embeddings are followed by layers of full attention and a feed-forward
//! part with the exact GELU. A layer norm follows each part, over its sum with the residual stream
//! (post-LN). The vector is the mean of a text's rows, or the first row, scaled to length 1. Matmul
//! is the decoder's, so a vector has the same bits in any batch and on any number of threads.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use levade_model::{EncoderFiles, ModelError, Pooling};
use levade_policy::{Embedder, PolicyError, TextIds, TextRole};

use crate::Compute;
use crate::buffer::Buffer;
use crate::gemm::{GemmScratch, Matrix, OutputMode, PackedMatrix, RhsOperand, gemm};
use crate::ops::attention_full::{self, FullHeads};
use crate::ops::{fill_rows, for_rows, gelu, layer_norm};

/// Maximum number of token rows in one forward pass, unless a single text is longer.
const ROWS: usize = 4096;

/// Weight and bias of a linear map.
struct LinearWeights {
    weight: PackedMatrix,
    bias: Vec<f32>,
}

/// Weight and bias of a layer norm.
struct LayerNormWeights {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl LayerNormWeights {
    fn parts(&self) -> (&[f32], &[f32]) {
        (&self.weight, &self.bias)
    }
}

struct EncoderBlock {
    qkv: LinearWeights,
    output: LinearWeights,
    attention_norm: LayerNormWeights,
    up: LinearWeights,
    down: LinearWeights,
    norm: LayerNormWeights,
}

/// Text encoder (BERT) with loaded weights, which computes one vector per text.
pub struct Encoder {
    compute: Compute,
    shape: FullHeads,
    hidden: usize,
    intermediate: usize,
    epsilon: f32,
    pooling: Pooling,
    max_tokens: usize,
    vocabulary: usize,
    tokens: Vec<f32>,
    /// Sum of the position embedding and the embedding of token type 0, for every position. All
    /// tokens have type 0.
    position_embeddings: Vec<f32>,
    embedding_norm: LayerNormWeights,
    blocks: Vec<EncoderBlock>,
    buffers: EncoderBuffers,
}

/// Buffers for intermediate values of the encoder's forward pass.
#[derive(Default)]
struct EncoderBuffers {
    stream: Buffer,
    qkv: Buffer,
    attended: Buffer,
    scores: Buffer,
    projected: Buffer,
    wide: Buffer,
    scratch: GemmScratch,
}

/// Reader of an encoder's tensors.
struct TensorReader<'a>(&'a EncoderFiles, &'a Compute);

impl TensorReader<'_> {
    fn read_norm(&self, name: &str, width: usize) -> Result<LayerNormWeights, ModelError> {
        let part = |kind: &str| self.0.tensor(&format!("{name}.{kind}"), &[width]);
        Ok(LayerNormWeights { weight: part("weight")?, bias: part("bias")? })
    }

    /// Reads the linear maps `names`, which have the same input, and stacks them into one map.
    fn read_linear(
        &self,
        names: &[String],
        inputs: usize,
        outputs: usize,
    ) -> Result<LinearWeights, ModelError> {
        let mut weight = Vec::new();
        let mut bias = Vec::new();
        for name in names {
            weight.extend(self.0.tensor(&format!("{name}.weight"), &[outputs, inputs])?);
            bias.extend(self.0.tensor(&format!("{name}.bias"), &[outputs])?);
        }
        let columns = Matrix::new(&weight, outputs * names.len(), inputs).transposed();
        Ok(LinearWeights { weight: PackedMatrix::new(self.1, columns), bias })
    }

    /// Reads one encoder layer. `hidden` is the width of the layer's output, `wide` the width
    /// within its feed-forward part.
    fn read_block(
        &self,
        layer: usize,
        hidden: usize,
        wide: usize,
    ) -> Result<EncoderBlock, ModelError> {
        let name = |part: &str| format!("encoder.layer.{layer}.{part}");
        let qkv = ["query", "key", "value"].map(|part| name(&format!("attention.self.{part}")));
        Ok(EncoderBlock {
            qkv: self.read_linear(&qkv, hidden, hidden)?,
            output: self.read_linear(&[name("attention.output.dense")], hidden, hidden)?,
            attention_norm: self.read_norm(&name("attention.output.LayerNorm"), hidden)?,
            up: self.read_linear(&[name("intermediate.dense")], hidden, wide)?,
            down: self.read_linear(&[name("output.dense")], wide, hidden)?,
            norm: self.read_norm(&name("output.LayerNorm"), hidden)?,
        })
    }
}

impl Encoder {
    /// Loads an encoder that computes on `threads` threads.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing, damaged or has another shape.
    pub fn new(files: &EncoderFiles, threads: usize) -> Result<Self, ModelError> {
        let compute = Compute::new(threads);
        let config = &files.config;
        let hidden = config.hidden;
        let wide = config.intermediate;
        let read = TensorReader(files, &compute);
        let tokens =
            files.tensor("embeddings.word_embeddings.weight", &[config.vocabulary, hidden])?;
        let positions = &[config.positions, hidden];
        let mut position_embeddings =
            files.tensor("embeddings.position_embeddings.weight", positions)?;
        let types =
            files.tensor("embeddings.token_type_embeddings.weight", &[config.types, hidden])?;
        for row in position_embeddings.chunks_exact_mut(hidden) {
            row.iter_mut().zip(&types).for_each(|(value, of_type)| *value += of_type);
        }
        let embedding_norm = read.read_norm("embeddings.LayerNorm", hidden)?;
        let blocks = (0..config.layers)
            .map(|layer| read.read_block(layer, hidden, wide))
            .collect::<Result<Vec<_>, ModelError>>()?;
        Ok(Encoder {
            shape: FullHeads { heads: config.heads, head_dim: hidden / config.heads },
            hidden,
            intermediate: wide,
            epsilon: config.norm_epsilon,
            pooling: config.pooling,
            max_tokens: config.max_tokens,
            vocabulary: config.vocabulary,
            tokens,
            position_embeddings,
            embedding_norm,
            blocks,
            buffers: EncoderBuffers::default(),
            compute,
        })
    }

    /// Returns the number of dimensions of an embedding vector.
    pub fn dimensions(&self) -> usize {
        self.hidden
    }

    /// Computes the embedding vector of each text, which is given as token ids.
    ///
    /// # Errors
    /// Returns [`PolicyError::Invalid`] if a text is empty or longer than the model's context, if
    /// an id is outside the vocabulary, or if a vector is not finite.
    pub fn encode(&mut self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, PolicyError> {
        for ids in texts {
            if ids.is_empty() || ids.len() > self.max_tokens {
                return Err(PolicyError::Invalid(format!(
                    "a text has {} tokens, but the encoder accepts 1 to {}",
                    ids.len(),
                    self.max_tokens
                )));
            }
            if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocabulary) {
                return Err(PolicyError::Invalid(format!(
                    "token {id} is outside the encoder's vocabulary of {}: the tokenizer belongs \
                     to another model",
                    self.vocabulary
                )));
            }
        }
        let mut vectors = Vec::with_capacity(texts.len());
        let mut rest = texts;
        while !rest.is_empty() {
            let mut rows = 0;
            let mut taken = Vec::new();
            for ids in rest {
                if rows > 0 && rows + ids.len() > ROWS {
                    break;
                }
                taken.push(rows..rows + ids.len());
                rows += ids.len();
            }
            let (now, later) = rest.split_at(taken.len());
            self.encode_batch(now, &taken, &mut vectors);
            rest = later;
        }
        if vectors.iter().flatten().all(|x: &f32| x.is_finite()) {
            return Ok(vectors);
        }
        Err(PolicyError::Invalid(
            "the computed vectors are not finite, because the encoder's weights are damaged; fetch \
             them again"
                .into(),
        ))
    }

    /// Encodes texts and appends their embedding vectors to `vectors`. `runs` are the ranges of
    /// rows of the texts.
    fn encode_batch(
        &mut self,
        texts: &[Vec<u32>],
        runs: &[Range<usize>],
        vectors: &mut Vec<Vec<f32>>,
    ) {
        let Encoder { compute, hidden, intermediate, .. } = self;
        let compute = &*compute;
        let hidden = *hidden;
        let wide = *intermediate;
        let rows = runs.last().map_or(0, |run| run.end);
        let ids: Vec<u32> = texts.iter().flatten().copied().collect();
        let positions: Vec<usize> = runs.iter().flat_map(|run| 0..run.len()).collect();
        let EncoderBuffers { stream, qkv, attended, scores, projected, wide: wide_rows, scratch } =
            &mut self.buffers;
        let tokens = &self.tokens;
        let position_embeddings = &self.position_embeddings;

        let stream = stream.reserve(rows * hidden);
        for_rows(compute, rows, hidden, stream, |row, out| {
            out.copy_from_slice(&tokens[ids[row] as usize * hidden..][..hidden]);
        });
        let projected = projected.reserve(rows * hidden);
        for_rows(compute, rows, hidden, projected, |row, out| {
            out.copy_from_slice(&position_embeddings[positions[row] * hidden..][..hidden]);
        });
        layer_norm::forward(
            compute,
            rows,
            self.embedding_norm.parts(),
            self.epsilon,
            projected,
            stream,
        );

        let qkv = qkv.reserve(rows * 3 * hidden);
        let attended = attended.reserve(rows * hidden);
        let scores = scores.reserve(rows * self.shape.heads);
        let wide_rows = wide_rows.reserve(rows * wide);
        for block in &self.blocks {
            apply_linear(compute, scratch, &block.qkv, rows, stream, qkv);
            attention_full::forward(compute, self.shape, runs, qkv, scores, attended);
            apply_linear(compute, scratch, &block.output, rows, attended, projected);
            let norm = block.attention_norm.parts();
            layer_norm::forward(compute, rows, norm, self.epsilon, projected, stream);

            // The bias is added with the activation, which saves a pass over the widest rows.
            let x = Matrix::new(stream, rows, hidden);
            gemm(
                compute,
                scratch,
                x,
                RhsOperand::Packed(&block.up.weight),
                wide_rows,
                wide,
                OutputMode::Set,
            );
            gelu::forward(compute, rows, &block.up.bias, wide_rows);
            apply_linear(compute, scratch, &block.down, rows, wide_rows, projected);
            layer_norm::forward(compute, rows, block.norm.parts(), self.epsilon, projected, stream);
        }
        let mut pooled = vec![0.0; runs.len() * hidden];
        let mean = self.pooling == Pooling::Mean;
        attention_full::pool_texts(compute, runs, mean, stream, hidden, &mut pooled);
        vectors.extend(pooled.chunks_exact(hidden).map(<[f32]>::to_vec));
    }
}

/// Computes `out = x · Wᵀ + bias`.
fn apply_linear(
    compute: &Compute,
    scratch: &mut GemmScratch,
    map: &LinearWeights,
    rows: usize,
    x: &[f32],
    out: &mut [f32],
) {
    fill_rows(compute, rows, &map.bias, out);
    let x = Matrix::new(x, rows, x.len() / rows);
    gemm(
        compute,
        scratch,
        x,
        RhsOperand::Packed(&map.weight),
        out,
        map.bias.len(),
        OutputMode::Add,
    );
}

/// Encoder with its tokenizer, which embeds texts as vectors. Concurrent calls run one after the
/// other.
pub struct TextEncoder {
    encoder: Arc<Mutex<Encoder>>,
    tokenizer: Arc<dyn TextIds>,
    dimensions: usize,
    fingerprint: String,
    query_prefix: String,
    passage_prefix: String,
}

impl TextEncoder {
    /// Loads the encoder in `files`; `tokenizer` converts its texts to ids.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing, damaged or has another shape.
    pub fn new(
        files: &EncoderFiles,
        tokenizer: Arc<dyn TextIds>,
        threads: usize,
    ) -> Result<Self, ModelError> {
        let encoder = Encoder::new(files, threads)?;
        Ok(TextEncoder {
            dimensions: encoder.dimensions(),
            encoder: Arc::new(Mutex::new(encoder)),
            tokenizer,
            fingerprint: files.fingerprint()?,
            query_prefix: files.config.query_prefix.clone(),
            passage_prefix: files.config.passage_prefix.clone(),
        })
    }
}

#[async_trait]
impl Embedder for TextEncoder {
    fn dimensions(&self) -> usize {
        self.dimensions
    }

    fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    async fn embed(&self, texts: &[String], role: TextRole) -> Result<Vec<Vec<f32>>, PolicyError> {
        let prefix = match role {
            TextRole::Query => &self.query_prefix,
            TextRole::Passage => &self.passage_prefix,
        };
        let texts: Vec<String> = texts.iter().map(|text| format!("{prefix}{text}")).collect();
        let encoder = Arc::clone(&self.encoder);
        let tokenizer = Arc::clone(&self.tokenizer);
        let work = move || {
            let ids =
                texts.iter().map(|text| tokenizer.ids(text)).collect::<Result<Vec<_>, _>>()?;
            encoder.lock().unwrap_or_else(PoisonError::into_inner).encode(&ids)
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|_| PolicyError::Stopped("the encoder".into()))?
    }
}

#[cfg(test)]
#[path = "encoder_tests.rs"]
mod tests;
