"""Runs TRL's side of `group.py`: a GRPO trainer that waits for a line before each step, and prints the step's seconds.

Usage: trl_worker.py MODEL JOB.json, where the job is `{"threads", "precision", "prompt": [ids], "rollouts", "turns",
"new", "given", "steps", "side_by_side"}`.

The rollouts use TRL's `rollout_func`: transformers' generate with a KV cache that persists between turns, and the
requested number of new tokens per turn. In bf16 both parts run under autocast, which keeps its rounded weights as long
as it is active: once for all turns. Rewards are random, so that there is always something to learn.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOTrainer

from trl_setup import announce, settings

logging.set_verbosity_error()


class Clock(TrainerCallback):
    """Waits before the rollouts of a step, and reports after its update."""

    def __init__(self) -> None:
        self.start = self.sampled = 0.0

    def begin(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.start = time.perf_counter()

    def on_step_end(self, *_args, **_kwargs) -> None:
        end = time.perf_counter()
        answer = {"seconds": end - self.start, "sampling": self.sampled - self.start, "training": end - self.sampled}
        print(json.dumps(answer), flush=True)


def main() -> None:
    directory, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    clock, rng = Clock(), random.Random(0)
    new, given, bf16 = job["new"], job["given"], job["precision"] == "bf16"

    def rollout(_prompts: list, trainer) -> dict:
        clock.begin()
        policy = trainer.model
        policy.eval()
        ids = torch.tensor([job["prompt"]] * job["rollouts"])
        mask: list[int] = []
        cache = None
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            for turn in range(job["turns"]):
                out = policy.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    past_key_values=cache,
                    do_sample=True,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    min_new_tokens=new,
                    max_new_tokens=new,
                    pad_token_id=0,
                    return_dict_in_generate=True,
                )
                ids, cache = out.sequences, out.past_key_values
                mask += [1] * new
                if turn + 1 < job["turns"]:
                    answers = [[rng.randrange(len(tokenizer)) for _ in range(given)] for _ in range(len(ids))]
                    ids = torch.cat([ids, torch.tensor(answers)], dim=1)
                    mask += [0] * given
        policy.train()
        completions = ids[:, len(job["prompt"]) :].tolist()
        clock.sampled = time.perf_counter()
        return {
            "prompt_ids": [job["prompt"]] * job["rollouts"],
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": [mask] * job["rollouts"],
        }

    config = settings(
        bf16=bf16,
        output_dir=str(Path(sys.argv[2]).parent / "trl"),
        per_device_train_batch_size=job["side_by_side"],
        gradient_accumulation_steps=job["rollouts"] // job["side_by_side"],
        num_generations=job["rollouts"],
        max_completion_length=job["turns"] * (new + given),
        max_steps=job["steps"],
        learning_rate=1e-6,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [rng.random() for _ in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * job["steps"]}),
        rollout_func=rollout,
        callbacks=[clock],
    )
    announce("autocast to bf16" if bf16 else "f32")
    trainer.train()


if __name__ == "__main__":
    main()
