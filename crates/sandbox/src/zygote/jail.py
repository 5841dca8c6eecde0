"""The jail: namespaces and a minimal root for the fork server, and what a runner gives up.

First of the files that are joined into one program; `server.py`, the last, says how they work together.
"""

import builtins
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys

# Functions of these files find what Python had at its start, whatever code puts in the place of it.
__builtins__ = dict(vars(builtins))

libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (1 << bit for bit in (17, 25, 26, 27, 28, 29, 30))
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, CLOSE_RANGE = 442, 444, 445, 446, 436
PDEATHSIG, DUMPABLE, SECCOMP, CAPBSET_DROP, SUBREAPER, NO_NEW_PRIVS, CAP_AMBIENT = 1, 4, 22, 24, 36, 38, 47
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
INSIDE = 1000  # The user as which code runs, as it sees itself.
PASSWD = "sandbox:x:1000:1000::/work:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
GROUP = "sandbox:x:1000:\nnogroup:x:65534:\n"


class Step(Exception):
    """A step of building the jail that the kernel refused: which, and why."""


def call(what, result):
    """The result of a system call, or `Step`."""
    if result < 0:
        raise Step("%s: %s" % (what, os.strerror(ctypes.get_errno())))
    return result


def text(value):
    return None if value is None else os.fsencode(value)


def mount(source, target, kind, flags, data=None):
    done = libc.mount(text(source), text(target), text(kind), ctypes.c_ulong(flags), text(data))
    call("mount %s" % target, done)


def restrict_mount(target, flags, recursive=True):
    """Sets flags of a mount, and of all below; none that is there is lost."""
    attributes = struct.pack("=QQQQ", flags, 0, 0, 0)
    depth = AT_RECURSIVE if recursive else 0
    done = libc.syscall(MOUNT_SETATTR, AT_FDCWD, text(target), depth, attributes, ctypes.c_size_t(32))
    call("mount_setattr %s (Linux 5.12)" % target, done)


def write(path, content):
    with open(path, "wb", buffering=0) as file:
        file.write(content)


def view(config, root):
    """Builds the read-only view below `root`: interpreters, libraries, devices that are safe, and no more."""
    done = []
    for path in sorted(config["read"]):
        # Above a bound folder nothing is listed; below one all is there already.
        if any(path.startswith(above + "/") for above in done) or not os.path.lexists(path):
            continue
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        bind(path, target)
        restrict_mount(target, MS_RDONLY | MS_NOSUID | MS_NODEV)
        done.append(path)
    for name in ["proc", "dev/shm", "etc", "tmp", "work", "run"]:
        os.makedirs(root + "/" + name, exist_ok=True)
    for name in ["null", "zero", "full", "random", "urandom"]:
        bind("/dev/" + name, root + "/dev/" + name)
        restrict_mount(root + "/dev/" + name, MS_NOSUID | MS_NOEXEC)
    for name, target in [("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")]:
        os.symlink("/proc/self/fd" + target, root + "/dev/" + name)
    write(root + "/etc/passwd", PASSWD.encode())
    write(root + "/etc/group", GROUP.encode())
    write(root + "/etc/hosts", b"127.0.0.1 localhost\n::1 localhost\n")
    write(root + "/etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files\n")
    for name in ["ld.so.cache", "localtime"]:
        if os.path.isfile("/etc/" + name):
            with open("/etc/" + name, "rb") as file:
                write(root + "/etc/" + name, file.read())


def bind(source, target):
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        write(target, b"")
    mount(source, target, None, MS_BIND | MS_REC)


def map_user(inside, outside):
    """Gives the user of this process a name in the user namespace that it has just entered."""
    write("/proc/self/setgroups", b"deny")
    write("/proc/self/uid_map", b"%d %d 1" % (inside, outside[0]))
    write("/proc/self/gid_map", b"%d %d 1" % (inside, outside[1]))


def enter(config):
    """Moves into namespaces and the minimal root. Returns in the fork server; the launcher waits here for its
    end.

    As root, mounts are made as root and then a user of no rights is become; as another, a user namespace
    gives the right to mount.
    """
    root, ids = os.geteuid() == 0, (os.geteuid(), os.getegid())
    names = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP | (0 if root else NEWUSER)
    call("unshare", libc.unshare(names))
    if not root:
        map_user(INSIDE, ids)
    child = os.fork()
    if child:
        os.close(config["control"].detach())
        os.waitpid(child, 0)
        os._exit(0)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    above = next(path for path in ["/sys", "/mnt", "/srv", "/media"] if os.path.isdir(path))
    # Hides nothing that is shown: no interpreter lies there.
    mount("tmpfs", above, "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,nr_inodes=4k,mode=755")
    view(config, above)
    mount("proc", above + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(above)
    call("pivot_root", libc.syscall(config["pivot_root"], b".", b"."))
    call("umount", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    restrict_mount("/", MS_RDONLY, recursive=False)
    socket.sethostname("sandbox")
    if root:
        become(config["user"])
    # The launcher is a child of whoever uses the sandbox, and is ended with it.
    call("prctl", libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def become(user):
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    call("prctl", libc.prctl(DUMPABLE, 1, 0, 0, 0))


def landlock(read, change):
    """Restricts this process to files below `read` and `change`, to no network, and to itself."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    call("landlock", version)
    every = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    of_files = every & (1 << 0 | 1 << 1 | 1 << 2 | 1 << 14)
    no_devices = every & ~(1 << 6 | 1 << 11 | 1 << 15)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("=QQQ", every, 3, 3)[:size]
    rules = libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), 0)
    call("landlock_create_ruleset", rules)
    reading = 1 << 0 | 1 << 2 | 1 << 3
    # A shared mapping of /dev/zero that can be written to is memory that nothing counts.
    devices = ["/dev/null", "/dev/full", "/dev/random", "/dev/urandom"]
    for rights, paths in [(reading, read), (no_devices, change), (1 << 1 | 1 << 2, devices), (1 << 2, ["/dev/zero"])]:
        for path in paths:
            try:
                found = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & of_files, found)
            call("landlock_add_rule", libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0))
            os.close(found)
    call("landlock_restrict_self", libc.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def drop_capabilities():
    for capability in range(64):
        if libc.prctl(CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    libc.prctl(CAP_AMBIENT, 4, 0, 0, 0)
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    call("capset", libc.capset(header, none))


def filter_calls(programs):
    for program in programs:
        filled = ctypes.create_string_buffer(program, len(program))
        loaded = struct.pack("@HP", len(program) // 8, ctypes.addressof(filled))
        call("seccomp", libc.prctl(SECCOMP, 2, loaded, 0, 0))


def limit(order):
    limits = order["limits"]
    memory = limits["memory"]
    for which, most in [
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_AS, max(4 * memory, memory + (2 << 30))),
        (resource.RLIMIT_FSIZE, limits["file"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + 1),
        (resource.RLIMIT_CPU, limits["cpu"]),
        (resource.RLIMIT_STACK, 64 << 20),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_SIGPENDING, 256),
        (resource.RLIMIT_MSGQUEUE, 0),
    ]:
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
