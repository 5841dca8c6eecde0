# Attacks on the sandbox, by class: in each file of this directory a program follows each title, and runs
# behind the lines of this file. A title says how the program must end: `refused` (all that it tries fails,
# and is printed so), `fine`, `exit N`, `signal N`, `late`, `memory`, or `bounded`: it is refused, ended for
# its memory, or says itself that it holds (`HELD MIB`) no more than memory and files of a run may. Numbers of
# system calls are those of x86-64. Names in `@` are things of the host that `main.rs` and
# conformance/sandbox_attacks.py make: a TCP port, an abstract socket, a folder with a secret file and a
# socket, and a folder that is shown (`--read`), with sockets, a pipe, a database.
import ctypes
import errno
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)


def tries(what, *arguments):
    try:
        found = what(*arguments)
    except OSError as error:  # Any other is a mistake of the attempt, which then fails.
        print("refused:", type(error).__name__, error)
    else:
        print("refused: nothing" if found in (None, False, [], b"", "") else "ESCAPED: %r" % (found,))


def call(number, *arguments):
    done = libc.syscall(number, *arguments)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "call %d: %d" % (number, done)


def does(what, *arguments):
    what(*arguments)
    return "done"


def does_not_end(*_):
    time.sleep(60)


def many(count, hold, leaderless=False):
    """Lets each of `count` processes hold what `hold` returns with its bytes, and prints the sum once all do. In
    a leaderless process, a second thread holds it, and the first one has ended."""
    ours, theirs = os.pipe()

    def holds():
        amount, kept = 0, None
        if leaderless:
            # Without a pause, what is held is counted while the first thread still waits for the interpreter's lock.
            time.sleep(0.5)
        try:
            amount, kept = hold()
        except (OSError, MemoryError, ValueError) as error:
            print("refused:", error, flush=True)
        os.write(theirs, b"%d " % amount)
        time.sleep(60)

    for _ in range(count):
        if os.fork() == 0:
            if leaderless:
                threading.Thread(target=holds).start()
                libc.syscall(60, 0)
            holds()
    os.close(theirs)
    text, deadline = b"", time.time() + 20
    while text.count(b" ") < count and time.time() < deadline:
        text += os.read(ours, 65536)
    time.sleep(1)
    print("HELD", sum(map(int, text.split())) >> 20)


def fill_socket(sock, piece=65536):
    """Sends until a socket takes no more. Returns the bytes."""
    sock.setblocking(False)
    amount = 0
    try:
        while True:
            amount += sock.send(bytes(piece))
    except BlockingIOError:
        return amount


def anonymous(size, flags=0x21):
    """Maps memory by the system call itself; shared as a default."""
    return mapped(None, size, 3, flags, -1, 0)


def mapped(*arguments):
    libc.mmap.restype = ctypes.c_void_p
    at = libc.mmap(ctypes.c_void_p(arguments[0]), ctypes.c_size_t(arguments[1]), *arguments[2:5], ctypes.c_long(arguments[5]))
    if at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return at
