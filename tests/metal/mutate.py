"""Plants every small fault in the kernels, one at a time, and writes down which test finds it.

    python tests/metal/mutate.py                   # those that are not in the list yet
    python tests/metal/mutate.py --again rope      # all of one kernel; of all kernels, it takes some twenty minutes

A fault is a barrier that is gone or orders no memory, a comparison shifted by one or turned round, a term of one left
out, the lesser bound taken for the greater, an "and" for an "or", a conditional statement left out. `mutations.tsv`
holds them with the test that found each; one that no test can find, because it changes nothing, has its reason there
and is not planted again. It ends with 1 if a fault was found by nothing.
"""

import argparse
import csv
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIST = HERE / "mutations.tsv"
KERNELS = HERE.parent.parent / "mlx_tformer" / "kernels"
TESTS = {
    "rope": ["test_kernel_rope.py"],
    "attention": ["test_kernel_attention.py", "test_kernel_keys.py"],
    "merge": ["test_kernel_keys.py"],
    "router": ["test_kernel_router.py"],
}
SHIFTED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&"}
NOTHING, NOT_FOUND, CRASH = "changes nothing: ", "NOT FOUND", "the process ends"
LONGEST = 900
"""Seconds for one fault: a loop may have lost its end."""


@dataclass(frozen=True)
class Mutant:
    """One fault: in the `line`-th line of a kernel's file the text from `start` to `stop` becomes `new`."""

    file: str
    line: int
    start: int
    stop: int
    new: str
    variant: bool = False
    """True if it stands in the part that packed keys and latents have for themselves."""

    def source(self) -> str:
        """The faulty kernel."""
        lines = (KERNELS / f"{self.file}.metal").read_text().splitlines(keepends=True)
        text = lines[self.line]
        lines[self.line] = text[: self.start] + self.new + text[self.stop :]
        return "".join(lines)

    @property
    def key(self) -> tuple[str, str, str]:
        """File, line (with a number, if it is the same as one before it) and what it becomes: they stay what they are
        when other lines change."""
        lines = (KERNELS / f"{self.file}.metal").read_text().splitlines()
        text = lines[self.line]
        before = sum(line.strip() == text.strip() for line in lines[: self.line])
        changed = (text[: self.start] + self.new + text[self.stop :]).strip() or "(gone)"
        return self.file, text.strip() + (f" #{before + 1}" if before else ""), changed


def mutants(file: str) -> Iterator[Mutant]:
    """Every fault of one kernel."""
    variant = False
    for number, text in enumerate((KERNELS / f"{file}.metal").read_text().splitlines()):
        code = text.split("//")[0].rstrip()
        if code.startswith("#"):
            variant = "PACKED" in code or "LATENT" in code
            continue
        if "threadgroup_barrier" in code or re.match(r"\s*if \(.*;$", code):
            yield Mutant(file, number, 0, len(code), "", variant)
        for m in re.finditer(r"mem_threadgroup", code):
            yield Mutant(file, number, *m.span(), "mem_none", variant)
        for m in re.finditer(r"(?<= )(<|<=|>|>=|==|!=|&&|\|\|)(?= )", code):
            yield Mutant(file, number, *m.span(), SHIFTED[m[0]], variant)
        for m in re.finditer(r" [+-] 1(?![\d.])", code):
            yield Mutant(file, number, *m.span(), "", variant)
        for m in re.finditer(r"metal::(min|max)\b", code):
            other = "metal::max" if m[1] == "min" else "metal::min"
            yield Mutant(file, number, *m.span(), other, variant)


def known() -> dict[tuple[str, str, str], str]:
    """What `mutations.tsv` says of each fault."""
    if not LIST.exists():
        return {}
    with LIST.open(newline="") as stream:
        return {(file, old, new): verdict for file, old, new, verdict in csv.reader(stream, delimiter="\t")}


def write(verdicts: dict[tuple[str, str, str], str]) -> None:
    """Put the list down, in the order of the kernels' lines."""
    order = {mutant.key: i for i, mutant in enumerate(m for file in TESTS for m in mutants(file))}
    rows = sorted((key for key in verdicts if key in order), key=lambda key: order[key])
    with LIST.open("w", newline="") as stream:
        csv.writer(stream, delimiter="\t", lineterminator="\n").writerows([*key, verdicts[key]] for key in rows)


class FirstFailure:
    """A pytest plugin that remembers the first test that failed."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid.split("::")[-1].split("[")[0]


def found_by(mutant: Mutant) -> str:
    """The first test that fails with this fault, or NOT_FOUND."""
    import msl
    import pytest

    sound, text, first = msl.Kernel, mutant.source(), FirstFailure()

    def make(**settings: Any) -> Any:
        faulty = settings["name"].removeprefix("mlx_tformer_").split("_")[0] == mutant.file
        return sound(**(settings | {"source": text} if faulty else settings))

    msl.metal_kernel, msl.clang = make, lambda: None  # clang takes most faults for sound
    files = [str(HERE / name) for name in TESTS[mutant.file]][:: -1 if mutant.variant else 1]
    pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", "--tb=no", *files], plugins=[first])
    return first.name or NOT_FOUND


def side_by_side(todo: Iterable[Mutant], jobs: int) -> Iterator[tuple[Mutant, str]]:
    """Each fault with what found it; each in a process of its own, which it may take down."""
    waiting, running = list(todo), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant, (reading, writing) = waiting.pop(0), os.pipe()
            pid = os.fork()
            if not pid:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                signal.alarm(LONGEST)
                os.write(writing, found_by(mutant).encode())
                os._exit(0)
            os.close(writing)
            running[pid] = mutant, reading
        pid, status = os.wait()
        mutant, reading = running.pop(pid)
        with os.fdopen(reading) as stream:
            yield mutant, stream.read() if status == 0 else CRASH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help=f"out of {', '.join(TESTS)}")
    parser.add_argument("--again", action="store_true", help="plant those too that were found before")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    given, verdicts, missed = parser.parse_args(), known(), 0
    every = [mutant for file in given.kernels or TESTS for mutant in mutants(file)]
    todo = [m for m in every if not verdicts.get(m.key, NOT_FOUND).startswith(NOTHING)]
    todo = [m for m in todo if given.again or verdicts.get(m.key, NOT_FOUND) == NOT_FOUND]
    for mutant, verdict in side_by_side(todo, given.jobs):
        missed += verdict == NOT_FOUND
        verdicts[mutant.key] = verdict
        write(verdicts)
        print(verdict, *mutant.key, sep="  |  ", flush=True)
    print(f"{missed} faults were found by nothing")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
