"""Takes orders, and answers them in any order."""

import asyncio
import importlib
import os
import sys
import threading

from levade_worker import numbers, protocol

# The module of each kind of source.
KINDS = {"reasoning_gym": "reasoning", "verifiers": "rubrics", "gymnasium": "worlds", "openenv": "servers"}


# The answer for what was stopped.
STOPPED = {"error": "stopped"}


class Server:
    """One source, and what is under way at it."""

    def __init__(self, options, line, loop):
        self.options, self.line, self.loop = options, line, loop
        self.source = None
        self.loading = threading.Lock()
        self.running = {}

    def answer(self, order, said):
        # Whoever was answered once is not answered again: a call that was stopped may end late.
        if self.running.pop(order["attempt"], None) is not None:
            self.line.answer(order, said)

    def load(self):
        with self.loading:
            if self.source is None:
                module = importlib.import_module(f"levade_worker.{KINDS[self.options['kind']]}")
                self.source = module.Source(self.options)
            return self.source

    def take(self, order):
        name = order["attempt"]
        if order.get("stop"):
            self.stop(name)
            return
        entry = self.running[name] = {"order": order, "stopped": threading.Event(), "task": None}
        if "do" not in order and self.options["kind"] == "verifiers":
            self.loop.call_soon_threadsafe(self.begin, entry)
        else:
            threading.Thread(target=self.work, args=(order, entry["stopped"]), daemon=True).start()

    def begin(self, entry):
        entry["task"] = self.loop.create_task(self.lead(entry["order"]))
        if entry["stopped"].is_set():
            entry["task"].cancel()
        # One that was cancelled before it began says nothing itself.
        entry["task"].add_done_callback(lambda _: self.answer(entry["order"], STOPPED))

    def stop(self, name):
        """Stops an attempt. One in the environment's own code is not let go of, and whoever asked ends this process."""
        entry = self.running.get(name)
        if entry is None:
            return
        entry["stopped"].set()
        if entry["task"] is not None:
            self.loop.call_soon_threadsafe(entry["task"].cancel)
        # A thread that waits for the model alone is left to itself.
        conversation = entry["order"].get("conversation")
        if conversation is not None and conversation.asking:
            self.answer(entry["order"], STOPPED)

    async def lead(self, order):
        try:
            source = await asyncio.to_thread(self.load)
            said = await source.attempt(order)
        except asyncio.CancelledError:
            said = STOPPED
        except BaseException as error:
            said = {"error": told(error)}
        self.answer(order, said)

    def work(self, order, stopped):
        try:
            source = self.load()
            match order.get("do"):
                case "tasks":
                    said = {"tasks": source.tasks(order), "package": source.describe()}
                case "score":
                    said = {"score": source.score(order)}
                case _:
                    said = source.attempt(order, stopped)
        except BaseException as error:
            said = {"error": told(error)}
        self.answer(order, said)


def told(error):
    """An error in words, with the place in the environment's code that it came from."""
    if isinstance(error, numbers.Refused):
        return str(error)
    place = protocol.where(error, lambda file: not file.startswith("levade_worker/"))
    where = f" ({os.path.basename(place[0])}, line {place[1]})" if place else ""
    if isinstance(error, SystemExit):
        return f"ended with exit({error.code!r}){where}"
    return f"{type(error).__name__}: {error}{where}"


def main(first, line):
    sys.path.insert(0, os.getcwd())
    loop = asyncio.new_event_loop()
    server = Server(first["source"], line, loop)

    # When the line ends, nobody is there to answer to.
    protocol.read_in_thread(line, server.take, lambda: loop.call_soon_threadsafe(loop.stop))
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    pending = asyncio.all_tasks(loop)
    if pending:
        loop.run_until_complete(asyncio.wait(pending, timeout=1.5))
    os._exit(0)
