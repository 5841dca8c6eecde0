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
### refused: the terminal
import fcntl
import termios

tries(open, "/dev/tty")
for fd in (0, 1, 2):
    tries(fcntl.ioctl, fd, termios.TIOCSTI, b"x")
### refused: sockets of any family
for family in range(1, 46):
    tries(socket.socket, family, socket.SOCK_STREAM, 0)
    tries(socket.socket, family, socket.SOCK_DGRAM, 0)
### refused: pairs of other families
for family in [number for number in range(2, 46)]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        tries(socket.socketpair, family, kind)
### refused: listening and accepting at one of a pair
for what in (lambda: socket.socketpair()[0].listen(), lambda: socket.socketpair()[0].accept()):
    tries(what)
### refused: calls of 32 bits
tries(call, 0x40000000 + 41, 1, 1, 0)
tries(call, 0x40000000 + 39)
### refused: asynchronous input and output
for number in (206, 207, 208, 209, 210, 426, 427):
    tries(call, number, 0, 0, 0, 0, 0)
### refused: memory of other processes by file
tries(lambda: open("/proc/1/mem", "rb"))
### refused: core pattern, modules and firmware
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/sys/firmware", "/proc/kallsyms"):
    tries(lambda: open(path).read())
### refused: handles of mounts
for number in (457, 458, 303):
    tries(call, number, 0, 0, 0, 0, 0)
### refused: Landlock rules of its own, as an oracle
for number in (444, 445, 446):
    tries(call, number, None, 0, 1)
### refused: the layout of a process
tries(call, 157, 35, 1, 0, 0, 0)
