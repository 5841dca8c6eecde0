### refused: names of the host's and of other runs' sockets
tries(lambda: [line for line in open("/proc/self/net/unix").readlines()[1:] if "/" in line or "@" in line])
### refused: sockets of other runs
tries(lambda: open("/proc/self/net/unix").readlines()[1:])
### refused: abstract names
tries(lambda: does(socket.socket(socket.AF_UNIX).bind, "\0taken"))
### refused: a name for one of a pair
tries(lambda: does(socket.socketpair()[0].bind, "\0taken"))
tries(lambda: does(socket.socketpair()[0].bind, "/work/socket"))
### refused: a service in a shown folder
tries(lambda: does(socket.socket(socket.AF_UNIX).connect, "@shown@/socket"))
tries(lambda: does(socket.socketpair()[0].connect, "@shown@/socket"))
### refused: a message to a service in a shown folder
tries(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", "@shown@/datagrams"))
tries(lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"x", "@shown@/datagrams"))
pair = socket.socketpair(type=socket.SOCK_SEQPACKET)
try:
    pair[0].sendto(b"x", "@shown@/datagrams")  # The kernel ignores the name: the other end of the pair has it.
    assert pair[1].recv(10) == b"x"
except OSError:
    pass
tries(lambda: pair[0].sendmsg([b"x"], [], 0, "@shown@/datagrams"))
### refused: writing into a pipe of a shown folder
tries(lambda: os.write(os.open("@shown@/pipe", os.O_WRONLY | os.O_NONBLOCK), b"x"))
tries(lambda: os.write(os.open("@shown@/pipe", os.O_RDWR | os.O_NONBLOCK), b"x"))
### refused: reading what the host writes into a pipe of a shown folder
def read():
    file = os.open("@shown@/pipe", os.O_RDONLY | os.O_NONBLOCK)
    time.sleep(1)
    try:
        return os.read(file, 100)
    except BlockingIOError:
        return b""


tries(read)
### refused: locking the interpreter
import fcntl

for how in (fcntl.LOCK_EX, fcntl.LOCK_SH):
    tries(lambda: does(fcntl.flock, os.open(os.path.realpath(sys.executable), os.O_RDONLY), how | fcntl.LOCK_NB))
    tries(lambda: does(fcntl.flock, os.open(os.__file__, os.O_RDONLY), how | fcntl.LOCK_NB))
### refused: locking a shown file
import fcntl

tries(lambda: does(fcntl.flock, os.open("@shown@/data", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB))
tries(lambda: does(fcntl.flock, os.open("@shown@", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB))
tries(lambda: does(fcntl.lockf, os.open("@shown@/data", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB))
### refused: locks of open file descriptions
import fcntl
import struct

for command in (37, 38):
    lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0)
    tries(lambda: does(fcntl.fcntl, os.open("@shown@/data", os.O_RDONLY), command, lock))
### refused: leases
import fcntl

for kind in (fcntl.F_RDLCK, fcntl.F_WRLCK):
    tries(lambda: does(fcntl.fcntl, os.open("@shown@/data", os.O_RDONLY), 1024, kind))
    tries(lambda: does(fcntl.fcntl, os.open("/work", os.O_RDONLY), 1024, kind))
### refused: notifications about programs that the host starts
import fcntl

for folder in ("/usr/bin", "/usr/lib", "@shown@"):
    tries(lambda: does(fcntl.fcntl, os.open(folder, os.O_RDONLY), 1026, 0x8000003F))
### refused: hints for files
import fcntl

tries(lambda: does(fcntl.fcntl, os.open("@shown@/data", os.O_RDONLY), 1036, bytes(8)))
### refused: changing a shown folder
for what in (lambda: open("@shown@/new", "w"), lambda: open("@shown@/data", "a"), lambda: open("@shown@/data", "r+")):
    tries(what)
for what in (os.remove, os.chmod, os.utime, os.mkdir, os.rename, os.link):
    arguments = {os.chmod: [0o777], os.rename: ["@shown@/other"], os.link: ["@shown@/other"]}.get(what, [])
    path = "@shown@/new" if what is os.mkdir else "@shown@/data"
    tries(lambda: does(what, path, *arguments))
### refused: attributes of shown files
tries(lambda: does(os.setxattr, "@shown@/data", "user.x", b"x"))
### refused: a sibling of a core for itself
tries(call, 157, 62, 1, 0, 0, 0)
### refused: more filters
import struct

program = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
head = struct.pack("@HP", 1, ctypes.addressof(program))
tries(call, 157, 22, 2, head, 0, 0)
tries(call, 317, 1, 0, head)
### refused: processes of other runs
tries(lambda: [pid for pid in range(2, 5000) if pid != os.getpid() and os.path.exists("/proc/%d" % pid)])
### refused: files of other runs
tries(lambda: os.listdir("/tmp") + os.listdir("/dev/shm"))
### refused: memory that other runs have locked or shared
for number in (29, 64, 68, 240):
    tries(call, number, 1234, 1 << 20, 0o1666, 0)
### refused: load of the machine by process
tries(lambda: [name for name in os.listdir("/proc") if not name.isdigit() and name not in ("self", "thread-self")])
### refused: mounts of other runs
tries(lambda: os.path.exists("/run/work") or os.listdir("/run"))
### refused: core dumps for a program of the host
before = resource.getrlimit(resource.RLIMIT_CORE)
for size in (b"\0", b"\xff"):
    libc.setrlimit(resource.RLIMIT_CORE, size * 16)
    libc.syscall(160, resource.RLIMIT_CORE, size * 16)
tries(lambda: does(resource.prlimit, 0, resource.RLIMIT_CORE, (0, 0)))
tries(lambda: before[1] > 1 or resource.getrlimit(resource.RLIMIT_CORE) != before)
