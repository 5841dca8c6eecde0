//! Low-rank adapters (Hu et al. 2021): a linear map W x becomes W x + (alpha / rank) B A x, with W frozen.
//!
//! Several adapters live over one base. Each has its own weights, optimiser, versions and prefixes in the cache; the base's
//! weights are in memory once. Files are in PEFT's layout.

use std::ops::Range;
use std::path::Path;

use dressage_model::{ModelConfig, ModelError, SafetensorsFile, write_json, write_safetensors};
use dressage_policy::{LoraOptions, uniform};
use serde_json::json;

use crate::buffer::Buffer;
use crate::layout::Site;
use crate::ops::adamw::Group;
use crate::ops::{for_rows, softmax};
use crate::product::{Matrix, Mode, Packed, Right, Scratch, product};
use crate::weights::attention_shape;
use crate::{Compute, EngineError};

/// Names of an adapter's files.
const WEIGHTS: &str = "adapter_model.safetensors";
/// Its configuration; a folder that has it holds an adapter.
pub const CONFIG: &str = "adapter_config.json";

/// One adapted projection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The linear map that it is a part of.
    pub site: Site,
    /// Its name in PEFT's files.
    name: String,
    /// Its columns among the outputs of the linear map.
    pub outputs: Range<usize>,
    inputs: usize,
    /// A, rank × inputs.
    a: Range<usize>,
    /// B, outputs × rank.
    b: Range<usize>,
}

/// Where an adapter's parameters lie in one flat array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterLayout {
    /// The parts of every block.
    pub layers: Vec<Vec<Part>>,
    /// Length of the array.
    pub len: usize,
}

impl AdapterLayout {
    /// The layout of an adapter with these options.
    ///
    /// # Errors
    /// When an option is out of range, or a target does not exist.
    pub fn new(config: &ModelConfig, options: &LoraOptions) -> Result<Self, EngineError> {
        let refuse = |what: String| Err(EngineError::Options(what));
        if options.rank == 0 || options.rank > config.hidden {
            let (rank, hidden) = (options.rank, config.hidden);
            return refuse(format!("lora.rank = {rank}; it must be 1 to {hidden}, the model's width"));
        }
        if !(options.alpha > 0.0 && options.alpha.is_finite()) {
            return refuse(format!("lora.alpha = {}; it must be more than 0", options.alpha));
        }
        let short = |module: &str| module.rsplit('.').next().unwrap_or(module).to_owned();
        let known: Vec<String> = Site::ALL.iter().flat_map(|s| s.modules()).map(|m| short(m)).collect();
        if let Some(target) = options.targets.iter().find(|target| !known.contains(target)) {
            return refuse(format!("lora.targets has {target:?}; there are {}", known.join(", ")));
        }
        if options.targets.is_empty() {
            return refuse(format!("lora.targets is empty; name some of {}", known.join(", ")));
        }
        let (shape, hidden, wide) = (attention_shape(config), config.hidden, config.intermediate);
        let mut len = 0;
        let mut lay = |size: usize| {
            let range = len..len + size;
            len = range.end.next_multiple_of(64);
            range
        };
        let layers = (0..config.layers).map(|layer| {
            let mut parts = Vec::new();
            for site in Site::ALL {
                let (inputs, widths) = match site {
                    Site::Qkv => (hidden, vec![shape.query(), shape.key(), shape.key()]),
                    Site::Output => (shape.query(), vec![hidden]),
                    Site::GateUp => (hidden, vec![wide, wide]),
                    Site::Down => (wide, vec![hidden]),
                };
                let mut column = 0;
                for (module, width) in site.modules().iter().zip(widths) {
                    let outputs = column..column + width;
                    column += width;
                    if options.targets.contains(&short(module)) {
                        let name = format!("base_model.model.model.layers.{layer}.{module}");
                        let (a, b) = (lay(options.rank * inputs), lay(width * options.rank));
                        parts.push(Part { site, name, outputs, inputs, a, b });
                    }
                }
            }
            parts
        });
        Ok(AdapterLayout { layers: layers.collect(), len })
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.layers.iter().flatten().map(|part| part.a.len() + part.b.len()).sum()
    }

