"""Seconds that a new process needs to import the package and to show the command's help.

    python tests/bench/import_time.py [--rounds 9]

The commands take turns, so that a busy machine slows all of them alike; beside them stand Python alone and MLX alone,
which are the floor. Wanted: `import mlx_tformer` in 0.35 s and `mlx-tformer --help` in 0.5 s.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measuring import print_table


def commands() -> dict[str, list[str]]:
    """What is timed, by the name that the table shows."""
    found = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import mlx.core": [sys.executable, "-c", "import mlx.core"],
        "import mlx_tformer": [sys.executable, "-c", "import mlx_tformer"],
        "mlx_tformer.load": [sys.executable, "-c", "import mlx_tformer; mlx_tformer.load"],
    }
    program = Path(sys.executable).with_name("mlx-tformer")
    if program.exists():
        found["mlx-tformer --help"] = [str(program), "--help"]
    else:
        print("mlx-tformer is not installed beside this Python, so its --help is left out")
    return found


def seconds(command: list[str]) -> float:
    """Wall-clock seconds of one run."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds, todo = parser.parse_args().rounds, commands()
    for command in todo.values():  # files into the disk's cache, bytecode written
        seconds(command)
    times: dict[str, list[float]] = {name: [] for name in todo}
    for _ in range(rounds):
        for name, command in todo.items():
            times[name].append(seconds(command))
    floor = statistics.median(times["python -c pass"])
    rows = [(n, statistics.median(t), min(t), max(t), statistics.median(t) / floor) for n, t in times.items()]
    print_table(["command", "median s", "least", "most", "of python"], rows)


if __name__ == "__main__":
    main()
