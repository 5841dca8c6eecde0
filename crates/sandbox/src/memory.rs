//! Memory of a jail, counted from outside: the pages of its processes, and the kernel memory that
//! they use.
//!
//! Resident pages are only a part of what code can allocate. The kernel also keeps page tables,
//! buffers of pipes and sockets, watched descriptors, mappings and locks, none of which is in a
//! process's resident size. Each is counted here at the maximum that the kernel allocates for it,
//! so that the sum is an upper bound. The call filter (`filter.rs`) rejects memory that cannot be
//! counted this way; docs/sandbox.md has the table.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};

/// Size of a memory page, in bytes. It is the same on all supported processors.
const PAGE: u64 = 4096;

/// Maximum kernel memory of a pipe, in bytes: 16 pages and its kernel structures.
const MAX_PIPE_BYTES: u64 = 68 << 10;

/// Maximum kernel memory of a thread, in bytes: its kernel stack, its kernel structures, and one
/// pipe. A blocked system call keeps its pipe in memory after the descriptor is closed, when no
/// list of descriptors shows the pipe.
const MAX_THREAD_BYTES: u64 = (32 << 10) + MAX_PIPE_BYTES;

/// Maximum kernel memory of a descriptor of any other kind, in bytes. Files of /proc keep a buffer
/// for the longest record that was read, in which [`MAX_RECORDS`] locks or watched descriptors fit.
const DESCRIPTOR: u64 = 32 << 10;

/// Kernel memory of a descriptor that `epoll` watches, in bytes.
const WATCHED_RECORD_BYTES: u64 = 320;

/// Maximum memory of a descriptor that a blocked `poll` or `select` holds, even after it is closed,
/// in bytes: at most an `epoll` that watches [`MAX_RECORDS`] descriptors.
const MAX_POLLED_BYTES: u64 = DESCRIPTOR + MAX_RECORDS * WATCHED_RECORD_BYTES;

/// Kernel memory of a mapping, with its reverse mapping and its name, in bytes.
const MAPPING: u64 = 512;

/// Kernel memory of a lock on a range of a file, in bytes.
const LOCK: u64 = 256;

/// Maximum number of memory mappings of a process (`vm.max_map_count`).
const MAX_MAPPINGS: u64 = 65530;

/// Assumed size of a socket's buffer if the kernel does not report it, in bytes.
const BUFFER: u64 = 212_992;

/// Maximum number of pipes of a run. All runs of a user share 16,384 pages of pipes
/// (`pipe-user-pages-soft`). Beyond that, new pipes are smaller.
const MAX_PIPES: usize = 256;

/// Maximum number of descriptors that `epoll` watches in a run. The kernel limits their number for
/// all runs of a user together (`fs.epoll.max_user_watches`, 4 % of memory).
const MAX_WATCHED: u64 = 1 << 16;

/// Maximum number of file range locks in a run. It is also the maximum number of descriptors that
/// one `epoll` watches, unless its process has a larger descriptor table. /proc shows them as one
/// record, which each descriptor of such a file keeps.
const MAX_RECORDS: u64 = 256;

/// Maximum number of memory mappings of a run, which bounds the duration of an observation.
const MAX_MAPPED: u64 = 1 << 17;

/// Maximum number of processes of a run that are observed.
const MAX_PROCESSES: usize = 4096;

/// Maximum number of times that a list in /proc is read again because it changes meanwhile.
const MAX_READINGS: usize = 8;

/// Clock ticks per second in /proc/PID/stat. Linux uses this value on all supported processors.
const TICKS: f64 = 100.0;

/// Returns the process id to which a pidfd refers, in the PID namespace of this process.
pub(crate) fn pid_of_pidfd(descriptor: &OwnedFd) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd())).ok()?;
    text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()
}

/// Returns whether the descendants of the process `pid` can be listed.
pub(crate) fn can_watch(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).is_ok()
}

/// Watch over the memory and processor time of a keeper's descendants.
#[derive(Debug, Clone)]
pub(crate) struct MemoryWatch {
    supervisor: u32,
    /// Maximum memory of all descendants together, in bytes.
    limit: u64,
    /// Whether the run has its own network namespace, in which its sockets are listed.
    has_network: bool,
    /// Maximum kernel memory of a socket, in bytes.
    socket: u64,
    /// Processor time of the running processes at the last observation, in seconds.
    last_cpu: f64,
    /// Total processor time of the run, including ended processes, in seconds.
    pub cpu: f64,
    /// Number of processes that were running or runnable at the last observation.
    pub busy: usize,
    /// Whether the run has exceeded its memory limit.
    pub exceeded: bool,
}

