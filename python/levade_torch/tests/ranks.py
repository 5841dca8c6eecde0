"""Runs ranks of a group for tests: local processes with tiny learners, which execute verbs as in a real group."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from levade_torch import wire
from levade_torch.batch import TreeBatch
from levade_torch.group import Group
from levade_torch.host import Host
from levade_torch.merge import Paths, merge
from levade_torch.mesh import Ranks, Shape
from levade_torch.model import COMBINES_SPLITS
from levade_torch.options import Options, parse
from levade_torch.worker import Worker

CPU = torch.device("cpu")
VOCABULARY = 32
ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0}
IMITATION = {"policy": "cross_entropy", "kl": None, "entropy": 0.0, "interpolated": None}
VALUES = {"policy": {"value": {"clip": None}}, "kl": None, "entropy": 0.0, "interpolated": None}
ABSENT = ("value", "behaviour", "proximal", "reference", "path_log_ratio", "correction")


def make_model(directory: Path) -> Path:
    """Creates a small model with a tied head in a directory."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def path_arrays(paths: list[list[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """Creates the body of `train`: all tokens of each sequence except the first are targets, with random returns."""
    counts = np.array([len(path) - 1 for path in paths])
    total = int(counts.sum())
    returns = np.random.default_rng(seed).normal(size=total).astype(np.float32)
    return {
        "path_tokens": np.concatenate([np.asarray(path, np.int64) for path in paths]),
        "path_len": counts + 1,
        "path_targets": counts,
        "index": np.concatenate([np.arange(1, count + 1) for count in counts]),
        "temperature": np.ones(total, np.float32),
        "weight": np.full(total, 0.1, np.float32),
        "advantage": np.ones(total, np.float32),
        "returns": returns,
        "marked": np.zeros(total, np.uint8),
        "age": np.zeros(total, np.int64),
        "version": np.zeros(total, np.int64),
    } | dict.fromkeys(ABSENT, np.full(total, np.nan, np.float32))


def merged(paths: list[list[int]], seed: int = 0) -> TreeBatch:
    """Creates a tree batch of the same sequences."""
    return merge(Paths.read(path_arrays(paths, seed)), list(range(len(paths))))


def batch_arrays(batch: TreeBatch) -> dict[str, np.ndarray]:
    """Creates the body of verbs that take a batch."""
    names = ("tokens", "position", "subtree_end", "target_token", "predictor", "temperature", "first_term")
    columns = ("path", "weight", "advantage", "returns", *ABSENT, "age", "version")
    arrays = {name: getattr(batch, name) for name in names} | {"terms": batch.term_count}
    arrays |= {name: getattr(batch.terms, name) for name in columns}
    return arrays | {"marked": batch.terms.marked.astype(np.uint8)}


class Rank:
    """One rank of a group. All ranks call the same verbs in the same order."""

    def __init__(self, options: Options, group: Group) -> None:
        self.group, self.progress = group, []
        shape = Shape(group.world, options.tp, options.cp, options.ep, options.pp)
        ranks = Ranks.of(shape, CPU, options.collective_seconds)
        self.host = Host(options, ranks, group.control, lambda *done: self.progress.append(done))
        self.worker = Worker(group, None)
        self.worker.host = self.host

    @property
    def root(self) -> Path:
        """The root of the run."""
        return self.host.options.run_root

    def ask(self, verb: str, control=None, arrays=None, of: str = "policy") -> tuple[dict, dict] | None:
        """Executes a verb, and returns JSON and arrays of its response on rank 0. Raises the error on which all ranks
        agree.
        """
        reply, error = self.worker._perform(of, verb, wire.pack(control or {}, arrays))
        if error:
            raise error
        return wire.unpack(reply) if reply else None

    def train(self, paths: list[list[int]], of: str = "policy") -> dict | None:
        """Runs an update whose sequences go to the ranks in turn. Returns rank 0's response."""
        world = self.host.ranks.shape.data
        batches = [{"rank": index % world, "paths": [index]} for index in range(len(paths))]
        loss = VALUES if of == "critic" else IMITATION
        control = {"loss": loss, "params": ADAM, "cut": {"world_size": world, "micro_batches": batches}}
        response = self.ask("train", control, path_arrays(paths), of)
        return response and response[0]

    def save(self, name: str, of: str = "policy") -> dict[str, bytes]:
        """Returns the files of a checkpoint with optimizer state."""
        directory = self.root / name
        if not self.group.rank:
            directory.mkdir(exist_ok=True)
        dist.barrier(self.group.control)
        self.ask("save", {"folder": str(directory), "with_optimiser": True}, of=of)
        return contents(directory)

    def publish(self, version: int, of: str = "policy") -> dict[str, bytes]:
        """Returns the files of a publication."""
        self.ask("publish", {"version": version}, of=of)
        return contents(self.root / "published" / of / f"v{version}")


def contents(directory: Path) -> dict[str, bytes]:
    """Returns the contents of files by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def _life(number: int, variables: dict[str, str], arguments: list[str], work: Callable, given: tuple, pipe) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.update(variables | {"RANK": str(number)})
        options = parse(arguments)
        pipe.send((True, work(Rank(options, Group(CPU, options.collective_seconds)), *given)))
        dist.barrier()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        # Skips cleanup, since threads of autograd and of the group would delay the exit.
        os._exit(0)


def run(world: int, work: Callable, directory: Path, *given, seconds: float = 240.0, **options) -> list:
    """Runs `work(rank, *given)` on every rank of a group of size `world`, and returns the results.

    The root of the run is `directory/run`; `options` become command-line options. The model is in `directory/model`, and is
    created if it does not exist. Skips the test if transformers is too old for the options.
    """
    splits = [name for name in ("tp", "ep", "pp") if options.get(name, 1) > 1]
    if splits and not COMBINES_SPLITS:
        pytest.skip(f"transformers {transformers.__version__} does not combine --{splits[0]} with FSDP2")
    (directory / "run").mkdir(exist_ok=True)
    (directory / "token").write_text("of the tests, long enough")
    if "model" not in options and not (directory / "model").exists():
        make_model(directory / "model")
    options = {"model": directory / "model", "dtype": "f32", "export_dtype": "f32", "device": "cpu"} | options
    options |= {"run_root": directory / "run", "token_file": directory / "token"}
    arguments = ["--no-probe"]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # Forks from a process that has not used autograd: its threads do not survive a fork, and other tests use autograd
    # here.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks"])
    pipes = [context.Pipe() for _ in range(world)]
    for number, (_, theirs) in enumerate(pipes):
        arrive = (number, variables, arguments, work, given, theirs)
        context.Process(target=_life, args=arrive, daemon=True).start()
    until, found = time.monotonic() + seconds, []
    for number, (ours, _) in enumerate(pipes):
        assert ours.poll(max(0.0, until - time.monotonic())), f"rank {number} did not come to its end"
        well, response = ours.recv()
        assert well, response
        found.append(response)
    return found
