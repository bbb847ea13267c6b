"""Confine this process further, then run a command: the last step before a sandboxed shell starts.

Runs as `python -I -S launcher.py SPEC COMMAND ARG...`, where SPEC is the JSON of `Launch` in `launch.py`. Inside
bubblewrap it closes what mounts and namespaces leave open: abstract sockets of the host, and limits of resources.
Without bubblewrap it is the sandbox itself: namespaces and Landlock rules.

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
import struct
import sys
import threading
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 38, 24
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
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


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    command = sys.argv[2:]
    if spec.get("cgroup"):
        _write(spec["cgroup"] + "/cgroup.procs", "0")
    if spec.get("overlays"):
        _mount_overlays(spec["overlays"])
    if spec.get("namespaces"):
        _enter_namespaces(spec)
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

    Without `network`, it has no network but a loopback of its own.
    """
    network = bool(spec.get("network", True))
    _unshare(_NEWUSER | _NEWNS | _NEWPID | _NEWIPC | _NEWUTS | (0 if network else _NEWNET))
    if not network:
        _loopback_up()
    # The first child becomes process 1 of the new namespace; this process waits for it and passes its status on.
    child = os.fork()
    if child:
        _wait_for(child)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _LIBC.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if _LIBC.mount(b"proc", b"/proc", b"proc", flags, None) != 0:
        _fail(f"cannot mount /proc: {os.strerror(ctypes.get_errno())}")
    kept = [path for paths in (spec.get("rules") or {}).values() for path in paths]
    # Landlock does not control connections to sockets in the file system, so they must not be visible.
    for entry in os.scandir("/"):
        if entry.is_dir(follow_symlinks=False) and entry.name not in _SYSTEM_FOLDERS:
            _cover(entry.path, kept)
    for path in spec.get("hidden", ()):
        if os.path.isdir(path):
            _cover(path, kept)
    os.chdir(os.environ["PWD"])  # the same folder, through the new mounts
    inner = os.fork()  # process 1 ignores signals without a handler, so the command is not process 1
    if inner:
        _wait_for(inner)
    for capability in range(64):
        _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _drop_capabilities()


def _cover(folder: str, kept: list[str]) -> None:
    """Mount an empty folder over one, and what is to be kept of it on its place again."""
    opened = []
    for path in kept:
        if path.startswith(folder + "/") and os.path.isdir(path):
            opened.append((path, os.open(path, os.O_PATH | os.O_CLOEXEC)))
    if _LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=0755") != 0:
        _fail(f"cannot hide {folder}: {os.strerror(ctypes.get_errno())}")
    for path, number in opened:
        os.makedirs(path, exist_ok=True)
        source = os.fsencode(f"/proc/self/fd/{number}")
        if _LIBC.mount(source, os.fsencode(path), None, _MS_BIND | _MS_REC, None) != 0:
            _fail(f"cannot mount {path}: {os.strerror(ctypes.get_errno())}")
        os.close(number)


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
