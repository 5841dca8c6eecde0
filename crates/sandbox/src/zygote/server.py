# The fork server of the sandbox: a Python process in a jail, which forks a jail of its own for every run.
#
# Started by `zygote.rs` as `python3 -I -X utf8 -B -c <the files of this folder>`, with one end of a socket as
# its standard input.
#
#     launcher          waits, so that the fork server can be the first process of a PID namespace
#       fork server     sees a minimal read-only root and nothing of the machine; reads one byte a run and
#                       nothing of what is in it, so that no run finds another's code or secrets in the memory
#                       that it is forked from
#         keeper        first process of the run's own namespaces: mounts its folders, puts files in, forks
#                       the runner, ends all that is left over, hands files out
#           runner      drops all that it may do, then runs the code, or an interpreter in its place
#
# All but the runner is trusted, and so is what they import. Nothing the runner does reaches the others: it is
# in another Landlock domain, has no capability, and they ignore its signals.


def fork_into(config):
    """Forks into the namespaces of a run. Returns as `fork` does and, below 0, why not."""
    # Python's own fork knows no flags; between the two calls of its hooks any fork will do in one thread.
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = libc.syscall(config["clone"], config["run_namespaces"] | signal.SIGCHLD, None, None, None, None)
    number = ctypes.get_errno()
    (ctypes.pythonapi.PyOS_AfterFork_Parent if pid else ctypes.pythonapi.PyOS_AfterFork_Child)()
    return pid, number


def spawn(config, fds):
    """Forks the keeper of a run, in namespaces of its own. Returns a keeper in the runner, else nothing."""
    pid, number = fork_into(config) if config["jailed"] else (os.fork(), 0)
    if pid < 0:
        head = json.dumps({"failed": "clone: %s" % os.strerror(number)}).encode()
        os.write(fds[4], struct.pack("=I", len(head)) + head)
    if pid:
        for fd in fds:
            os.close(fd)
        return None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(config["control"].detach())
    return Keeper(config, fds, config["jailed"]).run()


def main():
    """Enters the jail and forks a keeper a run, until whoever started this is gone. Returns in runners."""
    line = os.dup(0)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    control = socket.socket(fileno=line)
    config = json.loads(control.recv(1 << 20))
    filters = [bytes.fromhex(program) for program in config.pop("filters")]
    config["runner_filter"] = bytes.fromhex(config["runner_filter"])
    config["control"] = control
    config["jailed"] = config["namespaces"]
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    missing = {}
    try:
        # One byte: no core dump at all. At 0 bytes, a program of the host would still get one (core(5)).
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    except ValueError:
        pass  # The host allows none, and this process has no right to change that.
    if config["jailed"]:
        try:
            enter(config)
        except (Step, OSError) as error:
            missing["namespaces"] = str(error)
            control.send(json.dumps({"missing": missing}).encode())
            return None
    config["ids"] = (os.getuid(), os.getgid())
    # System V and POSIX message objects cannot be created, so that all runs can share one IPC namespace.
    config["run_namespaces"] = NEWUSER | NEWNS | NEWPID | NEWNET
    if config["jailed"]:
        pid, number = fork_into(config)
        if pid == 0:
            os._exit(0)
        if pid < 0:
            missing["namespaces"] = "clone: " + os.strerror(number)
        else:
            os.waitpid(pid, 0)
    if not config["counted"]:
        share_by_files()
    failed = {}
    for name in config["preload"]:
        try:
            __import__(name)
        except Exception as error:
            failed[name] = repr(error)
    config["unfiltered"] = None
    try:
        call("prctl", libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0))
        filter_calls(filters)
    except Step as error:
        config["unfiltered"] = str(error)
    control.send(json.dumps({"missing": missing, "preload": failed}).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    import gc

    gc.collect()
    gc.freeze()
    while True:
        order, fds, _, _ = socket.recv_fds(control, 1, 7)
        if not order:
            return None
        keeper = spawn(config, fds)
        if keeper:
            return keeper


if __name__ == "__main__":
    _keeper = main()
    if _keeper:
        end(start, _keeper)
