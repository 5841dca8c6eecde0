"""Starts a rank: `torchrun --nproc-per-node N -m levade_torch --model DIR --run-root DIR --token-env NAME`."""

import os
import signal
import sys
import threading
import traceback

os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers.utils import logging

from . import PROTOCOL
from .calls import Calls
from .errors import StartError, VerbError
from .group import Group, exit_now, say
from .host import Host
from .mesh import Ranks, Shape, choose_device
from .options import Options, parse
from .server import Service, serve
from .worker import Worker

DRAIN_SECONDS = 5.0
EXIT_FAILED, EXIT_INPUT, EXIT_TERMINATED = 1, 2, 143


class Rank:
    """This process: a worker thread that computes, and the main thread, which handles signals."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rank = int(os.environ.get("RANK", 0))
        self.calls = Calls() if self.rank == 0 else None
        self.service = None
        self.group: Group | None = None
        self.ending = threading.Lock()

    def listen(self) -> None:
        """Starts the HTTP service on rank 0, before any slow initialization."""
        if self.calls:
            self.service = Service(self.options.token, self.calls, self.options.max_body_mib << 20)
            server = serve(self.service, self.options.host, self.options.port, self.options.port_file)
            say(f"listens on {self.options.host}:{server.server_address[1]}")

    def work(self) -> None:
        """Initializes the rank and executes verbs. Never returns to its caller."""
        try:
            self._work()
        except StartError as error:
            say(f"rank {self.rank}: {error}")
            self.end("the group could not start: " + str(error), EXIT_INPUT)
        except BaseException as error:
            trace = traceback.format_exc()
            cause = self.group.heart.diagnosis() if self.group else "the group was not complete"
            message = f"rank {self.rank} failed: {type(error).__name__}: {error}; {cause}"
            # If another rank has exited, that explains the collective's error, and the traceback adds nothing.
            say(message if cause.startswith("dead") else trace + message)
            self.end(message, EXIT_FAILED)

    def _work(self) -> None:
        o = self.options
        torch.set_num_threads(o.threads)
        device = choose_device(o.device)
        self.group = Group(device, o.collective_seconds)
        shape = Shape(self.group.world, o.tp, o.cp, o.ep, o.pp)
        shape.check()
        if self.rank == 0 and device.type == "cuda":
            say("CUDA paths (NCCL, FlexAttention, offloading) are untested: they were written without a GPU at hand")
        worker = Worker(self.group, self.calls)
        ranks = Ranks.of(shape, device, o.collective_seconds)
        host = Host(o, ranks, self.group.control, worker.advance)
        if self.service:
            self.service.description = lambda: {"protocol": PROTOCOL, **host.describe()}
            say(
                f"ready: {o.model} on {o.pp} pipeline × {shape.data} data × {o.cp} context × {o.tp} tensor parallel ranks, "
                f"{o.dtype}, {device.type}"
            )
        worker.run(host)

    def end(self, message: str, code: int) -> None:
        """Ends the process. Waiting clients get `message` as the reason."""
        if not self.ending.acquire(blocking=False):
            return
        if self.calls:
            self.calls.stop(VerbError("failed", message + "; restart the group and load the last checkpoint"))
            # Threads write the responses, and they end with the process.
            self.service.drain(DRAIN_SECONDS)
        exit_now(code)

    def terminate(self) -> None:
        """Handles SIGTERM, which torchrun sends when another rank has exited, or which the job's owner sends."""
        cause = self.group.heart.diagnosis() if self.group else "it was still starting"
        message = f"rank {self.rank} was told to end (SIGTERM); {cause}"
        say(message)
        self.end(message, EXIT_TERMINATED)


def main() -> None:
    """Runs this process of the group."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        rank = Rank(parse())
        rank.listen()
    except StartError as error:
        say(str(error))
        sys.exit(EXIT_INPUT)
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    signal.signal(signal.SIGINT, lambda *_: terminated.set())
    threading.Thread(target=rank.work, daemon=True, name="work").start()
    # The timeout lets Python handle signals.
    while not terminated.wait(0.2):
        pass
    rank.terminate()


if __name__ == "__main__":
    main()