impl MemoryWatch {
    /// Creates a watch over the descendants of the process `supervisor`. Together, they may use
    /// `limit` bytes.
    pub(crate) fn new(supervisor: u32, limit: u64, has_network: bool) -> Self {
        let buffer = fs::read_to_string("/proc/sys/net/core/wmem_default").ok();
        let buffer = buffer.and_then(|text| text.trim().parse().ok()).unwrap_or(BUFFER);
        MemoryWatch {
            supervisor,
            limit,
            has_network,
            // A sender may exceed its buffer by one message of at most half a buffer.
            socket: 2 * buffer,
            last_cpu: 0.0,
            cpu: 0.0,
            busy: 0,
            exceeded: false,
        }
    }

    /// Observes all processes of the run once, and updates the measured values.
    pub(crate) fn observe(mut self) -> Self {
        let processes = list_descendants(self.supervisor);
        let stats: Vec<ProcessStat> =
            processes.iter().filter_map(|(pid, _)| read_stat(*pid)).collect();
        let cpu = stats.iter().map(|stat| stat.cpu).sum::<f64>();
        // The time of a child that its parent does not wait for is lost when the child ends.
        self.cpu += (cpu - self.last_cpu).max(0.0);
        self.last_cpu = cpu;
        self.busy = stats.iter().filter(|stat| stat.is_busy).count();
        let found: Vec<ObservedProcess> =
            processes.iter().map(|(pid, threads)| ObservedProcess::read(*pid, threads)).collect();
        let (kernel, is_crowding) = self.kernel_memory(&processes, &found);
        let sum = kernel + found.iter().map(|process| process.resident).sum::<u64>();
        // The exact sum counts shared memory once, which takes longer to compute.
        let exact = || {
            let owners = found.iter().filter(|process| !process.has_same_memory_as_earlier(&found));
            kernel
                + owners
                    .map(|process| process.proportional_memory().unwrap_or(process.resident))
                    .sum::<u64>()
        };
        // The exact sum of a process with many mappings takes long to read, so the kernel memory is
        // checked first.
        self.exceeded =
            is_crowding || kernel > self.limit || sum > self.limit && exact() > self.limit;
        self
    }

    /// Returns the kernel memory of processes, in bytes. Also returns `true` if the processes use
    /// memory that cannot be counted, or so much of a resource shared by all runs that other runs
    /// could lack it.
    fn kernel_memory(
        &self,
        processes: &[(u32, BTreeSet<u32>)],
        found: &[ObservedProcess],
    ) -> (u64, bool) {
        let mut mappings = 0;
        for process in found {
            if mappings > MAX_MAPPED {
                break;
            }
            mappings += process.count_mappings();
        }
        let locks = count_locks(processes);
        let (bytes, is_crowding) = self.count_descriptor_memory(found);
        let is_crowding = is_crowding || mappings > MAX_MAPPED || locks > MAX_RECORDS;
        (bytes + mappings * MAPPING + locks * LOCK, is_crowding)
    }

    /// Returns the kernel memory of threads, page tables and descriptors, in bytes. The flag has
    /// the same meaning as in [`kernel_memory`](Self::kernel_memory).
    fn count_descriptor_memory(&self, processes: &[ObservedProcess]) -> (u64, bool) {
        let mut watched = 0;
        let mut is_crowding = false;
        let mut pipes = HashSet::new();
        let mut sockets = HashSet::new();
        let mut bytes = 0;
        for process in processes {
            if watched > MAX_WATCHED {
                break;
            }
            bytes += process.threads * MAX_THREAD_BYTES
                + process.polled * MAX_POLLED_BYTES
                + process.tables;
            let Some(descriptors) = process.list_descriptors() else {
                if !process.has_ended() {
                    bytes += process.table_size * MAX_PIPE_BYTES;
                }
                continue;
            };
            for (number, target) in descriptors {
                let kind = target.split(':').next().unwrap_or_default();
                match kind {
                    "pipe" => drop(pipes.insert(target)),
                    "socket" => drop(sockets.insert(target)),
                    _ if target.ends_with("[eventpoll]") => {
                        let count = process.count_watched(&number);
                        watched += count;
                        is_crowding |= count > process.table_size.max(MAX_RECORDS);
                    }
                    _ => bytes += DESCRIPTOR,
                }
            }
        }
        // The sockets that the run received at its start belong to the service.
        let listed = fs::read_to_string(format!("/proc/{}/net/unix", self.supervisor)).ok();
        let listed =
            listed.filter(|_| self.has_network).map(|text| text.lines().count().saturating_sub(1));
        let sockets = listed.unwrap_or(sockets.len()) as u64;
        is_crowding |= pipes.len() > MAX_PIPES || watched > MAX_WATCHED;
        bytes += pipes.len() as u64 * MAX_PIPE_BYTES
            + sockets * self.socket
            + watched * WATCHED_RECORD_BYTES;
        (bytes, is_crowding)
    }
}

