"""Compares the gradient of a GRPO step with TRL's, on the same attempts of several turns.

Reads a step from a run's store: the attempts with tool results, and the plan with the trainer's advantages and
weights. TRL gets the same tokens, which of them were sampled, and the rewards, through its `rollout_func`. It computes
advantages, masks and averages on its own. Checks that the gradients agree to 1e-4 for every tensor, as ||a − b|| /
||b||.

`--model` contains the weights that sampled the step: for the first step of a run without earlier phases, the model in
the recipe. The recipe's averaging corresponds to TRL's `--loss-type`: token_mean is "dapo", rollout_mean is "grpo".
Advantages must not be divided by the deviation, to which TRL adds 1e-4 and Levade 1e-6.

Not checked: sampling, the optimizer, learning curves (bench/learning.py).
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from common import begin, parser, relative, scratch, tensors
from record import Step


class GradientCapture(TrainerCallback):
    """Stores the gradient before the optimizer uses it."""

    def __init__(self) -> None:
        self.gradient: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *_args, model=None, **_kwargs) -> None:
        self.gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def trl_gradient(step: Step, directory: Path, loss_type: str, clip: tuple[float, float], scratch_folder: Path) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None
    groups = sorted({group for group, _ in step.attempts})
    size = len(step.attempts) // len(groups)
    rewards: list[float] = []
    temperatures = {t for _, sampled, _ in step.attempts.values() for _, _, t in sampled}
    (temperature,) = temperatures

    def rollout(prompts: list, _trainer) -> dict:
        seen = dict.fromkeys(groups, 0)
        out: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        rewards.clear()
        for prompt in prompts:
            group = int(prompt)
            tokens, sampled, reward = step.attempts[group, seen[group]]
            seen[group] += 1
            start, end = sampled[0][0], sampled[-1][0] + 1
            of_model = {index for index, _, _ in sampled}
            out["prompt_ids"].append(tokens[:start])
            out["completion_ids"].append(tokens[start:end])
            out["logprobs"].append([0.0] * (end - start))
            out["env_mask"].append([int(index in of_model) for index in range(start, end)])
            rewards.append(reward)
        return out

    keep = GradientCapture()
    config = GRPOConfig(
        output_dir=str(scratch_folder / "trl"),
        per_device_train_batch_size=len(step.attempts),
        num_generations=size,
        max_completion_length=4096,
        max_steps=1,
        learning_rate=0.0,
        temperature=temperature,
        beta=0.0,
        epsilon=clip[0],
        epsilon_high=clip[1],
        loss_type=loss_type,
        scale_rewards="none",
        max_grad_norm=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: list(rewards),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(group) for group in groups]}),
        rollout_func=rollout,
        callbacks=[keep],
    )
    trainer.train()
    return keep.gradient


def main() -> None:
    p = parser(__doc__)
    p.add_argument(
        "--run", type=Path, required=True, help="directory of a run whose last phase is reinforcement learning"
    )
    p.add_argument("--step", type=int, default=0, help="step of the last phase")
    p.add_argument("--loss-type", default="dapo", help="TRL's loss type for the recipe's averaging")
    p.add_argument(
        "--clip", type=float, nargs=2, default=(0.2, 0.2), help="clip bounds below and above 1, as in the recipe"
    )
    arguments = p.parse_args()
    if arguments.model is None:
        sys.exit("--model is needed: the weights that drew the step")
    levade, report = begin(arguments)
    step = Step(arguments.run, arguments.step)
    batch = step.batch()
    low, high = arguments.clip
    loss = {"policy": {"clip": {"low": low, "high": high, "dual": None}}, "kl": None}
    with scratch() as directory:
        out = Path(directory) / "out"
        result = levade.run("gradients", arguments.model, out, batch=batch, loss=loss)
        ours = tensors(out)
        theirs = trl_gradient(step, arguments.model, arguments.loss_type, (low, high), Path(directory))
        report.expect("tensors", ours.keys() == theirs.keys(), f"{len(ours)} of Levade, {len(theirs)} of TRL")
        errors = {name: relative(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
        worst = max(errors, key=errors.__getitem__)
        turns = sum(len(sampled) for _, sampled, _ in step.attempts.values())
        report.check(
            f"{len(step.attempts)} attempts, {len(batch)} trained, {turns} sampled tokens",
            errors[worst],
            1e-4,
            f"worst {worst}, {result.get('mismatched', 0)} log-probabilities differ from the record",
        )
    report.finish()


if __name__ == "__main__":
    main()
