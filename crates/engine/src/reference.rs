//! Naive transformer in f64, one sequence at a time, as reference for tests of the engine.

use std::collections::HashMap;

use levade_model::{Activation, ModelConfig};

use crate::layout::ParameterLayout;
use crate::weights::Weights;

/// Reference model for tests: a model's parameters in f64, by Hugging Face name.
pub struct ReferenceModel {
    config: ModelConfig,
    /// Values by parameter name.
    pub parameters: HashMap<String, Vec<f64>>,
}

fn matvec(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    matrix.chunks(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let z = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + z.tanh())
        }
    }
}

impl ReferenceModel {
    /// Creates a reference with the parameters of `weights`.
    pub fn new(weights: &Weights) -> Self {
        let wide: Vec<f64> = weights.master.iter().map(|v| f64::from(*v)).collect();
        ReferenceModel::from_weights(&weights.config, &weights.layout, &wide)
    }

    /// Creates a reference with the parameters that `array` holds in `layout`.
    pub fn from_weights(config: &ModelConfig, layout: &ParameterLayout, array: &[f64]) -> Self {
        let named = layout
            .tensors
            .entries
            .iter()
            .map(|p| (p.parameter.name.clone(), array[p.range.clone()].to_vec()));
        ReferenceModel { config: config.clone(), parameters: named.collect() }
    }

    fn project(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mut y = matvec(&self.parameters[&format!("{name}.weight")], x);
        if let Some(bias) = self.parameters.get(&format!("{name}.bias")) {
            y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        y
    }

    /// Computes the RMS norm of `x` with the weights of this name.
    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = &self.parameters[name];
        let offset = f64::from(self.config.norm_offset());
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let root = (mean + f64::from(self.config.norm_epsilon)).sqrt();
        x.iter().zip(weight).map(|(v, w)| (offset + w) * v / root).collect()
    }

    /// Applies norms to one kind of heads, if the model has them, and rotates the heads by
    /// `position`, if the layer has a rotary embedding.
    fn normalize_and_rotate(&self, layer: usize, norm: &str, position: usize, x: &mut [f64]) {
        let dim = self.config.head_dim;
        let pattern = &self.config.pattern;
        let local = pattern.local_rope.as_ref().filter(|_| self.config.window(layer).is_some());
        let theta = f64::from(local.unwrap_or(&self.config.rope).theta);
        for head in x.chunks_mut(dim) {
            if self.parameters.contains_key(norm) {
                head.copy_from_slice(&self.norm(norm, head));
            }
            if pattern.unrotated.contains(&layer) {
                continue;
            }
            for i in 0..dim / 2 {
                let frequency = theta.powf(-2.0 * i as f64 / dim as f64);
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let a = head[i];
                let b = head[i + dim / 2];
                head[i] = a * cos - b * sin;
                head[i + dim / 2] = b * cos + a * sin;
            }
        }
    }

    /// Computes the logits after every token of a sequence.
    pub fn logits(&self, tokens: &[u32]) -> Vec<Vec<f64>> {
        let embedding = &self.parameters["model.embed_tokens.weight"];
        let head = self.parameters.get("lm_head.weight").unwrap_or(embedding);
        self.hidden_states(tokens).iter().map(|x| matvec(head, x)).collect()
    }

    /// Computes the normalized hidden states after every token of a sequence.
    pub fn hidden_states(&self, tokens: &[u32]) -> Vec<Vec<f64>> {
        let config = &self.config;
        let dim = config.head_dim;
        let scale = f64::from(config.query_scalar.unwrap_or(dim as f32)).sqrt();
        let embedding_scale = f64::from(config.embedding_scale().unwrap_or(1.0));
        let group = config.heads / config.kv_heads;
        let embedding = &self.parameters["model.embed_tokens.weight"];
        let mut xs: Vec<Vec<f64>> = tokens
            .iter()
            .map(|t| &embedding[*t as usize * config.hidden..][..config.hidden])
            .map(|row| row.iter().map(|x| x * embedding_scale).collect())
            .collect();
        for layer in 0..config.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let [before_attention, after_attention, before_mlp, after_mlp] =
                config.block_norms().map(|norm| name(&format!("{norm}.weight")));
            let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (Vec::new(), Vec::new());
            for (position, x) in xs.iter_mut().enumerate() {
                let n = self.norm(&before_attention, x);
                let mut q = self.project(&name("self_attn.q_proj"), &n);
                let mut k = self.project(&name("self_attn.k_proj"), &n);
                self.normalize_and_rotate(
                    layer,
                    &name("self_attn.q_norm.weight"),
                    position,
                    &mut q,
                );
                self.normalize_and_rotate(
                    layer,
                    &name("self_attn.k_norm.weight"),
                    position,
                    &mut k,
                );
                keys.push(k);
                values.push(self.project(&name("self_attn.v_proj"), &n));
                let first = keys.len() - config.window(layer).unwrap_or(keys.len()).min(keys.len());
                let mut attended = Vec::new();
                for (head, q) in q.chunks(dim).enumerate() {
                    let at = head / group * dim;
                    let scores: Vec<f64> = keys[first..]
                        .iter()
                        .map(|k| q.iter().zip(&k[at..]).map(|(a, b)| a * b).sum::<f64>() / scale)
                        .collect();
                    let max = scores.iter().copied().fold(f64::MIN, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    attended.extend((0..dim).map(|d| {
                        values[first..]
                            .iter()
                            .zip(&weights)
                            .map(|(v, w)| v[at + d] * w / total)
                            .sum::<f64>()
                    }));
                }
                let mut out = self.project(&name("self_attn.o_proj"), &attended);
                if config.has_post_norms() {
                    out = self.norm(&after_attention, &out);
                }
                x.iter_mut().zip(out).for_each(|(x, o)| *x += o);
                let n = self.norm(&before_mlp, x);
                let gate = self.project(&name("mlp.gate_proj"), &n);
                let up = self.project(&name("mlp.up_proj"), &n);
                let h: Vec<f64> = gate
                    .iter()
                    .zip(up)
                    .map(|(g, u)| activate(config.activation(), *g) * u)
                    .collect();
                let mut out = self.project(&name("mlp.down_proj"), &h);
                if config.has_post_norms() {
                    out = self.norm(&after_mlp, &out);
                }
                x.iter_mut().zip(out).for_each(|(x, o)| *x += o);
            }
        }
        xs.iter().map(|x| self.norm("model.norm.weight", x)).collect()
    }

    /// Computes log p of `tokens[index]` at a temperature.
    pub fn logprob(logits: &[Vec<f64>], tokens: &[u32], index: usize, temperature: f64) -> f64 {
        let z: Vec<f64> = logits[index - 1].iter().map(|z| z / temperature).collect();
        let max = z.iter().copied().fold(f64::MIN, f64::max);
        z[tokens[index] as usize] - max - z.iter().map(|z| (z - max).exp()).sum::<f64>().ln()
    }

    /// Computes the entropy, in nats, of the distribution that predicts the token at `index`, at a
    /// temperature.
    pub fn entropy(logits: &[Vec<f64>], index: usize, temperature: f64) -> f64 {
        let z: Vec<f64> = logits[index - 1].iter().map(|z| z / temperature).collect();
        let max = z.iter().copied().fold(f64::MIN, f64::max);
        let log_sum = max + z.iter().map(|z| (z - max).exp()).sum::<f64>().ln();
        z.iter().map(|z| -(z - log_sum).exp() * (z - log_sum)).sum()
    }
}
