"""Which system calls a command in the sandbox may make: a program for the kernel's filter (seccomp, classic BPF)."""

import struct

# What a command has no use for, and what reaches further than namespaces do: x86_64's number, aarch64's.
DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
# (architecture as the kernel's audit has it, clone, clone3, socket)
MACHINES = {"x86_64": (0xC000003E, 56, 435, 41), "aarch64": (0xC00000B7, 220, 435, 198)}
OTHER_TABLE = 0x40000000  # numbers from here on are of another table of calls
NAMESPACES = 0x7E020000  # flags of clone: mount, cgroup, uts, ipc, user, pid, net
FAMILIES = (1, 2, 10)  # local and internet sockets: a machine's vsock, say, is shared by all network namespaces
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # where they are in what the filter reads


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """An instruction; of a comparison, how many to skip."""
    return struct.pack("HBBI", code, yes, no, value)


def _refuse(error: int) -> bytes:
    """The call fails with this error."""
    return _step(RETURN, 0x00050000 | error)


def program(machine: str) -> bytes:
    """Refuses the calls of ``DENIED``, namespaces and sockets of other families, and allows the rest."""
    audit, clone, clone3, socket = MACHINES[machine]
    which = list(MACHINES).index(machine)
    allow = _step(RETURN, 0x7FFF0000)
    steps = [_step(LOAD, ARCHITECTURE), _step(EQUAL, audit, 1), _refuse(EPERM)]
    steps += [_step(LOAD, NUMBER), _step(AT_LEAST, OTHER_TABLE, 0, 1), _refuse(EPERM)]
    for numbers in DENIED.values():
        steps += [_step(EQUAL, numbers[which], 0, 1), _refuse(EPERM)]
    steps += [_step(EQUAL, clone3, 0, 1), _refuse(ENOSYS)]  # its flags cannot be read here: clone takes its place
    steps += [_step(EQUAL, clone, 0, 4), _step(LOAD, FIRST_ARGUMENT), _step(ANY_BIT, NAMESPACES, 0, 1),
              _refuse(EPERM), allow]  # fmt: skip
    steps += [_step(EQUAL, socket, 0, len(FAMILIES) + 3), _step(LOAD, FIRST_ARGUMENT)]
    steps += [_step(EQUAL, family, len(FAMILIES) - at) for at, family in enumerate(FAMILIES)]
    return b"".join([*steps, _refuse(EAFNOSUPPORT), allow, allow])
