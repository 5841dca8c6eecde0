//! Low-rank adapters (Hu et al. 2021): a linear map W x becomes W x + (alpha / rank) B A x, with W
//! frozen.
//!
//! Several adapters share one base, whose weights are in memory once. Each adapter is a policy: it
//! has its own weights, optimizer, versions and cached prefixes. Rows of different adapters share a
//! batch and the base's matmuls. A frozen reference for a KL penalty is another adapter, not
//! another copy of the model. A policy with a [`ValueHead`](crate::value_head::ValueHead) is a
//! critic.
//!
//! Files are in PEFT's layout.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use levade_model::{
    AdapterConfig, MERGE, ModelConfig, ModelError, Parameter, SafetensorsFile, write_json,
};
use levade_policy::{LoraOptions, uniform};
use serde_json::json;

use crate::buffer::Buffer;
use crate::gemm::{GemmScratch, Matrix, NR, OutputMode, PackedMatrix, RhsOperand, gemm};
use crate::layout::{LayerMap, LinearMap, ParameterLayout};
use crate::ops::{for_rows, softmax};
use crate::parameters::Parameters;
use crate::precision::{Precision, words};
use crate::scratch::MapScratch;
use crate::tensors::Tensors;
use crate::{Compute, EngineError};

/// Name of the file with an adapter's weights.
const WEIGHTS: &str = "adapter_model.safetensors";

/// Low-rank adapter of one projection.
#[derive(Debug, Clone, PartialEq)]
pub struct AdaptedProjection {
    /// Range of the projection's matrix in the array of base weights.
    base: Range<usize>,
    /// Range of the projection's columns in the output of its linear map.
    outputs: Range<usize>,
    /// Number of outputs of the projection's linear map.
    width: usize,
    inputs: usize,
    rank: usize,
    /// Scale by which the product B A x is multiplied.
    scale: f32,
    /// Range of the matrix A (rank × inputs) in the adapter's parameters.
    a: Range<usize>,
    /// Range of the matrix B (outputs × rank) in the adapter's parameters.
    b: Range<usize>,
}

/// Offsets of an adapter's parameters in one flat array.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterLayout {
    /// Adapted projections of every linear map, in the order of [`LinearMap::all`].
    maps: Vec<Vec<AdaptedProjection>>,
    /// Tensors of the adapter's parameters, under the names that PEFT gives them.
    pub tensors: Tensors,
}

impl AdapterLayout {
    /// Returns the total number of words of the adapter's packed matrices in `precision`.
    pub fn packed_words(&self, precision: Precision) -> usize {
        let packed = |depth, columns: usize| words(precision, depth) * columns.next_multiple_of(NR);
        let parts = self.maps.iter().flatten();
        parts
            .map(|part| packed(part.inputs, part.rank) + packed(part.rank, part.outputs.len()))
            .sum()
    }
}

impl AdaptedProjection {
    /// Returns the projection's columns of `rows`, the output of the linear map.
    fn adapted_columns<'a>(&self, rows: &'a [f32]) -> Matrix<'a> {
        Matrix::with_stride(
            &rows[self.outputs.start..],
            rows.len() / self.width,
            self.outputs.len(),
            self.width,
        )
    }

    /// Computes `scale` · x Aᵀ, the low-rank product before B.
    fn low_rank_product<'a>(
        &self,
        compute: &Compute,
        scratch: &mut GemmScratch,
        inner: &'a mut Buffer,
        packed: &[PackedMatrix; 2],
        x: &[f32],
    ) -> Matrix<'a> {
        let rows = x.len() / self.inputs;
        let inner = inner.reserve(rows * self.rank);
        let x = Matrix::new(x, rows, self.inputs);
        gemm(
            compute,
            scratch,
            x,
            RhsOperand::Packed(&packed[0]),
            inner,
            self.rank,
            OutputMode::Set,
        );
        scale_rows(compute, self.rank, self.scale, inner);
        Matrix::new(inner, rows, self.rank)
    }

    /// Computes `scale` · dy B from the adapted columns of `dy`. `master` holds the adapter's
    /// parameters.
    fn low_rank_gradient<'a>(
        &self,
        compute: &Compute,
        scratch: &mut GemmScratch,
        buffer: &'a mut Buffer,
        master: &[f32],
        dy: &[f32],
    ) -> Matrix<'a> {
        let rows = dy.len() / self.width;
        let buffer = buffer.reserve(rows * self.rank);
        let dy = self.adapted_columns(dy);
        let b = Matrix::new(&master[self.b.clone()], self.outputs.len(), self.rank);
        gemm(compute, scratch, dy, RhsOperand::Plain(b), buffer, self.rank, OutputMode::Set);
        scale_rows(compute, self.rank, self.scale, buffer);
        Matrix::new(buffer, rows, self.rank)
    }
}

