### memory: a memory bomb
held = []
while True:
    held.append(bytearray(16 << 20))
### memory: a memory bomb of a mapping
held = mmap.mmap(-1, 1 << 34, flags=mmap.MAP_PRIVATE)
for at in range(0, 1 << 34, 4096):
    held[at] = 1
### refused: a shared memory bomb
def fill():
    held = []
    while len(held) < 100:
        held.append(mmap.mmap(-1, 4 << 20))
        for at in range(0, 4 << 20, 4096):
            held[-1][at] = 1
    return "filled"


tries(fill)
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
### refused: locking memory
tries(lambda: libc.mlockall(3) == 0)
### refused: descriptors in masses
tries(lambda: [os.dup(0) for _ in range(100000)])
### bounded: buffers of socket pairs in many processes
def hold():
    pairs = [socket.socketpair() for _ in range(110)]
    return sum(fill_socket(end) for pair in pairs for end in pair), pairs


many(20, hold)
### bounded: socket buffers that are made larger
def hold():
    pairs = [socket.socketpair() for _ in range(110)]
    for pair in pairs:
        for end in pair:
            for option in (7, 8, 32, 33):
                end.setsockopt(1, option, 1 << 20)
    return sum(fill_socket(end) for pair in pairs for end in pair), pairs


many(20, hold)
### bounded: buffers of packet sockets
def hold():
    pairs = [socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in range(110)]
    return sum(fill_socket(end, 1024) for pair in pairs for end in pair), pairs


many(20, hold)
### refused: socket buffers larger than the default
pair = socket.socketpair()
before = pair[0].getsockopt(1, 7)
pair[0].setsockopt(1, 7, 1 << 20)
tries(lambda: pair[0].getsockopt(1, 7) > before)
### refused: datagram pairs
for kind in (2, 3, 4, 6, 10):
    tries(socket.socketpair, socket.AF_UNIX, kind)
### refused: filters of sockets
pair = socket.socketpair()
for option in (26, 50, 51, 52):
    tries(lambda: does(pair[0].setsockopt, 1, option, bytes(16)))
### bounded: shared mappings whose pages are dropped
def hold():
    size = 40 << 20
    at = anonymous(size)
    ctypes.memset(at, 1, size)
    libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), 4)
    return size, at


many(20, hold)
### bounded: shared mappings of which one page stays
def hold():
    size = 40 << 20
    at = anonymous(size, 0x23)
    ctypes.memset(at, 1, size)
    libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t(size - 4096))
    return size, at


many(20, hold)
### refused: shared mappings of /dev/zero
tries(lambda: mapped(None, 1 << 20, 3, 1, os.open("/dev/zero", os.O_RDWR), 0))
tries(lambda: mapped(None, 1 << 20, 3, 1, os.open("/dev/zero", os.O_RDONLY), 0))
### bounded: shared mappings by Python, dropped
def hold():
    kept = []
    try:
        for _ in range(40):
            kept.append(mmap.mmap(-1, 1 << 20))
            kept[-1].write(bytes(1 << 20))
            kept[-1].madvise(mmap.MADV_DONTNEED)
    except OSError as error:
        print("refused:", error)
    return len(kept) << 20, kept


many(20, hold)
### bounded: processes whose first thread has ended
def hold():
    kept = bytearray(b"x") * (100 << 20)
    return len(kept), kept


many(8, hold, leaderless=True)
### bounded: descriptors of processes whose first thread has ended
def hold():
    pairs = [socket.socketpair() for _ in range(100)]
    return sum(fill_socket(end) for pair in pairs for end in pair), pairs


many(20, hold, leaderless=True)
### bounded: pipes
def hold():
    pipes, amount = [], 0
    for _ in range(110):
        pipes.append(os.pipe())
        os.set_blocking(pipes[-1][1], False)
        try:
            while True:
                amount += os.write(pipes[-1][1], bytes(4096))
        except BlockingIOError:
            pass
    return amount, pipes


many(60, hold)
### refused: larger pipes
import fcntl

