"""What TRL's sides of the comparisons share: a trainer on the processor that keeps quiet and has no penalty, and saying its name."""

import json

import torch
import trl
from trl import GRPOConfig


def settings(**more) -> GRPOConfig:
    """GRPO's settings with what is the same in every comparison."""
    return GRPOConfig(
        beta=0.0,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        **more,
    )


def announce(precision: str) -> None:
    """Says that the trainer is ready."""
    print(json.dumps({"name": f"TRL {trl.__version__}, torch {torch.__version__}, {precision}"}), flush=True)
