"""Global memory traffic of a kernel, counted in its PTX.

A thread's loads and stores are found with the argument that their address comes from and the loops
around them. LLVM writes loops in one form: `add r, r, step` and `setp r, bound` in the loop. A
bound that is a number gives a number of trips. Any other bound means a loop over elements, and
`step` is how many of them one trip covers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

_REGISTER = re.compile(r"%[a-z]+\d+|%tid\.[xyz]|%laneid|%warpid")
_INSTRUCTION = re.compile(
    r"^(?:@(?P<negated>!?)(?P<guard>%p\d+)\s+)?(?P<code>[a-z][\w.:]*)\s+(?P<rest>.*);"
)
_LABEL = re.compile(r"^(\$L__BB\w+):")
_PARAMETER = re.compile(r"\[\w+_param_(\d+)\]")
_INTEGER = re.compile(r"^-?\d+$")
_THREAD_REGISTERS = ("%tid.", "%laneid", "%warpid")


class UnknownCode(Exception):
    """PTX in a form whose traffic cannot be counted."""


@dataclass(frozen=True)
class Instruction:
    """One line of PTX. writes, reads: registers. guard: the predicate's register, or ""."""

    code: str
    rest: str
    guard: str
    writes: tuple[str, ...]
    reads: tuple[str, ...]


@dataclass
class Block:
    """Instructions without a jump between them, with the indices of the blocks that may follow."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A loop. trips: their number, or None for a loop over elements. step: elements of a trip."""

    blocks: frozenset[int]
    trips: int | None
    step: int


@dataclass(frozen=True)
class Access:
    """A load or a store of global memory.

    parameter: position among the kernel's parameters. num_bytes: of one thread. by_thread: the
    address differs between threads. trips: product of the counted loops around it. step: elements
    that one trip of the innermost loop over elements covers, or None outside of such loops.
    """

    parameter: int
    is_store: bool
    num_bytes: int
    by_thread: bool
    trips: int
    step: int | None


def read_accesses(ptx: str) -> list[Access]:
    """Every access of global memory in a kernel. Raises `UnknownCode` for another form of code."""
    blocks = _read_blocks(ptx)
    loops = [_describe(loop, blocks) for loop in _natural_loops(blocks)]
    definitions: dict[str, list[Instruction]] = defaultdict(list)
    for block in blocks:
        for instruction in block.instructions:
            for register in instruction.writes:
                definitions[register].append(instruction)
    accesses = []
    for index, block in enumerate(blocks):
        around = [loop for loop in loops if index in loop.blocks]
        for instruction in block.instructions:
            if _is_global_access(instruction):
                accesses.append(_access(instruction, around, definitions))
    return accesses


def _is_global_access(instruction: Instruction) -> bool:
    code = instruction.code
    if code.startswith(("cp.async", "atom.global", "red.global", "ld.volatile")):
        raise UnknownCode(f"{code} {instruction.rest}: only plain loads and stores are counted")
    return code.startswith(("ld.global", "st.global"))


def _access(
    instruction: Instruction, around: list[Loop], definitions: dict[str, list[Instruction]]
) -> Access:
    parts = instruction.code.split(".")
    vector = next((int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)), 1)
    width = int(re.sub(r"\D", "", parts[-1])) // 8
    brackets = re.search(r"\[([^\]]*)\]", instruction.rest)
    if brackets is None:
        raise UnknownCode(f"{instruction.code} {instruction.rest}: no address")
    parameters, by_thread = _origin(_REGISTER.findall(brackets[1]), definitions)
    if len(parameters) != 1:
        raise UnknownCode(
            f"{instruction.code} {instruction.rest}: the address comes from pointers {parameters}"
        )
    trips = 1
    step: int | None = None
    for loop in around:
        if loop.trips is not None:
            trips *= loop.trips
        elif step is None:
            step = loop.step
        else:
            raise UnknownCode(f"{instruction.code} {instruction.rest}: nested loops over elements")
    is_store = instruction.code.startswith("st.")
    return Access(parameters.pop(), is_store, vector * width, by_thread, trips, step)


def _origin(
    registers: list[str], definitions: dict[str, list[Instruction]]
) -> tuple[set[int], bool]:
    """(pointer parameters that an address is computed from, whether it depends on the thread)."""
    parameters: set[int] = set()
    by_thread = False
    visits: set[str] = set()
    pending = list(registers)
    while pending:
        register = pending.pop()
        if register in visits:
            continue
        visits.add(register)
        by_thread |= register.startswith(_THREAD_REGISTERS)
        for instruction in definitions.get(register, []):
            if instruction.code == "ld.param.b64":
                match = _PARAMETER.search(instruction.rest)
                if match is not None:
                    parameters.add(int(match[1]))
            if not instruction.code.startswith("ld."):
                pending.extend(instruction.reads)
    return parameters, by_thread


