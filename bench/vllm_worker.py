"""Runs vLLM's side of `decode.py` on the CPU. Executes the requests of README.md."""

import os
import time

# Uses one process, so that its processor time can be distinguished from that of other programs.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm

from worker import serve


class Worker:
    """Holds the model between requests."""

    def load(self, model: str, threads: int, precision: str) -> dict:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        dtype = {"f32": "float32", "bf16": "bfloat16"}[precision]
        self.llm = vllm.LLM(model, dtype=dtype, max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False)
        return {"name": f"vLLM {vllm.__version__}, {precision}"}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        out = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": [list(reply.outputs[0].token_ids) for reply in out]}


if __name__ == "__main__":
    serve(Worker())
