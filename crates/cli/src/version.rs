//! The text of `levade --version`: the release, the commit, and the processor that the engine computes for.

use std::sync::LazyLock;

use levade_engine::Isa;

static LONG: LazyLock<String> = LazyLock::new(describe);

/// Returns the version with the commit, the platform and the vector instructions, such as
/// `0.1.0 (commit 1a2b3c4d, linux x86_64, avx2)`.
pub fn long() -> &'static str {
    &LONG
}

fn describe() -> String {
    let commit = match env!("LEVADE_COMMIT") {
        "" => "unknown commit".to_owned(),
        commit => format!("commit {commit}"),
    };
    let isa = match Isa::detect() {
        Isa::Amx => "amx",
        Isa::Avx512Bf16 => "avx512 with bf16",
        Isa::Avx512 => "avx512",
        Isa::Avx2 => "avx2",
        Isa::Portable => "portable vector code",
    };
    let (system, processor) = (std::env::consts::OS, std::env::consts::ARCH);
    format!("{} ({commit}, {system} {processor}, {isa})", env!("CARGO_PKG_VERSION"))
}
