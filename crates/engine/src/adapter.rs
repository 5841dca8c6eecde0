//! Low-rank adapters (Hu et al. 2021): a linear map W x becomes W x + (alpha / rank) B A x, with W frozen.
//!
//! Several adapters live over one base. Each has its own weights, optimiser, versions and prefixes in the cache; the base's
//! weights are in memory once. Files are in PEFT's layout.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use dressage_model::{ModelError, Parameter, SafetensorsFile, write_json};
use dressage_policy::{LoraOptions, uniform};
use serde_json::json;

use crate::buffer::Buffer;
use crate::layout::{Layout, Map, Site};
use crate::ops::{for_rows, softmax};
use crate::parameters::Parameters;
use crate::precision::{Precision, words};
use crate::product::{Matrix, Mode, NR, Packed, Right, Scratch, product};
use crate::tensors::Tensors;
use crate::transformer::MapScratch;
use crate::{Compute, EngineError};

/// Names of an adapter's files.
const WEIGHTS: &str = "adapter_model.safetensors";
/// Its configuration; a folder that has it holds an adapter.
pub const CONFIG: &str = "adapter_config.json";

/// What an adapter may ask for besides, in PEFT's words: all of it changes what the adapter computes, and is refused unless it is
/// empty or says no.
const BESIDES: [&str; 13] = [
    "use_rslora",
    "use_dora",
    "use_qalora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "layers_to_transform",
    "exclude_modules",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
];

/// The way out for adapters that are more than that.
const MERGE: &str = "only plain LoRA adapters can be used: merge it into its base with PEFT (merge_and_unload), and take the result";

/// One adapted projection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Where its matrix lies among the weights of the base.
    base: Range<usize>,
    /// Its columns among the outputs of the linear map.
    outputs: Range<usize>,
    /// Outputs of the linear map.
    width: usize,
    inputs: usize,
    /// A, rank × inputs.
    a: Range<usize>,
    /// B, outputs × rank.
    b: Range<usize>,
}

/// Where an adapter's parameters lie in one flat array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterLayout {
    /// The adapted projections of every linear map, in the order of [`Map::all`].
    maps: Vec<Vec<Part>>,
    /// All parameters, under PEFT's names.
    pub tensors: Tensors,
}

impl AdapterLayout {
    /// Words of the packed matrices.
    pub fn packed_words(&self, precision: Precision, rank: usize) -> usize {
        let packed = |depth, columns: usize| words(precision, depth) * columns.next_multiple_of(NR);
        let parts = self.maps.iter().flatten();
        parts.map(|part| packed(part.inputs, rank) + packed(rank, part.outputs.len())).sum()
    }
}

impl Part {
    /// Its columns of rows of the linear map's outputs.
    fn columns<'a>(&self, rows: &'a [f32]) -> Matrix<'a> {
        Matrix::strided(&rows[self.outputs.start..], rows.len() / self.width, self.outputs.len(), self.width)
    }
}

impl AdapterLayout {
    /// The layout of an adapter with these options, over a base of layout `base`.
    ///
    /// # Errors
    /// When an option is out of range, or a target does not exist.
    pub fn new(base: &Layout, options: &LoraOptions) -> Result<Self, EngineError> {
        let refuse = |what: String| Err(EngineError::Options(what));
        let (rank, hidden) = (options.rank, base.norm.len());
        if rank == 0 || rank > hidden {
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
        let mut tensors = Tensors::default();
        let mut part = |map: Map, module: &str| {
            let name = format!("model.layers.{}.{module}", map.layer);
            let place = base.tensors.find(&format!("{name}.weight"))?;
            let (at, inputs) = (base.linear(map), place.parameter.shape[1]);
            let [start, end] = [place.range.start, place.range.end].map(|i| (i - at.weight.start) / inputs);
            let mut lay = |matrix: &str, shape: [usize; 2]| {
                let name = format!("base_model.model.{name}.{matrix}.weight");
                tensors.lay([Parameter { name, shape: shape.to_vec() }])
            };
            let (a, b) = (lay("lora_A", [rank, inputs]), lay("lora_B", [end - start, rank]));
            Some(Part { base: place.range.clone(), outputs: start..end, width: at.outputs, inputs, a, b })
        };
        let maps = Map::all(base.layers.len()).map(|map| {
            let wanted = map.site.modules().iter().filter(|module| options.targets.contains(&short(module)));
            wanted.filter_map(|module| part(map, module)).collect()
        });
        Ok(AdapterLayout { maps: maps.collect(), tensors })
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
    /// A and B of every part, in the order of the layout, packed for `x · Aᵀ` and `t · Bᵀ`.
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
        layout: &Layout,
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
        let rank = options.rank;
        let packed = |part: &Part| {
            [(part.inputs, rank), (rank, part.outputs.len())]
                .map(|(depth, columns)| Packed::empty(compute.precision, depth, columns))
        };
        let packed = layout.maps.iter().map(|parts| parts.iter().map(packed).collect()).collect();
        let mut adapter = Adapter { options, base, layout, master, packed };
        adapter.parameters().pack(compute);
        Ok(adapter)
    }

    /// The weights and what is packed from them.
    pub fn parameters(&mut self) -> Parameters<'_> {
        let Adapter { layout, master, packed, .. } = self;
        let ranges = layout.maps.iter().flatten().flat_map(|part| [part.a.clone(), part.b.clone()]);
        let packed = ranges.zip(packed.iter_mut().flatten().flatten()).collect();
        Parameters { tensors: &layout.tensors, master, packed }
    }

