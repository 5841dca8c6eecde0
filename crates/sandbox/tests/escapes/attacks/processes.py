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
### refused: limits of the keeper
for kind in range(16):
    tries(lambda: does(resource.prlimit, 1, kind, (0, 0)))
### refused: priority and processors of the keeper
tries(lambda: does(os.setpriority, os.PRIO_PROCESS, 1, 19))
tries(lambda: does(os.sched_setaffinity, 1, [0]))
### refused: a process that shares its table of descriptors
tries(lambda: os.getpid() if call(56, 0x411, None, None, None, None) else None)
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
for which in (resource.RLIMIT_NPROC, resource.RLIMIT_DATA, resource.RLIMIT_NOFILE):
    both = ctypes.create_string_buffer(b"\xff" * 16)
    tries(lambda: does(call, 160, int(which), both))
### refused: a better priority
tries(does, os.setpriority, os.PRIO_PROCESS, 0, -20)
### refused: real-time scheduling
tries(does, os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50))
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
### refused: secrets in the environment
tries(lambda: [value for value in os.environ.values() if "hush" in value])
tries(lambda: b"hush" in open("/proc/self/environ", "rb").read())
### refused: descriptors of others
tries(lambda: [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 3])
tries(lambda: [fd for fd in range(3, 1024) if fd != 3 and does(os.fstat, fd)])
