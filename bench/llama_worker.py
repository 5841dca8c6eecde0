"""Runs llama.cpp's side of `decode.py` through llama-cpp-python. Executes the requests of README.md, one completion at
a time.

The model is a GGUF file in the precision of the comparison.
"""

import time

import llama_cpp
import numpy as np

from worker import serve


class Worker:
    """Holds the model between requests."""

    def load(self, model: str, threads: int, precision: str) -> dict:
        self.llama = llama_cpp.Llama(
            model, n_ctx=2048, n_batch=512, n_threads=threads, n_threads_batch=threads, n_gpu_layers=0, verbose=False
        )
        return {"name": f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), {precision}"}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict:
        replies = []
        start = time.perf_counter()
        for prompt in prompts:
            self.llama.reset()
            reply: list[int] = []
            ids = prompt
            while len(reply) < new_tokens:
                self.llama.eval(ids)
                logits = llama_cpp.llama_get_logits_ith(self.llama.ctx, -1)
                ids = [int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.llama.n_vocab(),))))]
                reply += ids
            replies.append(reply)
        return {"seconds": time.perf_counter() - start, "tokens": replies}


if __name__ == "__main__":
    serve(Worker())
