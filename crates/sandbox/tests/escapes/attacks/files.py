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
    tries(lambda: does(open, folder + "/levade", "w"))
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
