"""Shared code of TRL's sides of the comparisons: a quiet CPU trainer without a KL penalty, and its ready message."""

import json

import torch
import trl
from trl import GRPOConfig


def settings(**more) -> GRPOConfig:
    """Returns the GRPO settings that all comparisons share."""
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
    """Prints that the trainer is ready."""
    print(json.dumps({"name": f"TRL {trl.__version__}, torch {torch.__version__}, {precision}"}), flush=True)
