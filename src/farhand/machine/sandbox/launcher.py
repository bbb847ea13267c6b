"""Confine this process further, then run a command: the last step before a sandboxed shell starts.

Runs as `python -I -S launcher.py SPEC COMMAND ARG...`, where SPEC is the JSON of `Launch` in `launch.py`. Inside
bubblewrap it closes what mounts and namespaces leave open: abstract sockets of the host, and limits of resources.
Without bubblewrap it is the sandbox itself: namespaces, mounts and Landlock rules. Outside of either it joins a control
group, mounts the overlays of a trial, and stays as the parent of a command whose disk space is limited.

Standard library only: the sandbox has no other packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
import threading
import time
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 38, 24
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_RECURSIVE, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = -100, 0x8000, 1, 4
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
_SYSTEM_FOLDERS = frozenset({"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "dev", "proc", "sys"})
_PROXY_PORT = 3128
_CA_BUNDLE = "ca.pem"
_CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO")
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

# Access rights of Landlock for files.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK, _REFER, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 13, 1 << 14, 1 << 15
_FIRST_VERSION = (1 << 13) - 1
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_SCOPE_VERSION = 6

# How often the free space is read, in seconds; the folders are counted when it shrank, and now and then.
_DISK_SECONDS = 0.05
_COUNT_SECONDS = 5.0
# Deeper folders are not counted, since each takes an open file.
_DEEPEST = 400
_DISK_STATUS = 122  # errno EDQUOT
# Times of files are those of the last tick of the kernel's clock.
_CLOCK_NS = 20_000_000


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    command = sys.argv[2:]
    if spec.get("cgroup"):
        _write(spec["cgroup"] + "/cgroup.procs", "0")
    # Before the overlays: a folder whose upper folder lies in it cannot be opened through its own overlay.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    counted = [os.open(folder, flags) for folder in spec.get("counted", ())] if spec.get("disk") else []
    if spec.get("overlays"):
        _mount_overlays(spec["overlays"])
    if spec.get("disk"):
        _fork_under_disk_limit(spec["disk"], counted)
    if spec.get("namespaces"):
        _enter_namespaces(spec)
    if spec.get("devices"):
        _protect_devices()
        _drop_bounding_set()
        _drop_capabilities()
    _check_expected(spec.get("expected", ()))
    _reopen_null()
    _lead_terminal()
    _limit(spec.get("limits", {}))
    environment = dict(os.environ)
    if spec.get("egress"):
        environment |= _serve_proxy(spec["egress"])
    _restrict(spec.get("rules"))
    try:
        os.execve(command[0], command, environment)  # noqa: S606 (the command was chosen by the caller)
    except OSError as error:
        _fail(f"cannot run {command[0]!r}: {error.strerror}")


def landlock_version() -> int:
    """Return the version of Landlock that the kernel offers; 0 if there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def _restrict(rules: dict[str, list[str]] | None) -> None:
    """Apply Landlock: file rules if any are given, and no abstract sockets or signals of processes outside."""
    version = landlock_version()
    if rules is not None and version < 1:
        _fail("the kernel has no Landlock")
    handled = 0
    if rules is not None:
        handled = _FIRST_VERSION
        handled |= _REFER if version >= 2 else 0
        handled |= _TRUNCATE if version >= 3 else 0
        handled |= _IOCTL_DEV if version >= 5 else 0
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= _SCOPE_VERSION else 0
    if not handled and not scoped:
        return
    attributes = struct.pack("=QQQ", handled, 0, scoped)[: 24 if scoped else 8]
    ruleset = _LIBC.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        _fail(f"Landlock: {os.strerror(ctypes.get_errno())}")
    rights = {
        "read": _EXECUTE | _READ_FILE | _READ_DIR,
        "device": _READ_FILE | _WRITE_FILE | _IOCTL_DEV,
        "write": _FIRST_VERSION & ~(_MAKE_CHAR | _MAKE_BLOCK) | _REFER | _TRUNCATE,
    }
    for kind, paths in (rules or {}).items():
        for path in paths:
            _allow(ruleset, path, rights[kind] & handled)
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _LIBC.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)) != 0:
        _fail(f"Landlock: {os.strerror(ctypes.get_errno())}")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a path that does not exist needs no rule
    try:
        if not os.path.isdir(path):
            rights &= _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
        rule = struct.pack("=Qi", rights, opened)
        if _LIBC.syscall(_ADD_RULE, ruleset, 1, rule, ctypes.c_uint32(0)) != 0:
            _fail(f"Landlock rule for {path!r}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(opened)


def _mount_overlays(overlays: list[list[str]]) -> None:
    """Mount a copy-on-write view over each folder, seen by this process alone: changes go to the upper folder."""
    privileged = os.geteuid() == 0
    _unshare(_NEWNS | (0 if privileged else _NEWUSER))
    _LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    for folder, upper, work in overlays:
        options = f"lowerdir={folder},upperdir={upper},workdir={work}" + ("" if privileged else ",userxattr")
        if _LIBC.mount(b"overlay", os.fsencode(folder), b"overlay", 0, os.fsencode(options)) != 0:
            _fail(f"cannot mount an overlay on {folder}: {os.strerror(ctypes.get_errno())}")
    os.chdir(os.environ.get("PWD", "/"))


def _unshare(kinds: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    if _LIBC.unshare(kinds) != 0:
        _fail(f"cannot create namespaces: {os.strerror(ctypes.get_errno())}")
    if kinds & _NEWUSER:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")


def _enter_namespaces(spec: dict[str, Any]) -> None:
    """Continue as a process that sees no other processes and only the folders it needs.

    Without `network`, it has no network but a loopback of its own. With `user`, which needs root, it is that user.
    """
    network = bool(spec.get("network", True))
    user = spec.get("user")
    _unshare((0 if user else _NEWUSER) | _NEWNS | _NEWPID | _NEWIPC | _NEWUTS | (0 if network else _NEWNET))
    if not network:
        _loopback_up()
    # The first child becomes process 1 of the new namespace; this process waits for it and passes its status on.
    child = os.fork()
    if child:
        _wait_for(child)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _arrange_mounts(spec.get("rules") or {}, spec.get("hidden", ()), spec.get("temporary", 0))
    os.chdir(os.environ["PWD"])  # the same folder, through the new mounts
    inner = os.fork()  # process 1 ignores signals without a handler, so the command is not process 1
    if inner:
        _wait_for(inner)
    _drop_bounding_set()
    if user:
        uid, gid = user
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    _drop_capabilities()


def _arrange_mounts(rules: dict[str, list[str]], hidden: list[str], temporary: int) -> None:
    """Make everything read-only but the writable paths, and cover what is not needed.

    Landlock does not control modes, owners and times of files, nor connections to sockets in the file system: so what
    a command must not change is read-only, and what it does not need is not there.
    """
    written = [path for path in rules.get("write", ()) if path != "/tmp" and os.path.exists(path)]  # noqa: S108
    kept = [(path, _cloned(path)) for path in written]
    _set_attributes("/", _ATTR_RDONLY | _ATTR_NOSUID)
    for path in rules.get("read", ()):
        if os.path.exists(path) and (path.split("/")[1] not in _SYSTEM_FOLDERS or _is_in(path, hidden)):
            kept.append((path, _cloned(path)))
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if _LIBC.mount(b"proc", b"/proc", b"proc", flags, None) != 0:
        _fail(f"cannot mount /proc: {os.strerror(ctypes.get_errno())}")
    for entry in os.scandir("/"):
        if entry.is_dir(follow_symlinks=False) and entry.name not in _SYSTEM_FOLDERS:
            _cover(entry.path, temporary)
    os.umask(0o022)
    _attach([one for one in kept if not _is_in(one[0], hidden)])
    for path in hidden:
        if os.path.isdir(path):
            _cover(path, temporary)
    _attach([one for one in kept if _is_in(one[0], hidden)])


def _attach(mounts: list[tuple[str, tuple[int, bool]]]) -> None:
    """Give mounts their place, those of the upper folders first."""
    for path, (mount, is_folder) in sorted(mounts, key=lambda one: one[0].count("/")):
        os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
        if not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # for a file to be mounted on
        target = os.fsencode(path)
        if _LIBC.syscall(_MOVE_MOUNT, mount, b"", _AT_FDCWD, target, _MOVE_MOUNT_F_EMPTY_PATH) != 0:
            _fail(f"cannot mount {path}: {os.strerror(ctypes.get_errno())}")
        os.close(mount)


def _is_in(path: str, folders: list[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _cloned(path: str) -> tuple[int, bool]:
    """Return a mount of a path, as it is now, that has no place yet, and whether it is a folder."""
    kinds = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    mount = _LIBC.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), ctypes.c_uint(kinds))
    if mount < 0:
        _fail(f"cannot mount {path}: {os.strerror(ctypes.get_errno())}")
    return int(mount), os.path.isdir(path)


def _set_attributes(path: str, attributes: int) -> None:
    """Set attributes of the mount of a path and of those below."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    arguments = (_AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, wanted, ctypes.c_size_t(len(wanted)))
    if _LIBC.syscall(_MOUNT_SETATTR, *arguments) != 0:
        _fail(f"cannot make {path} read-only: {os.strerror(ctypes.get_errno())}")


def _cover(folder: str, size: int) -> None:
    """Mount an empty folder over one. `size`: the bytes it can hold; 0 for the default of the system."""
    mode = "1777" if folder == "/tmp" else "0755"  # noqa: S108 (its own)
    options = f"mode={mode}" + (f",size={size}" if size else "")
    if _LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode()) != 0:
        _fail(f"cannot hide {folder}: {os.strerror(ctypes.get_errno())}")


def _check_expected(expected: list[tuple[str, int, int]]) -> None:
    """Fail if something else was mounted on a path: its folder was replaced by a link after it was looked up."""
    for path, device, inode in expected:
        status = os.stat(path)
        if (status.st_dev, status.st_ino) != (device, inode):
            _fail(f"{path} was replaced while the command was being started")


def _protect_devices() -> None:
    """Make the mount of each device read-only: it can be used as before, but its mode, owner and times stay."""
    for entry in os.scandir("/dev"):
        if not stat.S_ISCHR(entry.stat(follow_symlinks=False).st_mode):
            continue
        # Flags that the mount has must be repeated.
        flags = os.statvfs(entry.path).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        flags |= _MS_REMOUNT | _MS_BIND | _MS_RDONLY
        if _LIBC.mount(None, os.fsencode(entry.path), None, flags, None) != 0:
            _fail(f"cannot make {entry.path} read-only: {os.strerror(ctypes.get_errno())}")


def _reopen_null() -> None:
    """Open a standard stream that is /dev/null again, through the mount of the sandbox.

    The open file of the program that started this one leads to the mount outside, which may be writable.
    """
    null = os.stat("/dev/null").st_rdev
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):  # it is closed
            status = os.fstat(number)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == null:
                opened = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
                os.dup2(opened, number)
                os.close(opened)


def _lead_terminal() -> None:
    """Make this process the foreground of its terminal, if it has one.

    The process group that it began in is not visible here, so a shell could not return the terminal to it at its end.
    """
    if not os.isatty(0):
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a session leader is one already
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, before)


def _drop_bounding_set() -> None:
    for capability in range(64):
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", 0x20080522, 0)
    if _LIBC.capset(header, struct.pack("=6I", *[0] * 6)) != 0:
        _fail(f"cannot drop capabilities: {os.strerror(ctypes.get_errno())}")


def _wait_for(child: int) -> None:
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            os._exit(0)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)


def _fork_under_disk_limit(limit: int, opened: list[int]) -> None:
    """Continue as a child; this process ends it if the opened folders grow by more than `limit` bytes.

    It is outside of the sandbox, so the command cannot reach it, and ends as the command does.
    """
    free, began = _free_space(opened), time.time_ns() - _CLOCK_NS
    child = os.fork()
    if child == 0:
        for number in opened:
            os.close(number)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)  # they are for the command
    with contextlib.suppress(OSError):
        os.nice(5)
    _watch_disk(child, limit, opened, free, began)


def _watch_disk(child: int, limit: int, opened: list[int], free: int, began: int) -> NoReturn:
    """Wait for the child, and end it if the folders grow too much.

    Reading the free space costs nothing; the folders are counted when it shrank so much that the limit may be reached,
    and now and then, since other programs may free space meanwhile. The command does not wait for the first count,
    which leaves out what was changed since it began.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    first = None  # the use of the folders when the command began
    grown, before = 0, free
    count = _Count(opened, child, began)
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, _DISK_SECONDS)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            count.stop()
            _end_alike(status)
        now = _free_space(opened)
        used = count.result()
        if used is not None:
            if first is None:
                first = used
            else:
                grown, before = max(0, used - first), count.free
            if count.is_partial:
                grown = max(grown, free - now)
        if grown > limit:
            count.stop()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            sys.stderr.write(
                f"farhand: the command was ended: the folders it may write grew by {grown} bytes, and its limit "
                f"(disk) is {limit}\n"
            )
            sys.stderr.flush()
            os._exit(_DISK_STATUS)
        is_suspect = grown + max(0, before - now) > limit
        if count.is_over and (is_suspect or time.monotonic() > count.ended_at + max(_COUNT_SECONDS, 20 * count.took)):
            count = _Count(opened, child)


class _Count:
    """A count of the bytes that folders take, in a process of its own.

    It needs a right that the parent of the command must not have: a command can close its folders to its own user.
    Files that were removed but are still open count, too.
    """

    def __init__(self, opened: list[int], child: int, changed_before: int | None = None) -> None:
        """`changed_before`: leave out what was changed later, in nanoseconds."""
        self._devices = {os.fstat(number).st_dev for number in opened}
        self._child = child
        self._is_first = changed_before is not None
        self._began = time.monotonic()
        # Free space before it began.
        self.free = _free_space(opened)
        # Whether folders are nested too deeply to be counted.
        self.is_partial = False
        self.is_over = False
        self.ended_at = self.took = 0.0
        self._pipe, writer = os.pipe()
        self._counter = os.fork()
        if self._counter == 0:
            if os.geteuid() != 0:
                with contextlib.suppress(OSError):
                    _own_user_namespace()
            os.write(writer, json.dumps(_disk_use(opened, changed_before)).encode())
            os._exit(0)
        os.close(writer)

    def result(self) -> int | None:
        """Return the count once, when it is complete."""
        if self.is_over or os.waitpid(self._counter, os.WNOHANG)[0] == 0:
            return None
        self.is_over, self.ended_at = True, time.monotonic()
        self.took = self.ended_at - self._began
        found = os.read(self._pipe, 1000)
        os.close(self._pipe)
        used, self.is_partial = json.loads(found or "[0, true]")
        return int(used) + (0 if self._is_first else _removed_but_open(self._child, self._devices))

    def stop(self) -> None:
        if not self.is_over:
            os.kill(self._counter, signal.SIGKILL)
            os.waitpid(self._counter, 0)


def _end_alike(status: int) -> NoReturn:
    """End as a child did."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def _free_space(opened: list[int]) -> int:
    """Return the free bytes of the file systems of folders."""
    found = {os.fstat(number).st_dev: os.fstatvfs(number) for number in opened}
    return sum(one.f_bfree * one.f_frsize for one in found.values())


def _own_user_namespace() -> None:
    """Get the right to read the folders of this user, whatever their modes."""
    uid, gid = os.geteuid(), os.getegid()
    if _LIBC.unshare(_NEWUSER) != 0:
        return
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _disk_use(opened: list[int], changed_before: int | None) -> tuple[int, bool]:
    """Return the bytes that folders and what is in them take, and whether some are nested too deeply to be counted.

    A file with several names counts once. It works with open folders, since a path may be too long.
    """
    blocks = sum(os.fstat(number).st_blocks for number in opened)
    linked: set[tuple[int, int]] = set()
    is_partial = False
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folders = []
    for number in opened:
        own = os.open(".", flags, dir_fd=number)  # another count has its own position in the folder
        folders.append((own, os.scandir(own)))
    while folders:
        above, entries = folders[-1]
        entry = next(entries, None)
        if entry is None:
            folders.pop()
            entries.close()
            os.close(above)
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                if (status.st_dev, status.st_ino) in linked:
                    continue
                linked.add((status.st_dev, status.st_ino))
            if changed_before is None or status.st_ctime_ns < changed_before:
                blocks += status.st_blocks
            if stat.S_ISDIR(status.st_mode) and len(folders) < _DEEPEST:
                folder = os.open(entry.name, flags, dir_fd=above)
                folders.append((folder, os.scandir(folder)))
            elif stat.S_ISDIR(status.st_mode):
                is_partial = True
        except OSError:
            continue  # it was removed meanwhile
    return blocks * 512, is_partial


def _removed_but_open(process: int, devices: set[int]) -> int:
    """Return the bytes of files without a name that a process and its descendants hold open."""
    total = 0
    seen: set[tuple[int, int]] = set()
    waiting = [process]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    waiting += map(int, file.read().split())
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    known = (status.st_dev, status.st_ino)
                    if status.st_nlink == 0 and status.st_dev in devices and known not in seen:
                        seen.add(known)
                        total += status.st_blocks * 512
    return total


def _loopback_up() -> None:
    import fcntl  # noqa: PLC0415 - needed only here

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _limit(limits: dict[str, int]) -> None:
    kinds = {"file_size": resource.RLIMIT_FSIZE, "cpu_seconds": resource.RLIMIT_CPU, "core": resource.RLIMIT_CORE}
    kinds |= {"processes": resource.RLIMIT_NPROC, "memory": resource.RLIMIT_AS}
    for name, value in limits.items():
        _, hard = resource.getrlimit(kinds[name])
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kinds[name], (most, most))


def _serve_proxy(path: str) -> dict[str, str]:
    """Listen on the loopback address and pass each connection to the proxy outside, at the socket `path`.

    Returns the variables that programs read. The server is a process of its own and ends with the sandbox.
    """
    server = socket.create_server(("127.0.0.1", _PROXY_PORT))
    folder, _, name = path.rpartition("/")
    if os.fork() == 0:
        if os.fork() != 0:
            os._exit(0)
        os.setsid()
        # Through the open folder, since the path of a socket has at most 107 bytes.
        path = f"/proc/self/fd/{os.open(folder, os.O_PATH)}/{name}"
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        while True:
            client, _ = server.accept()
            threading.Thread(target=_relay, args=(client, path), daemon=True).start()
    os.wait()
    server.close()
    address = f"http://127.0.0.1:{_PROXY_PORT}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")
    found = {**dict.fromkeys(names, address), "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}
    trusted = f"{folder}/{_CA_BUNDLE}"
    return found | (dict.fromkeys(_CA_VARIABLES, trusted) if os.path.exists(trusted) else {})


def _relay(client: socket.socket, path: str) -> None:
    with client, socket.socket(socket.AF_UNIX) as proxy:
        try:
            proxy.connect(path)
        except OSError:
            return
        back = threading.Thread(target=_copy, args=(proxy, client), daemon=True)
        back.start()
        _copy(client, proxy)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        _fail(f"cannot write {path}: {error.strerror}")


def _fail(reason: str) -> None:
    sys.stderr.write(f"sandbox: {reason}; the command did not run\n")
    sys.stderr.flush()
    os._exit(126)


if __name__ == "__main__":
    main()