impl AdapterLayout {
    /// Creates the layout of an adapter with `options` over a base model with layout `base`.
    ///
    /// # Errors
    /// Returns an error if an option is out of range, or if a target does not exist.
    pub fn new(base: &ParameterLayout, options: &LoraOptions) -> Result<Self, EngineError> {
        let reject = |what: String| Err(EngineError::Options(what));
        let hidden = base.norm.len();
        let ranks = options.ranks.iter().map(|(name, rank)| (format!("lora.ranks.{name}"), *rank));
        for (key, rank) in [("lora.rank".to_owned(), options.rank)].into_iter().chain(ranks) {
            if rank == 0 || rank > hidden {
                return reject(format!(
                    "{key} = {rank}; it must be between 1 and {hidden}, the model's hidden size"
                ));
            }
        }
        let alphas =
            options.alphas.iter().map(|(name, alpha)| (format!("lora.alphas.{name}"), *alpha));
        for (key, alpha) in [("lora.alpha".to_owned(), options.alpha)].into_iter().chain(alphas) {
            if !(alpha > 0.0 && alpha.is_finite()) {
                return reject(format!("{key} = {alpha}; it must be more than 0"));
            }
        }
        let all = LinearMap::all(base.layers.len());
        let modules: Vec<String> = all
            .flat_map(|map| map.site.modules().iter().map(move |module| module_name(map, module)))
            .collect();
        let names = [("targets", options.targets.iter().collect::<Vec<_>>())];
        let names = names.into_iter().chain([
            ("ranks", options.ranks.keys().collect()),
            ("alphas", options.alphas.keys().collect()),
        ]);
        for (key, name) in
            names.flat_map(|(key, names)| names.into_iter().map(move |name| (key, name)))
        {
            if !modules.iter().any(|module| LoraOptions::matches_module(name, module)) {
                let modules = LayerMap::ALL.iter().flat_map(|site| site.modules());
                let known: Vec<&str> =
                    modules.filter_map(|module| module.rsplit('.').next()).collect();
                return reject(format!(
                    "lora.{key} has {name:?}, which is not a module of the model; the modules are \
                     {}",
                    known.join(", ")
                ));
            }
        }
        if options.targets.is_empty() {
            return reject(
                "lora.targets is empty; list at least one module, such as q_proj".into(),
            );
        }
        let mut tensors = Tensors::default();
        let mut part = |map: LinearMap, module: &str| {
            let name = module_name(map, module);
            let (rank, alpha) = options.rank_and_alpha(&name)?;
            let entry = base.tensors.find(&format!("{name}.weight"))?;
            let at = base.linear(map);
            let inputs = entry.parameter.shape[1];
            let [start, end] =
                [entry.range.start, entry.range.end].map(|i| (i - at.weight.start) / inputs);
            let mut lay = |matrix: &str, shape: [usize; 2]| {
                let name = format!("base_model.model.{name}.{matrix}.weight");
                tensors.append([Parameter { name, shape: shape.to_vec() }])
            };
            let a = lay("lora_A", [rank, inputs]);
            let b = lay("lora_B", [end - start, rank]);
            let base = entry.range.clone();
            let outputs = start..end;
            let scale = options.scale(rank, alpha);
            Some(AdaptedProjection { base, outputs, width: at.outputs, inputs, rank, scale, a, b })
        };
        let maps = LinearMap::all(base.layers.len())
            .map(|map| map.site.modules().iter().filter_map(|module| part(map, module)).collect());
        Ok(AdapterLayout { maps: maps.collect(), tensors })
    }
}

