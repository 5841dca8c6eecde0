//! System calls that code may make, as programs for the kernel's filter (seccomp).
//!
//! A list of what is allowed: whatever is not on it, also what kernels to come add, answers that there is no
//! such call, which libraries take for an older kernel. On the list is what interpreters, numerical
//! libraries, shells and compilers need. Not on it: anything about mounts, namespaces, other processes'
//! memory, keys, modules, clocks, and interfaces with a history of holes (io_uring, bpf, userfaultfd, perf).

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Width, SeccompCmpOp as Compare,
    SeccompCondition as Condition, SeccompFilter, SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

macro_rules! numbers {
    ($($name:ident)*) => { [$(libc::$name),*] };
}

/// Calls that exist on all processors.
const EVERYWHERE: &[libc::c_long] = &numbers! {
    SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev SYS_preadv2 SYS_pwritev2
    SYS_openat SYS_openat2 SYS_close SYS_close_range SYS_lseek SYS_ioctl SYS_fcntl SYS_flock SYS_fsync SYS_fdatasync
    SYS_sync_file_range SYS_syncfs SYS_ftruncate SYS_truncate SYS_fallocate SYS_fadvise64 SYS_readahead
    SYS_newfstatat SYS_fstat SYS_statx SYS_statfs SYS_fstatfs SYS_getdents64 SYS_getcwd SYS_chdir SYS_fchdir
    SYS_mkdirat SYS_unlinkat SYS_symlinkat SYS_linkat SYS_renameat SYS_renameat2 SYS_readlinkat SYS_mknodat
    SYS_fchmod SYS_fchmodat SYS_fchown SYS_fchownat SYS_faccessat SYS_faccessat2 SYS_utimensat SYS_umask
    SYS_getxattr SYS_lgetxattr SYS_fgetxattr SYS_listxattr SYS_llistxattr SYS_flistxattr
    SYS_copy_file_range SYS_sendfile SYS_splice SYS_tee SYS_dup SYS_dup3 SYS_pipe2
    SYS_inotify_init1 SYS_inotify_add_watch SYS_inotify_rm_watch
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
    SYS_socket SYS_socketpair SYS_bind SYS_connect SYS_listen SYS_accept SYS_accept4 SYS_shutdown SYS_getsockname
    SYS_getpeername SYS_getsockopt SYS_setsockopt SYS_sendto SYS_recvfrom SYS_sendmsg SYS_recvmsg SYS_sendmmsg
    SYS_recvmmsg
};

/// Older forms that x86-64 has kept.
#[cfg(target_arch = "x86_64")]
const HERE: &[libc::c_long] = &numbers! {
    SYS_open SYS_creat SYS_stat SYS_lstat SYS_access SYS_readlink SYS_mkdir SYS_rmdir SYS_unlink SYS_rename
    SYS_link SYS_symlink SYS_mknod SYS_chmod SYS_chown SYS_lchown SYS_utime SYS_utimes SYS_futimesat SYS_getdents
    SYS_dup2 SYS_pipe SYS_poll SYS_select SYS_epoll_create SYS_epoll_wait SYS_eventfd SYS_signalfd SYS_inotify_init
    SYS_fork SYS_vfork SYS_alarm SYS_pause SYS_time SYS_getpgrp SYS_arch_prctl
};
#[cfg(not(target_arch = "x86_64"))]
const HERE: &[libc::c_long] = &[];

/// Flags of `clone` that make namespaces.
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWCGROUP) as u32 as u64;

/// Calls that can be tried by honest code are refused as a right that it lacks, in place of "no such call".
const REFUSED: &[libc::c_long] = &numbers! {
    SYS_mount SYS_umount2 SYS_chroot SYS_pivot_root SYS_unshare SYS_setns SYS_ptrace SYS_settimeofday
    SYS_clock_settime SYS_sethostname SYS_setdomainname SYS_reboot SYS_bpf SYS_perf_event_open SYS_userfaultfd
    SYS_keyctl SYS_add_key SYS_request_key SYS_init_module SYS_finit_module SYS_delete_module SYS_swapon SYS_acct
    SYS_io_uring_setup SYS_process_vm_readv SYS_process_vm_writev SYS_kcmp SYS_open_by_handle_at SYS_syslog
    SYS_memfd_create SYS_shmget SYS_semget SYS_msgget SYS_mq_open SYS_setgroups SYS_fanotify_init
};

/// Both programs as bytes that the kernel reads, in the order in which they are loaded.
///
/// # Errors
/// When there is no such filter for this processor.
pub(crate) fn programs() -> Result<[Vec<u8>; 2], String> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(|error| error.to_string())?;
    let when = |conditions: Vec<Condition>| SeccompRule::new(conditions);
    let condition = |argument, width, compare, value| Condition::new(argument, width, compare, value);
    let named = |error: seccompiler::BackendError| error.to_string();

    let no_namespace = condition(0, Width::Qword, Compare::MaskedEq(NAMESPACES), 0).map_err(named)?;
    let mut allowed: BTreeMap<i64, Vec<SeccompRule>> =
        EVERYWHERE.iter().chain(HERE).map(|number| (*number, Vec::new())).collect();
    allowed.insert(libc::SYS_clone, vec![when(vec![no_namespace]).map_err(named)?]);

    let local = libc::AF_UNIX as u64;
    let no_network = condition(0, Width::Dword, Compare::Ne, local).map_err(named)?;
    let mut refused: BTreeMap<i64, Vec<SeccompRule>> =
        REFUSED.iter().map(|number| (*number, Vec::new())).collect();
    refused.insert(libc::SYS_socket, vec![when(vec![no_network]).map_err(named)?]);
    // Keys typed into the terminal of whoever started the service.
    let typed = [libc::TIOCSTI, libc::TIOCLINUX, libc::TIOCSETD].iter().map(|request| {
        when(vec![condition(1, Width::Dword, Compare::Eq, *request).map_err(named)?]).map_err(named)
    });
    refused.insert(libc::SYS_ioctl, typed.collect::<Result<_, String>>()?);

    let no_call = SeccompAction::Errno(libc::ENOSYS as u32);
    let no_right = SeccompAction::Errno(libc::EACCES as u32);
    let allow = SeccompFilter::new(allowed, no_call, SeccompAction::Allow, arch).map_err(named)?;
    let refuse = SeccompFilter::new(refused, SeccompAction::Allow, no_right, arch).map_err(named)?;
    // Of two refusals that one counts which was loaded last.
    Ok([bytes(allow.try_into().map_err(named)?), bytes(refuse.try_into().map_err(named)?)])
}

/// A program as an array of `struct sock_filter`.
fn bytes(program: BpfProgram) -> Vec<u8> {
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
    fn both_programs_fit_the_kernel() {
        for program in programs().unwrap() {
            assert!(program.len() % 8 == 0 && program.len() / 8 < 4096, "{}", program.len());
        }
    }

    #[test]
    fn no_call_is_both_allowed_and_refused_but_those_that_depend_on_an_argument() {
        for number in REFUSED {
            assert!(!EVERYWHERE.contains(number) && !HERE.contains(number), "{number}");
        }
    }
}
