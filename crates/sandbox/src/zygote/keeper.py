# The keeper: first process of a run, between the fork server and the code. Joined behind `jail.py`.


class Keeper:
    """First process of a run."""

    def __init__(self, config, fds, jailed):
        self.config, self.jailed = config, jailed
        order, self.stdin, self.stdout, self.stderr, self.line, self.cells = fds[:6]
        self.group = fds[6] if len(fds) > 6 else None
        self.line = socket.socket(fileno=self.line)
        with open(order, "rb") as file:
            size = struct.unpack("=I", file.read(4))[0]
            self.order = json.loads(file.read(size))
            self.blob = file.read()
        self.missing, self.runner = {}, None

    def run(self):
        """Runs what is ordered. Returns in the runner, with what it is to do; the keeper ends here."""
        try:
            self.prepare()
            ours = os.getpid()
            self.runner = os.fork()
            if not self.runner:
                return self.give_up(ours)
            for fd in [self.stdin, self.stdout, self.stderr, self.cells]:
                os.close(fd)
            self.outlive()
        except Exception as error:  # Whatever it is, somebody waits for it.
            self.say({"failed": str(error) or repr(error)})
        os._exit(0)

    def say(self, what, blobs=()):
        head = json.dumps(what).encode()
        try:
            self.line.sendall(struct.pack("=I", len(head)) + head + b"".join(blobs))
        except OSError:
            os._exit(0)  # Nobody listens any more.

    def prepare(self):
        ids = (os.getuid(), os.getgid())
        if self.group is not None:
            os.write(self.group, b"0")
            os.close(self.group)
        if self.jailed:
            map_user(INSIDE, self.config["ids"])
            if self.group is not None:
                # /proc/self/cgroup then shows a root, and no name of the host.
                call("unshare", libc.unshare(NEWCGROUP))
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        call("prctl", libc.prctl(DUMPABLE, 0, 0, 0, 0))
        if self.jailed:
            self.home = "/work"
            limits = self.order["limits"]
            room = "size=%d,nr_inodes=%d,mode=700" % (limits["disk"], limits["inodes"])
            shown = below(self.config["read"], ["/work", "/tmp", "/dev/shm"])
            mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, room)
            for name, at in [("work", "/work"), ("tmp", "/tmp"), ("shm", "/dev/shm")]:
                os.mkdir("/run/" + name)
                mount("/run/" + name, at, None, MS_BIND)
            call("umount", libc.umount2(b"/run", MNT_DETACH))
            for path, held in shown:
                show_again(path, held)
            for path in self.config["apart"]:
                set_apart(path)
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
        else:
            call("prctl", libc.prctl(SUBREAPER, 1, 0, 0, 0))
            self.home = self.order["folder"]
            os.mkdir(self.home, 0o700)
            os.mkdir(self.home + "/tmp")
        try:
            self.put_in()
        except OSError as error:
            self.say({"refused": "a file cannot be put in: %s" % error})
            os._exit(0)
        if not self.jailed and ids[0] == 0:
            give_away(self.home, self.config["user"])
        # Says which process this is, in any namespace.
        head = json.dumps({"keeper": True}).encode()
        socket.send_fds(self.line, [struct.pack("=I", len(head)) + head], [os.pidfd_open(os.getpid())])

    def put_in(self):
        at = 0
        for name, size in self.order["files"]:
            path = os.path.join(self.home, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write(path, self.blob[at : at + size])
            at += size
        self.blob = b""

    def give_up(self, keeper):
        """Drops all rights, in the runner. What cannot be is said, and ends the run where all must be."""
        os.setsid()
        # First of all out of the way of the low numbers.
        line = os.dup2(self.line.fileno(), 200)
        for fd, to in [(self.stdin, 0), (self.stdout, 1), (self.stderr, 2)]:
            os.dup2(fd, to)
        kept = os.dup2(self.cells, 3) if self.order["session"] else 2
        call("close_range", libc.syscall(CLOSE_RANGE, kept + 1, line - 1, 0))
        call("close_range", libc.syscall(CLOSE_RANGE, line + 1, ctypes.c_uint(0xFFFFFFFF), 0))
        self.line.detach()
        os.chdir(self.home)
        os.umask(0o022)
        try:
            steps = self.steps()
            failed = {}
            for name, step in steps:
                try:
                    step()
                except (Step, OSError, ValueError) as error:
                    failed[name] = str(error)
            if failed:
                head = json.dumps({"missing": failed}).encode()
                os.write(line, struct.pack("=I", len(head)) + head)
                if self.config["full"]:
                    os._exit(1)
        except BaseException as error:
            head = json.dumps({"failed": repr(error)}).encode()
            os.write(line, struct.pack("=I", len(head)) + head)
            os._exit(1)
        os.close(line)
        del self.line
        return self

    def steps(self):
        """The rights to drop, in order; the call filter comes last, as it refuses what the others need."""
        read, change = list(self.config["read"]), [self.home]
        if self.jailed:
            read += ["/proc", "/etc", "/dev"]
            change += ["/tmp", "/dev/shm"]
        elif os.getuid() == 0:
            user = self.config["user"]
            yield "unprivileged-user", lambda: become(user)
        yield "resource-limits", lambda: limit(self.order)
        yield "no-capabilities", drop_capabilities
        yield "no-new-privileges", lambda: call("prctl", libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0))
        yield "landlock", lambda: landlock(read, change)
        yield "dumpable", lambda: libc.prctl(DUMPABLE, 1, 0, 0, 0)
        yield "seccomp", self.filter

    def filter(self):
        if self.config["unfiltered"]:
            raise Step(self.config["unfiltered"])
        filter_calls([self.config["runner_filter"]])

    def outlive(self):
        """Waits for the runner or for the word to stop, ends what is left, hands files out."""
        runner = os.pidfd_open(self.runner)
        poll = select.poll()
        poll.register(runner, select.POLLIN)
        poll.register(self.line, select.POLLIN)
        poll.poll()
        ended = None
        while ended is None:
            # In its own namespace that is all but this process.
            self.end_all()
            pid, status = os.waitpid(-1, 0)
            if pid == self.runner:
                ended = status
        self.end_all()
        while self.reap():
            self.end_all()
        files, blobs = [], []
        room = self.order["fetch_bytes"]
        for name in self.order["fetch"]:
            content, why = take_out(self.home, name, room)
            room -= len(content)
            files.append([name, len(content), why])
            blobs.append(content)
        if not self.jailed:
            remove(self.home)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        said = {
            "code": os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else None,
            "signal": os.WTERMSIG(ended) if os.WIFSIGNALED(ended) else None,
            "cpu": usage.ru_utime + usage.ru_stime,
            "files": files,
        }
        self.say({"ended": said}, blobs)

    def end_all(self):
        if self.jailed:
            try:
                assert os.getpid() == 1
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            return
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass

    def reap(self):
        try:
            os.wait4(-1, 0)
            return True
        except ChildProcessError:
            return False


