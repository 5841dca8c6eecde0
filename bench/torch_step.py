"""Compares a step of the PyTorch learner with a plain FSDP2 loop on the same model, and measures the gain from trees.

Both have two ranks with one thread each over gloo, in f32, with AdamW and clipping, and alternate on the same tokens:
sequences that share nothing, in which all tokens except the first are targets of cross-entropy. The plain loop is
ordinary user code: `fully_shard` on each block, transformers' own loss over padded (here: equally long) rows, and
PyTorch's fused optimizer. Then the learner trains on sequences that share a prefix, as groups of attempts do: the same
tokens as separate sequences and as trees. The gain is compared with the ratio of tokens, which is the ideal.

    VENV/bin/python bench/torch_step.py --model FOLDER    # an environment with levade_torch's packages

Prints medians of rounds (min–max), and the fraction of processor time that other processes used. Not measured: CUDA,
tensor and context parallelism, bf16.
"""

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from torch_steps import OPTIM, RANKS, Group, Torchrun, inputs, train


def plain(rank: int, port: int, model: Path, pipe) -> None:
    """Runs the plain loop: a step for each list of rows that arrives through the pipe."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for block in loaded.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(loaded, mesh=mesh)
    loaded.train()
    adamw = torch.optim.AdamW(
        loaded.parameters(), lr=OPTIM["learning_rate"], weight_decay=OPTIM["weight_decay"], fused=True
    )
    pipe.send("ready")
    while (rows := pipe.recv()) is not None:
        mine = torch.tensor(rows[rank::RANKS])
        started = time.perf_counter()
        loaded(input_ids=mine, labels=mine).loss.backward()
        torch.nn.utils.clip_grad_norm_(loaded.parameters(), OPTIM["max_grad_norm"])
        adamw.step()
        adamw.zero_grad()
        dist.barrier()
        pipe.send(time.perf_counter() - started)
    dist.destroy_process_group()


class Plain:
    """The ranks of the plain loop."""

    def __init__(self, model: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.pipes, self.ranks = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.ranks.append(context.Process(target=plain, args=(rank, port, model, theirs), daemon=True))
            self.ranks[-1].start()
        for pipe in self.pipes:
            pipe.recv()

    def step(self, rows: list[list[int]]) -> float:
        """Returns the seconds of the slowest rank."""
        for pipe in self.pipes:
            pipe.send(rows)
        return max(pipe.recv() for pipe in self.pipes)

    def stop(self) -> None:
        """Stops the ranks."""
        for pipe in self.pipes:
            pipe.send(None)
        for rank in self.ranks:
            rank.join(30)


def step(group: Group, groups: list[list[dict]], tokens: int) -> float:
    """Returns the seconds of a step of the learner, including its plan and its request body."""
    started = time.perf_counter()
    train(group, groups, tokens)
    return time.perf_counter() - started


def spread(values: list[float]) -> str:
    """Formats median (min–max)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f}, n = {len(values)})"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, required=True, help="directory with safetensors files")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--tokens", type=int, default=4096, help="tokens of a rank's sequences with a common prefix")
    a = p.parse_args()
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(count)]

    peer = Plain(a.model)
    with (
        tempfile.TemporaryDirectory() as root,
        Group(RANKS, Path(root), Torchrun, model=a.model, tokens=a.tokens, no_probe=True) as group,
    ):
        pairs = []
        for turn in range(a.rounds + 1):
            rows = [ids(a.length) for _ in range(a.rows)]
            paths = inputs(rows, 1, 1 / (a.rows * (a.length - 1)))
            # One group for each rank, as data-parallel ranks get them.
            of_ranks = [paths[rank::RANKS] for rank in range(RANKS)]
            tokens = a.rows * a.length // RANKS
            if turn % 2:
                theirs, ours = peer.step(rows), step(group, of_ranks, tokens)
            else:
                ours, theirs = step(group, of_ranks, tokens), peer.step(rows)
            if turn:
                pairs.append((ours, theirs))
                print(f"  the learner {ours:.2f} s, the plain loop {theirs:.2f} s", flush=True)
        print(
            f"{a.rows} rows of {a.length} tokens, the plain loop over the learner: {spread([t / o for o, t in pairs])}"
        )
        peer.stop()
        for group_size, prefix, tail in [(4, 192, 64), (8, 192, 64), (8, 64, 192)]:
            of_rank = max(a.tokens // (group_size * (prefix + tail)), 1)
            ideal = group_size * (prefix + tail) / (prefix + group_size * tail)
            weight = 1 / (RANKS * of_rank * group_size * tail)
            shares = []
            for turn in range(a.rounds):
                groups = []
                for _ in range(RANKS * of_rank):
                    shared = ids(prefix)
                    groups.append([shared + ids(tail) for _ in range(group_size)])
                # The same sequences without a common prefix: the first token differs.
                separate = [[[1000 + at, *path[1:]] for at, path in enumerate(paths)] for paths in groups]
                merged, alone = ([inputs(paths, prefix, weight) for paths in kind] for kind in (groups, separate))
                order = (merged, alone) if turn % 2 else (alone, merged)
                seconds = {id(kind): step(group, kind, a.tokens) for kind in order}
                shares.append(seconds[id(alone)] / seconds[id(merged)] / ideal)
                print(f"  paths {seconds[id(alone)]:.2f} s, trees {seconds[id(merged)]:.2f} s", flush=True)
            what = f"{of_rank} groups of {group_size}, {prefix} tokens shared of {prefix + tail}, ideal {ideal:.2f}"
            print(f"{what}: share of it {spread(shares)}", flush=True)


if __name__ == "__main__":
    main()
