//! Tests of the memory watch, which counts the memory of processes from outside.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::FromRawFd;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::*;

fn exceeds(supervisor: u32, limit: u64) -> bool {
    MemoryWatch::new(supervisor, limit, false).observe().exceeded
}

#[test]
fn memory_of_children_is_counted() {
    let mut cat = std::process::Command::new("cat");
    let mut child = cat.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // A process that was just started has not mapped its libraries yet. One that responds has.
    child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let me = std::process::id();
    let found = list_descendants(me);
    let (pid, threads) = found.iter().find(|(pid, _)| *pid == child.id()).unwrap();
    let process = ObservedProcess::read(*pid, threads);
    assert!(
        process.resident > 0 && process.tables > 0 && process.proportional_memory().unwrap() > 0
    );
    assert!(process.count_mappings() > 5 && process.list_descriptors().unwrap().len() >= 3);
    assert!(exceeds(me, 1) && !exceeds(me, 1 << 40));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!exceeds(child.id(), 0));
}

#[test]
fn processor_time_of_children_is_counted() {
    let me = std::process::id();
    let busy = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn();
    let mut busy = busy.unwrap();
    let mut watch = MemoryWatch::new(me, 1 << 40, false);
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while watch.cpu < 0.2 && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
        watch = watch.observe();
    }
    busy.kill().unwrap();
    busy.wait().unwrap();
    assert!(watch.cpu >= 0.2 && watch.busy >= 1, "{watch:?}");
}

