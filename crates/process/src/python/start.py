import json, os, sys, types

# The line to the process that sends requests moves out of the reach of the user's code, which finds nothing to read,
# and prints to standard error.
requests, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.close(nothing)
os.dup2(2, 1)
sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
first = json.loads(requests.readline())
package = types.ModuleType("levade_worker")
package.__path__ = []
sys.modules[package.__name__] = package
for name, source in first["modules"]:
    module = types.ModuleType("levade_worker." + name)
    sys.modules[module.__name__] = module
    setattr(package, name, module)
    exec(compile(source, "levade_worker/" + name + ".py", "exec"), module.__dict__)
package.serve.main(first, package.protocol.Line(requests, out, first["key"]))
