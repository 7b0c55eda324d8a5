"""The process that builds a sandbox: run as a script by sandbox.py, it imports the standard library alone.

What it does, in this order, each step closing what the one before leaves open:

    namespaces        own users, processes (none survives, none outside is seen), network (nothing but a dead loopback),
                      mounts and System V objects
    root folder       only Python, the system's libraries and four devices, read-only, and an empty folder in memory
    drop root         an unprivileged user, whose processes the kernel counts
    Landlock          the same once more, by the kernel's access control; nothing above can be undone
    resource limits   processor time, memory, files, processes

Three processes: this one waits outside; its child is process 1 of the new process namespace and the one whose end ends
all others there; the grandchild becomes the program.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

NOBODY = 65534
PYTHON = os.path.realpath(sys.executable)  # a link to it, as environments have, lies outside the new root folder
WORK_FOLDER = "/tmp"
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
RUN = (
    "import builtins, sys; builtins.exit = builtins.quit = sys.exit; sys.argv = ['program.py']; "
    "exec(compile(open('program.py', encoding='utf-8').read(), 'program.py', 'exec'))"
)
"""The code that starts a program, which may call exit(): Python's -S leaves that out."""

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_AT_RECURSIVE, _AT_FDCWD, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 0x8000, -100, 1, 2
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_ALL_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Version of Landlock -> all file rights: 2 adds linking between folders, 3 truncation, 5 device commands."""

_libc = ctypes.CDLL(None, use_errno=True)


class Missing(Exception):
    """A protection that this machine does not offer; the message names it and the cause."""


def main(settings_text: str, status_fd: int) -> None:
    """Builds the sandbox, runs the program in it and says how it ended.

    Args:
        settings_text: JSON: folder, allow_unsafe, the caller's process id and the limits.
        status_fd: gets lines of JSON: {"missing": [...]} where the program was not run, else {"exit_code": n}, and
            {"not_started": why} before it where Python could not be started.
    """
    os.set_inheritable(status_fd, False)
    settings = json.loads(settings_text)
    with open(f"{settings['folder']}/program.py", "rb") as file:
        program = file.read()
    folder, missing = build(settings, program)
    if missing and not settings["allow_unsafe"]:
        _report(status_fd, {"missing": missing})
        return
    die_with_parent()
    if os.getppid() != settings["caller"]:  # the caller died before the line above
        return
    first = os.fork()
    if first == 0:
        os._exit(_be_process_one(settings, folder, status_fd, confined=not missing))
    os.waitpid(first, 0)


def build(settings: dict[str, Any], program: bytes) -> tuple[str, list[str]]:
    """Does everything that comes before the fork. Returns the folder to work in and the missing protections."""
    missing: list[str] = []
    folder = str(settings["folder"])
    try:
        enter_namespaces()
        change_root(folder, size_bytes=settings["disk_bytes"])
        folder = WORK_FOLDER
        with open(f"{folder}/program.py", "wb") as file:
            file.write(program)
    except Missing as error:
        missing.append(str(error))
    try:
        drop_root(folder)
    except OSError as error:
        missing.append(f"a user without privileges ({error.strerror})")
    except Missing as error:
        missing.append(str(error))
    if landlock_version() < 1:
        missing.append("Landlock (Linux 5.13 or newer, with landlock among the kernel's security modules)")
    return folder, missing


def readable_paths() -> list[str]:
    """Returns what a Python program needs to read, without a folder inside another one of them."""
    prefix = os.path.realpath(sys.base_prefix)
    inside_system = any(prefix == folder or prefix.startswith(f"{folder}/") for folder in SYSTEM_FOLDERS)
    return [*SYSTEM_FOLDERS, *([] if inside_system else [prefix])]


def drop_root(folder: str) -> None:
    """Becomes an unprivileged user who owns `folder`; the kernel does not count the processes of root."""
    if os.geteuid() != 0:
        return
    if folder != WORK_FOLDER and not _others_may_run(PYTHON):
        raise Missing(f"a user without privileges (only root may run {PYTHON})")
    os.chown(folder, NOBODY, NOBODY)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def enter_namespaces() -> None:
    """Gives this process namespaces of its own. Raises Missing: the kernel, or a container around it, refuses them."""
    user, group = os.geteuid(), os.getegid()
    try:
        if user == 0:
            # Root stays root until the mounts are made: Python may be in a folder that only root can enter.
            _unshare_with_users([0, NOBODY])
        else:
            _check(_libc.unshare(_NAMESPACES))
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{user} {user} 1")
            _write("/proc/self/gid_map", f"{group} {group} 1")
        # Allows no further namespaces inside, in which the program would have privileges again.
        _write("/proc/sys/user/max_user_namespaces", "0")
    except OSError as error:
        raise Missing(f"user, process, network and mount namespaces ({error.strerror})") from None


def _unshare_with_users(users: list[int]) -> None:
    """Enters the namespaces with several users mapped, which only a child that stays outside can do."""
    mapping = "".join(f"{user} {user} 1\n" for user in users)
    target = os.getpid()
    go_read, go_write = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(go_write)
            os.read(go_read, 1)
            _write(f"/proc/{target}/uid_map", mapping)
            _write(f"/proc/{target}/gid_map", mapping)
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    try:
        # The next child is process 1 of the new namespace, so the helper had to be started before.
        _check(_libc.unshare(_NAMESPACES))
    finally:
        os.close(go_read)
        os.close(go_write)
        code = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if code:
        raise OSError(code, os.strerror(code))


def change_root(folder: str, *, size_bytes: int) -> None:
    """Makes `folder` a file system in memory that shows what Python needs, read-only, and makes it the root folder.

    Raises:
        Missing: a mount is refused.
    """
    try:
        _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size_bytes},nr_inodes=4096,mode=755")
        for path in (*readable_paths(), *DEVICES):
            target = folder + path
            if not os.path.exists(path):
                continue
            if os.path.islink(path):  # /bin is usr/bin on most systems
                os.symlink(os.readlink(path), target)
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.isdir(path):
                os.mkdir(target)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
            _mount(path, target, None, _MS_BIND | _MS_REC)
            if path not in DEVICES:
                _make_read_only(target)
        os.makedirs(folder + WORK_FOLDER, mode=0o700)
        os.chdir(folder)
        _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."))
        _check(_libc.umount2(b".", _MNT_DETACH))
        os.chdir("/")
    except KeyError as machine:
        raise Missing(f"a root folder of its own (unknown architecture {machine})") from None
    except OSError as error:
        raise Missing(f"a root folder of its own ({error.strerror}: {error.filename})") from None


def landlock_version() -> int:
    """Returns the kernel's version of Landlock; 0 or less where it has none."""
    return int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def restrict_files(folder: str) -> None:
    """Restricts this process by Landlock: it may read and execute the system's files, and read and write `folder` and
    the devices, nothing else; from version 6 signals to processes outside are refused too. It holds for all children
    and cannot be undone."""
    version = landlock_version()
    rights = _ALL_RIGHTS[min(version, 5)]
    attributes = [rights, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0]
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    buffer = (ctypes.c_uint64 * 3)(*attributes)
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE, buffer, ctypes.c_size_t(size), ctypes.c_uint32(0)))
    _allow(ruleset, folder, rights)
    for path in readable_paths():
        _allow(ruleset, path, _READ)
    for device in DEVICES:
        _allow(ruleset, device, _READ_FILE | _WRITE_FILE)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0)))
    os.close(ruleset)


