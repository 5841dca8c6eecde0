//! The embedded engine: kernels, transformer, sampling and training on this machine.