#[test]
fn descriptors_of_blocked_poll_are_counted() {
    let pipes: Vec<_> = (0..3).map(|_| std::io::pipe().unwrap()).collect();
    let mut waited: Vec<_> = pipes
        .iter()
        .map(|(ours, _)| libc::pollfd { fd: ours.as_raw_fd(), events: libc::POLLIN, revents: 0 })
        .collect();
    let (sender, thread) = mpsc::channel();
    let waiting = std::thread::spawn(move || {
        // SAFETY: the call takes no arguments and always succeeds.
        sender.send(unsafe { libc::gettid() }).unwrap();
        // SAFETY: the list outlives the call.
        unsafe { libc::poll(waited.as_mut_ptr(), 3, 20_000) }
    });
    let thread = thread.recv().unwrap() as u32;
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while count_polled(thread) != 3 {
        assert!(std::time::Instant::now() < deadline, "{}", count_polled(thread));
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(pipes);
    waiting.join().unwrap();
    assert_eq!(count_polled(thread), 0);
}

#[test]
fn children_are_found_while_sibling_threads_exit() {
    for _ in 0..300 {
        let before: Vec<_> = (0..16)
            .map(|n| {
                std::thread::spawn(move || std::thread::sleep(Duration::from_micros(400 + 37 * n)))
            })
            .collect();
        let (sender, id) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        let parent = std::thread::spawn(move || {
            let mut child = std::process::Command::new("sleep").arg("10").spawn().unwrap();
            sender.send(child.id()).unwrap();
            let _ = ends.recv();
            child.kill().unwrap();
            child.wait().unwrap();
        });
        let child = id.recv().unwrap();
        for _ in 0..20 {
            assert!(list_descendants(std::process::id()).iter().any(|(pid, _)| *pid == child));
        }
        end.send(()).unwrap();
        before.into_iter().chain([parent]).for_each(|thread| thread.join().unwrap());
    }
}

/// A Python program that has printed `ready` and waits in `read`.
struct Program {
    /// The shell that started the program.
    supervisor: std::process::Child,
    /// Everything that the program has printed.
    output: String,
}

impl Program {
    /// Starts a program and waits until it has run `code`, which keeps its objects in the list
    /// `kept`.
    fn start(code: &str) -> Self {
        // Descriptors that the program inherits from the tests must not count.
        let before = "import os\nos.closerange(3, 4096)\nkept = []";
        let code = format!("{before}\n{code}\nprint('ready', flush=True)\nos.read(0, 1)");
        let mut shell = std::process::Command::new("sh");
        // Another command follows, so that the shell remains the parent.
        shell.args(["-c", "python3 -c \"$1\"; exit", "sh", &code]);
        let streams = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut supervisor = streams.spawn().unwrap();
        let mut output = String::new();
        let mut lines = BufReader::new(supervisor.stdout.as_mut().unwrap());
        while !output.ends_with("ready\n") {
            assert!(lines.read_line(&mut output).unwrap() > 0, "the program ended: {code}");
        }
        let program = Program { supervisor, output };
        let deadline = Instant::now() + Duration::from_secs(10);
        while current_call(program.process().0) != Some(libc::SYS_read) {
            assert!(Instant::now() < deadline, "the program does not wait");
            std::thread::sleep(Duration::from_millis(2));
        }
        program
    }

    /// Returns the program with its threads.
    fn process(&self) -> (u32, BTreeSet<u32>) {
        list_descendants(self.supervisor.id()).remove(0)
    }

    /// Returns the kernel memory of the program, in bytes, without page tables and mappings, and
    /// whether it is crowding out other runs.
    fn kernel_memory(&self) -> (u64, bool) {
        let (pid, threads) = self.process();
        let process = ObservedProcess::read(pid, &threads);
        let other = process.tables + process.count_mappings() * MAPPING;
        let watch = MemoryWatch::new(self.supervisor.id(), 1 << 40, false);
        let (bytes, is_crowding) = watch.kernel_memory(&[(pid, threads)], &[process]);
        (bytes - other, is_crowding)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // The program exits when its standard input closes.
        drop(self.supervisor.stdin.take());
        let _ = self.supervisor.wait();
    }
}

/// Returns the number of the system call in which a thread waits.
fn current_call(thread: u32) -> Option<libc::c_long> {
    let text = fs::read_to_string(format!("/proc/{thread}/syscall")).ok()?;
    text.split(' ').next()?.parse().ok()
}

/// Kernel memory of a thread, of the pipes for input and output, and of /dev/null, in bytes.
const PLAIN: u64 = MAX_THREAD_BYTES + 2 * MAX_PIPE_BYTES + DESCRIPTOR;

#[test]
fn kernel_memory_is_counted_by_kind() {
    let socket = MemoryWatch::new(1, 1, false).socket;
    assert!(socket >= 2 * 4096, "{socket}");
    for (code, bytes) in [
        ("", 0),
        ("for _ in range(3): kept.append(os.pipe())", 3 * MAX_PIPE_BYTES),
        ("import socket\nfor _ in range(3): kept.append(socket.socketpair())", 6 * socket),
        ("for _ in range(3): kept.append(open('/dev/zero'))", 3 * DESCRIPTOR),
        (
            "import select\nends = os.pipe()\npoll = select.epoll()\n\
             for _ in range(5): kept.append(os.dup(ends[0])); poll.register(kept[-1])",
            MAX_PIPE_BYTES + 5 * WATCHED_RECORD_BYTES,
        ),
        (
            "import threading, time\n\
             for _ in range(3): threading.Thread(target=time.sleep, args=(60,), \
             daemon=True).start()",
            3 * MAX_THREAD_BYTES,
        ),
        (
            "import fcntl, tempfile\nfile = tempfile.TemporaryFile()\n\
             for at in range(3): fcntl.lockf(file, fcntl.LOCK_EX, 1, 10 * at)",
            DESCRIPTOR + 3 * LOCK,
        ),
    ] {
        assert_eq!(Program::start(code).kernel_memory(), (PLAIN + bytes, false), "{code}");
    }
}

#[test]
fn run_is_crowding_above_pipe_and_lock_limits() {
    assert!(!Program::start(&keep_pipes(MAX_PIPES)).kernel_memory().1);
    let crowding = Program::start(&keep_pipes(MAX_PIPES + 1));
    assert!(crowding.kernel_memory().1 && exceeds(crowding.supervisor.id(), 1 << 40));
    assert!(!Program::start(&keep_locks(MAX_RECORDS)).kernel_memory().1);
    assert!(Program::start(&keep_locks(MAX_RECORDS + 1)).kernel_memory().1);
}

fn keep_pipes(count: usize) -> String {
    format!("for _ in range({}): kept.append(os.pipe())", count - 2)
}

fn keep_locks(count: u64) -> String {
    format!(
        "import fcntl, tempfile\nfile = tempfile.TemporaryFile()\n\
             for at in range({count}): fcntl.lockf(file, fcntl.LOCK_EX, 1, 10 * at)"
    )
}

/// An epoll continues to watch a file under the number of a closed descriptor if another descriptor
/// refers to the file.
#[test]
fn run_is_crowding_above_epoll_watch_limits() {
    assert!(!watches_crowd("[size]"));
    assert!(watches_crowd("[size + 1]"));
    let all = format!("[size] * ({MAX_WATCHED} // size)");
    assert!(!watches_crowd(&all));
    assert!(watches_crowd(&format!("{all} + [1]")));
}

/// Returns whether epolls with these numbers of watches crowd out other processes. `size` is the
/// capacity of the descriptor table, a power of 2 that divides the limit on all watches.
fn watches_crowd(of_epolls: &str) -> bool {
    let code = format!(
        "import select\nends = [os.pipe()[0] for _ in range(2)]\n\
             os.dup2(0, 400); os.close(400)\n\
             status = open('/proc/self/status').read()\n\
             size = int(status.split('FDSize:')[1].split()[0])\n\
             for count in {of_epolls}:\n    kept.append(select.epoll())\n    for at in \
             range(count):\n        fd = 200 + at // 2\n        os.dup2(ends[at % 2], fd); \
             kept[-1].register(fd); os.close(fd)"
    );
    Program::start(&code).kernel_memory().1
}

#[test]
fn pid_is_read_from_pidfd() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    // SAFETY: the call takes numbers only.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    // SAFETY: the kernel has just returned the descriptor, and nothing else owns it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor as i32) };
    assert_eq!(pid_of_pidfd(&descriptor), Some(child.id()));
    assert!(can_watch(child.id()));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!can_watch(child.id()));
    assert_eq!(pid_of_pidfd(&fs::File::open("/dev/null").unwrap().into()), None);
}

