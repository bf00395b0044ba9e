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
from collections.abc import Callable, Iterator
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
QUICK = 24
"""Tests that a quick run tries for each fault."""
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
    variant: str = ""
    """"packed" or "latent" if it stands in a part that such keys have for themselves."""

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
    variant = ""
    for number, text in enumerate((KERNELS / f"{file}.metal").read_text().splitlines()):
        code = text.split("//")[0].rstrip()
        if code.startswith("#"):
            variant = "packed" if "PACKED" in code else "latent" if "LATENT" in code else ""
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


class Planting:
    """A pytest plugin: the tests are collected once, and run in a fresh process for each fault, until one fails."""

    def __init__(self, todo: list[Mutant], jobs: int, most: int | None, done: Callable[[Mutant, str], None]):
        self.todo, self.jobs, self.most, self.done = todo, jobs, most, done
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid.split("::")[-1].split("[")[0]

    def pytest_runtestloop(self, session: Any) -> bool:
        waiting, running = list(self.todo), {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                mutant, (reading, writing) = waiting.pop(0), os.pipe()
                pid = os.fork()
                if not pid:
                    os.write(writing, self.found_by(mutant, session).encode())
                    os._exit(0)
                os.close(writing)
                running[pid] = mutant, reading
            pid, status = os.wait()
            mutant, reading = running.pop(pid)
            with os.fdopen(reading) as stream:
                self.done(mutant, stream.read() if status == 0 else CRASH)
        return True

    def found_by(self, mutant: Mutant, session: Any) -> str:
        """The first test that fails with this fault, or NOT_FOUND; in the process that it may take down."""
        import mlx.core as mx
        import msl

        mx.set_default_stream(mx.new_stream(mx.cpu))  # the other one's thread has not come along
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)
        signal.alarm(LONGEST)
        sound, text = msl.Kernel, mutant.source()

        def make(**settings: Any) -> Any:
            faulty = settings["name"].removeprefix("mlx_tformer_").split("_")[0] == mutant.file
            return sound(**(settings | {"source": text} if faulty else settings))

        msl.metal_kernel, msl.clang = make, lambda: None  # clang takes most faults for sound
        msl.GPP = msl.GPP.replace("-O1", "-O0")  # each kernel runs once
        for item in self.tests(mutant, session.items)[: self.most]:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if self.failed:
                break
        return self.failed or NOT_FOUND

    def tests(self, mutant: Mutant, items: list[Any]) -> list[Any]:
        """The tests of one kernel, those first that are likely to see the fault."""
        names = TESTS[mutant.file]
        mine = [item for item in items if item.path.name in names]
        return sorted(mine, key=lambda item: (mutant.variant not in item.name, names.index(item.path.name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help=f"out of {', '.join(TESTS)}")
    parser.add_argument("--again", action="store_true", help="plant those too that were found before")
    parser.add_argument(
        "--quick", action="store_true", help=f"try the first {QUICK} tests alone, which find nearly all"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    import pytest

    sys.path[:0] = [str(HERE), str(HERE.parent)]
    given, verdicts = parser.parse_args(), known()
    every = [mutant for file in given.kernels or TESTS for mutant in mutants(file)]
    todo = [m for m in every if not verdicts.get(m.key, NOT_FOUND).startswith(NOTHING)]
    todo = [m for m in todo if given.again or verdicts.get(m.key, NOT_FOUND) == NOT_FOUND]
    todo.sort(key=lambda m: m.key in verdicts)  # those that take longest, because no test finds them, come last

    def done(mutant: Mutant, verdict: str) -> None:
        verdicts[mutant.key] = verdict
        write(verdicts)
        print(verdict, *mutant.key, sep="  |  ", file=sys.__stderr__, flush=True)

    files = sorted({str(HERE / name) for mutant in todo for name in TESTS[mutant.file]})
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--tb=no", "-s"]
    if todo:
        pytest.main([*options, *files], plugins=[Planting(todo, given.jobs, QUICK if given.quick else None, done)])
    missed = sum(verdicts.get(mutant.key, NOT_FOUND) == NOT_FOUND for mutant in every)
    print(f"{missed} faults were found by nothing")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
