"""The worker: takes orders, and answers them as they are done.

Functions that are coroutines run on one loop, all others in a thread for each call."""

import asyncio
import copy
import ctypes
import gc
import inspect
import json
import os
import sys
import threading

from levade_worker import answers, load, protocol, schema, shims
from levade_worker.tools import ACTIONS, Box, finished


class Stopped(BaseException):
    """Raised in a thread whose call has been given up."""


class Job:
    """A function under way in a thread of its own."""

    def __init__(self, function):
        self.function, self.lock = function, threading.Lock()
        self.thread, self.is_done = None, False

    async def run(self):
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def tell(error, value):
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(value)

        def body():
            error = value = None
            try:
                value = self.function()
            except StopIteration as stop:
                # No future takes this one, which would end a coroutine.
                error = RuntimeError(f"StopIteration: {stop.value!r}")
            except BaseException as raised:
                error = raised
            # What the function holds, an object of an attempt say, ends no later than its call.
            self.function = None
            # A call may be given up at any moment, this one included.
            while True:
                try:
                    with self.lock:
                        self.is_done = True
                    loop.call_soon_threadsafe(tell, error, value)
                    return
                except Stopped:
                    continue

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        self.thread = thread.ident
        try:
            value = await asyncio.shield(done)
        except asyncio.CancelledError:
            self.stop()
            # It is over when the thread is, and no earlier.
            await asyncio.wait([done])
            raise
        return await finished(value)

    def stop(self):
        """Interrupts the function where it runs Python code; whatever blocks elsewhere goes on."""
        with self.lock:
            if not self.is_done and self.thread is not None:
                say_where(self.thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.thread), ctypes.py_object(Stopped)
                )


def say_where(thread):
    """Prints where a thread is, for the log."""
    frame = sys._current_frames().get(thread)
    if frame is not None:
        code = frame.f_code
        print(
            f"given up in {code.co_name}, {code.co_filename} line {frame.f_lineno}",
            file=sys.stderr,
            flush=True,
        )


async def run(function, is_async):
    """What a function gives, on the loop or in a thread."""
    return await finished(function()) if is_async else await Job(function).run()


class Session:
    """An attempt: an instance of every tool with state, or of the class whose methods tools are."""

    def __init__(self, name, task):
        self.name, self.instances, self.lock = name, {}, asyncio.Lock()
        self.row = task.get("row") or {}
        extra = self.row.get("extra_info")
        if isinstance(extra, str):
            try:
                extra = json.loads(extra)
            except ValueError:
                extra = None
        given = extra.get("tools_kwargs") if isinstance(extra, dict) else None
        self.given = given if isinstance(given, dict) else {}
        self.told = shims.AgentData(name, self.row, self.given)
        # The row as it was: an object may change what it was made of.
        self.fresh = copy.deepcopy((self.row, self.given)) if self.row.get(ACTIONS) is not None else None

    async def open(self, holders):
        """Makes the instances. Returns the texts that they begin with."""
        said = []
        for holder in holders:
            instance, text = await holder.open(self.name, self.given.get(holder.name), self.row, run)
            self.instances[holder.name] = instance
            if text:
                said.append(text)
        return said

    async def evidence(self, holders, tools):
        found = {}
        for holder in holders:
            instance, given = self.instances[holder.name], self.given.get(holder.name)
            reward = await holder.evaluate(instance, given, run)
            if reward is not None:
                value = answers.number(reward)
                found[holder.name] = {"reward": answers.text_of(reward) if value is None else value}
            if isinstance(holder, Box):
                found.setdefault(holder.name, {}).update(await self.states(holder, tools, instance))
        return {name: facts for name, facts in found.items() if facts}

    async def states(self, box, tools, instance):
        """The state of an object, and the state that the row expects, if it has the calls that lead there."""
        state = await box.state(instance, run)
        if state is None:
            return {}
        found = {"state": state}
        if self.fresh is not None:
            methods = {tool.name: tool for tool in tools if tool.holder is box}
            row, given = copy.deepcopy(self.fresh)
            try:
                found["expected_state"] = await box.expected(row[ACTIONS], methods, given.get(box.name), row, run)
            except schema.Unusable as error:
                found["expected_error"] = str(error)
        return found

    async def close(self, holders):
        """Releases every instance, also after one that would not be."""
        first = None
        for holder in holders:
            if holder.name not in self.instances:
                continue
            instance, given = self.instances.pop(holder.name), self.given.get(holder.name)
            try:
                await holder.close(instance, given, run)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first


