"""From the Metal source that MLX writes out to C++: one text to run, one for clang to check."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

_VARIABLE = re.compile(r"\bthreadgroup\s+((?:unsigned\s+)?[\w:]+(?:<[^<>;]*>)?)\s+(\w+)((?:\s*\[[^\]]*\])*)\s*;")
_POINTER = re.compile(r"\bthreadgroup\s+(?:const\s+)?(?:unsigned\s+)?[\w:]+(?:<[^<>;]*>)?\s*(?:const\s*)?[*&(]")


def _threadgroup_variables(source: str, replacement: Callable[[int, str, str, str], str]) -> str:
    """Metal makes a `threadgroup T x[n];` in a kernel one variable for all threads, which C++ has no word for."""
    rest = _VARIABLE.sub("", source)
    for m in re.finditer(r"\bthreadgroup\s", rest):
        if not _POINTER.match(rest, m.start()):
            line = rest[m.start() :].split("\n")[0]
            raise ValueError(f"declare one threadgroup variable at a time, with no initial value: {line}")
    number = iter(range(1000))
    return _VARIABLE.sub(lambda m: replacement(next(number), m[1], m[2], m[3]), source)


def _signature(source: str, name: str) -> list[tuple[str, str, str]]:
    """(type, parameter, attribute) of each argument of the kernel, as MLX wrote it."""
    found = re.search(rf"\[\[kernel\]\] void {re.escape(name)}\(\n(.*?)\) {{\n", source, re.S)
    assert found is not None, f"MLX wrote no kernel called {name}"
    return re.findall(r"^\s*(.*?) ?(\w+) \[\[(.*?)\]\]", found[1], re.M)


def _instance(source: str, name: str) -> tuple[str, str]:
    """The source without comments and without MLX's last line, and the kernel that this line asks for."""
    source = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), source, flags=re.S)
    m = re.search(r"\ntemplate \[\[host_name.*?\) (.*);\n*\Z", source)
    return (source[: m.start()] + "\n", m[1]) if m else (source, name)


def _argument(type_: str, attribute: str) -> str:
    """What `msl_entry` passes for one argument of the kernel."""
    if buffer := re.fullmatch(r"buffer\((\d+)\)", attribute):
        pointer = re.sub(r"\s*[*&]$", "*", type_)
        return ("*" if type_.endswith("&") else "") + f"({pointer})b[{buffer[1]}]"
    part = ", ".join(f"id.{attribute}[{k}]" for k in range(3))
    return f"uint3({part})" if type_ == "uint3" else f"id.{attribute}"


def translate(source: str, name: str) -> str:
    """The C++ translation unit that runs a kernel which MLX has written out."""
    body, instance = _instance(source, name)
    passed = ", ".join(_argument(type_, attribute) for type_, _, attribute in _signature(source, name))
    body = _threadgroup_variables(
        body,
        lambda n, type_, var, dims: f'threadgroup {type_} (&{var}){dims} = msl_shared<{type_}{dims}>({n}, "{var}");',
    )
    entry = f'extern "C" void msl_entry(void** b, const msl::Ids& id) {{ (void)b, (void)id; {instance}({passed}); }}'
    return f'#include "prelude.h"\n#line 1 "{name}"\n{body}\n#line 1 "entry"\n{entry}\n'


def checkable(source: str, name: str) -> str:
    """The C++ translation unit in which clang sees the four address spaces as types."""
    body, instance = _instance(source, name)
    body = _threadgroup_variables(body, lambda n, type_, var, dims: f"static threadgroup {type_} {var}{dims};")
    return f'#include "prelude.h"\n#line 1 "{name}"\n{body}\n#line 1 "entry"\nauto* msl_entry = &{instance};\n'


_TYPES = "float|half|bfloat|u?(?:char|short|int|long)|bool|unsigned|size_t|u?int(?:8|16|32|64)_t|b?float16_t"
_NAKED = r"(?:^|[;{(,<])\s*(?:const\s+)?(?:%s)(?:[234])?(?:\s+const)?\s*[*&]\s*\w+"


def naked_pointer(source: str, name: str) -> str | None:
    """The first pointer or reference that names no address space, which C++ allows and Metal does not."""
    body, _ = _instance(source, name)
    types = "|".join([_TYPES, *re.findall(r"\b(?:typename|class)\s+(\w+)", body)])
    found = re.search(_NAKED % types, body, re.M)
    return found[0].strip() if found else None


def faulty_line(source: str, library: Path, pc: int) -> str:
    """The line of the kernel at which it was stopped, or nothing where that cannot be told."""
    at = subprocess.run(["addr2line", "-e", library, "-i", hex(pc - 1)], capture_output=True, text=True).stdout
    lines = source.splitlines()
    found = [int(line) for line in re.findall(r"custom_kernel_\w+:(\d+)", at)]
    return f"\n  line {found[0]}: {lines[found[0] - 1].strip()}" if found else ""