#[test]
fn mappings_of_process_are_counted() {
    let code = "import mmap\n\
                kept = [mmap.mmap(-1, 4096, flags=mmap.MAP_SHARED) for _ in range(500)]\n\
                print(len(open('/proc/self/maps').readlines()))";
    let program = Program::start(code);
    let (pid, threads) = program.process();
    let found = ObservedProcess::read(pid, &threads);
    let listed: u64 = program.output.lines().next().unwrap().parse().unwrap();
    assert!(
        listed > 500 && found.count_mappings().abs_diff(listed) < 10,
        "{listed}, {}",
        found.count_mappings()
    );
    let watch = MemoryWatch::new(program.supervisor.id(), 1 << 40, false);
    let both = watch.kernel_memory(&[], &[found]).0;
    let (pid, threads) = program.process();
    let found = ObservedProcess::read(pid, &threads);
    assert_eq!(
        both - watch.count_descriptor_memory(std::slice::from_ref(&found)).0,
        found.count_mappings() * MAPPING
    );
}

/// Creates a process of two threads whose directories in /proc cannot be read.
fn unreadable(pid: u32, pages: u64) -> ObservedProcess {
    ObservedProcess {
        pid,
        thread: u32::MAX,
        threads: 2,
        polled: 3,
        resident: 0,
        tables: 5,
        virtual_size: pages * PAGE,
        table_size: 7,
    }
}

#[test]
fn unreadable_process_counts_at_maximum() {
    assert_eq!(unreadable_self(10).count_mappings(), 10);
    assert_eq!(unreadable_self(MAX_MAPPINGS + 10).count_mappings(), MAX_MAPPINGS);
    let watch = MemoryWatch::new(u32::MAX, 1 << 40, false);
    let bytes = 2 * MAX_THREAD_BYTES + 3 * MAX_POLLED_BYTES + 5 + 7 * MAX_PIPE_BYTES;
    assert_eq!(watch.kernel_memory(&[], &[unreadable_self(10)]), (bytes + 10 * MAPPING, false));
    assert!(!watch.kernel_memory(&[], &[full_process(), full_process()]).1);
    assert!(watch.kernel_memory(&[], &[full_process(), full_process(), full_process()]).1);
    let rest = MAX_MAPPED - 2 * MAX_MAPPINGS;
    assert!(!watch.kernel_memory(&[], &[full_process(), full_process(), unreadable_self(rest)]).1);
    assert!(
        watch.kernel_memory(&[], &[full_process(), full_process(), unreadable_self(rest + 1)]).1
    );
}

/// Returns a process of which three exceed the maximum number of mappings of a run.
fn full_process() -> ObservedProcess {
    unreadable_self(MAX_MAPPINGS)
}

