### fine: a line of 30 MB
sys.stdout.write("x" * (30 << 20))
### late: a flood
while True:
    os.write(1, b"y" * 65536)
    os.write(2, b"n" * 65536)
### exit 4: closing all streams
for fd in (0, 1, 2):
    os.close(fd)
os._exit(4)
### fine: output that is no text
os.write(1, bytes(range(256)) * 10)
### signal 6: a core dump
os.abort()
### exit 3: an exit code
sys.exit(3)
### exit 1: an exit with words
sys.exit("words")
### exit 1: an exception
1 / 0
### signal 11: a crash
ctypes.string_at(1)
### exit 1: recursion
def again():
    again()


again()
### signal 11: recursion without end
sys.setrecursionlimit(1 << 30)


class Again:
    def __getattr__(self, name):
        return getattr(self, name)


Again().x
### exit 1: code that cannot be parsed
this is no Python
### exit 3: an exit function that exits
import atexit

atexit.register(os._exit, 3)
### exit 120: output that cannot be written at the end
sys.stdout.write("x")
os.close(1)
### exit 0: streams that are replaced
sys.stdout = sys.stderr = None
### exit 7: an exit code from a thread does not count
threading.Thread(target=sys.exit, args=(3,)).start()
sys.exit(7)
### exit 1: an exception with a text that cannot be made
class Odd(Exception):
    __str__ = property(lambda self: 1 / 0)


raise Odd()
### fine: modules that are taken away
sys.modules.clear()
### fine: a finalizer that fails
class Odd:
    def __del__(self):
        raise SystemExit(9)


odd = Odd()
### exit 1: an exit with an object that cannot be printed
class Odd:
    def __str__(self):
        raise ValueError


sys.exit(Odd())