    /// The parameters as groups for the optimiser: matrices, all of them.
    pub fn groups(&self) -> Vec<Group> {
        let group = |range: &Range<usize>| Group { start: range.start, len: range.len(), decay: true };
        self.layers.iter().flatten().flat_map(|part| [group(&part.a), group(&part.b)]).collect()
    }

    /// Names and shapes in PEFT's files, with their places.
    fn tensors(&self, rank: usize) -> impl Iterator<Item = (String, Vec<usize>, Range<usize>)> {
        self.layers.iter().flatten().flat_map(move |part| {
            [
                (format!("{}.lora_A.weight", part.name), vec![rank, part.inputs], part.a.clone()),
                (format!("{}.lora_B.weight", part.name), vec![part.outputs.len(), rank], part.b.clone()),
            ]
        })
    }
}

/// An adapter's weights.
pub struct Adapter {
    /// What it is.
    pub options: LoraOptions,
    /// What the model below is called.
    base: String,
    /// Where its parameters lie.
    pub layout: AdapterLayout,
    /// The parameters.
    pub master: Buffer,
    /// For every part of every block A and B, packed for `x · Aᵀ` and `t · Bᵀ`.
    packed: Vec<Vec<[Packed; 2]>>,
}

/// Low-rank rows on their way, kept between products.
#[derive(Default)]
pub struct Low {
    /// x Aᵀ, scaled.
    inner: Buffer,
    /// dy B, scaled.
    slope: Buffer,
}

impl Adapter {
    /// A new adapter, which changes nothing yet: A is drawn from `seed`, B is zero.
    ///
    /// # Errors
    /// As [`AdapterLayout::new`].
    pub fn new(
        compute: &Compute,
        config: &ModelConfig,
        options: LoraOptions,
        seed: u64,
        base: String,
    ) -> Result<Self, EngineError> {
        let layout = AdapterLayout::new(config, &options)?;
        let mut master = Buffer::zeroed(layout.len);
        for (stream, part) in layout.layers.iter().flatten().enumerate() {
            // Uniform with the variance of PEFT's default (He et al. 2015 with a = √5).
            let bound = 1.0 / (part.inputs as f64).sqrt();
            for (i, value) in master[part.a.clone()].iter_mut().enumerate() {
                *value = (bound * (2.0 * uniform(seed, stream as u64, i as u64) - 1.0)) as f32;
            }
        }
        let rank = options.rank;
        let packed = |part: &Part| {
            [(part.inputs, rank), (rank, part.outputs.len())]
                .map(|(depth, columns)| Packed::empty(compute.precision, depth, columns))
        };
        let packed = layout.layers.iter().map(|parts| parts.iter().map(packed).collect()).collect();
        let mut adapter = Adapter { options, base, layout, master, packed };
        adapter.refresh(compute);
        Ok(adapter)
    }

    /// Packs the matrices again, after they changed.
    pub fn refresh(&mut self, compute: &Compute) {
        let (rank, master) = (self.options.rank, &self.master);
        for (part, packed) in self.layout.layers.iter().flatten().zip(self.packed.iter_mut().flatten()) {
            let [a, b] = packed;
            a.refresh(compute, Matrix::new(&master[part.a.clone()], rank, part.inputs).transposed());
            b.refresh(compute, Matrix::new(&master[part.b.clone()], part.outputs.len(), rank).transposed());
        }
    }

    fn scale(&self) -> f32 {
        self.options.alpha / self.options.rank as f32
    }

    fn parts(&self, layer: usize, site: Site) -> impl Iterator<Item = (&Part, &[Packed; 2])> {
        self.layout.layers[layer].iter().zip(&self.packed[layer]).filter(move |(part, _)| part.site == site)
    }