tries(fcntl.fcntl, os.pipe()[1], 1031, 1 << 20)
### refused: watching files
tries(call, 253)
tries(call, 294, 0)
tries(call, 300, 0, 0)
### refused: pages moved between files, pipes and sockets
ours, theirs = os.pipe()
file = os.open("f", os.O_CREAT | os.O_RDWR)
os.write(file, bytes(4096))
tries(call, 275, file, ctypes.byref(ctypes.c_long(0)), theirs, None, 1, 0)
tries(call, 276, ours, theirs, 1, 0)
tries(call, 278, theirs, ctypes.create_string_buffer(16), 1, 0)
tries(call, 40, theirs, file, None, 1)
### refused: descriptors in flight
pair = socket.socketpair()
tries(socket.send_fds, pair[0], [b"x"], [0])
tries(call, 46, pair[0].fileno(), ctypes.create_string_buffer(56), 0)
tries(call, 307, pair[0].fileno(), ctypes.create_string_buffer(64), 1, 0)
### refused: secret memory
tries(call, 447, 0)
### refused: huge pages
tries(anonymous, 1 << 21, 0x22 | 0x40000)
### memory: descriptors that epoll watches many times
import select


def hold():
    polls, ends, items = [select.epoll() for _ in range(60)], [os.pipe() for _ in range(30)], 0
    for ours, theirs in ends:
        for number in range(200, 250):
            os.dup2(ours, number)
            for poll in polls:
                poll.register(number)
                items += 1
    return items * 300, (polls, ends)


many(40, hold)
### memory: watched descriptors of one epoll in masses
import select

poll, ends = select.epoll(), [os.pipe()[0] for _ in range(30)]
for number in range(200, 250):
    for ours in ends:
        os.dup2(ours, number)
        poll.register(number)
time.sleep(60)
### memory: epolls that only a blocked call holds
import select

threading.stack_size(1 << 20)
ours, _ = os.pipe()
for number in range(200, 250):
    os.dup2(ours, number)
held = 0
for _ in range(50):
    polls = [select.epoll() for _ in range(100)]
    for poll in polls:
        for number in range(200, 250):
            poll.register(number)
            held += 300
    waited = (ctypes.c_uint64 * 100)(*[poll.fileno() | 2 << 32 for poll in polls])
    threading.Thread(target=lambda waited=waited: libc.poll(waited, 100, -1), daemon=True).start()
    time.sleep(0.02)
    for poll in polls:
        poll.close()
time.sleep(2)
print("HELD", held >> 20, "and 5000 epolls")
### bounded: pipes that only a blocked call holds
threading.stack_size(1 << 20)
held = 0
for _ in range(55):
    pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(60)]
    held += sum(os.write(theirs, bytes(65536)) for _, theirs in pipes)
    waited = (ctypes.c_uint64 * 120)(*[end | (4 if at else 2) << 32 for pipe in pipes for at, end in enumerate(pipe)])
    threading.Thread(target=lambda waited=waited: libc.poll(waited, 120, -1), daemon=True).start()
    time.sleep(0.02)
    for pipe in pipes:
        os.close(pipe[0]), os.close(pipe[1])
time.sleep(2)
print("HELD", held >> 20)
### fine: waiting for few descriptors in many threads
import select

threading.stack_size(1 << 20)
pairs = [os.pipe() for _ in range(40)]
waiting = [threading.Thread(target=select.select, args=([ours], [], [], 1)) for ours, _ in pairs[:8]]
waiting += [threading.Thread(target=select.select, args=([pairs[0][0]], [], [], 1)) for _ in range(8)]
for thread in waiting:
    thread.start()
for thread in waiting:
    thread.join()
### bounded: page tables of pages that are only read
def hold():
    size, pages = 1900 << 20, 0
    at = anonymous(size, 0x4022)
    for address in range(at, at + size, 2 << 20):
        ctypes.c_char.from_address(address).value
        pages += 1
    return pages * 4096, at


many(60, hold)
### bounded: mappings in masses
def hold():
    count, page = 60000, 4096
    at = anonymous(count * page, 0x4022)
    for number in range(0, count, 2):
        if libc.mprotect(ctypes.c_void_p(at + number * page), page, 1):
            raise OSError(ctypes.get_errno(), "mprotect")
    return count * 250, at


