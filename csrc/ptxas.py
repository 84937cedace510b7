"""Read the report of ``nvcc -Xptxas -v`` on the resources that the compiled kernels use."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

__all__ = ["FunctionUsage", "read_ptxas_report", "summarize"]

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>sm_\w+)'")
_PROPERTIES = re.compile(r"Function properties for (?P<name>\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class FunctionUsage:
    """The resources that one function uses on one architecture.

    Attributes:
        name: The function's mangled C++ name.
        architecture: For example ``"sm_90"``.
        is_kernel: False for a device function that was not inlined. ptxas counts the registers of such a function as
            its callers'.
        registers: Registers of a thread; 0 if ``is_kernel`` is False.
        shared_bytes: Static shared memory of a block in bytes. The report does not include dynamic shared memory,
            because the launch determines its size.
        stack_bytes: Local memory of a thread in bytes.
        spill_store_bytes: Bytes of registers that a thread writes to local memory because it has too few registers.
        spill_load_bytes: Bytes of registers that a thread reads back.
    """

    name: str
    architecture: str
    _: KW_ONLY
    is_kernel: bool = False
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0

    @property
    def spills(self) -> bool:
        """Return True if registers of this function spill to local memory."""
        return self.spill_store_bytes + self.spill_load_bytes > 0


def read_ptxas_report(text: str) -> list[FunctionUsage]:
    """Read the report of one nvcc run.

    For each architecture in turn, ptxas writes ``Compiling entry function`` with a kernel's name. The stack and spills
    of every function follow under ``Function properties for``, and the registers and shared memory of the kernel under
    ``Used``. Other lines, such as nvcc's warnings, are ignored.

    Args:
        text: The output of nvcc.

    Returns:
        One entry for each function and architecture, in the order of the text; empty if the text has no report.

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
        # Properties follow for the kernel itself and for every device function that was not inlined into it.
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
    """Return one line about the kernels of a source file.

    Args:
        usages: The result of :func:`read_ptxas_report`.

    Returns:
        The number of kernels, and the ranges of the resources that they use.

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
