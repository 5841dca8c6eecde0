"""Runs TRL's side of `learning.py`: its own GRPO including sampling, on numbered prompts.

Prints one line of JSON per step, and saves the final model. Usage: trl_learner.py MODEL JOB.json, where the job is
`{"threads", "seed", "steps", "groups", "group_size", "max_tokens", "temperature", "learning_rate", "beta2", "tasks":
[{"question", "answer"}], "save": FOLDER}`.
"""

import json
import os
import random
import re
import sys
import time
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from transformers.utils import logging
from trl import GRPOTrainer

from trl_setup import announce, settings

logging.set_verbosity_error()


class Report(TrainerCallback):
    """Prints the mean reward and the duration of a step."""

    def __init__(self) -> None:
        self.start = 0.0
        self.rewards: list[float] = []

    def on_step_begin(self, *_args, **_kwargs) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, _args, state, *_rest, **_kwargs) -> None:
        line = {
            "step": state.global_step,
            "reward": sum(self.rewards) / len(self.rewards),
            "seconds": time.perf_counter() - self.start,
        }
        self.rewards.clear()
        print(json.dumps(line), flush=True)


def number_in(text: str) -> float | None:
    found = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(found[-1]) if found else None


def main() -> None:
    directory, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(job["threads"])
    set_seed(job["seed"])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    tasks, stop = job["tasks"], tokenizer.eos_token_id
    for task in tasks:
        messages = [{"role": "user", "content": task["question"]}]
        task["ids"] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    random.Random(job["seed"]).shuffle(tasks)
    report = Report()

    def rollout(prompts: list, trainer) -> dict:
        policy = trainer.model
        policy.eval()
        prompt_ids = [tasks[int(prompt)]["ids"] for prompt in prompts]
        longest = max(map(len, prompt_ids))
        ids = torch.tensor([[stop] * (longest - len(p)) + p for p in prompt_ids])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompt_ids])
        with torch.inference_mode():
            out = policy.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=job["temperature"],
                top_p=1.0,
                top_k=0,
                max_new_tokens=job["max_tokens"],
                eos_token_id=stop,
                pad_token_id=stop,
            )
        policy.train()
        completions = []
        for reply in out[:, longest:].tolist():
            completions.append(reply[: reply.index(stop) + 1] if stop in reply else reply)
        # A truncated completion is not an answer.
        finished = [stop in reply for reply in completions]
        texts = [tokenizer.decode(reply, skip_special_tokens=True) for reply in completions]
        answers = [tasks[int(prompt)]["answer"] for prompt in prompts]
        report.rewards += [
            float(done and number_in(text) == answer)
            for done, text, answer in zip(finished, texts, answers, strict=True)
        ]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    config = settings(
        output_dir=str(Path(sys.argv[2]).parent / "trl"),
        bf16=False,
        seed=job["seed"],
        per_device_train_batch_size=job["groups"] * job["group_size"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        max_steps=job["steps"],
        temperature=job["temperature"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=job["beta2"],
        max_grad_norm=1.0,
        loss_type="dapo",
        scale_rewards="group",
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: report.rewards[-len(completions) :],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(tasks))]}),
        rollout_func=rollout,
        callbacks=[report],
    )
    announce("f32")
    trainer.train()
    trainer.model.save_pretrained(job["save"])
    tokenizer.save_pretrained(job["save"])


if __name__ == "__main__":
    main()
