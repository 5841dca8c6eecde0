import asyncio
import os
import subprocess
import sys
import time
import warnings


def divide(x):
    return 1 / x


class Thing:
    def __str__(self):
        return "an object"


calls = 0


def deeper(n):
    return deeper(n + 1) + 1


def does(mode: str):
    global calls
    calls += 1
    if mode == "raise":
        return divide(0)
    if mode == "exit":
        exit(3)
    if mode == "print":
        print('{"id": 0, "parts": []}')
        os.write(1, b"straight to the descriptor\n")
        return "printed"
    if mode == "close":
        sys.stdout.close()
        return "closed"
    if mode == "none":
        return None
    if mode == "bytes":
        return b"ab"
    if mode == "binary":
        return b"\xff\xfe"
    if mode == "object":
        return Thing()
    if mode == "surrogate":
        return "\ud83d"
    if mode == "stop":
        raise StopIteration(5)
    if mode == "interrupt":
        raise KeyboardInterrupt()
    if mode == "recursion":
        return deeper(0)
    if mode == "long":
        return "x" * 50_000_000
    if mode == "count":
        return calls
    if mode == "loop":
        while True:
            pass
    if mode == "block":
        time.sleep(1000)
    if mode == "end":
        print("last words", file=sys.stderr, flush=True)
        os._exit(5)
    if mode == "kill":
        os.kill(os.getpid(), 9)
    if mode == "close_all":
        os.closerange(3, 4096)
        return "closed"
    if mode == "fork":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            time.sleep(1000)
            os._exit(0)
        return child
    if mode == "detach":
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


async def waits():
    await asyncio.sleep(1000)


def process():
    return os.getpid()