/// A process as observed in /proc through one of its running threads.
#[derive(Debug)]
struct ObservedProcess {
    pid: u32,
    /// Id of the first running thread. Its directory in /proc shows the memory and descriptors of
    /// the process.
    thread: u32,
    threads: u64,
    /// Number of descriptors that threads of the process wait for in `poll` and `select`.
    polled: u64,
    /// Size of pages in memory and in swap space, and of huge pages, in bytes.
    resident: u64,
    /// Size of the page tables, in bytes.
    tables: u64,
    /// Size of all memory mappings, in bytes.
    virtual_size: u64,
    /// Capacity of the process's descriptor table.
    table_size: u64,
}

impl ObservedProcess {
    /// Reads the values of the process `pid` with these threads. The first thread may have ended
    /// before the remaining threads; it then shows no memory.
    fn read(pid: u32, threads: &BTreeSet<u32>) -> Self {
        let empty = ObservedProcess {
            pid,
            thread: pid,
            threads: threads.len() as u64,
            polled: threads.iter().map(|thread| count_polled(*thread)).sum(),
            resident: 0,
            tables: 0,
            virtual_size: 0,
            table_size: 0,
        };
        let other_threads = threads.iter().copied().filter(|thread| *thread != pid);
        let living = std::iter::once(pid).chain(other_threads).find_map(|thread| {
            let text = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
            let kib = |name| number_after(&text, name).unwrap_or(0) << 10;
            number_after(&text, "VmRSS:").map(|resident| ObservedProcess {
                thread,
                resident: (resident << 10) + kib("VmSwap:") + kib("HugetlbPages:"),
                tables: kib("VmPTE:"),
                virtual_size: kib("VmSize:"),
                table_size: number_after(&text, "FDSize:").unwrap_or(0),
                ..empty
            })
        });
        living.unwrap_or(empty)
    }

    /// Returns the proportional set size of the process, in bytes: a shared page counts in part.
    /// Returns `None` if it cannot be read.
    fn proportional_memory(&self) -> Option<u64> {
        let text = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.thread)).ok()?;
        let line = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        Some(
            (first_number(line("Pss:")?)? + line("SwapPss:").and_then(first_number).unwrap_or(0))
                << 10,
        )
    }

    /// Returns whether an earlier process of the list `of` has the same address space, as a child
    /// of `vfork` has.
    fn has_same_memory_as_earlier(&self, of: &[ObservedProcess]) -> bool {
        const VIRTUAL_MEMORY: libc::c_int = 1;
        let earlier = of.iter().take_while(|process| process.thread != self.thread);
        let mut alike = earlier
            .filter(|process| process.resident > 0 && process.virtual_size == self.virtual_size);
        alike.any(|process| {
            // SAFETY: kcmp takes numbers only, and has no effect.
            let order = unsafe {
                libc::syscall(libc::SYS_kcmp, process.thread, self.thread, VIRTUAL_MEMORY, 0, 0)
            };
            order == 0
        })
    }

    /// Returns the number and target of each descriptor of the process, or `None` if they cannot be
    /// read.
    fn list_descriptors(&self) -> Option<Vec<(String, String)>> {
        let listed = fs::read_dir(format!("/proc/{}/fd", self.thread)).ok()?;
        let read = listed.flatten().filter_map(|entry| {
            let target = fs::read_link(entry.path()).ok()?;
            Some((
                entry.file_name().to_string_lossy().into_owned(),
                target.to_string_lossy().into_owned(),
            ))
        });
        Some(read.collect())
    }

    /// Returns the number of descriptors that the `epoll` descriptor `descriptor` watches.
    fn count_watched(&self, descriptor: &str) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/fdinfo/{descriptor}", self.thread))
            .unwrap_or_default();
        text.lines().filter(|line| line.starts_with("tfd:")).count() as u64
    }

    /// Returns the number of memory mappings of the process. If they cannot be read, returns the
    /// maximum that the process can have.
    fn count_mappings(&self) -> u64 {
        match fs::read(format!("/proc/{}/maps", self.thread)) {
            Ok(text) => text.iter().filter(|byte| **byte == b'\n').count() as u64,
            Err(_) if self.has_ended() => 0,
            Err(_) => (self.virtual_size / PAGE).min(MAX_MAPPINGS),
        }
    }

    /// Returns whether the process has released its memory, or no longer exists. Only root can read
    /// the descriptors and mappings of such a process, so an unreadable list does not show whether
    /// the process still uses memory.
    fn has_ended(&self) -> bool {
        let Ok(text) = fs::read_to_string(format!("/proc/{}/status", self.pid)) else {
            return true;
        };
        let has_one_thread = text
            .lines()
            .filter_map(|line| line.strip_prefix("Threads:"))
            .any(|count| count.trim() == "1");
        // The first thread of a process may end before the remaining threads, which keep the
        // memory.
        has_one_thread && !text.contains("\nVmRSS:")
    }
}

