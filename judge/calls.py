"""The filters of system calls: programs in BPF, which the kernel runs before each call (seccomp).

judge/worker.py installs them. `worker_filter` is an allow-list: the worker puts it on once, and
every child inherits it. `child_filter` refuses more; each child puts it on top before it reads its
job. A filter can be put on but never taken off. Linux on x86-64 and aarch64 alone (`MACHINES`).

Order: the calls, the two filters, then what their instructions are made of.
"""

import ctypes
import platform
import struct

# Each call is name:x86_64:aarch64, with "-" where it is absent. All other calls fail with EPERM.
SYSTEM_CALLS = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62
mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135
rt_sigreturn:15:139 ioctl:16:29 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66
access:21:- pipe:22:- select:23:- sched_yield:24:124 mremap:25:216 msync:26:227 mincore:27:232
madvise:28:233 dup:32:23 dup2:33:- pause:34:- nanosleep:35:101 getitimer:36:102 alarm:37:-
setitimer:38:103 getpid:39:172 sendfile:40:71 recvfrom:45:207 recvmsg:47:212 shutdown:48:210
getsockname:51:204 getpeername:52:205 setsockopt:54:208 getsockopt:55:209 exit:60:93
wait4:61:260 uname:63:160 fcntl:72:25 flock:73:32 fsync:74:82 fdatasync:75:83 ftruncate:77:46
getdents:78:- getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:-
getdents64:217:61 link:86:- unlink:87:- symlink:88:- readlink:89:- umask:95:166
gettimeofday:96:169 getrlimit:97:163 getrusage:98:165 sysinfo:99:179 times:100:153
getuid:102:174 getgid:104:176 geteuid:107:175 getegid:108:177 getppid:110:173 getpgrp:111:-
getgroups:115:158 getresuid:118:148 getresgid:120:150 getpgid:121:155 getsid:124:156
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132
statfs:137:43 fstatfs:138:44 getpriority:140:141 sched_getparam:143:121
sched_getscheduler:145:120 arch_prctl:158:- setrlimit:160:164 gettid:186:178 time:201:-
futex:202:98 sched_getaffinity:204:123 set_tid_address:218:96 restart_syscall:219:128
fadvise64:221:223 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115
exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 waitid:247:95 openat:257:56 mkdirat:258:34
newfstatat:262:79 unlinkat:263:35 renameat:264:38 linkat:265:37 symlinkat:266:36
readlinkat:267:78 faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99
get_robust_list:274:100 epoll_pwait:281:22 eventfd2:290:19 epoll_create1:291:20
dup3:292:24 pipe2:293:59 getcpu:309:168 renameat2:316:276 getrandom:318:278 membarrier:324:283
copy_file_range:326:285 statx:332:291 rseq:334:293 close_range:436:436 faccessat2:439:439"""
# What the worker alone needs; a child is refused them.
WORKER_CALLS = "prctl:157:167 chmod:90:- fchmodat:268:53 landlock_restrict_self:446:446"
# Allowed with one argument fixed: call, argument, value. Sockets of a pair are local (AF_UNIX),
# messages have no address, limits are those of the process itself.
CONDITIONS = ("socketpair:53:199", 0, 1), ("sendto:44:206", 4, 0), ("prlimit64:302:261", 0, 0)
# Refused with these commands: F_SETOWN and F_SETOWN_EX name another process that a file is to send
# its signals to; F_SETLEASE and, since Linux 6.19, F_SETDELEG let all who open the file wait;
# F_SET_RW_HINT writes a number that later answers can read, even to a file that is open for
# reading alone.
FCNTL, FILE_COMMANDS = "fcntl:72:25", (8, 15, 1024, 1040, 1036)
# Of ioctl, only the type that Python needs, for descriptors and terminals, is allowed. Others name
# owners of signals, too, or change the flags (chattr) of a file that is open for reading alone.
IOCTL, TYPE_BITS, TERMINAL_TYPE = "ioctl:16:29", 0xFF00, 0x5400
# Refused: opening a file read-only with O_TRUNC (it empties the file, and Landlock checks it only
# since Linux 6.2), and access mode 3 (which Landlock never checks). OPEN_BITS are O_TRUNC and
# O_ACCMODE.
OPEN_BITS, ODD_OPENINGS = 0o1003, (0o1000, 0o1003, 0o3)
OPENINGS = ("open:2:-", 1), ("openat:257:56", 2)  # call, the argument that holds the bits
# Allowed in the worker, and in a child under a condition: new threads, signals to itself
CLONE = "clone:56:220"
KILLS = "kill:62:129 tgkill:234:131"
# A filter cannot read its flags, which are in memory. With ENOSYS, "no such call", the C library
# uses clone instead.
CLONE3 = "clone3:435:435"
MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column above, AUDIT_ARCH

# Results of a filter, SECCOMP_RET_...: allow; fail with EPERM; fail with ENOSYS; end the process
ALLOW, REFUSE, NO_SUCH_CALL, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
# BPF instructions: load a word, mask it, jump if equal, jump if any bit is set, return
LOAD, MASK, EQUAL, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x45, 0x06
# Offsets of what a filter can load: call number, machine, arguments of 8 bytes each
CALL_NUMBER, MACHINE, ARGUMENTS = 0, 4, 16
THREAD = 0x10000  # CLONE_THREAD
INSTALL_FILTER, FILTER_MODE = 22, 2  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def worker_filter() -> bytes:
    """The allow-list: calls that are not on it fail, those of another machine end the process."""
    return b"".join([
        instruction(LOAD, MACHINE),
        instruction(EQUAL, MACHINES[platform.machine()][1], 1, 0),
        instruction(RETURN, KILL),
        instruction(LOAD, CALL_NUMBER),
        if_call(f"{SYSTEM_CALLS} {WORKER_CALLS} {CLONE} {KILLS}", instruction(RETURN, ALLOW)),
        *(fixed_argument(*condition) for condition in CONDITIONS),
        if_call(CLONE3, instruction(RETURN, NO_SUCH_CALL)),
        instruction(RETURN, REFUSE),
    ])


def child_filter(process: int) -> bytes:
    """On top, in the child with this id: threads but no processes, signals to itself alone.

    It also refuses the worker's own calls, such as putting on locks.
    """
    return b"".join([
        instruction(LOAD, CALL_NUMBER),
        fixed_argument(CLONE, 0, THREAD, ANY_BIT),
        fixed_argument(KILLS, 0, process),
        *(refused_argument(FCNTL, 1, command) for command in FILE_COMMANDS),
        refused_argument(IOCTL, 1, TERMINAL_TYPE, TYPE_BITS, unless=True),
        *(refused_argument(call, argument, bits, OPEN_BITS)
          for call, argument in OPENINGS for bits in ODD_OPENINGS),
        if_call(WORKER_CALLS, instruction(RETURN, REFUSE)),
        instruction(RETURN, ALLOW),
    ])


def install_filter(libc: ctypes.CDLL, program: bytes) -> bool:
    """Have the kernel run a filter before every further system call; false if it refuses."""
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    return libc.prctl(INSTALL_FILTER, FILTER_MODE, header, 0, 0) == 0


def fixed_argument(calls: str, argument: int, value: int, test: int = EQUAL) -> bytes:
    """Allow these calls if the low half of an argument passes the test and its high half is zero.

    Refuse them otherwise.
    """
    low_half = ARGUMENTS + 8 * argument
    return if_call(
        calls,
        instruction(LOAD, low_half),
        instruction(test, value, 0, 3),
        instruction(LOAD, low_half + 4),
        instruction(EQUAL, 0, 0, 1),
        instruction(RETURN, ALLOW),
        instruction(RETURN, REFUSE),
    )


def refused_argument(calls: str, argument: int, value: int, mask: int = 0xFFFFFFFF,
                     unless: bool = False) -> bytes:
    """Refuse these calls if an argument, of which the kernel reads the low half, has this value.

    With `unless`, refuse them if it has another. Only the bits of the mask are compared.
    """
    jumps = (1, 0) if unless else (0, 1)  # if equal, if not: 1 skips the refusal
    return if_call(
        calls,
        instruction(LOAD, ARGUMENTS + 8 * argument),
        instruction(MASK, mask),
        instruction(EQUAL, value, *jumps),
        instruction(RETURN, REFUSE),
        instruction(LOAD, CALL_NUMBER),
    )


def if_call(calls: str, *instructions: bytes) -> bytes:
    """Run the instructions if the call is one of these, as far as this machine has them."""
    column, _ = MACHINES[platform.machine()]
    program = []
    for call in calls.split():
        number = call.split(":")[column]
        if number != "-":
            program += [instruction(EQUAL, int(number), 0, len(instructions)), *instructions]
    return b"".join(program)


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One BPF instruction; a jump skips `if_true` or `if_false` instructions."""
    return struct.pack("HBBI", code, if_true, if_false, value)