fn unreadable_self(pages: u64) -> ObservedProcess {
    unreadable(std::process::id(), pages)
}

#[test]
fn unreadable_ended_process_counts_nothing() {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = child.id();
    let deadline = Instant::now() + Duration::from_secs(20);
    while fs::read(format!("/proc/{pid}/maps")).is_ok_and(|maps| !maps.is_empty()) {
        assert!(Instant::now() < deadline, "`true` did not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    let watch = MemoryWatch::new(u32::MAX, 1 << 40, false);
    let kernel = |pid| watch.kernel_memory(&[], &[unreadable(pid, 10)]).0;
    let rest = 2 * MAX_THREAD_BYTES + 3 * MAX_POLLED_BYTES + 5;
    // The first process was not waited for, and the second does not exist.
    assert_eq!(kernel(pid), rest);
    child.wait().unwrap();
    assert_eq!(kernel(pid), rest);
    // A thread that continues after the first one keeps the memory of its process.
    let code = format!(
        "import ctypes, threading, time\n\
         threading.Thread(target=time.sleep, args=(60,)).start()\n\
         ctypes.CDLL(None).syscall({}, 0)",
        libc::SYS_exit
    );
    let mut child = std::process::Command::new("python3").args(["-c", &code]).spawn().unwrap();
    let pid = child.id();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("zombie") {
        assert!(Instant::now() < deadline, "the first thread did not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    let counted = kernel(pid);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(counted, rest + 10 * MAPPING + 7 * MAX_PIPE_BYTES);
}

#[test]
fn processor_time_is_counted_once() {
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "sh -c 'while :; do :; done'; exit"]);
    let started = Instant::now();
    let mut shell = shell.stderr(Stdio::null()).spawn().unwrap();
    let mut watch = MemoryWatch::new(shell.id(), 1 << 40, false);
    while watch.cpu < 0.3 && started.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
        watch = watch.observe();
        // The tick count is rounded up by at most one tick.
        assert!(watch.cpu <= started.elapsed().as_secs_f64() + 0.02, "{watch:?}");
    }
    for (pid, _) in list_descendants(shell.id()) {
        // SAFETY: the process was started above, and was not waited for.
        unsafe { libc::kill(pid as i32, libc::SIGKILL) };
    }
    shell.wait().unwrap();
    assert!(watch.cpu >= 0.3 && watch.busy == 1, "{watch:?}");
}

#[test]
fn shared_pages_count_once_toward_limit() {
    // The child shares the 64 MiB of its parent.
    let program =
        Program::start("kept = b'x' * (64 << 20)\nif os.fork() == 0: os.read(0, 1); os._exit(0)");
    let exceeds = |mib: u64| exceeds(program.supervisor.id(), mib << 20);
    assert!(list_descendants(program.supervisor.id()).len() == 2 && exceeds(60));
    // Each of the two processes counts for half of the shared pages.
    assert!(!exceeds(110));
}

/// A child of `vfork` has the address space of its parent, as the threads of a process share one.
#[test]
fn process_with_memory_of_earlier_process_is_detected() {
    let program = Program::start(
        "import threading, time\n\
         threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n\
         if os.fork() == 0: os.read(0, 1); os._exit(0)",
    );
    let found = list_descendants(program.supervisor.id());
    let parent = read_thread(found[0].0);
    let thread = read_thread(*found[0].1.iter().find(|thread| **thread != found[0].0).unwrap());
    let child = ObservedProcess { virtual_size: parent.virtual_size, ..read_thread(found[1].0) };
    let all = [parent, thread, child];
    let borrows: Vec<bool> =
        all.iter().map(|process| process.has_same_memory_as_earlier(&all)).collect();
    assert_eq!(borrows, [false, true, false]);
    // A process that has ended has no memory to share.
    let [mut parent, thread, _] = all;
    parent.resident = 0;
    assert!(!thread.has_same_memory_as_earlier(&[parent]));
    let smaller =
        ObservedProcess { virtual_size: thread.virtual_size - PAGE, ..read_thread(found[0].0) };
    assert!(!thread.has_same_memory_as_earlier(&[smaller]));
}

fn read_thread(thread: u32) -> ObservedProcess {
    ObservedProcess::read(thread, &[thread].into())
}