fn number_after(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse::<u64>().ok()
}

fn first_number(text: &str) -> Option<u64> {
    text.split_whitespace().next()?.parse::<u64>().ok()
}

/// System calls that keep files open while they wait. On other processors, the C library uses only
/// `ppoll` and `pselect`.
#[cfg(target_arch = "x86_64")]
const POLLS: [libc::c_long; 4] =
    [libc::SYS_poll, libc::SYS_ppoll, libc::SYS_select, libc::SYS_pselect6];
#[cfg(not(target_arch = "x86_64"))]
const POLLS: [libc::c_long; 2] = [libc::SYS_ppoll, libc::SYS_pselect6];

/// Returns the number of descriptors that a thread waits for in `poll`, or that are below the bound
/// of its `select`. The kernel keeps their files until the system call ends, even if the
/// descriptors are closed meanwhile and no list of descriptors shows them.
fn count_polled(thread: u32) -> u64 {
    // The text has the number of the call and its arguments, or "running".
    let text = fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap_or_default();
    let fields: Vec<&str> = text.split_whitespace().collect();
    let call =
        fields.first().and_then(|number| number.parse().ok()).filter(|call| POLLS.contains(call));
    let argument = match call {
        None => return 0,
        Some(libc::SYS_pselect6) => 1,
        #[cfg(target_arch = "x86_64")]
        Some(libc::SYS_select) => 1,
        Some(_) => 2,
    };
    let count = fields
        .get(argument)
        .and_then(|text| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok());
    count.unwrap_or(0)
}

/// Times and state of a process from /proc. The process may have ended without having been waited
/// for.
struct ProcessStat {
    /// Processor time of the process and of the ended children that it waited for, in seconds.
    cpu: f64,
    is_busy: bool,
}

fn read_stat(pid: u32) -> Option<ProcessStat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process name before this position can contain any character.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks =
        fields.get(11..15)?.iter().filter_map(|field| field.parse::<u64>().ok()).sum::<u64>();
    Some(ProcessStat { cpu: ticks as f64 / TICKS, is_busy: fields.first() == Some(&"R") })
}

/// Counts the file range locks that `processes` hold or wait for.
fn count_locks(processes: &[(u32, BTreeSet<u32>)]) -> u64 {
    let text = fs::read_to_string("/proc/locks").unwrap_or_default();
    text.lines()
        .filter_map(parse_lock_owner)
        .filter(|owner| processes.iter().any(|(pid, _)| pid == owner))
        .count() as u64
}

fn parse_lock_owner(line: &str) -> Option<u32> {
    let fields: Vec<&str> = line.split_whitespace().filter(|field| *field != "->").collect();
    fields.get(4)?.parse::<u32>().ok()
}

/// Returns all descendants of the process `supervisor`, each with its threads.
fn list_descendants(supervisor: u32) -> Vec<(u32, BTreeSet<u32>)> {
    let mut found = vec![(supervisor, read_until_stable(|| list_threads(supervisor)))];
    let mut at = 0;
    while at < found.len() && found.len() < MAX_PROCESSES {
        let (pid, threads_of) = found[at].clone();
        for thread in threads_of {
            let children = read_until_stable(|| list_children(pid, thread));
            found.extend(
                children
                    .into_iter()
                    .map(|child| (child, read_until_stable(|| list_threads(child)))),
            );
        }
        at += 1;
    }
    found.split_off(1)
}

fn list_threads(pid: u32) -> BTreeSet<u32> {
    let entries = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn list_children(pid: u32, thread: u32) -> BTreeSet<u32> {
    let text =
        fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Returns every entry that `list` returns, calling it until two results in a row are equal. If an
/// entry disappears during a reading of /proc, the kernel can skip another entry, because it
/// resumes by position.
fn read_until_stable(list: impl Fn() -> BTreeSet<u32>) -> BTreeSet<u32> {
    let mut last = list();
    let mut all = last.clone();
    for _ in 0..MAX_READINGS {
        let next = list();
        all.extend(&next);
        if next == last {
            break;
        }
        last = next;
    }
    all
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
