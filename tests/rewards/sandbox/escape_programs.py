"""Programs that try to leave the sandbox. Each prints ESCAPED if it succeeds.

`$name` stands for a value of `attack.py`: a file with a secret, a folder that all users may write
to, the id of a process outside, a port, a path and a name of sockets.
"""

_LIBC = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(number, *arguments)
arm = os.uname().machine == "aarch64"
"""

# Attacks that do no harm without a sandbox, where they must succeed
HARMLESS = {
    "fork": """
import os
children = 0
for _ in range(3):
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        os._exit(0)
    children += 1
if children:
    print("ESCAPED", children)
""",
    "subprocess": """
import subprocess, sys
print(subprocess.check_output([sys.executable, "-c", "print('ESCAPED')"], text=True))
""",
    "execution": """
import os, sys
os.execv(sys.executable, [sys.executable, "-c", "print('ESCAPED')"])
""",
    "tcp": """
import socket
socket.create_connection(("127.0.0.1", $port), timeout=3).send(b"x")
print("ESCAPED")
""",
    "udp": """
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", $port))
print("ESCAPED")
""",
    "unix_socket": """
import socket
socket.socket(socket.AF_UNIX).connect("$socket")
print("ESCAPED")
""",
    "abstract_socket": """
import socket
socket.socket(socket.AF_UNIX).connect("\\0$name")
print("ESCAPED")
""",
    "pair_of_sockets": """
import socket
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]
pair.sendto(b"x", "$socket.datagrams")
print("ESCAPED")
""",
    "secret_file": """
print(open("$secret").read(), "ESCAPED")
""",
    "links": """
import os, tempfile
folder = tempfile.mkdtemp()
os.symlink("$secret", folder + "/link")
os.symlink("/", folder + "/root")
for path in (folder + "/link", folder + "/root$secret", folder + "/../..$secret"):
    try:
        print(open(path).read(), "ESCAPED")
    except OSError as error:
        print(error)
os.link("$secret", folder + "/hard")
print("ESCAPED")
""",
    "new_file": """
open("$folder/file", "w").write("x")
print("ESCAPED")
""",
    "environment": """
import os
print(dict(os.environ))
for process in [*range(1, 20), *range($victim - 1, $victim + 1), "self", "thread-self"]:
    try:
        print(open(f"/proc/{process}/environ", "rb").read())
    except OSError:
        pass
print("ESCAPED" if "RUN_KEY" in os.environ else "")
""",
    "signal": """
import os
os.kill($victim, 0)
print("ESCAPED")
""",
    "descriptors": """
import os
for number in range(3, 1024):
    try:
        print(os.pread(number, 1000, 0), "ESCAPED")
    except OSError:
        pass
""",
    "shared_memory": _LIBC
    + """
if call(194 if arm else 29, 0, ctypes.c_size_t(1 << 20), 0o1600) >= 0:
    print("ESCAPED")
""",
    "memory_file": """
import os
os.memfd_create("file")
print("ESCAPED")
""",
    "processes": """
import os
print([name for name in os.listdir("/proc") if name.isdigit()], "ESCAPED")
""",
    "clock": """
import ctypes, os
libc = ctypes.CDLL(None)
arm = os.uname().machine == "aarch64"
before = ctypes.create_string_buffer(208)
if libc.syscall(171 if arm else 159, before) >= 0:
    print("ESCAPED")
""",
}

HOSTILE = {
    "fork_bomb": """
import os, threading, time
threads = 0
def work():
    while True:
        try:
            os.fork()
            print("ESCAPED", flush=True)
        except OSError:
            time.sleep(0.001)
try:
    while threads < 500:
        threading.Thread(target=work, daemon=True).start()
        threads += 1
except RuntimeError:
    pass
if threads > 60:
    print("ESCAPED", threads)
os._exit(0)
""",
    "other_sockets": """
import socket
for family in range(1, 46):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try:
            socket.socket(family, kind)
            print("ESCAPED", family, kind)
        except OSError:
            pass
""",
    "accounts": """
