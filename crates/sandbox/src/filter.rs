//! Lists of permitted system calls, as programs for the kernel's filter (seccomp).
//!
//! The filter is an allow list. A call that is not on it, including calls of later kernels, returns
//! ENOSYS, which libraries interpret as an older kernel. The list contains what interpreters,
//! numerical libraries, shells and compilers need.
//!
//! It excludes mounts, namespaces, memory of other processes, keys, modules, clocks, and interfaces
//! with a history of vulnerabilities (io_uring, bpf, userfaultfd, perf). It also excludes three
//! groups whose memory cannot be attributed to a process: file notifications (inotify), moving
//! pages between files and sockets (splice, tee, sendfile), and descriptors in messages (sendmsg).
//!
//! Sockets are limited to connected pairs. Without calls that address a socket by name, code cannot
//! reach a service of the host through a directory that it can read.

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Width, SeccompCmpOp as Compare,
    SeccompCondition as Condition, SeccompFilter, SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

macro_rules! numbers {
    ($($name:ident)*) => { [$(libc::$name),*] };
}

/// System calls that code may use, which exist on all processors.
const COMMON_CALLS: &[libc::c_long] = &numbers! {
    SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev SYS_preadv2 SYS_pwritev2
    SYS_openat SYS_openat2 SYS_close SYS_close_range SYS_lseek SYS_ioctl SYS_fcntl SYS_fsync SYS_fdatasync
    SYS_sync_file_range SYS_syncfs SYS_ftruncate SYS_truncate SYS_fallocate SYS_fadvise64 SYS_readahead
    SYS_newfstatat SYS_fstat SYS_statx SYS_statfs SYS_fstatfs SYS_getdents64 SYS_getcwd SYS_chdir SYS_fchdir
    SYS_mkdirat SYS_unlinkat SYS_symlinkat SYS_linkat SYS_renameat SYS_renameat2 SYS_readlinkat SYS_mknodat
    SYS_fchmod SYS_fchmodat SYS_fchown SYS_fchownat SYS_faccessat SYS_faccessat2 SYS_utimensat SYS_umask
    SYS_getxattr SYS_lgetxattr SYS_fgetxattr SYS_listxattr SYS_llistxattr SYS_flistxattr
    SYS_copy_file_range SYS_dup SYS_dup3 SYS_pipe2
    SYS_mmap SYS_munmap SYS_mremap SYS_mprotect SYS_madvise SYS_msync SYS_mincore SYS_brk SYS_mlock SYS_munlock
    SYS_mlock2 SYS_mlockall SYS_munlockall SYS_membarrier SYS_pkey_alloc SYS_pkey_free SYS_pkey_mprotect
    SYS_get_mempolicy
    SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigsuspend SYS_rt_sigpending SYS_rt_sigtimedwait
    SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo SYS_sigaltstack SYS_kill SYS_tkill SYS_tgkill SYS_pidfd_open
    SYS_pidfd_send_signal SYS_signalfd4 SYS_restart_syscall
    SYS_execve SYS_execveat SYS_exit SYS_exit_group SYS_wait4 SYS_waitid SYS_set_tid_address SYS_set_robust_list
    SYS_get_robust_list SYS_futex SYS_rseq SYS_prctl SYS_prlimit64 SYS_getrlimit SYS_setrlimit SYS_getrusage
    SYS_getpid SYS_getppid SYS_gettid SYS_getpgid SYS_setpgid SYS_getsid SYS_setsid SYS_getpriority SYS_setpriority
    SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getgroups SYS_getresuid SYS_getresgid SYS_setuid SYS_setgid
    SYS_setreuid SYS_setregid SYS_setresuid SYS_setresgid SYS_setfsuid SYS_setfsgid SYS_capget
    SYS_sched_yield SYS_sched_getaffinity SYS_sched_setaffinity SYS_sched_getparam SYS_sched_getscheduler
    SYS_sched_get_priority_max SYS_sched_get_priority_min SYS_sched_rr_get_interval SYS_sched_getattr
    SYS_ioprio_get SYS_getcpu SYS_uname SYS_sysinfo SYS_times SYS_getrandom SYS_personality
    SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday SYS_getitimer SYS_setitimer
    SYS_timer_create SYS_timer_settime SYS_timer_gettime SYS_timer_getoverrun SYS_timer_delete SYS_timerfd_create
    SYS_timerfd_settime SYS_timerfd_gettime
    SYS_ppoll SYS_pselect6 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait SYS_epoll_pwait2 SYS_eventfd2
    SYS_socketpair SYS_shutdown SYS_getsockname SYS_getpeername SYS_getsockopt SYS_setsockopt SYS_sendto
    SYS_recvfrom SYS_recvmsg SYS_recvmmsg
};

