"""Run one command isolated from the rest of the machine; execution.py starts this script for every program.

    python -I -S supervisor.py '{"way": "namespaces", "argv": ["/usr/bin/java", ...], ...}'

    supervisor                 limits wall time, memory and disk; kills leftover processes; exits with the same status
      init of a PID namespace  (only for "namespaces") when it ends, the kernel kills everything in it
        the program            resource limits, no privileges, filtered system calls

There are two ways. "namespaces": a new root with the system's programs, read-only, and an empty home in memory; no
network, and other processes are invisible. "limits", if the system has no namespaces: Landlock (Linux 5.13) restricts
files, the system call filter blocks the network and signals to other processes, and the supervisor kills leftover
processes, which it finds because orphans become its children. In both, root runs the program as a separate,
unprivileged user.

Uses only the standard library and doesn't import this package, because it runs as a script. Linux only.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# what a program may read: the system's libraries and tools; not /home, /root, /tmp, /var, /mnt or /etc/passwd
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/alternatives", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
POLL_SECONDS = 0.05  # between two checks of memory and disk
SETUP_FAILED = 125
NUM_FILES = 256  # RLIMIT_NOFILE
GONE = FileNotFoundError, ProcessLookupError  # the process has ended in the meantime
# <sched.h>, <sys/mount.h>, <sys/prctl.h>
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 32, 4096, 16384
MS_PRIVATE, MS_RELATIME, MNT_DETACH = 1 << 18, 1 << 21, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
# numbers of system calls: (x86_64, aarch64)
DENIED = {
    "socket": (41, 198),  # socketpair is allowed: it reaches no other process, and its memory is counted
    "setsockopt": (54, 208),  # larger buffers
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),  # other processes
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "unshare": (272, 97), "setns": (308, 268),  # privileges in a new namespace
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190),  # memory that isn't counted for any process
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
}  # fmt: skip
SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
CLONE, CLONE3, PRLIMIT64, PIVOT_ROOT = (56, 220), (435, 435), (302, 261), (155, 41)
FORKS = (57, 58), ()  # fork and vfork: aarch64 only has clone
CLONE_THREAD = 0x10000
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the tables above, AUDIT_ARCH_*

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(name: str, *arguments: int | bytes | None) -> int:
    """Call a C library function; raise OSError if it fails. Strings are bytes; integers are passed as 64 bits."""
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = getattr(libc, name)(*values)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


# ------------------------------------------------------------------------------------------------------ 1. supervisor
def main() -> None:
    config = json.loads(sys.argv[1])
    os.set_inheritable(config["status_fd"], False)  # the program must not write to it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    with reported(config):
        if config["uid"] is not None:
            for path_or_fd in (config["home"], *config["pipes"]):  # the program reopens the pipes by name
                os.chown(path_or_fd, config["uid"], config["uid"])
        if config["way"] == "namespaces":
            enter_pid_namespace(config)
        call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # otherwise a program of the same user could write to our memory
        call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        call("prctl", PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != config["parent"]:  # the parent died before PR_SET_PDEATHSIG was set
            os._exit(SETUP_FAILED)
        child = os.fork()
        if child == 0:
            init(config) if config["way"] == "namespaces" else run(config)
        try:
            limit, code = supervise(config, child)
        finally:
            kill_all()
        os.write(config["status_fd"], limit.encode())
        os._exit(code)


@contextmanager
def reported(config: dict) -> Iterator[None]:
    """Report to execution.py why the sandbox could not be set up, and exit."""
    try:
        yield
    except BaseException as error:
        os.write(config["status_fd"], f"setup: {error}".encode(errors="replace"))
        os._exit(SETUP_FAILED)


def supervise(config: dict, child: int) -> tuple[str, int]:
    """Wait for the child; return ("", exit status or 128 + signal, as in shells) or (the exceeded limit, 0)."""
    deadline = time.monotonic() + (config["seconds"] or float("inf"))
    while True:
        remaining = max(deadline - time.monotonic(), 0)
        received = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, min(POLL_SECONDS, remaining))
        for pid, status in reap():
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return "", code if code >= 0 else 128 - code
        if received is not None and received.si_signo == signal.SIGTERM:
            return "stopped", 0
        if time.monotonic() >= deadline:
            return "timeout", 0
        processes = descendants(os.getpid())
        if sum(map(resident_bytes, processes)) + socket_bytes(processes) > config["memory_bytes"]:
            return "memory", 0
        # with namespaces, the file system of the home has a size limit
        if config["way"] == "limits" and bytes_below(config["home"]) > config["disk_bytes"]:
            return "disk", 0


def reap() -> list[tuple[int, int]]:
    """Return (pid, status) of each child that has ended."""
    ended = []
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append(child)
    return ended


def descendants(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(*GONE):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(*GONE), open(f"/proc/{pid}/task/{task}/children") as file:
                children += map(int, file.read().split())
    pids = []
    for child in children:
        pids += [child, *descendants(child)]
    return pids


def resident_bytes(pid: int) -> int:
    with suppress(*GONE), open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
    return 0


def socket_bytes(pids: list[int]) -> int:
    """Estimate the kernel memory of the processes' sockets, which isn't counted for any process and can't be read.

    A socket that a process has sent but not yet received is in no table; a user may have up to RLIMIT_NOFILE of them.
    """
    sockets, hidden = set(), 0
    for pid in pids:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:"):
                    sockets.add(target)
        except GONE:
            continue
        except PermissionError:  # the process has made itself unreadable
            hidden += NUM_FILES
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            buffer = int(file.read())
    except OSError:
        buffer = 212_992  # Linux's default
    return (len(sockets) + hidden) * 2 * buffer  # twice, for the kernel's overhead


def bytes_below(directory: str) -> int:
    """Return the disk space of the files below a directory, skipping unreadable directories."""
    total, todo = 0, [directory]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    total += 4096 + entry.stat(follow_symlinks=False).st_blocks * 512  # 4096 for the inode
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
        except OSError:  # gone, not readable, or the path is too long
            continue
    return total


def kill_all() -> None:
    """Kill every descendant; stop all of them first, so that none can fork while others are killed."""
    stopped: set[int] = set()
    while new := set(descendants(os.getpid())) - stopped:
        for pid in new:
            send(pid, signal.SIGSTOP)
        stopped |= new
    with suppress(ChildProcessError):  # until no child is left
        while True:
            for pid in descendants(os.getpid()):
                send(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# ------------------------------------------------------------------------------------------------------ 2. namespaces
def enter_pid_namespace(config: dict) -> None:
    """Make the next forked process the first of a new PID namespace."""
    uid, gid = os.getuid(), os.getgid()
    if config["uid"] is None:  # not root: only a user namespace permits the others
        call("unshare", CLONE_NEWUSER | CLONE_NEWPID)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    else:
        call("unshare", CLONE_NEWPID)


def init(config: dict) -> None:
    """Run as PID 1: create the new root, start the program and wait for it. All other processes die with this one."""
    with reported(config):
        call("unshare", CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
        new_root(config)
        program = os.fork()
        if program == 0:
            run(config)
        become(config["uid"])
        call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # again: changing the user resets it
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    pid = None
    while pid != program:
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def new_root(config: dict) -> None:
    """Make the root a file system in memory; `readonly`, `writable` and devices keep their paths in it."""
    root = config["root"]
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)  # the mounts below stay invisible outside
    options = f"size={config['disk_bytes']},nr_inodes=4096,mode=755".encode()
    call("mount", b"tmpfs", os.fsencode(root), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    for path in (*SYSTEM, *config["readonly"], *config["writable"], *DEVICES):
        inside = root + path
        if not os.path.lexists(path) or os.path.lexists(inside):  # missing, or in a directory that is already mounted
            continue
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        if os.path.islink(path):  # /bin -> usr/bin
            os.symlink(os.readlink(path), inside)
            continue
        if os.path.isdir(path):
            os.mkdir(inside)
        else:
            os.close(os.open(inside, os.O_CREAT))
        call("mount", os.fsencode(path), os.fsencode(inside), None, MS_BIND | MS_REC, None)
        if path not in (*config["writable"], *DEVICES):
            flags = os.statvfs(inside).f_flag  # a user namespace may not clear these flags
            kept = flags & (os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME)
            kept |= MS_RELATIME if flags & os.ST_RELATIME else 0
            flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept
            call("mount", None, os.fsencode(inside), None, flags, None)
    os.makedirs(root + config["home"])
    if config["uid"] is not None:
        os.chown(root + config["home"], config["uid"], config["uid"])
    os.mkdir(root + "/proc")
    call("mount", b"proc", os.fsencode(root + "/proc"), b"proc", MS_NOSUID | MS_NODEV, None)
    os.chdir(root)
    call("syscall", PIVOT_ROOT[platform.machine() != "x86_64"], b".", b".")  # the old root is now on top
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


# ----------------------------------------------------------------------------------------------------- 3. the program
def run(config: dict) -> None:
    """Drop all privileges and become the program."""
    with reported(config):
        os.chdir(config["home"])
        num_tasks = config["num_tasks"] + (count_tasks(os.getuid()) if config["uid"] is None else 0)
        for name, limit in (
            ("CORE", 0), ("FSIZE", config["disk_bytes"]), ("NOFILE", NUM_FILES), ("DATA", config["memory_bytes"]),
            ("NPROC", num_tasks), ("MSGQUEUE", 0), ("CPU", config["cpu_seconds"]),
        ):  # fmt: skip
            if limit is not None:
                number = getattr(resource, f"RLIMIT_{name}")
                hard = limit + (name == "CPU")  # SIGXCPU first, SIGKILL a second later
                allowed = resource.getrlimit(number)[1]
                hard = hard if allowed == resource.RLIM_INFINITY else min(hard, allowed)
                resource.setrlimit(number, (min(limit, hard), hard))
        become(config["uid"])
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        landlock = config["way"] == "limits" and restrict_files(config)
        seccomp = filter_system_calls(deny_signals=config["way"] == "limits")
        if config["argv"] is None:  # only check what works on this machine
            os.write(1, json.dumps({"landlock": landlock, "seccomp": seccomp}).encode())
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the program would inherit that
            signal.signal(number, signal.SIG_DFL)
        os.execve(config["argv"][0], config["argv"], config["environment"])


def become(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def count_tasks(uid: int) -> int:
    """Count the user's processes and threads: RLIMIT_NPROC counts them too, at least on older systems."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(*GONE):
            if os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def filter_system_calls(deny_signals: bool, deny_processes: bool = False) -> bool:
    """Make the system calls above fail with EPERM, permanently and in all children; return False if unsupported.

    deny_processes: allow new threads, but no new processes; the course's graders use it.
    """
    if platform.machine() not in ARCHITECTURES:
        return False
    column, architecture = ARCHITECTURES[platform.machine()]
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    load, equal, at_least, has_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06  # (operation, skip if true, if false, operand)
    code = [
        (load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, 0x80000000),  # another architecture's numbers: kill
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (end, 0, 0, refuse),  # x32's numbers
        (equal, 0, 1, CLONE3[column]), (end, 0, 0, unknown),  # the C library then uses clone, whose flags we can see
    ]  # fmt: skip
    for numbers in (*DENIED.values(), *(SIGNALS.values() if deny_signals else ())):
        code += [(equal, 0, 1, numbers[column]), (end, 0, 0, refuse)]
    if deny_processes:
        for number in FORKS[column]:
            code += [(equal, 0, 1, number), (end, 0, 0, refuse)]
        code += [
            (equal, 0, 4, CLONE[column]), (load, 0, 0, 16), (has_bit, 1, 0, CLONE_THREAD), (end, 0, 0, refuse),
            (load, 0, 0, 0),  # reload the number for the next checks
        ]  # fmt: skip
    code += [
        (equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (has_bit, 0, 5, CLONE_NEWUSER), (end, 0, 0, refuse),
        (equal, 0, 3, PRLIMIT64[column]), (load, 0, 0, 16), (equal, 1, 0, 0), (end, 0, 0, refuse),  # other processes
        (end, 0, 0, allow),
    ]  # fmt: skip
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer))
    return libc.prctl(PR_SET_SECCOMP, ctypes.c_long(2), program, ctypes.c_long(0), ctypes.c_long(0)) == 0