import os
for path in ("/etc/shadow", "/etc/passwd", "/etc/hostname", "/etc/resolv.conf", "/root/.ssh"):
    if os.path.exists(path):
        print("ESCAPED", path)
for folder in ("/root", "/home"):
    if os.path.isdir(folder):
        for path, folders, files in os.walk(folder):
            if files and "/lib/" not in path and not path.endswith(("/lib", "/bin")):
                print("ESCAPED", path, files)
""",
    "writes": """
import os, sys
folders = {"/", "/etc", "/usr", "/usr/lib", "/lib", "/lib64", "/dev", "/root", "/home", "/var/tmp",
           "/dev/shm", sys.base_prefix}
for path, names, _ in os.walk("/"):
    folders |= {os.path.join(path, name) for name in names}
tried = 0
for folder in sorted(folders):
    if folder == "/tmp" or folder.startswith("/tmp/"):
        continue
    tried += 1
    for attempt in (lambda: open(folder + "/x", "w"), lambda: os.mkdir(folder + "/y"),
                    lambda: os.symlink("/", folder + "/z")):
        try:
            attempt()
            print("ESCAPED", folder)
        except OSError:
            pass
for path in (sys.executable, os.__file__):
    for attempt in (lambda: open(path, "r+"), lambda: os.chmod(path, 0o777),
                    lambda: os.unlink(path)):
        try:
            attempt()
            print("ESCAPED", path)
        except OSError:
            pass
print(tried)
""",
    "disk_bomb": """
import os
written = 0
for number in range(1000):
    try:
        with open(f"/tmp/{number}", "wb") as file:
            for _ in range(16):
                written += file.write(bytes(1 << 20))
                file.flush()
    except OSError:
        pass
    if written > 64 << 20:
        break
if written > 20 << 20:
    print("ESCAPED", written)
""",
    "memory_of_others": _LIBC
    + """
for process in [1, 2, os.getppid(), $victim]:
    for path in (f"/proc/{process}/mem", f"/proc/{process}/maps"):
        try:
            open(path, "rb")
            print("ESCAPED", path)
        except OSError:
            pass
    buffer = ctypes.create_string_buffer(8)
    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    own = Vector(ctypes.addressof(buffer), 8)
    other = Vector(id(None), 8)
    for number in (270, 271) if arm else (310, 311):
        if call(number, process, ctypes.byref(own), 1, ctypes.byref(other), 1, 0) > 0:
            print("ESCAPED", number)
""",
    "ptrace": _LIBC
    + """
for process in [1, 2, os.getppid(), $victim]:
    for request in (16, 0x4206):
        if call(117 if arm else 101, request, process, None, None) == 0:
            print("ESCAPED", process, request)
""",
    "kill_all": """
import os, signal
for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
    for target in (1, $victim, -$victim, -1):
        if target == -1 and number != signal.SIGKILL:
            continue
        try:
            os.kill(target, number)
        except OSError as error:
            print(error)
""",
    "namespaces": _LIBC
    + """
for bit in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000,
            0x80):
    if call(97 if arm else 272, bit) == 0:
        print("ESCAPED", hex(bit))
    if call(220 if arm else 56, bit | 17, None, None, None, None) >= 0:
        print("ESCAPED")
    if call(220 if arm else 56, bit | 0x10f00, None, None, None, None) >= 0:
        print("ESCAPED")
    arguments = (ctypes.c_uint64 * 11)(bit)
    if call(435, arguments, 88) >= 0:
        print("ESCAPED")
""",
    "mounts": _LIBC
    + """
os.makedirs("/tmp/m", exist_ok=True)
for kind in (b"tmpfs", b"proc", b"sysfs", b"devpts", b"cgroup2", b"overlay"):
    if libc.mount(b"none", b"/tmp/m", kind, 0, None) == 0:
        print("ESCAPED", kind)
if libc.mount(b"/", b"/tmp/m", None, 4096, None) == 0 or libc.umount2(b"/usr/lib", 2) == 0:
    print("ESCAPED")
if libc.mount(None, b"/", None, 32, None) == 0:
    print("ESCAPED")
