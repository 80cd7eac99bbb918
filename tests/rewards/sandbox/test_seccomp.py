"""The seccomp filter on both architectures, in an interpreter of the kernel's BPF."""

import errno
import re
import struct
from pathlib import Path

import pytest

from megatron_rl.rewards.sandbox.seccomp import filter_program

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW = 0x7FFF0000
KILL = 0x80000000
REFUSE = 0x00050000 | errno.EPERM
ABSENT = 0x00050000 | errno.ENOSYS
HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
THREAD_FLAGS = 0x003D0F00  # as glibc makes a thread
# Of the kernel's interface, each of which must be refused
DANGEROUS = frozenset(
    re.findall(
        r"\w+",
        """
    fork vfork ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_open
    pidfd_getfd pidfd_send_signal socket bind connect unshare setns mount umount2 pivot_root
    chroot open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr open_by_handle_at
    bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register add_key
    request_key keyctl kexec_load kexec_file_load init_module finit_module delete_module reboot
    swapon memfd_create memfd_secret shmget shmat msgget semget mq_open settimeofday
    clock_settime iopl ioperm
    """,
    )
)
ORDINARY = frozenset(
    re.findall(
        r"\w+",
        """
    read write openat close fstat mmap munmap brk futex getrandom execve exit exit_group
    rt_sigaction clock_nanosleep nanosleep epoll_wait epoll_pwait poll ppoll pipe2 dup3
    prlimit64 setresuid setresgid setgroups sched_getaffinity gettid kill tgkill getcwd unlinkat
    mkdirat renameat2 landlock_create_ruleset landlock_add_rule landlock_restrict_self prctl
    rseq set_robust_list
    """,
    )
)


def judge(program: bytes, machine: int, number: int, argument: int = 0) -> int:
    """Return the action of a filter for a system call with a first argument."""
    data = struct.pack("=IIQ6Q", number, machine, 0, argument, 0, 0, 0, 0, 0)
    instructions = list(struct.iter_unpack("=HBBI", program))
    position = 0
    value = 0
    while True:
        code, if_true, if_false, operand = instructions[position]
        position += 1
        match code:
            case 0x20:
                value = struct.unpack_from("=I", data, operand)[0]
            case 0x06:
                return operand
            case 0x15 | 0x25 | 0x45:
                results = {0x15: value == operand, 0x25: value > operand, 0x45: value & operand}
                position += if_true if results[code] else if_false


def numbers(machine: str) -> dict[str, int]:
    """Read the numbers of system calls from the headers of the kernel."""
    path = Path(HEADERS[machine])
    if not path.exists():
        pytest.skip(f"the kernel's headers are absent: {path}")
    pattern = re.compile(r"#define __NR3?(?:264)?_(\w+)\s+(\d+)\s")
    return {name: int(number) for name, number in pattern.findall(path.read_text())}


@pytest.mark.parametrize("machine", MACHINES)
def test_dangerous_calls_are_refused(machine: str) -> None:
    program = filter_program(machine)
    assert program is not None
    calls = {name: number for name, number in numbers(machine).items() if name in DANGEROUS}
    assert len(calls) >= 50
    actions = {name: judge(program, MACHINES[machine], number) for name, number in calls.items()}
    assert {name for name, action in actions.items() if action != REFUSE} == set()


@pytest.mark.parametrize("machine", MACHINES)
def test_ordinary_calls_are_allowed(machine: str) -> None:
    program = filter_program(machine)
    assert program is not None
    calls = {name: number for name, number in numbers(machine).items() if name in ORDINARY}
    assert len(calls) > 28
    actions = {name: judge(program, MACHINES[machine], number) for name, number in calls.items()}
    assert {name for name, action in actions.items() if action != ALLOW} == set()


@pytest.mark.parametrize("machine", MACHINES)
def test_threads_are_allowed_but_no_processes(machine: str) -> None:
    program = filter_program(machine)
    assert program is not None
    number = CLONE[machine]
    assert judge(program, MACHINES[machine], number, THREAD_FLAGS) == ALLOW
    assert judge(program, MACHINES[machine], number, 17) == REFUSE  # SIGCHLD, as `fork`
    assert judge(program, MACHINES[machine], number, 0x4111) == REFUSE  # as `posix_spawn`
    for bit in (0x10000000, 0x20000000, 0x00020000, 0x40000000, 0x80):
        assert judge(program, MACHINES[machine], number, THREAD_FLAGS | bit) == REFUSE
    assert judge(program, MACHINES[machine], 435, THREAD_FLAGS) == ABSENT


@pytest.mark.parametrize("machine", MACHINES)
def test_only_pairs_of_local_sockets_are_allowed(machine: str) -> None:
    program = filter_program(machine)
    assert program is not None
    assert judge(program, MACHINES[machine], SOCKETPAIR[machine], 1) == ALLOW
    assert judge(program, MACHINES[machine], SOCKETPAIR[machine], 30) == REFUSE  # AF_TIPC


@pytest.mark.parametrize("machine", MACHINES)
def test_foreign_architectures_end_the_program_and_new_calls_look_absent(machine: str) -> None:
    program = filter_program(machine)
    assert program is not None
    for foreign in (0x40000003, 0x40000028, *MACHINES.values()):
        if foreign != MACHINES[machine]:
            assert judge(program, foreign, 0) == KILL
    assert judge(program, MACHINES[machine], 0x40000000 + 1) == KILL
    for number in (463, 467, 470, 1000):
        assert judge(program, MACHINES[machine], number) == ABSENT


def test_an_unknown_machine_has_no_filter() -> None:
    assert filter_program("riscv64") is None