def below(read, folders):
    """Paths that are shown to code below some folders, which a run has of its own, each with what is there."""
    found = []
    for path in sorted(read):
        inside = any(path.startswith(folder + "/") for folder in folders) and os.path.lexists(path)
        if inside and not any(path.startswith(above + "/") for above, _ in found):
            link = os.readlink(path) if os.path.islink(path) else None
            found.append((path, link or os.open(path, os.O_PATH | os.O_CLOEXEC)))
    return found


def show_again(path, held):
    """Puts what was at a path there again, read-only as it was."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if isinstance(held, str):
        os.symlink(held, path)
        return
    there = "/proc/self/fd/%d" % held
    bind(there, path)
    os.close(held)


def set_apart(path):
    """Covers a directory with an overlay of itself. Its pipes, sockets and locks are then objects of this run:
    nothing that the host does with them reaches the run, and nothing the other way. Where the kernel refuses the
    overlay, the directory stays as it is, and the call filter alone keeps sockets and leases away."""
    if any(mark in path for mark in ":,\\") or not os.path.isdir(path):
        return
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV
    try:
        mount("overlay", path, "overlay", flags, "lowerdir=%s:/run,userxattr" % path)
    except Step:
        pass


def descendants(of):
    """Processes below one, found by what each calls its children."""
    found = []
    try:
        for thread in os.listdir("/proc/%d/task" % of):
            with open("/proc/%d/task/%s/children" % (of, thread)) as file:
                for pid in file.read().split():
                    found.append(int(pid))
                    found += descendants(int(pid))
    except OSError:
        pass
    return found


def give_away(folder, user):
    for above, folders, files in os.walk(folder):
        for name in [""] + files:
            try:
                os.chown(os.path.join(above, name), user, user, follow_symlinks=False)
            except OSError:
                return  # Then the runner cannot become that user either, and that is said.


def remove(folder):
    """Removes the folder of a run, whatever rights the run took away there."""
    for above, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(above, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def take_out(home, name, most):
    """Content of a file of the folder and, where there is none, why. Links are not followed."""
    folder = os.open(home, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    opened, inside = [folder], os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        for part in parts[:-1]:
            opened.append(os.open(part, inside, dir_fd=opened[-1]))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        opened.append(os.open(parts[-1], flags, dir_fd=opened[-1]))
        found = os.fstat(opened[-1])
        if found.st_mode & 0o170000 != 0o100000:
            return b"", "is no regular file"
        if found.st_size > most:
            return b"", "has %d bytes, and %d may be fetched" % (found.st_size, most)
        content = b""
        while len(content) < found.st_size:
            more = os.read(opened[-1], found.st_size - len(content))
            if not more:
                break
            content += more
        return content, None
    except OSError as error:
        return b"", os.strerror(error.errno)
    finally:
        for fd in opened:
            os.close(fd)