def limit_resources(settings: dict[str, Any], *, count_processes: bool) -> None:
    """Limits this process and each of its children on its own; the number of processes is a limit on all together."""
    cpu = settings["cpu_seconds"]
    limits = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),  # SIGXCPU, then SIGKILL
        resource.RLIMIT_AS: (settings["memory_bytes"],) * 2,
        resource.RLIMIT_FSIZE: (settings["disk_bytes"],) * 2,
        resource.RLIMIT_NOFILE: (settings["num_open_files"],) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    # Outside a user namespace the processes that the user has elsewhere would count too.
    if count_processes:
        limits[resource.RLIMIT_NPROC] = (settings["num_processes"],) * 2
    for name, (soft, hard) in limits.items():
        ceiling = resource.getrlimit(name)[1]
        bound = ceiling if ceiling != resource.RLIM_INFINITY else max(soft, hard)
        resource.setrlimit(name, (min(soft, bound), min(hard, bound)))


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent dies. Call it after a change of user, which cancels it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _be_process_one(settings: dict[str, Any], folder: str, status_fd: int, *, confined: bool) -> int:
    """Reaps dead processes until the program ends. When this process ends, the kernel ends all in the namespace."""
    die_with_parent()
    program = os.fork()
    if program == 0:
        _become_program(settings, folder, status_fd, confined=confined)
    while True:
        pid, status = os.wait()
        if pid == program:
            break
    _report(status_fd, {"exit_code": os.waitstatus_to_exitcode(status)})
    return 0


def _become_program(settings: dict[str, Any], folder: str, status_fd: int, *, confined: bool) -> None:
    try:
        os.chdir(folder)
        limit_resources(settings, count_processes=confined)
        if landlock_version() >= 1:
            restrict_files(folder)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        environment = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
        os.execve(PYTHON, [PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", RUN], environment)
    except BaseException as error:
        _report(status_fd, {"not_started": repr(error)})
    finally:
        os._exit(125)


def _report(status_fd: int, status: dict[str, Any]) -> None:
    os.write(status_fd, json.dumps(status).encode() + b"\n")


def _others_may_run(path: str) -> bool:
    while os.stat(path).st_mode & 1:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False


def _allow(ruleset: int, path: str, rights: int) -> None:
    if not os.path.exists(path):
        return
    if not os.path.isdir(path):
        rights &= _EXECUTE | _WRITE_FILE | _READ_FILE
    fd = os.open(path, os.O_PATH)

    class PathBeneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))

    rule = PathBeneath(rights, fd)
    _check(_libc.syscall(_LANDLOCK_ADD_RULE, ruleset, ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0)))
    os.close(fd)


def _make_read_only(path: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    done = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), ctypes.c_uint(_AT_RECURSIVE), attributes, size)
    _check(done, path)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _check(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), target)


def _write(path: str, text: str) -> None:
    # Text files load their codec when they are opened first, and Python's own files may be out of reach by now.
    with open(path, "wb") as file:
        file.write(text.encode())


def _check(result: int, path: str | None = None) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return result


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
