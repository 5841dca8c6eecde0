"""The learners of a group by name, on one rank. Creates, saves, loads and publishes them."""

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed import ProcessGroup

from . import checkpoint, files, lora, model, probe, push
from .errors import StartError, VerbError, invalid_request
from .learner import Learner, Limits, Progress
from .mesh import Ranks
from .model import DTYPES
from .offload import OffloadManager
from .optimizer import Optimizer
from .options import Options
from .sharding import Precision


class Host:
    """All learners, with their source directories (configuration and tokenizer) and their last published versions."""

    def __init__(self, options: Options, ranks: Ranks, control: ProcessGroup, progress: Progress) -> None:
        self.options, self.ranks, self.control, self.progress = options, ranks, control, progress
        on_cuda = ranks.device.type == "cuda"
        if options.attention == "flex" and not on_cuda:
            raise StartError("--attention flex needs a GPU: FlexAttention has no backward pass on the CPU")
        self.precision = Precision(DTYPES[options.dtype], options.offload, options.recompute)
        self.flexible = options.attention == "flex" or (options.attention == "auto" and on_cuda)
        named = {"policy": options.model, "critic": options.critic, "reference": options.reference}
        self.sources = {name: directory for name, directory in named.items() if directory is not None}
        self.versions: dict[str, int | None] = dict.fromkeys(self.sources)
        # The optimizer's step count at the newest publication, for learners that still hold those weights.
        self.exported: dict[str, int] = {}
        self.push: push.Push | None = None
        self.offload_manager = OffloadManager(ranks.device)
        self.learners = {name: self._create_learner(name, directory) for name, directory in self.sources.items()}
        if options.probe:
            for learner in self.learners.values():
                probe.check(learner, self.precision.compute)
        self.description = self._describe()

    def _create_learner(self, name: str, directory: Path) -> Learner:
        """Creates a learner from a directory."""
        frozen, critic = name == "reference", name == "critic"
        made = model.load(directory, self.ranks, self.precision, value_head=critic, frozen=frozen)
        if self.options.lora and name == "policy":
            lora.inject(made, self.options.lora, self.ranks)
        checkpoint.read_head(made, directory)
        trained = {} if frozen else checkpoint.weight_parameters(made) | checkpoint.head_parameters(made)
        limits = Limits(self.options.head_rows, self.options.tokens)
        return Learner(made, trained, self.ranks, self.control, limits, self.flexible, self.progress)

    def describe(self) -> dict:
        """Returns the content of `/v1/describe` without the protocol. Runs in parallel with verbs, so it accesses no
        model.
        """
        rendezvous_info = {
            name: learner | {"version": self.versions[name]} for name, learner in self.description["learners"].items()
        }
        return self.description | {"learners": rendezvous_info}

    def _describe(self) -> dict:
        policy, shape = self.learners["policy"], self.ranks.shape
        config = policy.model.config
        learners = {
            name: {
                "value_head": learner.has_value_head,
                "trains": learner.optimizer is not None,
                "lora": self.options.lora.json() if self.options.lora and name == "policy" else None,
            }
            for name, learner in self.learners.items()
        }
        return {
            "model_type": config.model_type,
            "vocab_size": config.vocab_size,
            "context": model.max_context(config),
            "parameters": model.count_parameters(policy.model, self.ranks),
            "dtype": self.options.dtype,
            "export_dtype": self.options.export_dtype,
            "device": self.ranks.device.type,
            "world_size": shape.data,
            "processes": shape.world,
            "fsdp": shape.shards,
            "tp": shape.tensor,
            "cp": shape.context,
            "ep": shape.expert,
            "pp": shape.pipeline,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "learners": learners,
        }

    def content(self, name: str) -> str | dict:
        """Returns the `Content` of the files that a learner writes."""
        if hasattr(self.learners[name].model, "levade_lora"):
            return {"adapter": {"base": str(self.sources[name])}}
        return "whole"

    def save(self, name: str, directory: Path, with_optimizer: bool) -> dict | None:
        """Writes a learner to an existing directory. Rank 0 gets the manifest."""
        learner = self.learners[name]
        optimizer = learner.optimizer if with_optimizer else None
        names = checkpoint.save(learner.model, optimizer, self.sources[name], directory, self.ranks)
        if self.ranks.rank:
            return None
        if self.content(name) == "whole":
            names += files.copy_companions(self.sources[name], directory)
        files.flush(directory)
        return files.create_manifest(directory, self.content(name), names)

    def check_load(self, name: str, directory: Path | None, with_optimizer: bool) -> None:
        """Raises `storage` if a learner cannot load `directory`, or its initial state if `directory` is None."""
        held = self.learners[name].model
        if directory is not None:
            checkpoint.check(held, directory, with_optimizer)
        elif self.content(name) == "whole":
            # An adapter's initial state depends only on its seed.
            checkpoint.check_source(held, self.sources[name])

    def load(self, name: str, directory: Path | None, with_optimizer: bool) -> None:
        """Replaces the weights and, if requested and present, the optimizer state.

        If `directory` is None, restores the state in which the group was started. The caller must have called
        `check_load`.
        """
        learner = self.learners[name]
        if directory is None:
            self.versions[name] = None
        self.exported.pop(name, None)
        if hasattr(learner.model, "levade_lora"):
            if directory is None:
                lora.restart(learner.model, self.options.lora)
            else:
                lora.load(learner.model, directory)
            learner.optimizer.clear()
            learner.optimizer = Optimizer(learner.optimizer.parameters, self.ranks, None)
        else:
            # Drops the old weights first, since two models may not fit into memory.
            learner.model, learner.optimizer = None, None
            self.learners[name] = learner = self._create_learner(name, directory or self.sources[name])
        if directory and with_optimizer and learner.optimizer:
            checkpoint.read_optimizer(learner.optimizer, learner.model, directory)

    def publish(self, name: str, version: int) -> dict | None:
        """Writes the weights to a new directory, which appears atomically and complete. Rank 0 gets the reference."""
        parent = self.options.run_root / "published" / name
        final, partial = parent / f"v{version}", parent / f".v{version}.{os.getpid()}"
        learner, dtype = self.learners[name], DTYPES[self.options.export_dtype]
        writer = files.Writer(partial if self.ranks.rank == 0 else None)
        if writer.writes:
            with writer.attempt("make", partial):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        try:
            checkpoint.write_weights(learner.model, self.sources[name], writer, dtype, self.ranks)
            names = writer.finish()
            found = self._announce(name, version, partial, final, names) if self.ranks.rank == 0 else None
        except VerbError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self.versions[name] = version
        if learner.optimizer:
            self.exported[name] = learner.optimizer.steps
        return found

    def offload(self, name: str, keeps_weights: bool) -> dict | None:
        """Moves all learners to host memory, optionally except the weights of `name`. Rank 0 gets the statistics."""
        started = time.monotonic()
        if not keeps_weights:
            self.end_push()
        return self._offload_report(
            self.offload_manager.offload(self.learners, name if keeps_weights else None), started
        )

    def onload(self, only: str | None = None) -> dict | None:
        """Moves all learners back to the devices, or the weights of one learner. Rank 0 gets the statistics."""
        started = time.monotonic()
        return self._offload_report(self.offload_manager.onload(only), started)

    def _offload_report(self, mine: int, started: float) -> dict | None:
        total = torch.tensor([mine], dtype=torch.int64)
        dist.all_reduce(total, group=self.control)
        return None if self.ranks.rank else {"bytes": int(total.item()), "seconds": time.monotonic() - started}

    def check_push(self, name: str, version: int, wanted: push.PushRequest) -> None:
        """Raises `invalid` if a learner no longer holds the weights of published `version`, or cannot send them."""
        learner = self.learners[name]
        if self.content(name) != "whole":
            raise invalid_request(
                f"the learner {name!r} trains an adapter, but only full weights can be pushed; publish the adapter as a folder"
            )
        if wanted.backend == "nccl" and self.ranks.device.type != "cuda":
            raise invalid_request(
                f"a group with the backend nccl needs a GPU, but this learner runs on {self.ranks.device.type}; use the backend gloo"
            )
        steps = learner.optimizer.steps if learner.optimizer else None
        # Only rank 0 knows whether its publication was written.
        stale = self.versions[name] != version or name not in self.exported or self.exported[name] != steps
        if self.ranks.rank == 0 and stale:
            raise invalid_request(
                f"{name} no longer holds the weights of version {version} (it last published {self.versions[name]} and "
                "may have been trained since); load them from their folder"
            )

    def open_push(self, name: str, wanted: push.PushRequest) -> dict | None:
        """Opens a group with a server, and closes a group that was left open. Rank 0 gets what the server must know."""
        self.end_push()
        dtype, sends = DTYPES[self.options.export_dtype], self.ranks.rank == 0
        # During a push, ranks wait for each other. This wait must be shorter than the collectives' timeout.
        wanted = replace(wanted, seconds=min(wanted.seconds, self.options.collective_seconds / 2))
        entries = checkpoint.weight_entries(self.learners[name].model, dtype, self.ranks, sends)
        sender = push.Sender(wanted, self.ranks.device) if sends else None
        self.push = push.Push(wanted, entries, sender)
        return self.push.describe() if sends else None

    def end_push(self) -> None:
        """Closes an open group."""
        if self.push and self.push.sender:
            self.push.sender.close()
        self.push = None

    def send_push(self) -> dict | None:
        """Sends the weights to the open group, and closes it. Rank 0 gets the statistics."""
        try:
            return self.push.send()
        finally:
            self.push = None

    def _announce(self, name: str, version: int, partial: Path, final: Path, names: list[str]) -> dict:
        try:
            if self.content(name) == "whole":
                names = names + files.copy_companions(self.sources[name], partial)
            files.flush(partial)
            if final.exists():
                old = final.with_name(f".{final.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            partial.rename(final)
            files.flush(final.parent)
            files.remove_old(final.parent, self.options.keep_published, version)
            manifest = files.create_manifest(final, self.content(name), names)
        except OSError as error:
            raise files.storage_error(error, "publish", final) from None
        return {"version": version, "at": {"manifest": manifest}}
