"""The seccomp filter of programs: a program of the kernel's BPF, for x86_64 and aarch64.

It refuses what no test of a program needs: other processes, network, namespaces, mounts, tracing,
keys, io_uring, BPF, shared memory and memory files, which no limit of memory counts. System calls
that are newer than the list look absent, as on an old kernel. Calls of another architecture, such
as 32-bit ones, end the program.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class _Machine:
    """An architecture: its number in the audit interface, and the numbers of its system calls."""

    audit: int
    clone: int
    socketpair: int
    numbers: tuple[int, ...]


_CLONE3 = 435
# The newest call on the list of numbers, mseal. Newer ones get ENOSYS.
_LAST = 462
_X32_BIT = 0x40000000

# Calls with the same number everywhere: pidfd_send_signal, io_uring, open_tree, move_mount and
# fsopen to fspick, pidfd_open, pidfd_getfd, process_madvise, mount_setattr, quotactl_fd,
# memfd_secret, statmount, listmount
_COMMON = (424, 425, 426, 427, 428, 429, 430, 431, 432, 433, 434, 438, 440, 442, 443, 447, 457, 458)

# Name of a system call: number on x86_64, on aarch64 (None if it does not exist)
_REFUSED: MappingProxyType[str, tuple[int, int | None]] = MappingProxyType(
    {
        # other processes, and what they do
        "fork": (57, None),
        "vfork": (58, None),
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "kcmp": (312, 272),
        # network
        "socket": (41, 198),
        "bind": (49, 200),
        "connect": (42, 203),
        # namespaces and mounts
        "unshare": (272, 97),
        "setns": (308, 268),
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
        "fanotify_init": (300, 262),
        "fanotify_mark": (301, 263),
        # kernel
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "seccomp": (317, 277),
        "personality": (135, 92),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "reboot": (169, 142),
        "syslog": (103, 116),
        "acct": (163, 89),
        "swapon": (167, 224),
        "swapoff": (168, 225),
        "quotactl": (179, 60),
        "nfsservctl": (180, 42),
        "lookup_dcookie": (212, 18),
        "vhangup": (153, 58),
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "clock_adjtime": (305, 266),
        "adjtimex": (159, 171),
        "sethostname": (170, 161),
        "setdomainname": (171, 162),
        "iopl": (172, None),
        "ioperm": (173, None),
        "modify_ldt": (154, None),
        "uselib": (134, None),
        "ustat": (136, None),
        "sysfs": (139, None),
        "sysctl": (156, None),
        # memory that no limit counts
        "memfd_create": (319, 279),
        "shmget": (29, 194),
        "shmat": (30, 196),
        "shmctl": (31, 195),
        "shmdt": (67, 197),
        "semget": (64, 190),
        "semop": (65, 193),
        "semctl": (66, 191),
        "semtimedop": (220, 192),
        "msgget": (68, 186),
        "msgsnd": (69, 189),
        "msgrcv": (70, 188),
        "msgctl": (71, 187),
        "mq_open": (240, 180),
        "setxattr": (188, 5),
        "lsetxattr": (189, 6),
        "fsetxattr": (190, 7),
    }
)

_MACHINES: MappingProxyType[str, _Machine] = MappingProxyType(
    {
        "x86_64": _Machine(
            audit=0xC000003E,
            clone=56,
            socketpair=53,
            numbers=tuple(numbers[0] for numbers in _REFUSED.values()),
        ),
        "aarch64": _Machine(
            audit=0xC00000B7,
            clone=220,
            socketpair=199,
            numbers=tuple(numbers[1] for numbers in _REFUSED.values() if numbers[1] is not None),
        ),
    }
)

# Instructions of classic BPF, and results of a filter
_LOAD = 0x20
_IF_EQUAL = 0x15
_IF_GREATER = 0x25
_IF_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERROR = 0x00050000
# Places in `struct seccomp_data`
_NUMBER_AT = 0
_MACHINE_AT = 4
_FIRST_ARGUMENT_AT = 16

_CLONE_THREAD = 0x00010000
_CLONE_NEW_NAMESPACES = 0x7E020080
_AF_UNIX = 1


def filter_program(machine: str) -> bytes | None:
    """Return the filter as the kernel and bubblewrap read it, None for an unknown architecture.

    machine: as `platform.machine()` names it.
    """
    target = _MACHINES.get(machine)
    if target is None:
        return None
    refuse = _instruction(_RETURN, _ERROR | errno.EPERM)
    absent = _instruction(_RETURN, _ERROR | errno.ENOSYS)
    kill = _instruction(_RETURN, _KILL)
    allow = _instruction(_RETURN, _ALLOW)
    first_argument = _instruction(_LOAD, _FIRST_ARGUMENT_AT)
    # glibc falls back to `clone`, whose flags a filter can read
    steps = [
        _instruction(_LOAD, _MACHINE_AT),
        _instruction(_IF_EQUAL, target.audit, 1, 0),
        kill,
        _instruction(_LOAD, _NUMBER_AT),
        *_when(_IF_ANY_BIT, _X32_BIT, kill),
        *_when(_IF_GREATER, _LAST, absent),
        *_when(_IF_EQUAL, _CLONE3, absent),
        # A new thread, but no new process and no namespace
        *_when(
            _IF_EQUAL,
            target.clone,
            first_argument,
            *_when(_IF_ANY_BIT, _CLONE_NEW_NAMESPACES, refuse),
            *_when(_IF_ANY_BIT, _CLONE_THREAD, allow),
            refuse,
        ),
        # asyncio needs a pair of sockets for its loop
        *_when(
            _IF_EQUAL,
            target.socketpair,
            first_argument,
            *_when(_IF_EQUAL, _AF_UNIX, allow),
            refuse,
        ),
    ]
    for number in (*target.numbers, *_COMMON):
        steps += _when(_IF_EQUAL, number, refuse)
    return b"".join([*steps, allow])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode an instruction. if_true, if_false: how many instructions a jump leaves out."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _when(condition: int, value: int, *steps: bytes) -> list[bytes]:
    """Return instructions that run some steps, the last of which returns, on a condition."""
    return [_instruction(condition, value, 0, len(steps)), *steps]
