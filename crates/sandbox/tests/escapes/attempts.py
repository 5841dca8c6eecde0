# Attempts at getting out of the sandbox, or at harming what is outside: each is a program of its own, after the
# lines before the first title. A title says how it must end: `refused` (all that it tries fails, and is printed so),
# `fine`, `exit N`, `signal N`, `late`, `memory`. Numbers of system calls are those of x86-64. Names in `@` are
# things of the host that `main.rs` makes.
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


### refused: tcp
tries(does, socket.create_connection, ("127.0.0.1", @port@), 2)
### refused: tcp over IPv6
tries(lambda: does(socket.socket(socket.AF_INET6).connect, ("::1", @port@)))
### refused: udp
tries(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", @port@)))
### refused: listening
tries(lambda: does(socket.socket().bind, ("", 0)))
### refused: raw sockets
tries(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
### refused: packet sockets
tries(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0)
### refused: netlink
tries(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)
### refused: vsock
tries(socket.socket, 40, socket.SOCK_STREAM, 0)
### refused: a local socket of the host
tries(lambda: does(socket.socket(socket.AF_UNIX).connect, "@unix@"))
### refused: an abstract socket of the host
tries(lambda: does(socket.socket(socket.AF_UNIX).connect, "\0@abstract@"))
### refused: names by DNS
tries(socket.gethostbyname, "example.com")
### refused: the network as /proc shows it
tries(lambda: open("/proc/net/tcp").read())
### refused: a file of the host
tries(lambda: open("@secret@").read())
### refused: passwords
tries(lambda: open("/etc/shadow").read())
### refused: users of the host
tries(lambda: "root:" in open("/etc/passwd").read())
### refused: home folders
python = (sys.prefix, sys.base_prefix)
for home in ("/root", "/home"):
    tries(lambda: [f for f in os.listdir(home) if not any(p.startswith(home + "/" + f) for p in python)])
### refused: other folders of the root
known = "bin dev etc lib lib32 lib64 libx32 opt proc root run srv tmp usr work home var".split()
tries(lambda: [f for f in os.listdir("/") if f not in known])
### refused: writing outside
for folder in ["/", "/etc", "/usr/bin", "/usr/lib", "/dev", "/proc", "/run", sys.prefix, "@folder@"]:
    tries(lambda: does(open, folder + "/dressage", "w"))
### refused: changing the interpreter
tries(open, os.path.realpath(sys.executable), "r+b")
### refused: removing libraries
tries(does, os.remove, os.__file__)
### refused: symbolic links to the host
os.symlink("@secret@", "link")
tries(lambda: open("link").read())
### refused: symbolic links upwards
os.symlink("../../../../..", "up")
tries(lambda: open("up@secret@").read())
### refused: hard links
tries(does, os.link, os.path.realpath(sys.executable), "hard")
### refused: upwards from the root
tries(os.chdir, "/")
tries(os.chdir, "../../..")
tries(lambda: open(".@secret@").read())
### refused: file handles
tries(call, 304, -100, ctypes.create_string_buffer(16), 0)
### refused: devices that are no harmless ones
known = "null zero full random urandom shm fd stdin stdout stderr".split()
tries(lambda: [d for d in os.listdir("/dev") if d not in known])
### refused: making devices
tries(lambda: os.mknod("mem", 0o020666, os.makedev(1, 1)) or open("mem", "rb").read(1))
### refused: the memory of the machine
for device in ["/dev/mem", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/proc/kcore", "/dev/vda", "/dev/sda"]:
    tries(open, device, "rb")
### refused: the kernel's files
tries(lambda: os.listdir("/sys/kernel"))
### refused: the kernel's settings
tries(lambda: open("/proc/sys/kernel/core_pattern", "w").write("|/bin/sh"))
### refused: a magic request of the kernel
tries(lambda: open("/proc/sysrq-trigger", "w").write("b"))
### refused: mounting
for kind in (b"tmpfs", b"proc", b"sysfs", b"overlay", b"cgroup2"):
    tries(lambda: libc.mount(b"x", b"/tmp", kind, 0, None) == 0)
### refused: mounting a folder elsewhere
tries(lambda: libc.mount(b"/usr", b"/tmp", None, 1 << 12, None) == 0)
### refused: remounting
tries(lambda: libc.mount(None, b"/usr", None, 1 << 5 | 1 << 12, None) == 0)
### refused: unmounting
for path in (b"/work", b"/proc", b"/"):
    tries(lambda: libc.umount2(path, 2) == 0)
### refused: chroot
tries(does, os.chroot, ".")
### refused: pivot_root
tries(call, 155, b".", b".")
### refused: the newer calls for mounts
for number in (428, 429, 430, 431, 432, 433, 442):
    tries(call, number, 0, 0, 0, 0, 0)
### refused: namespaces
for bit in (7, 17, 25, 26, 27, 28, 29, 30):
    tries(lambda: libc.unshare(1 << bit) == 0)
### refused: clone with namespaces
for bit in (17, 28, 29, 30):
    tries(call, 56, 1 << bit | 17, None, None, None, None)
### refused: clone3
tries(call, 435, ctypes.create_string_buffer(88), 88)
### refused: namespaces of others
for name in ("mnt", "user", "net", "pid"):
    tries(lambda: libc.setns(os.open("/proc/1/ns/" + name, 0), 0) == 0)
### refused: processes of others
tries(lambda: [p for p in os.listdir("/proc") if p.isdigit() and int(p) > 40])
### refused: the keeper's files
for name in ("environ", "mem", "maps", "auxv", "stack"):
    tries(lambda: open("/proc/1/" + name, "rb").read(1))
for name in ("fd", "root", "cwd"):
    tries(lambda: os.listdir("/proc/1/" + name))
### refused: groups of the host, as the kernel counts them
tries(lambda: [line for line in open("/proc/self/cgroup").read().split() if not line.endswith(":/")])
### refused: signals to the host
tries(does, os.kill, @pid@, 0)
### refused: handles of processes of the host
tries(os.pidfd_open, @pid@)
### refused: tracing the keeper
tries(call, 101, 16, 1, 0, 0)
### refused: reading the keeper's memory
tries(call, 310, 1, None, 0, None, 0, 0)
### refused: taking descriptors of processes
tries(call, 438, os.pidfd_open(os.getpid()), 0, 0)
### refused: comparing processes
tries(call, 312, 1, os.getpid(), 0, 0, 0)
### fine: killing the keeper
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
    try:
        os.kill(1, number)
    except OSError:
        pass
time.sleep(0.1)
### fine: detached processes
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1)
        os._exit(0)
### fine: a detached shell
subprocess.Popen(["/bin/sh", "-c", "nohup sleep 1000 > /dev/null 2>&1 & disown 2>/dev/null"], start_new_session=True)
### late: ignoring signals past the deadline
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
while True:
    time.sleep(1)
### late: computing past the deadline
while True:
    pass
### late: one number that takes for ever
10 ** 10 ** 10
### late: stopped by itself
os.kill(os.getpid(), signal.SIGSTOP)
### refused: killing all
tries(does, os.kill, -1, signal.SIGKILL)
### late: a fork bomb
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
### late: a shell's fork bomb
subprocess.run(["/bin/sh", "-c", "f() { f | f & }; f"])
time.sleep(60)
### exit 5: a bomb of threads
count = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        count += 1
except RuntimeError:
    print("refused:", count)
    os._exit(5 if count < 200 else 1)
### refused: higher limits
for which in (resource.RLIMIT_NPROC, resource.RLIMIT_DATA, resource.RLIMIT_CORE, resource.RLIMIT_NOFILE):
    both = ctypes.create_string_buffer(b"\xff" * 16)
    tries(lambda: does(call, 160, int(which), both))
### refused: a better priority
tries(does, os.setpriority, os.PRIO_PROCESS, 0, -20)
### refused: real-time scheduling
tries(does, os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50))
### memory: a memory bomb
held = []
while True:
    held.append(bytearray(16 << 20))
### memory: a memory bomb of a mapping
held = mmap.mmap(-1, 1 << 34, flags=mmap.MAP_PRIVATE)
for at in range(0, 1 << 34, 4096):
    held[at] = 1
### memory: a shared memory bomb
held = []
while True:
    held.append(mmap.mmap(-1, 16 << 20))
    for at in range(0, 16 << 20, 4096):
        held[-1][at] = 1
### memory: a memory bomb of many processes
for _ in range(20):
    if os.fork() == 0:
        held = bytearray(b"x") * (40 << 20)
        time.sleep(60)
time.sleep(60)
### refused: files without names
tries(os.memfd_create, "x")
### refused: memory and queues of System V and POSIX
for number in (29, 64, 68, 240):
    tries(call, number, 1234, 1 << 20, 0o1666, 0)
### refused: filling the disk with a file
def fill():
    with open("/tmp/big", "wb") as file:
        for _ in range(1000):
            file.write(bytes(1 << 20))
    return "filled"


signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tries(fill)
### refused: filling the disk with many files
def fill(folder):
    for number in range(100):
        with open("%s/%d" % (folder, number), "wb") as file:
            file.write(bytes(8 << 20))
    return "filled"


for folder in ("/work", "/tmp", "/dev/shm"):
    tries(fill, folder)
### refused: filling the disk with names
def fill():
    for number in range(100000):
        os.close(os.open("n%d" % number, os.O_CREAT))
    return "filled"


tries(fill)
### refused: filling the disk with folders in folders
def fill():
    for number in range(100000):
        os.mkdir("d")
        os.chdir("d")
    return "filled"


tries(fill)
### refused: a file with holes
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tries(lambda: does(os.truncate, os.open("hole", os.O_CREAT | os.O_RDWR), 1 << 40))
### refused: locking memory
tries(lambda: libc.mlockall(3) == 0)
### refused: descriptors in masses
tries(lambda: [os.dup(0) for _ in range(100000)])
### fine: a line of 30 MB
sys.stdout.write("x" * (30 << 20))
### late: a flood
while True:
    os.write(1, b"y" * 65536)
    os.write(2, b"n" * 65536)
### exit 4: closing all streams
for fd in (0, 1, 2):
    os.close(fd)
os._exit(4)
### fine: output that is no text
os.write(1, bytes(range(256)) * 10)
### refused: another user
for become in (os.setuid, os.setgid, os.seteuid, os.setegid):
    tries(does, become, 0)
### refused: groups
tries(does, os.setgroups, [0])
### refused: capabilities
caps = [line.split() for line in open("/proc/self/status") if line.startswith("Cap")]
tries(lambda: [line for line in caps if int(line[1], 16)])
### refused: programs that become root
for program in ("/bin/su", "/bin/mount", "/usr/bin/sudo", "/usr/bin/passwd", "/usr/bin/newgrp"):
    tries(lambda: "uid=0" in subprocess.run([program, "-c", "id"], stdin=-3, capture_output=True, text=True).stdout)
### refused: clocks
tries(does, time.clock_settime, 0, 0)
tries(call, 164, None, None)
tries(call, 159, ctypes.create_string_buffer(256))
### refused: the host's name
tries(does, socket.sethostname, "x")
tries(lambda: socket.gethostname() == "@host@")
### refused: keys
tries(call, 250, 0, -3, 0)
tries(call, 248, b"user", b"k", b"v", 1, -3)
### refused: bpf
tries(call, 321, 0, ctypes.create_string_buffer(128), 128)
### refused: io_uring
tries(call, 425, 8, ctypes.create_string_buffer(120))
### refused: perf_event_open
tries(call, 298, ctypes.create_string_buffer(128), 0, -1, -1, 0)
### refused: userfaultfd
tries(call, 323, 1)
### refused: kernel modules
tries(call, 175, None, 0, b"")
tries(call, 313, 0, b"", 0)
### refused: the kernel's log
tries(call, 103, 3, ctypes.create_string_buffer(100), 100)
### refused: rebooting
tries(call, 169, 0xFEE1DEAD, 672274793, 0, None)
### refused: swap, quotas, accounting
for number in (167, 179, 163):
    tries(call, number, b"/tmp", 0, 0, 0)
### refused: ports
tries(call, 172, 3)
tries(call, 173, 0, 1, 1)
### refused: loosening the filter
tries(lambda: libc.prctl(22, 0, 0, 0, 0) == 0)
tries(call, 317, 0, 0, None)
### refused: calls that are yet to be invented
for number in range(462, 520):
    tries(call, number, 0, 0, 0, 0, 0, 0)
### refused: new privileges
tries(lambda: libc.prctl(38, 0, 0, 0, 0) == 0)
### refused: secrets in the environment
tries(lambda: [value for value in os.environ.values() if "hush" in value])
tries(lambda: b"hush" in open("/proc/self/environ", "rb").read())
### refused: descriptors of others
tries(lambda: [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 3])
tries(lambda: [fd for fd in range(3, 1024) if fd != 3 and does(os.fstat, fd)])
### refused: the terminal
import fcntl
import termios

tries(open, "/dev/tty")
for fd in (0, 1, 2):
    tries(fcntl.ioctl, fd, termios.TIOCSTI, b"x")
### signal 6: a core dump
os.abort()
### exit 3: an exit code
sys.exit(3)
### exit 1: an exit with words
sys.exit("words")
### exit 1: an exception
1 / 0
### signal 11: a crash
ctypes.string_at(1)
### exit 1: recursion
def again():
    again()


again()
### signal 11: recursion without end
sys.setrecursionlimit(1 << 30)


class Again:
    def __getattr__(self, name):
        return getattr(self, name)


Again().x
### exit 1: code that cannot be parsed
this is no Python