/// Legacy system calls of x86-64 that code may use.
#[cfg(target_arch = "x86_64")]
const LEGACY_CALLS: &[libc::c_long] = &numbers! {
    SYS_open SYS_creat SYS_stat SYS_lstat SYS_access SYS_readlink SYS_mkdir SYS_rmdir SYS_unlink SYS_rename
    SYS_link SYS_symlink SYS_mknod SYS_chmod SYS_chown SYS_lchown SYS_utime SYS_utimes SYS_futimesat SYS_getdents
    SYS_dup2 SYS_pipe SYS_poll SYS_select SYS_epoll_create SYS_epoll_wait SYS_eventfd SYS_signalfd
    SYS_fork SYS_vfork SYS_alarm SYS_pause SYS_time SYS_getpgrp SYS_arch_prctl
};
#[cfg(not(target_arch = "x86_64"))]
const LEGACY_CALLS: &[libc::c_long] = &[];

/// Flags of the system call `clone` that create namespaces.
const NAMESPACES: [libc::c_int; 8] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWCGROUP,
    0x80, // CLONE_NEWTIME
];

/// Additional system calls that the fork server and keepers need to build a jail.
const BUILDER_CALLS: &[libc::c_long] = &numbers! {
    SYS_mount SYS_umount2 SYS_mount_setattr SYS_unshare SYS_setgroups SYS_capset SYS_seccomp SYS_sendmsg
    SYS_landlock_create_ruleset SYS_landlock_add_rule SYS_landlock_restrict_self
};

/// System calls that legitimate code may try. They fail with EACCES (permission denied) instead of
/// ENOSYS.
const REJECTED_CALLS: &[libc::c_long] = &numbers! {
    SYS_mount SYS_umount2 SYS_chroot SYS_pivot_root SYS_unshare SYS_setns SYS_ptrace SYS_settimeofday
    SYS_clock_settime SYS_sethostname SYS_setdomainname SYS_reboot SYS_bpf SYS_perf_event_open SYS_userfaultfd
    SYS_keyctl SYS_add_key SYS_request_key SYS_init_module SYS_finit_module SYS_delete_module SYS_swapon SYS_acct
    SYS_io_uring_setup SYS_process_vm_readv SYS_process_vm_writev SYS_kcmp SYS_open_by_handle_at SYS_syslog
    SYS_memfd_create SYS_shmget SYS_semget SYS_msgget SYS_mq_open SYS_setgroups SYS_fanotify_init SYS_mount_setattr
    SYS_capset SYS_seccomp SYS_landlock_create_ruleset SYS_landlock_add_rule SYS_landlock_restrict_self
    SYS_socket SYS_bind SYS_connect SYS_listen SYS_accept SYS_accept4 SYS_sendmsg SYS_sendmmsg
};

/// System calls that succeed without effect. The files of a run are in memory and need no
/// synchronization, and the disks of the host are not burdened.
const NO_EFFECT_CALLS: &[libc::c_long] =
    &numbers! { SYS_fsync SYS_fdatasync SYS_sync_file_range SYS_syncfs };

/// Commands of the system call `fcntl` that are permitted. Leases, notifications (`F_NOTIFY`),
/// locks of open file descriptions and changes of the pipe size are excluded.
const CONTROLS: &[libc::c_int] = &[
    libc::F_DUPFD,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_SETOWN,
    libc::F_GETOWN,
    10, // F_SETSIG
    11, // F_GETSIG
    15, // F_SETOWN_EX
    16, // F_GETOWN_EX
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETPIPE_SZ,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
];

/// Option `prctl(PR_SCHED_CORE)`, which prevents other runs from using the sibling of a processor
/// core.
const PR_SCHED_CORE: libc::c_int = 62;

