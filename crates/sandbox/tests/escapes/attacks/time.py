### late: ignoring signals past the deadline
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
while True:
    time.sleep(1)
### late: computing past the deadline
while True:
    pass
### late: one number that takes for ever
10 ** 10 ** 10
### late: stopped by itself
os.kill(os.getpid(), signal.SIGSTOP)
### late: children that compute past the deadline
for _ in range(20):
    if os.fork() == 0:
        while True:
            pass
time.sleep(60)
### late: children that end at once, for ever
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        time.sleep(0.001)
### late: an exit function that does not end
import atexit

atexit.register(does_not_end)
### late: a finalizer that does not end
class Odd:
    __del__ = does_not_end


odd = Odd()
### late: a thread that is waited for
threading.Thread(target=does_not_end).start()
### late: a flood of signals to itself
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)
time.sleep(60)
### late: a program that runs on in other programs
os.execv(sys.executable, [sys.executable, "-c", "import os, sys; os.execv(sys.executable, sys.orig_argv)"])
