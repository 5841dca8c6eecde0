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


def serve_cells(names, most):
    """Runs cells that come over descriptor 3, all with the same names, until it closes."""
    import ast
    import builtins
    import linecache
    import traceback

    line, shown, ours = socket.socket(fileno=3), [], os.getpid()
    names["__builtins__"] = builtins
    # So that code which starts other processes does not hand it on.
    os.set_inheritable(3, False)

    def show(*values):
        for value in values:
            words = repr(value)
            shown.append(words if len(words) <= most else words[:most] + "…")

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
        error = None
        try:
            run(number, source)
        except BaseException as raised:
            # Frames of this file say nothing about the code.
            trace = raised.__traceback__
            while trace is not None and trace.tb_frame.f_globals is globals():
                trace = trace.tb_next
            lines = traceback.format_exception(type(raised), raised.with_traceback(trace), trace)
            words = "".join(lines)
            words = words if len(words) <= most else words[: most // 2] + "\n…\n" + words[-most // 2 :]
            value = str(raised)[:most]
            error = {"ename": type(raised).__name__, "evalue": value, "traceback": words.splitlines()}
            raised = trace = None
        if os.getpid() != ours:
            os._exit(0)  # A fork that the code made and forgot about.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # The code has closed it.
        answer = json.dumps({"shown": shown, "error": error}).encode()
        line.sendall(struct.pack("=I", len(answer)) + answer)
