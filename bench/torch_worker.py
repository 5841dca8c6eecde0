"""Runs PyTorch's side of the comparisons: reads one request per line, executes it, and prints one line of JSON with
the seconds.

README.md describes the requests. The program stays in memory, so that both sides can alternate in the same run. It
uses eager mode, scaled-dot-product attention and PyTorch's fused AdamW: the fastest options of plain PyTorch and
transformers. In bf16, training runs under autocast with f32 weights, and completions are sampled with bf16 weights.
"""

import copy
import os
import time
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is first imported

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from worker import serve

logging.set_verbosity_error()
logging.disable_progress_bar()


class Worker:
    """Holds the model between requests."""

    def load(self, model: str, threads: int, precision: str) -> dict:
        torch.set_num_threads(threads)
        self.half = None
        self.bf16 = precision == "bf16"
        path = Path(model)
        where = {"pretrained_model_name_or_path": model}
        if path.suffix == ".gguf":
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        self.model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation="sdpa")
        # Completions have the requested length: no token ends them early.
        self.model.generation_config.eos_token_id = None
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True
        )
        return {"name": f"torch {torch.__version__}, {'autocast to ' if self.bf16 else ''}{precision}"}

    def train(self, tokens: list[int]) -> dict:
        ids = torch.tensor([tokens])
        self.model.train()
        start = time.perf_counter()
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:])
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimiser.step()
        end = time.perf_counter()
        parts = {"forward and backward": backward - start, "optimiser": end - backward, "forward": forward - start}
        return {"seconds": end - start, "loss": loss.item(), "parts": parts}

    def forest(self, paths: list[list[int]], first: int, rows: int) -> dict:
        """Runs forward and backward over sequences of one length, each separately. Targets are the tokens from `first`
        on.
        """
        self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        targets = sum(len(path) - first for path in paths)
        size = max(1, rows // len(paths[0]))
        total = 0.0
        start = time.perf_counter()
        for at in range(0, len(paths), size):
            ids = torch.tensor(paths[at : at + size])
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                states = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, first - 1 : -1]
                logits = self.model.lm_head(states).float().flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, ids[:, first:].flatten(), reduction="sum") / targets
            loss.backward()
            total += loss.item()
        return {"seconds": time.perf_counter() - start, "loss": total}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict:
        ids = torch.tensor(prompts)
        if self.bf16 and self.half is None:
            self.half = copy.deepcopy(self.model).to(torch.bfloat16)
        model = (self.half if self.bf16 else self.model).eval()
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": out[:, ids.shape[1] :].tolist()}


if __name__ == "__main__":
    serve(Worker())