/// Option `prctl(PR_SET_MEMORY_MERGE)`, which merges pages of a process with pages of other
/// processes.
const PR_SET_MEMORY_MERGE: libc::c_int = 67;

/// Options of the system call `prctl` that are rejected. They load further filters (whose memory is
/// limited for all users together), change the memory layout of a process, merge its pages, reserve
/// a processor core, or hide a process from the memory watch.
const PROCESS_OPTIONS: [libc::c_int; 5] = [
    libc::PR_SET_SECCOMP,
    libc::PR_SET_MM,
    libc::PR_SET_DUMPABLE,
    PR_SCHED_CORE,
    PR_SET_MEMORY_MERGE,
];

/// Socket options that attach programs to sockets, which are rejected: `SO_ATTACH_FILTER`,
/// `SO_ATTACH_BPF`, `SO_ATTACH_REUSEPORT_CBPF`, `SO_ATTACH_REUSEPORT_EBPF`.
const SOCKET_PROGRAMS: [u64; 4] = [26, 50, 51, 52];

/// Socket options for buffer sizes. Setting such an option succeeds without effect, as Linux does
/// above the system's maximum. Each socket then holds at most `net.core.wmem_default` bytes.
const BUFFER_SIZES: [libc::c_int; 4] =
    [libc::SO_SNDBUF, libc::SO_RCVBUF, libc::SO_SNDBUFFORCE, libc::SO_RCVBUFFORCE];

/// Filter rules by system call number. A system call matches if one of its rules matches; a system
/// call without rules always matches.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Returns a filter condition that compares the low 32 bits of argument `index` with `value`.
fn argument_condition(index: u8, compare: Compare, value: u64) -> Result<Condition, String> {
    Condition::new(index, Width::Dword, compare, value).map_err(|error| error.to_string())
}

/// Returns a filter condition that the pointer in argument `index` is null (`Eq`) or not null
/// (`Ne`).
fn pointer_condition(index: u8, compare: Compare) -> Result<Condition, String> {
    Condition::new(index, Width::Qword, compare, 0).map_err(|error| error.to_string())
}

/// Returns a filter rule that matches if all `conditions` hold.
fn all_conditions_rule(conditions: Vec<Condition>) -> Result<SeccompRule, String> {
    SeccompRule::new(conditions).map_err(|error| error.to_string())
}

/// Returns filter rules of which one matches if argument `index` equals one of `values`.
fn any_value_rules(
    index: u8,
    values: impl IntoIterator<Item = u64>,
) -> Result<Vec<SeccompRule>, String> {
    values
        .into_iter()
        .map(|value| all_conditions_rule(vec![argument_condition(index, Compare::Eq, value)?]))
        .collect()
}

/// Returns a filter rule that matches if the bits of argument `index` that `mask` selects equal
/// `value`.
fn masked_bits_rule(index: u8, mask: u64, value: u64) -> Result<SeccompRule, String> {
    all_conditions_rule(vec![argument_condition(index, Compare::MaskedEq(mask), value)?])
}