def refusal(error, folder, is_given_up):
    """The reply to an order that ended with an exception. Code of the user's may cancel itself, too."""
    if is_given_up and isinstance(error, asyncio.CancelledError):
        return answers.failed("it was given up")
    if isinstance(error, schema.Unfit):
        return answers.bad_arguments(str(error))
    if isinstance(error, schema.Unusable):
        return answers.failed(str(error))
    if isinstance(error, SystemExit):
        return answers.failed(f"it called exit({error.code!r})")
    return answers.failed(answers.described(error, folder))


class Server:
    def __init__(self, tools, line, folder):
        self.tools, self.line, self.folder = tools, line, folder
        holders = {id(tool.holder): tool.holder for tool in tools.values() if tool.stateful}
        self.holders = list(holders.values())
        self.sessions, self.running = {}, {}
        # Orders under way that were given up.
        self.given_up = set()

    def take(self, order):
        """Begins what an order asks for."""
        if order.get("stop"):
            task = self.running.get(order["id"])
            if task is not None:
                self.given_up.add(order["id"])
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self.serve(order))
        self.running[order["id"]] = task
        task.add_done_callback(lambda _: self.running.pop(order["id"], None))

    async def serve(self, order):
        try:
            reply = await getattr(self, order["do"])(order)
        except BaseException as error:
            reply = refusal(error, self.folder, order["id"] in self.given_up)
        self.given_up.discard(order["id"])
        self.line.answer(order, reply)

    async def open(self, order):
        session = self.sessions[order["session"]] = Session(order["session"], order["task"])
        async with session.lock:
            try:
                said = await session.open(self.holders)
            except BaseException:
                self.sessions.pop(order["session"], None)
                # Nobody else knows of those that were created before.
                await asyncio.shield(session.close(self.holders))
                raise
        return {"opening": "\n\n".join(said)}

    async def call(self, order):
        tool, arguments = self.tools[order["tool"]], order["arguments"]
        if tool.stateful:
            session = self.sessions.get(order["session"])
            if session is None:
                return answers.failed("its instance is gone")
            name = tool.holder.name
            instance, given = session.instances[name], session.given.get(name)
            value = await run(lambda: tool.call(instance, arguments, given, session.told), tool.is_async)
        else:
            value = await run(lambda: tool.call(arguments), tool.is_async)
        gives_reward = tool.stateful and tool.gives_reward
        return await asyncio.get_running_loop().run_in_executor(None, answers.answer, value, gives_reward)

    async def evidence(self, order):
        session = self.sessions.get(order["session"])
        with_state = [tool for tool in self.tools.values() if tool.stateful]
        return {"found": await session.evidence(self.holders, with_state) if session is not None else {}}

    async def close(self, order):
        session = self.sessions.pop(order["session"], None)
        if session is not None:
            async with session.lock:
                await session.close(self.holders)
            if any(holder.has_del for holder in self.holders):
                # The errors of failed calls hold the object in cycles.
                gc.collect()
        return {}


def main(first, line):
    """Serves the tools that the first line names, until there are no more orders."""
    own = os.getpid()
    place = first.get("file") or first.get("config")
    folder = os.path.dirname(os.path.abspath(place))
    try:
        tools = load.load(first.get("file"), first.get("config"), first.get("functions") or [])
    except load.Fault as fault:
        return line.failed(answers.sound(fault))
    server = Server(tools, line, folder)
    described = []
    for tool in tools.values():
        about = {
            "name": answers.sound(tool.name),
            "description": answers.sound(tool.description),
            "parameters": tool.parameters,
            "stateful": tool.stateful,
        }
        try:
            json.dumps(about, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            why = f"the schema of {tool.name} cannot be written as JSON: {error}"
            return line.failed(answers.sound(why))
        described.append(about)
    line.parse = schema.order
    line.ready({"tools": described})
    asyncio.run(serve(server))
    if os.getpid() == own:
        os._exit(0)


async def serve(server):
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    take = lambda order: loop.call_soon_threadsafe(server.take, order)
    protocol.read_in_thread(server.line, take, lambda: loop.call_soon_threadsafe(ended.set))
    await ended.wait()
    os._exit(0)