fn module_name(map: LinearMap, module: &str) -> String {
    format!("model.layers.{}.{module}", map.layer)
}

/// Options and weights of a low-rank adapter.
pub struct Adapter {
    /// Rank, scale and target modules of the adapter.
    pub options: LoraOptions,
    /// Name of the base model.
    base: String,
    /// Offsets of the adapter's parameters in `master`.
    pub layout: AdapterLayout,
    /// Values of the adapter's parameters: the matrices A and B of every adapted projection.
    pub master: Buffer,
    /// Packed copies of A (for `x · Aᵀ`) and B (for `t · Bᵀ`) of every adapted projection, in the
    /// order of `layout`.
    packed: Vec<Vec<[PackedMatrix; 2]>>,
}

impl Adapter {
    /// Creates an adapter that changes nothing yet: A is sampled with `seed`, and B is zero.
    ///
    /// # Errors
    /// Returns an error if an option is out of range, or if a target does not exist in the base
    /// model.
    pub fn new(
        compute: &Compute,
        layout: &ParameterLayout,
        options: LoraOptions,
        seed: u64,
        base: String,
    ) -> Result<Self, EngineError> {
        let layout = AdapterLayout::new(layout, &options)?;
        let mut master = Buffer::zeroed(layout.tensors.len);
        for (stream, part) in layout.maps.iter().flatten().enumerate() {
            // Uniform with the variance of PEFT's default (He et al. 2015 with a = √5).
            let bound = 1.0 / (part.inputs as f64).sqrt();
            for (i, value) in master[part.a.clone()].iter_mut().enumerate() {
                *value = (bound * (2.0 * uniform(seed, stream as u64, i as u64) - 1.0)) as f32;
            }
        }
        let packed = |part: &AdaptedProjection| {
            [(part.inputs, part.rank), (part.rank, part.outputs.len())]
                .map(|(depth, columns)| PackedMatrix::zeroed(compute.precision, depth, columns))
        };
        let packed = layout.maps.iter().map(|parts| parts.iter().map(packed).collect()).collect();
        let mut adapter = Adapter { options, base, layout, master, packed };
        adapter.parameters().pack(compute);
        Ok(adapter)
    }

