"""Command-line flags for SGLang on CPUs, and a stub of the CUDA driver for machines without a GPU."""

import subprocess
from pathlib import Path

# Functions of the CUDA driver to which SGLang's kernels are linked. On a machine without a GPU, each returns "no
# device".
DRIVER = (
    "Init PointerGetAttribute DeviceGet DeviceGetCount GetProcAddress GetProcAddress_v2 DriverGetVersion GetErrorString "
    "GetErrorName CtxGetCurrent LaunchKernel ModuleLoadData ModuleGetFunction FuncSetAttribute TensorMapEncodeTiled "
    "MemAddressReserve MemCreate MemMap MemSetAccess MemUnmap MemRelease MemAddressFree CtxGetDevice"
)
FLAGS = [
    *("--device", "cpu"),
    *("--dtype", "float32"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--mem-fraction-static", "0.3"),
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
    "--skip-server-warmup",
]


def variables(directory: Path) -> dict[str, str]:
    """Returns a server's environment variables. Builds the driver stub in this directory (with gcc)."""
    directory.mkdir(exist_ok=True)
    library = directory / "libcuda.so.1"
    if not library.exists():
        source = directory / "cuda.c"
        source.write_text("".join(f"int cu{name}(){{return 100;}}\n" for name in DRIVER.split()))
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": str(directory)}
