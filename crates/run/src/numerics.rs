//! Records the properties, in addition to the recipe, on which the exact numbers of a run depend.

use std::path::Path;

use levade_engine::Fingerprint;
use levade_model::write_json;

use crate::host::Host;

/// Name of the file in the run directory that contains the numerical fingerprint of the engines.
const FILE: &str = "engine.json";

/// Notifies the user if the run in `dir` was computed with a numerical fingerprint that differs
/// from `now`. The results then differ in their bits.
pub fn compare(dir: &Path, now: &Fingerprint, host: &Host) {
    let recorded = std::fs::read(dir.join(FILE)).ok();
    let before = recorded.and_then(|bytes| serde_json::from_slice::<Fingerprint>(&bytes).ok());
    if let Some(note) = before.and_then(|before| describe_difference(&before, now)) {
        host.note(note);
    }
}

/// Writes the numerical fingerprint into the run directory.
pub fn record(dir: &Path, now: &Fingerprint) -> anyhow::Result<()> {
    Ok(write_json(&dir.join(FILE), &serde_json::to_value(now)?)?)
}

fn describe_difference(before: &Fingerprint, now: &Fingerprint) -> Option<String> {
    let bits = |f: &Fingerprint| (f.kernels, f.precision, f.order);
    if bits(before) == bits(now) {
        return None;
    }
    let name = |f: &Fingerprint| {
        let isa = serde_json::to_value(f.isa).unwrap_or_default();
        format!(
            "kernels {} in {} with {} sums ({})",
            f.kernels,
            f.precision,
            f.order,
            isa.as_str().unwrap_or("?")
        )
    };
    Some(format!(
        "this run was computed by {} and continues with {}; from now on, its results can differ \
         in their last bits",
        name(before),
        name(now)
    ))
}

#[cfg(test)]
mod tests {
    use levade_engine::SumOrder;
    use levade_engine::{Isa, Precision};

    use super::*;

    #[test]
    fn difference_reports_only_bit_changes() {
        let before = Fingerprint {
            kernels: 3,
            isa: Isa::Avx512Bf16,
            precision: Precision::Bf16,
            order: SumOrder::Chained,
        };
        let elsewhere = Fingerprint { isa: Isa::Avx2, ..before.clone() };
        assert_eq!(describe_difference(&before, &elsewhere), None);
        let tiled = Fingerprint { isa: Isa::Amx, order: SumOrder::Tiled, ..before.clone() };
        let note = describe_difference(&before, &tiled).unwrap_or_default();
        assert!(note.contains("bf16 with chained sums (avx512_bf16)"), "{note}");
        assert!(note.contains("bf16 with tiled sums (amx)"), "{note}");
    }
}
