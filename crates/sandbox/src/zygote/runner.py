# The runner: code that nobody trusts, with no rights left. Joined behind `keeper.py`.


def start(keeper):
    """Runs the code. Returns to the end of the program, so that the interpreter ends as any other does."""
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
    import types

    main = types.ModuleType("__main__")
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
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def plain(text):
    """A text that JSON can hold: half of a pair of surrogates is written as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def described(raised, most):
    """An exception as its cell tells of it, whatever its own methods do."""
    import traceback

    # Frames of this file say nothing about the code.
    trace = raised.__traceback__
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    name = type(raised).__name__
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
        source = receive(struct.unpack("=I", receive(4))[0]).decode()
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
        answer = json.dumps({"shown": shown, "error": error}).encode()
        line.sendall(struct.pack("=I", len(answer)) + answer)