for number in (428, 429, 430, 431, 432, 433, 442, 467):
    if call(number, -100, b"/", 1, 0, 0) >= 0:
        print("ESCAPED", number)
try:
    os.chroot("/tmp/m")
    print("ESCAPED")
except OSError:
    pass
try:
    os.mknod("/tmp/sda", 0o60600, os.makedev(8, 0))
    print("ESCAPED")
except OSError:
    pass
""",
    "io_uring": _LIBC
    + """
if call(425, 4, ctypes.create_string_buffer(256)) >= 0:
    print("ESCAPED")
print(ctypes.get_errno())
""",
    "kernel": _LIBC
    + """
calls = {"bpf": (280, 321), "perf": (241, 298), "faults": (282, 323), "keys": (219, 250),
         "add_key": (217, 248), "request_key": (218, 249), "modules": (273, 313)}
for name, numbers in calls.items():
    number = numbers[0] if arm else numbers[1]
    for command in range(3):
        ctypes.set_errno(0)
        result = call(number, command, ctypes.create_string_buffer(128), 128, -1, 0)
        if result >= 0 or ctypes.get_errno() != 1:
            print("ESCAPED", name, result, ctypes.get_errno())
""",
    "identity": """
import os
for attempt in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]),
                lambda: os.setresuid(0, 0, 0), lambda: os.setreuid(1000, 1000)):
    try:
        attempt()
        print("ESCAPED")
    except OSError:
        pass
if os.geteuid() == 0 or os.getegid() == 0:
    print("ESCAPED")
""",
    "limits": """
import resource
for name in ("AS", "CPU", "NOFILE", "NPROC", "FSIZE", "CORE"):
    number = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(number)[1]
    try:
        resource.setrlimit(number, (hard + 1, hard + 1))
        print("ESCAPED", name)
    except (OSError, ValueError):
        pass
    if hard == resource.RLIM_INFINITY:
        print("ESCAPED", name)
""",
    "foreign_architecture": """
import ctypes, mmap, os
if os.uname().machine == "x86_64":
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # getpid of 32-bit programs
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0:
        print("ESCAPED", flush=True)
""",
    "x32": _LIBC
    + """
if not arm and call(0x40000000 + 39) > 0:
    print("ESCAPED", flush=True)
""",
    "new_calls": _LIBC
    + """
for number in range(463, 600):
    if call(number, 0, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != 38:
        print("ESCAPED", number)
""",
    "terminal": """
import fcntl, os, termios
for path in ("/dev/tty", "/dev/pts/0", "/dev/ptmx", "/dev/mem", "/dev/kmsg", "/dev/kvm"):
    try:
        os.open(path, os.O_RDWR)
        print("ESCAPED", path)
    except OSError:
        pass
for number in range(3):
    try:
        fcntl.ioctl(number, termios.TIOCSTI, b"x")
        print("ESCAPED", number)
    except OSError:
        pass
""",
    "packages": """
import sys
sys.path += [sys.base_prefix + "/lib/python3.%d/site-packages" % sys.version_info[1]]
for name in ("megatron_rl", "torch", "pip", "pytest"):
    try:
        __import__(name)
        print("ESCAPED", name)
    except ImportError:
        pass
""",
    "memory_by_threads": """
import threading
blocks = []
def work():
    while True: blocks.append(bytearray(1 << 20))
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
work()
""",
}

# Programs that run into a limit
ENDLESS = {
    "spin": "while True: pass",
    "deaf_spin": """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass
""",
    "daemon": """
import os, threading
os.setsid() if os.getsid(0) != os.getpid() else None
for number in range(3):
    os.close(number)
def spin():
    while True: pass
threading.Thread(target=spin).start()
""",
    "sleep": """
import time
while True: time.sleep(1000)
""",
    "endless_input": """
import os, sys
read, write = os.pipe()
os.read(read, 1)
""",
    "output": """
import sys
print("started")
for _ in range(1024):
    sys.stdout.write("x" * (1 << 20))
""",
    "memory_bomb": """
blocks = []
while True: blocks.append(bytearray(1 << 20))
""",
}
