# The runner: code that nobody trusts, with no rights left. Joined behind `keeper.py`.


def end(run, *arguments):
    """Runs a function to its end, and ends the process as the interpreter would, but in less time.

    The interpreter would clear every object that it was forked with, and so copy all of that memory. Here only
    what the code has made is cleared: threads are waited for, exit functions run, modules of the code lose their
    names, so that objects are finalized and files written. Then the C library ends the process.
    """
    import gc
    import weakref

    known = set(sys.modules) - {"__main__"}
    code = 0
    try:
        code = run(*arguments) or 0
    except SystemExit as error:
        code = exit_code(error.code)
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    attempt(getattr(sys.modules.get("threading"), "_shutdown", None))
    import atexit

    attempt(atexit._run_exitfuncs)
    failed = not flush_streams()
    # A collection can close a file before what writes to it.
    flush_files()
    # Finalizers should still find the names of their module: most go with the module, in a collection.
    left = [weakref.ref(sys.modules.pop(name)) for name in list(sys.modules) if name not in known]
    attempt(gc.collect)
    for module in left:
        clear(module())
    attempt(gc.collect)
    # Files that something still refers to.
    flush_files()
    failed = not flush_streams() or failed
    ctypes.PyDLL(None).exit(ctypes.c_int(120 if failed and not code else code))


def exit_code(value):
    """The exit code that `sys.exit(value)` stands for."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    attempt(lambda: sys.stderr.write("%s\n" % (value,)))
    return 1


def attempt(what):
    """Calls a function of the code, whose faults no longer matter."""
    try:
        if what:
            what()
    except BaseException:
        pass


def flush_files():
    """Writes what the code's open files hold in their buffers."""
    import gc
    import io

    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
        for found in gc.get_objects():
            if issubclass(type(found), kind) and found is not sys.stdout and found is not sys.stderr:
                attempt(found.flush)


def flush_streams():
    """Flushes standard output and error. Returns whether the output could be written."""
    done = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException:
            done = False
    return done


def clear(module):
    """Takes the names of a module away, private ones first, as the interpreter does at its end."""
    names = getattr(module, "__dict__", None)
    if not isinstance(names, dict):
        return
    for private in (True, False):
        for name in list(names):
            if isinstance(name, str) and name != "__builtins__" and private == (name[:1] == "_" and name[1:2] != "_"):
                names[name] = None


def share_by_files():
    """Lets `mmap.mmap(-1, size)` map a file of /dev/shm, whose size is limited, as the filter refuses to share
    memory without a file."""
    import mmap

    plain = mmap.mmap

    class SharedMapping(plain):
        def __new__(cls, fileno, length, flags=mmap.MAP_SHARED, *rest, **named):
            if fileno != -1 or not flags & mmap.MAP_SHARED or length <= 0:
                return plain.__new__(cls, fileno, length, flags, *rest, **named)
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else os.environ.get("TMPDIR", ".")
            file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(file, 0, length)
                return plain.__new__(cls, file, length, flags & ~mmap.MAP_ANONYMOUS, *rest, **named)
            finally:
                os.close(file)

    SharedMapping.__name__ = SharedMapping.__qualname__ = "mmap"
    SharedMapping.__module__ = "mmap"
    mmap.mmap = SharedMapping


def start(keeper):
    """Runs the code, in the runner. Returns its exit code if an exception ended it."""
    order = keeper.order
    home = keeper.home
    keeper.__dict__.clear()
    os.environ.clear()
    os.environ.update(order["environment"])
    place = "/tmp" if home == "/work" else home + "/tmp"
    path = os.path.dirname(sys.executable) + ":/usr/local/bin:/usr/bin:/bin"
    for key, value in [("HOME", home), ("LANG", "C.UTF-8"), ("TMPDIR", place), ("PATH", path)]:
        os.environ.setdefault(key, value)
    if order["command"]:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execve(order["command"][0], order["command"], os.environ)
        except OSError as error:
            print("%s: %s" % (order["command"][0], os.strerror(error.errno)), file=sys.stderr)
            sys.exit(127)
    import builtins
    import types

    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    sys.path.insert(0, home)
    # Other runs were forked from the same state.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    if order["session"]:
        return serve_cells(main.__dict__, order["shown"])
    path = os.path.join(home, order["main"])
    main.__file__, sys.argv = path, [path]
    with open(path, "rb") as file:
        source = file.read()
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        # The code can have put something else in the place of `sys.exit`.
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def plain(text):
    """A text that JSON can hold: half of a pair of surrogates is written as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def described(raised, most):
    """An exception as its cell tells of it, whatever its own methods do."""
    import traceback

    # Frames of this file say nothing about the code.
    trace = BaseException.__traceback__.__get__(raised)
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    name = type.__getattribute__(type(raised), "__name__")
    try:
        words = "".join(traceback.format_exception(type(raised), raised.with_traceback(trace), trace))
    except BaseException:
        words = name + "\n"
    try:
        value = str(raised)
    except BaseException:
        value = "<exception str() failed>"
    words = words if len(words) <= most else words[: most // 2] + "\n…\n" + words[-most // 2 :]
    return {"ename": plain(name), "evalue": plain(value[:most]), "traceback": plain(words).splitlines()}


def serve_cells(names, most):
    """Runs cells that come over descriptor 3, all with the same names, until it closes."""
    import ast
    import builtins
    import linecache

    line, shown, ours = socket.socket(fileno=3), [], os.getpid()
    # Code can put other functions in the place of these.
    pack, unpack, dumps = struct.pack, struct.unpack, json.dumps
    # An answer is read as a whole outside.
    most = min(most, 1 << 20)
    room, left_out = 2 * most, 0
    names["__builtins__"] = builtins
    # So that code which starts other processes does not hand it on.
    os.set_inheritable(3, False)

    def show(*values):
        nonlocal room, left_out
        for value in values:
            words = plain(repr(value))
            words = words if len(words) <= most else words[:most] + "…"
            if len(words) > room:
                left_out += 1
                continue
            room -= len(words) + 1
            shown.append(words)

    builtins.display = show

    def receive(size):
        received = b""
        while len(received) < size:
            more = line.recv(size - len(received))
            if not more:
                raise SystemExit(0)
            received += more
        return received

    def run(number, source):
        name = "<cell %d>" % number
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            if value is not None and not source.rstrip().endswith(";"):
                names["_"] = value
                show(value)

    number = 0
    while True:
        source = receive(unpack("=I", receive(4))[0]).decode()
        number += 1
        shown.clear()
        room, left_out, error = 2 * most, 0, None
        try:
            run(number, source)
        except BaseException as raised:
            error = described(raised, most)
        if os.getpid() != ours:
            os._exit(0)  # A fork that the code made and forgot about.
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            try:
                getattr(sys, name).flush()
            except BaseException:
                pass  # The code has closed it, or put something else in its place.
        if left_out:
            shown.append("[... %d more values are left out ...]" % left_out)
        answer = dumps({"shown": shown, "error": error}).encode()
        line.sendall(pack("=I", len(answer)) + answer)