    /// Adds the adapter's share to `out` (rows of `width` outputs of a linear map), given its input `x`.
    #[allow(clippy::too_many_arguments)]
    pub fn forward(
        &self,
        compute: &Compute,
        scratch: &mut Scratch,
        low: &mut Low,
        layer: usize,
        site: Site,
        x: &[f32],
        width: usize,
        out: &mut [f32],
    ) {
        for (part, packed) in self.parts(layer, site) {
            let inner = self.inner(compute, scratch, low, part, packed, x);
            let to = &mut out[part.outputs.start..];
            product(compute, scratch, inner, Right::Packed(&packed[1]), to, width, Mode::Add);
        }
    }

    /// (alpha / rank) x Aᵀ.
    fn inner<'a>(
        &self,
        compute: &Compute,
        scratch: &mut Scratch,
        low: &'a mut Low,
        part: &Part,
        packed: &[Packed; 2],
        x: &[f32],
    ) -> Matrix<'a> {
        let (rank, rows) = (self.options.rank, x.len() / part.inputs);
        let inner = low.inner.reserve(rows * rank);
        let x = Matrix::new(x, rows, part.inputs);
        product(compute, scratch, x, Right::Packed(&packed[0]), inner, rank, Mode::Set);
        scale_rows(compute, rank, self.scale(), inner);
        Matrix::new(inner, rows, rank)
    }

    /// (alpha / rank) dy B, for the part's columns of `dy`, rows of `width`.
    fn slope<'a>(
        &self,
        compute: &Compute,
        scratch: &mut Scratch,
        slope: &'a mut Buffer,
        part: &Part,
        dy: &[f32],
        width: usize,
    ) -> Matrix<'a> {
        let (rank, rows) = (self.options.rank, dy.len() / width);
        let slope = slope.reserve(rows * rank);
        let dy = Matrix::strided(&dy[part.outputs.start..], rows, part.outputs.len(), width);
        let b = Matrix::new(&self.master[part.b.clone()], part.outputs.len(), rank);
        product(compute, scratch, dy, Right::Plain(b), slope, rank, Mode::Set);
        scale_rows(compute, rank, self.scale(), slope);
        Matrix::new(slope, rows, rank)
    }

    /// Adds the gradients of A and B to `gradient`, or overwrites them, given a linear map's input and its output's gradient.
    #[allow(clippy::too_many_arguments)]
    pub fn add_gradient(
        &self,
        compute: &Compute,
        scratch: &mut Scratch,
        low: &mut Low,
        layer: usize,
        site: Site,
        x: &[f32],
        dy: &[f32],
        width: usize,
        gradient: &mut [f32],
        mode: Mode,
    ) {
        let rank = self.options.rank;
        for (part, packed) in self.parts(layer, site) {
            let rows = x.len() / part.inputs;
            let slope = self.slope(compute, scratch, &mut low.slope, part, dy, width).transposed();
            let right = Right::Plain(Matrix::new(x, rows, part.inputs));
            product(compute, scratch, slope, right, &mut gradient[part.a.clone()], part.inputs, mode);
            let inner = self.inner(compute, scratch, low, part, packed, x);
            let dy = Matrix::strided(&dy[part.outputs.start..], rows, part.outputs.len(), width);
            let to = &mut gradient[part.b.clone()];
            product(compute, scratch, dy.transposed(), Right::Plain(inner), to, rank, mode);
        }
    }

    /// Adds the adapter's share of a linear map's input gradient to `dx`.
    #[allow(clippy::too_many_arguments)]
    pub fn add_input_gradient(
        &self,
        compute: &Compute,
        scratch: &mut Scratch,
        low: &mut Low,
        layer: usize,
        site: Site,
        dy: &[f32],
        width: usize,
        dx: &mut [f32],
    ) {
        for (part, _) in self.parts(layer, site) {
            let slope = self.slope(compute, scratch, &mut low.slope, part, dy, width);
            let a = Right::Plain(Matrix::new(&self.master[part.a.clone()], self.options.rank, part.inputs));
            product(compute, scratch, slope, a, dx, part.inputs, Mode::Add);
        }
    }

    /// Adds what an adapter of this layout does, whose parameters are `array`, to a copy of the base's weights, which lie as
    /// `place` says: from a parameter's name to its range.
    pub fn merge_into(
        &self,
        place: impl Fn(&str) -> Option<Range<usize>>,
        array: &[f64],
        weights: &mut [f64],
    ) {
        let (rank, scale) = (self.options.rank, f64::from(self.scale()));
        for part in self.layout.layers.iter().flatten() {
            let name = part.name.trim_start_matches("base_model.model.");
            let Some(range) = place(&format!("{name}.weight")) else { continue };
            let (a, b) = (&array[part.a.clone()], &array[part.b.clone()]);
            for (row, b) in weights[range].chunks_exact_mut(part.inputs).zip(b.chunks_exact(rank)) {
                for (r, b) in b.iter().enumerate() {
                    for (w, a) in row.iter_mut().zip(&a[r * part.inputs..]) {
                        *w += scale * b * a;
                    }
                }
            }
        }
    }

    /// Writes an array of this layout (weights, or a moment of the optimiser) under PEFT's names.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, path: &Path, array: &[f32]) -> Result<(), ModelError> {
        write_safetensors(path, self.layout.tensors(self.options.rank).map(|(n, s, r)| (n, s, &array[r])))
    }

    /// Reads such an array.
    ///
    /// # Errors
    /// When a tensor is missing or has another shape.
    pub fn read(&self, path: &Path, array: &mut [f32]) -> Result<(), ModelError> {
        let file = SafetensorsFile::open(path)?;
        for (name, shape, range) in self.layout.tensors(self.options.rank) {
            file.read_shaped(&name, &shape, &mut array[range])?;
        }
        Ok(())
    }

    /// Writes weights and configuration in PEFT's layout.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn save(&self, folder: &Path) -> Result<(), ModelError> {
        let LoraOptions { rank, alpha, targets, .. } = &self.options;
        let config = json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "target_modules": targets,
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
        });
        write_json(&folder.join(CONFIG), &config)?;
        self.write(&folder.join(WEIGHTS), &self.master)
    }

    /// What the adapter in a folder in PEFT's layout is, and what its base is called.
    ///
    /// # Errors
    /// When the folder holds no adapter, or one that this engine does not know.
    pub fn describe(folder: &Path) -> Result<(LoraOptions, String), ModelError> {
        let path = folder.join(CONFIG);
        let damaged = |what: String| ModelError::Damaged { path: path.clone(), what };
        let text = std::fs::read_to_string(&path).map_err(|error| damaged(error.to_string()))?;
        let config: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| damaged(error.to_string()))?;
        let refuse = |what: &str| Err(damaged(format!("{what}; only plain LoRA adapters can be used")));
        if config["peft_type"] != "LORA" {
            return refuse(&format!("peft_type is {}", config["peft_type"]));
        }
        for (key, plain) in
            [("use_rslora", json!(false)), ("use_dora", json!(false)), ("bias", json!("none"))]
        {
            if !config[key].is_null() && config[key] != plain {
                return refuse(&format!("{key} is {}", config[key]));
            }
        }
        let targets = config["target_modules"]
            .as_array()
            .map(|targets| targets.iter().filter_map(|target| target.as_str()).map(str::to_owned).collect());
        let (Some(rank), Some(alpha), Some(targets), Some(base)) = (
            config["r"].as_u64(),
            config["lora_alpha"].as_f64(),
            targets,
            config["base_model_name_or_path"].as_str(),
        ) else {
            return refuse("r, lora_alpha, a list of target_modules or base_model_name_or_path is missing");
        };
        Ok((LoraOptions { rank: rank as usize, alpha: alpha as f32, targets }, base.to_owned()))
    }

    /// Replaces the weights by those of a folder in PEFT's layout.
    ///
    /// # Errors
    /// When a file is missing, or does not fit.
    pub fn load(&mut self, compute: &Compute, folder: &Path) -> Result<(), ModelError> {
        let mut master = Buffer::zeroed(self.layout.len);
        self.read(&folder.join(WEIGHTS), &mut master)?;
        self.master = master;
        self.refresh(compute);
        Ok(())
    }
}

fn scale_rows(compute: &Compute, width: usize, scale: f32, rows: &mut [f32]) {
    for_rows(compute, rows.len() / width, width, rows, |_, row| softmax::multiply(compute.isa, row, scale));
}