def _read_blocks(ptx: str) -> list[Block]:
    """The kernel's blocks in the order of the text, linked."""
    blocks = [Block()]
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    ends_here = False
    for line in _kernel_lines(ptx):
        label = _LABEL.match(line)
        if label is not None or ends_here:
            _append_block(blocks)
            ends_here = False
        if label is not None:
            labels[label[1]] = len(blocks) - 1
            continue
        instruction = _read_instruction(line)
        if instruction is None:
            continue
        blocks[-1].instructions.append(instruction)
        if instruction.code.startswith("bra"):
            jumps.append((len(blocks) - 1, instruction.rest.strip()))
            ends_here = True
        ends_here |= instruction.code == "ret"
    for source, target in jumps:
        blocks[source].successors.append(labels[target])
    return blocks


def _append_block(blocks: list[Block]) -> None:
    """Add a block, which follows the last one unless that one always jumps away."""
    last = blocks[-1].instructions[-1:]
    falls_through = not last or last[0].guard or not last[0].code.startswith(("bra", "ret"))
    if falls_through:
        blocks[-1].successors.append(len(blocks))
    blocks.append(Block())


def _kernel_lines(ptx: str) -> Iterator[str]:
    if ptx.count(".entry") != 1 or ".func" in ptx:
        raise UnknownCode("one kernel without functions is expected")
    body = ptx[ptx.index(".entry") :]
    for line in body[body.index("{") + 1 :].splitlines():
        yield line.split("//")[0].strip()


def _read_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None or match["code"].startswith("."):
        return None
    code = match["code"]
    rest = match["rest"]
    guard = match["guard"] or ""
    operands = _operands(rest)
    has_result = not code.startswith(("st.", "bra", "bar", "ret", "red.", "membar", "fence"))
    writes = _REGISTER.findall(operands[0]) if has_result and operands else []
    sources = operands[1:] if has_result else operands
    reads = [register for operand in sources for register in _REGISTER.findall(operand)]
    return Instruction(code, rest, guard, tuple(writes), tuple(reads))


def _operands(rest: str) -> list[str]:
    """Split at commas outside of braces."""
    return [part.strip() for part in re.split(r",(?![^{]*\})", rest)]


def _natural_loops(blocks: list[Block]) -> list[tuple[int, frozenset[int]]]:
    """(index of the block that jumps back, indices of all blocks) of each loop."""
    dominators = _dominators(blocks)
    predecessors: dict[int, list[int]] = defaultdict(list)
    for index, block in enumerate(blocks):
        for successor in block.successors:
            predecessors[successor].append(index)
    loops = []
    for index, block in enumerate(blocks):
        for header in block.successors:
            if header not in dominators[index]:
                continue
            body = {header, index}
            pending = [index] if index != header else []
            while pending:
                for before in predecessors[pending.pop()]:
                    if before not in body:
                        body.add(before)
                        pending.append(before)
            loops.append((index, frozenset(body)))
    return loops


def _dominators(blocks: list[Block]) -> list[set[int]]:
    """For each block, the blocks on every way to it."""
    everything = set(range(len(blocks)))
    dominators = [{0}] + [set(everything) for _ in blocks[1:]]
    predecessors: dict[int, list[int]] = defaultdict(list)
    for index, block in enumerate(blocks):
        for successor in block.successors:
            predecessors[successor].append(index)
    changes = True
    while changes:
        changes = False
        for index in range(1, len(blocks)):
            before = [dominators[one] for one in predecessors[index]]
            after = (set.intersection(*before) if before else set()) | {index}
            if after != dominators[index]:
                dominators[index] = after
                changes = True
    return dominators


def _describe(loop: tuple[int, frozenset[int]], blocks: list[Block]) -> Loop:
    """The trips of a loop, from the comparison that ends it."""
    latch, body = loop
    inside = [line for index in sorted(body) for line in blocks[index].instructions]
    outside = [
        line
        for index, block in enumerate(blocks)
        if index not in body
        for line in block.instructions
    ]
    guard = blocks[latch].instructions[-1].guard
    comparisons = [line for line in inside if guard in line.writes]
    if len(comparisons) != 1 or not comparisons[0].code.startswith("setp."):
        raise UnknownCode(f"a loop ends on {guard}, which no single comparison sets")
    _, counter, bound = _operands(comparisons[0].rest)
    step = _step_of(counter, inside)
    if not _INTEGER.match(bound):
        return Loop(body, None, step)
    start = _constant(counter, outside)
    return Loop(body, -(-(int(bound) - start) // step), step)


def _step_of(counter: str, inside: list[Instruction]) -> int:
    for line in inside:
        operands = _operands(line.rest)
        is_growth = line.code.startswith("add.s") and operands[:2] == [counter, counter]
        if is_growth and _INTEGER.match(operands[2]):
            return int(operands[2])
    raise UnknownCode(f"a loop's counter {counter} does not grow by a number")


def _constant(register: str, lines: list[Instruction]) -> int:
    """The number that moves bring into a register."""
    values = {_operands(line.rest)[1] for line in lines if register in line.writes}
    if len(values) != 1:
        raise UnknownCode(f"a loop's counter {register} starts at {sorted(values)}")
    value = values.pop()
    return int(value) if _INTEGER.match(value) else _constant(value, lines)