/// Returns the rules for system calls that fail with EACCES. `counted` states whether the kernel
/// charges all memory of a run to its cgroup. If not, system calls whose memory cannot be
/// attributed to a process are rejected as well.
fn rejection_rules(counted: bool) -> Result<Rules, String> {
    let mut rejection_rules: Rules =
        REJECTED_CALLS.iter().map(|number| (*number, Vec::new())).collect();
    // Rejects families other than local sockets, and datagrams, which can be sent to a name without
    // a connection.
    let connected = [libc::SOCK_STREAM as u64, libc::SOCK_SEQPACKET as u64];
    let mut pairs =
        vec![all_conditions_rule(vec![argument_condition(0, Compare::Ne, libc::AF_UNIX as u64)?])?];
    for kind in (0..16).filter(|kind| !connected.contains(kind)) {
        pairs.push(masked_bits_rule(1, 0xf, kind)?);
    }
    rejection_rules.insert(libc::SYS_socketpair, pairs);
    let unknown =
        CONTROLS.iter().map(|command| argument_condition(1, Compare::Ne, *command as u64));
    rejection_rules
        .insert(libc::SYS_fcntl, vec![all_conditions_rule(unknown.collect::<Result<_, _>>()?)?]);
    // These calls insert input into the terminal of the user who started the service.
    rejection_rules.insert(
        libc::SYS_ioctl,
        any_value_rules(1, [libc::TIOCSTI, libc::TIOCLINUX, libc::TIOCSETD])?,
    );
    rejection_rules.insert(libc::SYS_setsockopt, any_value_rules(2, SOCKET_PROGRAMS)?);
    rejection_rules
        .insert(libc::SYS_prctl, any_value_rules(0, PROCESS_OPTIONS.map(|option| option as u64))?);
    // These merge pages with those of other processes, or evict pages of shared files from memory.
    let advice = [libc::MADV_MERGEABLE, libc::MADV_COLD, libc::MADV_PAGEOUT];
    rejection_rules
        .insert(libc::SYS_madvise, any_value_rules(2, advice.map(|advice| advice as u64))?);
    // The first rule rejects setting limits of another process. The keeper runs as the same user as
    // the code, which could otherwise lower the keeper's limits so that it cannot report. The
    // second rule rejects setting the size of core dumps together with a query of it, which
    // `no_effect_rules` cannot answer.
    let core = argument_condition(1, Compare::Eq, u64::from(libc::RLIMIT_CORE))?;
    let other = all_conditions_rule(vec![
        argument_condition(0, Compare::Ne, 0)?,
        pointer_condition(2, Compare::Ne)?,
    ])?;
    let has_set = all_conditions_rule(vec![
        core,
        pointer_condition(2, Compare::Ne)?,
        pointer_condition(3, Compare::Ne)?,
    ])?;
    rejection_rules.insert(libc::SYS_prlimit64, vec![other, has_set]);
    // Threads must share their descriptors, and processes must not: the memory watch reads the
    // descriptors of one thread per process, and attributes a lock to the process that took it.
    let thread = libc::CLONE_THREAD as u64;
    let files = libc::CLONE_FILES as u64;
    let mut clones = vec![
        masked_bits_rule(0, thread | files, thread)?,
        masked_bits_rule(0, thread | files, files)?,
    ];
    for flag in NAMESPACES.map(|flag| u64::from(flag as u32)) {
        clones.push(masked_bits_rule(0, flag, flag)?);
    }
    rejection_rules.insert(libc::SYS_clone, clones);
    rejection_rules.insert(libc::SYS_close_range, vec![masked_bits_rule(2, 2, 2)?]);
    let mut mappings =
        vec![masked_bits_rule(3, libc::MAP_HUGETLB as u64, libc::MAP_HUGETLB as u64)?];
    if !counted {
        // Such pages remain after the last process has unmapped them.
        for shared_flag in [libc::MAP_SHARED, libc::MAP_SHARED_VALIDATE] {
            let flags = (libc::MAP_ANONYMOUS | shared_flag) as u64;
            mappings.push(masked_bits_rule(
                3,
                (libc::MAP_ANONYMOUS | libc::MAP_TYPE) as u64,
                flags,
            )?);
        }
    }
    rejection_rules.insert(libc::SYS_mmap, mappings);
    Ok(rejection_rules)
}

/// Returns the rules for system calls that succeed without effect.
fn no_effect_rules() -> Result<Rules, String> {
    let mut ignored: Rules = NO_EFFECT_CALLS.iter().map(|number| (*number, Vec::new())).collect();
    let sizes = BUFFER_SIZES.iter().map(|option| {
        let level = argument_condition(1, Compare::Eq, libc::SOL_SOCKET as u64)?;
        all_conditions_rule(vec![level, argument_condition(2, Compare::Eq, *option as u64)?])
    });
    ignored.insert(libc::SYS_setsockopt, sizes.collect::<Result<_, _>>()?);
    // A host that pipes core dumps to a program does so at any size limit except 1 byte, which the
    // fork server has set.
    let sets = all_conditions_rule(vec![
        core_limit_condition(1)?,
        pointer_condition(2, Compare::Ne)?,
        pointer_condition(3, Compare::Eq)?,
    ])?;
    ignored.insert(libc::SYS_prlimit64, vec![sets]);
    ignored.insert(libc::SYS_setrlimit, vec![all_conditions_rule(vec![core_limit_condition(0)?])?]);
    // Pages of shared files stay in memory.
    ignored.insert(libc::SYS_fadvise64, any_value_rules(3, [libc::POSIX_FADV_DONTNEED as u64])?);
    Ok(ignored)
}