    fn scale(&self) -> f32 {
        self.options.alpha / self.options.rank as f32
    }

    fn parts(&self, map: Map) -> impl Iterator<Item = (&Part, &[Packed; 2])> {
        let index = map.index();
        self.layout.maps[index].iter().zip(&self.packed[index])
    }

    /// Adds the adapter's share to the output of a linear map, given its input `x`.
    pub fn forward(&self, compute: &Compute, scratch: &mut MapScratch, map: Map, x: &[f32], out: &mut [f32]) {
        let MapScratch { product: scratch, low } = scratch;
        for (part, packed) in self.parts(map) {
            let inner = self.inner(compute, scratch, &mut low.inner, part, packed, x);
            let to = &mut out[part.outputs.start..];
            product(compute, scratch, inner, Right::Packed(&packed[1]), to, part.width, Mode::Add);
        }
    }

    /// (alpha / rank) x Aᵀ.
    fn inner<'a>(
        &self,
        compute: &Compute,
        scratch: &mut Scratch,
        inner: &'a mut Buffer,
        part: &Part,
        packed: &[Packed; 2],
        x: &[f32],
    ) -> Matrix<'a> {
        let (rank, rows) = (self.options.rank, x.len() / part.inputs);
        let inner = inner.reserve(rows * rank);
        let x = Matrix::new(x, rows, part.inputs);
        product(compute, scratch, x, Right::Packed(&packed[0]), inner, rank, Mode::Set);
        scale_rows(compute, rank, self.scale(), inner);
        Matrix::new(inner, rows, rank)
    }

    /// (alpha / rank) dy B, for the part's columns of `dy`.
    fn slope<'a>(
        &self,
        compute: &Compute,
        scratch: &mut Scratch,
        slope: &'a mut Buffer,
        part: &Part,
        dy: &[f32],
    ) -> Matrix<'a> {
        let (rank, rows) = (self.options.rank, dy.len() / part.width);
        let slope = slope.reserve(rows * rank);
        let dy = part.columns(dy);
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
        scratch: &mut MapScratch,
        map: Map,
        x: &[f32],
        dy: &[f32],
        gradient: &mut [f32],
        mode: Mode,
    ) {
        let rank = self.options.rank;
        let MapScratch { product: scratch, low } = scratch;
        for (part, packed) in self.parts(map) {
            let slope = self.slope(compute, scratch, &mut low.slope, part, dy).transposed();
            let right = Right::Plain(Matrix::new(x, x.len() / part.inputs, part.inputs));
            product(compute, scratch, slope, right, &mut gradient[part.a.clone()], part.inputs, mode);
            let inner = self.inner(compute, scratch, &mut low.inner, part, packed, x);
            let to = &mut gradient[part.b.clone()];
            product(compute, scratch, part.columns(dy).transposed(), Right::Plain(inner), to, rank, mode);
        }
    }

    /// Adds the adapter's share of a linear map's input gradient to `dx`.
    pub fn add_input_gradient(
        &self,
        compute: &Compute,
        scratch: &mut MapScratch,
        map: Map,
        dy: &[f32],
        dx: &mut [f32],
    ) {
        let MapScratch { product: scratch, low } = scratch;
        for (part, _) in self.parts(map) {
            let slope = self.slope(compute, scratch, &mut low.slope, part, dy);
            let a = Right::Plain(Matrix::new(&self.master[part.a.clone()], self.options.rank, part.inputs));
            product(compute, scratch, slope, a, dx, part.inputs, Mode::Add);
        }
    }

    /// Whether it changes the matrix that lies at `place` among the base's weights.
    pub fn adapts(&self, place: &Range<usize>) -> bool {
        self.layout.maps.iter().flatten().any(|part| part.base == *place)
    }

    /// Adds what an adapter of this layout does, whose parameters are `array`, to a copy of the matrix that lies at `place` among the
    /// base's weights.
    pub fn merge_into(&self, array: &[f64], place: &Range<usize>, matrix: &mut [f64]) {
        let (rank, scale) = (self.options.rank, f64::from(self.scale()));
        for part in self.layout.maps.iter().flatten().filter(|part| part.base == *place) {
            let (a, b) = (&array[part.a.clone()], &array[part.b.clone()]);
            for (row, b) in matrix.chunks_exact_mut(part.inputs).zip(b.chunks_exact(rank)) {
                for (r, b) in b.iter().enumerate() {
                    for (w, a) in row.iter_mut().zip(&a[r * part.inputs..]) {
                        *w += scale * b * a;
                    }
                }
            }
        }
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
        self.layout.tensors.write(&folder.join(WEIGHTS), &self.master)
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
        let unsupported =
            |what| Err(ModelError::Unsupported { path: path.clone(), what, way_out: MERGE.into() });
        if config["peft_type"] != "LORA" {
            return unsupported(format!("peft_type is {}", config["peft_type"]));
        }
        if !matches!(config["bias"].as_str(), None | Some("none")) {
            return unsupported(format!("bias is {}", config["bias"]));
        }
        let says_no = |value: &serde_json::Value| match value {
            serde_json::Value::Array(list) => list.is_empty(),
            serde_json::Value::Object(entries) => entries.is_empty(),
            other => other.is_null() || *other == json!(false),
        };
        if let Some(key) = BESIDES.iter().find(|key| !says_no(&config[**key])) {
            return unsupported(format!("{key} is {}", config[*key]));
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
            return Err(damaged(
                "r, lora_alpha, a list of target_modules or base_model_name_or_path is missing".into(),
            ));
        };
        Ok((LoraOptions { rank: rank as usize, alpha: alpha as f32, targets }, base.to_owned()))
    }

    /// Opens the weights of a folder in PEFT's layout, which must be those of an adapter like this one.
    ///
    /// # Errors
    /// When a file is missing or damaged, or when it is another adapter.
    pub fn open(&self, folder: &Path) -> Result<SafetensorsFile, ModelError> {
        let (found, _) = Self::describe(folder)?;
        let words = |options: &LoraOptions| {
            let targets: BTreeSet<&str> = options.targets.iter().map(String::as_str).collect();
            format!("r = {}, lora_alpha = {}, target_modules = {targets:?}", options.rank, options.alpha)
        };
        if words(&found) != words(&self.options) {
            return Err(ModelError::Unsupported {
                path: folder.join(CONFIG),
                what: format!("it has {}; the policy has {}", words(&found), words(&self.options)),
                way_out: "load it into a policy that was made with its options".into(),
            });
        }
        self.layout.tensors.open(&folder.join(WEIGHTS)).map_err(|error| match error {
            ModelError::UnexpectedTensor { path, tensor, .. } => ModelError::Unsupported {
                path,
                what: format!("tensor {tensor} is no part of what {CONFIG} says"),
                way_out: MERGE.into(),
            },
            other => other,
        })
    }

    /// Replaces the weights by those of a file that [`Adapter::open`] has opened.
    ///
    /// # Errors
    /// When the file was opened for another adapter.
    pub fn load(&mut self, compute: &Compute, file: &SafetensorsFile) -> Result<(), ModelError> {
        let loaded = self.layout.tensors.read(file, &mut self.master);
        self.parameters().pack(compute);
        loaded
    }
}

fn scale_rows(compute: &Compute, width: usize, scale: f32, rows: &mut [f32]) {
    for_rows(compute, rows.len() / width, width, rows, |_, row| softmax::multiply(compute.isa, row, scale));
}