def restrict_files(config: dict) -> bool:
    """Use Landlock to allow only the system's files, `readonly`, `writable` and the home; False if unsupported."""
    create, add, restrict = 444, 445, 446  # the same numbers on all architectures
    version = libc.syscall(create, None, ctypes.c_long(0), ctypes.c_long(1))
    if version < 1:
        return False
    every = (1 << (13 + min(version - 1, 2))) - 1  # file rights: 13 in version 1, 14 in 2, 15 in 3
    network, scopes = 3 if version >= 4 else 0, 3 if version >= 6 else 0  # TCP; abstract sockets and signals
    rules = struct.pack("QQQ", every, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = call("syscall", create, rules, len(rules), 0)
    look = 1 | 4 | 8  # execute, read a file, read a directory
    for path, rights in (
        *((path, look) for path in (*SYSTEM, *config["readonly"], "/proc")),
        *((path, 2 | 4) for path in DEVICES),
        *((path, every) for path in (*config["writable"], config["home"])),
    ):
        if os.path.exists(path):
            fd = os.open(path, os.O_PATH)
            if not os.path.isdir(path):
                rights &= 1 | 2 | 4 | (1 << 14 if version >= 3 else 0)
            call("syscall", add, ruleset, 1, struct.pack("=Qi", rights, fd), 0)
            os.close(fd)
    call("syscall", restrict, ruleset, 0)
    os.close(ruleset)
    return True


if __name__ == "__main__":
    main()