fn core_limit_condition(index: u8) -> Result<Condition, String> {
    argument_condition(index, Compare::Eq, u64::from(libc::RLIMIT_CORE))
}

/// Seccomp filter programs in the kernel's binary format, in loading order. If two programs reject
/// a system call, the error of the program that was loaded last is returned.
pub(crate) struct FilterPrograms {
    /// Filter programs of the fork server, which all its descendants inherit. They also permit the
    /// system calls that build a jail. Loading their long list takes longer than everything that a
    /// run does afterwards, so it is loaded only once.
    pub server: [Vec<u8>; 2],
    /// Program that each runner loads in addition. It rejects the system calls that build a jail or
    /// load further programs.
    pub runner: Vec<u8>,
}

/// Builds the seccomp filter programs. `counted` states whether the kernel charges all memory of a
/// run to its cgroup.
///
/// # Errors
/// Returns an error if filters are not supported on this processor.
pub(crate) fn build_filter_programs(counted: bool) -> Result<FilterPrograms, String> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(|error| error.to_string())?;
    let allowed =
        [COMMON_CALLS, LEGACY_CALLS, BUILDER_CALLS, &[libc::SYS_clone]].into_iter().flatten();
    let allowed: Rules = allowed.map(|number| (*number, Vec::new())).collect();
    let program = |rules, otherwise, action| -> Result<Vec<u8>, String> {
        let filter = SeccompFilter::new(rules, otherwise, action, arch)
            .map_err(|error| error.to_string())?;
        Ok(encode_program(
            filter.try_into().map_err(|error: seccompiler::BackendError| error.to_string())?,
        ))
    };
    Ok(FilterPrograms {
        server: [
            program(allowed, errno_action(libc::ENOSYS), SeccompAction::Allow)?,
            program(no_effect_rules()?, SeccompAction::Allow, errno_action(0))?,
        ],
        runner: program(
            rejection_rules(counted)?,
            SeccompAction::Allow,
            errno_action(libc::EACCES),
        )?,
    })
}

fn errno_action(number: libc::c_int) -> SeccompAction {
    SeccompAction::Errno(number as u32)
}

/// Encodes a filter program as an array of `struct sock_filter`.
fn encode_program(program: BpfProgram) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(program.len() * 8);
    for step in program {
        bytes.extend(step.code.to_ne_bytes());
        bytes.extend([step.jt, step.jf]);
        bytes.extend(step.k.to_ne_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_programs_fit_kernel_length_limit() {
        let FilterPrograms { server: [list, ignored], runner } =
            build_filter_programs(false).unwrap();
        for program in [list, ignored, runner, build_filter_programs(true).unwrap().runner] {
            assert!(program.len() % 8 == 0 && program.len() / 8 < 4096, "{}", program.len());
        }
    }

    #[test]
    fn shared_anonymous_mappings_are_rejected_unless_counted() {
        let huge = masked_bits_rule(3, 0x4_0000, 0x4_0000).unwrap();
        // MAP_ANONYMOUS is 0x20. The lowest 4 bits are the type: MAP_SHARED or MAP_SHARED_VALIDATE.
        let shared_flag = [0x21, 0x23].map(|flags| masked_bits_rule(3, 0x2f, flags).unwrap());
        assert_eq!(mapping_rules(true), std::slice::from_ref(&huge));
        assert_eq!(mapping_rules(false), [&[huge], &shared_flag[..]].concat());
    }

    fn mapping_rules(counted: bool) -> Vec<SeccompRule> {
        rejection_rules(counted).unwrap().remove(&libc::SYS_mmap).unwrap()
    }

    #[test]
    fn rejected_calls_are_not_on_allow_list() {
        for number in REJECTED_CALLS {
            assert!(!COMMON_CALLS.contains(number) && !LEGACY_CALLS.contains(number), "{number}");
        }
    }

    #[test]
    fn jail_building_calls_are_rejected_for_code() {
        for number in BUILDER_CALLS {
            assert!(REJECTED_CALLS.contains(number), "{number}");
        }
    }
}
