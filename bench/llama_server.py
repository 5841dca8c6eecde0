"""Runs llama.cpp's server through `xllamacpp`, for `serve.py`: continuous batching over a GGUF file in its own
precision.

    python bench/llama_server.py MODEL.gguf --threads 2 --parallel 64 --context 512
"""

import argparse
import signal

import xllamacpp


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--parallel", type=int, default=64, help="maximum number of concurrent completions")
    p.add_argument("--context", type=int, default=512, help="context per completion, in tokens")
    a = p.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = a.model
    params.n_ctx = a.context * a.parallel
    params.n_parallel = a.parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = a.threads
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    print(xllamacpp.get_system_info(), flush=True)
    server = xllamacpp.Server(params)
    address = server.listening_address
    print(f"serving at {address if '://' in address else f'http://{address}'}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