    /// Returns the adapter's parameters with the packed copies that are made from them.
    pub fn parameters(&mut self) -> Parameters<'_> {
        let Adapter { layout, master, packed, .. } = self;
        let ranges = layout.maps.iter().flatten().flat_map(|part| [part.a.clone(), part.b.clone()]);
        let packed = ranges.zip(packed.iter_mut().flatten().flatten()).collect();
        Parameters { tensors: &layout.tensors, master, packed }
    }

    fn parts(
        &self,
        map: LinearMap,
    ) -> impl Iterator<Item = (&AdaptedProjection, &[PackedMatrix; 2])> {
        let index = map.index();
        self.layout.maps[index].iter().zip(&self.packed[index])
    }

    /// Adds the adapter's part of a linear map's output to `out`. `x` is the map's input.
    pub fn forward(
        &self,
        compute: &Compute,
        scratch: &mut MapScratch,
        map: LinearMap,
        x: &[f32],
        out: &mut [f32],
    ) {
        let MapScratch { gemm: scratch, low } = scratch;
        for (part, packed) in self.parts(map) {
            let inner = part.low_rank_product(compute, scratch, &mut low.inner, packed, x);
            let to = &mut out[part.outputs.start..];
            gemm(
                compute,
                scratch,
                inner,
                RhsOperand::Packed(&packed[1]),
                to,
                part.width,
                OutputMode::Add,
            );
        }
    }

    /// Adds the gradients of A and B to `gradient`, or overwrites it, depending on `mode`. `x` is
    /// the linear map's input, `dy` the gradient of its output.
    #[allow(clippy::too_many_arguments)]
    pub fn add_gradient(
        &self,
        compute: &Compute,
        scratch: &mut MapScratch,
        map: LinearMap,
        x: &[f32],
        dy: &[f32],
        gradient: &mut [f32],
        mode: OutputMode,
    ) {
        let MapScratch { gemm: scratch, low } = scratch;
        for (part, packed) in self.parts(map) {
            let inner_gradient = part
                .low_rank_gradient(compute, scratch, &mut low.inner_gradient, &self.master, dy)
                .transposed();
            let rhs = RhsOperand::Plain(Matrix::new(x, x.len() / part.inputs, part.inputs));
            gemm(
                compute,
                scratch,
                inner_gradient,
                rhs,
                &mut gradient[part.a.clone()],
                part.inputs,
                mode,
            );
            let inner = part.low_rank_product(compute, scratch, &mut low.inner, packed, x);
            let to = &mut gradient[part.b.clone()];
            gemm(
                compute,
                scratch,
                part.adapted_columns(dy).transposed(),
                RhsOperand::Plain(inner),
                to,
                part.rank,
                mode,
            );
        }
    }

    /// Adds the adapter's part of a linear map's input gradient to `dx`.
    pub fn add_input_gradient(
        &self,
        compute: &Compute,
        scratch: &mut MapScratch,
        map: LinearMap,
        dy: &[f32],
        dx: &mut [f32],
    ) {
        let MapScratch { gemm: scratch, low } = scratch;
        for (part, _) in self.parts(map) {
            let inner_gradient =
                part.low_rank_gradient(compute, scratch, &mut low.inner_gradient, &self.master, dy);
            let a = RhsOperand::Plain(Matrix::new(
                &self.master[part.a.clone()],
                part.rank,
                part.inputs,
            ));
            gemm(compute, scratch, inner_gradient, a, dx, part.inputs, OutputMode::Add);
        }
    }

    /// Returns whether the adapter changes the matrix at `range` in the base weights.
    pub fn adapts_matrix(&self, range: &Range<usize>) -> bool {
        self.layout.maps.iter().flatten().any(|part| part.base == *range)
    }

    /// Adds `scale` · B A to `matrix`, a copy of the matrix at `range` in the base weights. `array`
    /// holds the parameters of an adapter with this layout.
    pub fn merge_into(&self, array: &[f64], range: &Range<usize>, matrix: &mut [f64]) {
        for part in self.layout.maps.iter().flatten().filter(|part| part.base == *range) {
            let scale = f64::from(part.scale);
            let a = &array[part.a.clone()];
            let b = &array[part.b.clone()];
            for (row, b) in matrix.chunks_exact_mut(part.inputs).zip(b.chunks_exact(part.rank)) {
                for (r, b) in b.iter().enumerate() {
                    for (w, a) in row.iter_mut().zip(&a[r * part.inputs..]) {
                        *w += scale * b * a;
                    }
                }
            }
        }
    }

    /// Writes the adapter's weights and configuration to `dir` in PEFT's layout. Returns the names
    /// of the files.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn save(&self, dir: &Path) -> Result<[&'static str; 2], ModelError> {
        let LoraOptions { rank, alpha, targets, rank_stabilized: rank_stabilised, ranks, alphas } =
            &self.options;
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": rank,
            "lora_alpha": alpha,
            "use_rslora": rank_stabilised,
            "rank_pattern": ranks,
            "alpha_pattern": alphas,
            "lora_dropout": 0.0,
            "target_modules": targets,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
        });
        write_json(&dir.join(AdapterConfig::FILE), &config)?;
        self.layout.tensors.write(&dir.join(WEIGHTS), &self.master)?;
        Ok([AdapterConfig::FILE, WEIGHTS])
    }

    /// Returns the name of the base model.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// Returns the options of an adapter over `base` that can load an adapter with the
    /// configuration `config`.
    ///
    /// # Errors
    /// Returns the errors of [`AdapterConfig::modules`].
    pub fn options_of(
        config: &AdapterConfig,
        base: &ModelConfig,
    ) -> Result<LoraOptions, ModelError> {
        let modules = config.modules(base)?;
        let mut options = LoraOptions {
            rank: config.rank,
            alpha: config.alpha,
            rank_stabilized: config.rank_stabilized,
            targets: modules.iter().map(|module| module.name.clone()).collect(),
            ..LoraOptions::default()
        };
        for module in modules {
            if module.rank != config.rank {
                options.ranks.insert(module.name.clone(), module.rank);
            }
            if module.alpha != config.alpha {
                options.alphas.insert(module.name, module.alpha);
            }
        }
        Ok(options)
    }

    /// Opens the weights of a directory in PEFT's layout, which must have the options of this
    /// adapter over `base`.
    ///
    /// # Errors
    /// Returns an error if a file is missing or damaged, or if the files contain an adapter with
    /// other options.
    pub fn open(&self, dir: &Path, base: &ModelConfig) -> Result<SafetensorsFile, ModelError> {
        let config = AdapterConfig::open(dir)?;
        let found = Self::options_of(&config, base)?;
        let all = || {
            base.parameters()
                .into_iter()
                .filter_map(|p| Some(p.name.strip_suffix(".weight")?.to_owned()))
        };
        let adapted = |options: &LoraOptions| -> Vec<(String, (usize, f32))> {
            let adapted = all()
                .filter_map(|name| options.rank_and_alpha(&name).map(|adapted| (name, adapted)));
            adapted
                .map(|(name, (rank, alpha))| (name, (rank, options.scale(rank, alpha))))
                .collect()
        };
        if adapted(&found) != adapted(&self.options) {
            let describe = |options: &LoraOptions| {
                let adapted = adapted(options);
                let kinds: BTreeSet<&str> =
                    adapted.iter().filter_map(|(name, _)| name.rsplit('.').next()).collect();
                let stabilized = if options.rank_stabilized { ", use_rslora" } else { "" };
                format!(
                    "r = {}, lora_alpha = {}{stabilized}, {} target_modules of the types {kinds:?}",
                    options.rank,
                    options.alpha,
                    adapted.len()
                )
            };
            return Err(ModelError::Unsupported {
                path: config.path().to_owned(),
                what: format!(
                    "the adapter has {}; the policy has {}",
                    describe(&found),
                    describe(&self.options)
                ),
                way_out: "load it into a policy that has the adapter's options".into(),
            });
        }
        let weights = dir.join(WEIGHTS);
        if !weights.exists() {
            return Err(ModelError::Missing {
                path: weights,
                what: format!("the file is missing, although {} exists", AdapterConfig::FILE),
                way_out:
                    "fetch the adapter again; if it was saved as adapter_model.bin, which can \
                    run code on loading, load it with PEFT and save it again"
                        .into(),
            });
        }
        self.layout.tensors.open(&weights).map_err(|error| match error {
            ModelError::UnexpectedTensor { path, tensor, .. } => ModelError::Unsupported {
                path,
                what: format!(
                    "tensor {tensor} does not belong to the adapter that {} describes",
                    AdapterConfig::FILE
                ),
                way_out: MERGE.into(),
            },
            other => other,
        })
    }

    /// Replaces the adapter's weights with the weights in a file that [`Adapter::open`] has opened.
    ///
    /// # Errors
    /// Returns an error if the file was opened for another adapter.
    pub fn load(&mut self, compute: &Compute, file: &SafetensorsFile) -> Result<(), ModelError> {
        let loaded = self.layout.tensors.read(file, &mut self.master);
        self.parameters().pack(compute);
        loaded
    }
}

fn scale_rows(compute: &Compute, width: usize, scale: f32, rows: &mut [f32]) {
    for_rows(compute, rows.len() / width, width, rows, |_, row| {
        softmax::scale_values(compute.isa, row, scale)
    });
}
