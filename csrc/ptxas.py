"""What ``nvcc -Xptxas -v`` says about the kernels it compiled."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["FunctionUsage", "read_ptxas_report", "summarize"]

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>sm_\w+)'")
_PROPERTIES = re.compile(r"Function properties for (?P<name>\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class FunctionUsage:
    """What one function takes on one architecture.

    Attributes:
        name: Its (mangled) name.
        architecture: For example ``"sm_90"``.
        is_kernel: False for a device function that was not inlined; ptxas counts its registers with its callers.
        registers: Registers of a thread.
        shared_bytes: Static shared memory of a block in bytes; what a launch asks for on top is not known here.
        stack_bytes: Local memory of a thread in bytes.
        spill_store_bytes: Bytes of registers that a thread writes to local memory for want of registers.
        spill_load_bytes: Bytes of registers that a thread reads back.
    """

    name: str
    architecture: str
    is_kernel: bool = field(default=False, kw_only=True)
    registers: int = field(default=0, kw_only=True)
    shared_bytes: int = field(default=0, kw_only=True)
    stack_bytes: int = field(default=0, kw_only=True)
    spill_store_bytes: int = field(default=0, kw_only=True)
    spill_load_bytes: int = field(default=0, kw_only=True)

    @property
    def spills(self) -> bool:
        """Whether registers of this function go through local memory."""
        return self.spill_store_bytes + self.spill_load_bytes > 0


def read_ptxas_report(text: str) -> list[FunctionUsage]:
    """Read the report of one nvcc run.

    ptxas writes, for each architecture in turn, ``Compiling entry function`` with a kernel's name, the stack and
    spills of every function under ``Function properties for``, and the registers and shared memory of the last kernel
    under ``Used``. Lines of others, nvcc's warnings for example, are passed over.

    Args:
        text: What nvcc wrote.

    Returns:
        One entry for each function and architecture, in the order of the text; empty where it has no report.

    Example:
        >>> report = '''ptxas info    : Compiling entry function 'twice' for 'sm_90'
        ... ptxas info    : Function properties for twice
        ...     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
        ... ptxas info    : Used 32 registers, used 1 barriers, 256 bytes smem'''
        >>> (usage,) = read_ptxas_report(report)
        >>> usage.name, usage.architecture, usage.registers, usage.shared_bytes, usage.spills
        ('twice', 'sm_90', 32, 256, True)
    """
    found: dict[tuple[str, str], FunctionUsage] = {}
    architecture, kernel, function = "unknown", None, None
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            architecture = entry["architecture"]
            kernel = found.setdefault((entry["name"], architecture), FunctionUsage(entry["name"], architecture))
            kernel.is_kernel = True
        elif properties := _PROPERTIES.search(line):
            name = properties["name"]
            function = found.setdefault((name, architecture), FunctionUsage(name, architecture))
        elif function is not None and (stack := _STACK.search(line)):
            function.stack_bytes, function.spill_store_bytes, function.spill_load_bytes = map(int, stack.groups())
        elif kernel is not None and (registers := _REGISTERS.search(line)):
            kernel.registers = int(registers[1])
            shared = _SHARED.search(line)
            kernel.shared_bytes = int(shared[1]) if shared else 0
    return list(found.values())


def summarize(usages: Iterable[FunctionUsage]) -> str:
    """One line for the kernels of a source file.

    Args:
        usages: What :func:`read_ptxas_report` gave.

    Returns:
        How many kernels there are, and the range of what they take.

    Example:
        >>> summarize([FunctionUsage("a", "sm_90", is_kernel=True, registers=r) for r in (40, 96)])
        'kernels: 2 (sm_90), registers: 40 to 96, bytes of static shared memory: 0, functions that spill: 0'
    """
    usages = list(usages)
    kernels = [usage for usage in usages if usage.is_kernel]
    if not kernels:
        return "no kernels"
    architectures = ", ".join(dict.fromkeys(usage.architecture for usage in kernels))
    return (
        f"kernels: {len(kernels)} ({architectures}), registers: {_range(kernel.registers for kernel in kernels)}, "
        f"bytes of static shared memory: {_range(kernel.shared_bytes for kernel in kernels)}, "
        f"functions that spill: {sum(usage.spills for usage in usages)}"
    )


def _range(values: Iterable[int]) -> str:
    values = list(values)
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