many(60, hold)
### bounded: locks of ranges in masses
import fcntl


def hold():
    for number in range(20):
        file = open("lock%d-%d" % (os.getpid(), number), "w")
        for at in range(300):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 2 * at)
        kept.append(file)
    return 20 * 300 * 200, kept


kept = []
many(20, hold)
### refused: timers in masses
def fill():
    timer = ctypes.c_int()
    for _ in range(100000):
        call(222, 1, None, ctypes.byref(timer))
    return "filled"


tries(fill)
### refused: queued signals in masses
def fill():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
    info = ctypes.create_string_buffer(128)
    ctypes.memmove(info, b"\x22\0\0\0\0\0\0\0\xff\xff\xff\xff", 12)
    for _ in range(100000):
        call(129, os.getpid(), int(signal.SIGRTMIN), info)
    return "filled"


tries(fill)
### refused: deleted files that stay open
def fill():
    for number in range(200):
        file = open("/tmp/d%d" % number, "wb")
        os.unlink("/tmp/d%d" % number)
        file.write(bytes(4 << 20))
        kept.append(file)
    return "filled"


kept = []
tries(fill)
### refused: symbolic links of 4 KiB in masses
def fill():
    for number in range(100000):
        os.symlink("x" * 4000, "l%d" % number)
    return "filled"


tries(fill)
### bounded: memory behind a process that hides
def hold():
    libc.prctl(4, 0, 0, 0, 0)
    kept = bytearray(b"x") * (40 << 20)
    return len(kept), kept


many(20, hold)
### bounded: memory of a program that cannot be read
import shutil

shutil.copy("/bin/bash", "hidden")
os.chmod("hidden", 0o111)
code = "x=$(head -c 30000000 /dev/zero | tr '\\0' x); echo 30000000 >&3; sleep 60"
ours, theirs = os.pipe()
for _ in range(12):
    if os.fork() == 0:
        os.dup2(theirs, 3)
        os.execv("hidden", ["bash", "-c", code])
time.sleep(6)
os.set_blocking(ours, False)
try:
    print("HELD", sum(map(int, os.read(ours, 65536).split())) >> 20)
except BlockingIOError:
    print("refused: none started")
### bounded: memory of interpreters that are started
code = "x = bytearray(b'x') * (30 << 20); import os, time; os.write(%d, b'31457280 '); time.sleep(60)"
ours, theirs = os.pipe()
for _ in range(20):
    subprocess.Popen([sys.executable, "-c", code % theirs], pass_fds=[theirs])
time.sleep(8)
print("HELD", sum(map(int, os.read(ours, 65536).split())) >> 20)
### bounded: memory of daemons
def hold():
    os.setsid()
    kept = bytearray(b"x") * (20 << 20)
    return len(kept), kept


many(40, hold)
### bounded: copies of private file mappings
def hold():
    paths = [file.path for file in os.scandir(os.path.dirname(os.__file__)) if file.is_file()]
    path = max(paths, key=os.path.getsize)
    size = os.path.getsize(path)
    kept = [mmap.mmap(os.open(path, os.O_RDONLY), size, access=mmap.ACCESS_COPY) for _ in range(100)]
    for one in kept:
        for at in range(0, size, 4096):
            one[at] = 1
    return size * 100, kept


many(40, hold)
### refused: threads with descriptors of their own
tries(call, 56, 0x10F00 & ~0x400, ctypes.c_void_p(0), None, None, None)
tries(call, 436, 1000, 1000, 2)
### refused: merging pages with other processes
at = anonymous(1 << 20, 0x22)
for advice in (12, 20, 21):
    tries(lambda: does(call, 28, ctypes.c_void_p(at), ctypes.c_size_t(4096), advice))
tries(call, 157, 67, 1, 0, 0, 0)
### refused: hiding from the watch
tries(call, 157, 4, 0, 0, 0, 0)
### fine: a child that borrows the memory of its parent
held = bytearray(b"x") * (70 << 20)
for _ in range(5):
    assert subprocess.run(["/bin/true"]).returncode == 0
