"""Programs per second of a persistent compiler and of one process per program."""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.settings import Args, Shape
from bench.stopwatch import table_rows
from nanorlhf.progress import Progress
from nanorlhf.rlcf.compilers import JAVAC, JavaCompiler, PythonCompiler

NUM_PROGRAMS = 300  # per round of a persistent compiler
NUM_PROCESSES = 8  # programs per round with one process each, half a second per program


def bench_compile(args: Args, shape: Shape, device: torch.device) -> list[dict]:
    """Measure programs per second with a persistent compiler and with one process per program.

    Milliseconds are per program. The processes run one after the other, each on as many cores as it uses. Our compiler
    also finds unused variables, unlike javac. The persistent compiler's start-up time is printed, not counted.
    """
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        javac = ["javac", "-d", directory, *JAVAC]
        for what, compiler, way, command, ending, program in (
            ("compile Java", JavaCompiler(), "javac, one process per program", javac, "java", java_program),
            ("compile Python", PythonCompiler(), "pyflakes, one process per program",
             [sys.executable, "-m", "pyflakes"], "py", python_program),
        ):  # fmt: skip
            programs = [program(number) for number in range(NUM_PROGRAMS)]
            files = [Path(directory) / f"Example{number}.{ending}" for number in range(NUM_PROCESSES)]
            for file, text in zip(files, programs, strict=False):
                file.write_text(text)
            times, peaks = {"ours": [], way: []}, {}
            with compiler:
                start = time.perf_counter()
                compiler.check(programs[:1])
                start_seconds = time.perf_counter() - start
                assert not any(compiler.check(programs))  # also the warm-up
                peaks[way] = command_peak_memory([*command, files[0]])
                for _ in Progress(range(args.rounds), desc=what):
                    start = time.perf_counter()
                    compiler.check(programs)
                    times["ours"].append((time.perf_counter() - start) / len(programs))
                    start = time.perf_counter()
                    for file in files:
                        subprocess.run([*command, file], check=True)
                    times[way].append((time.perf_counter() - start) / len(files))
                peaks["ours"] = peak_memory(compiler.server.process)
            size = f"{NUM_PROGRAMS} programs, start of {start_seconds:.1f} s not counted"
            rows += table_rows(what, size, {name: (statistics.median(times[name]), peaks[name]) for name in times})
    for row in rows:
        row["programs_per_second"] = 1 / row["seconds"]
    return rows


def peak_memory(process: subprocess.Popen) -> int:
    """Return the process's peak resident size in bytes; wait4 would report the parent's if that is larger."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(peak[1]) if peak else 0  # the process has ended


def command_peak_memory(command: list) -> int:
    process, peak = subprocess.Popen(command), 0
    while process.poll() is None:
        peak = peak_memory(process) or peak
        time.sleep(0.002)
    return peak


def java_program(number: int) -> str:
    """Return a small class that takes javac as long as a typical MBJP solution."""
    return f"""import java.util.*;

class Example{number} {{
    public static List<Integer> largest(List<Integer> values, int limit) {{
        int[] counts = new int[{number + 2}];
        for (int value : values) {{
            counts[value % counts.length]++;
        }}
        List<Integer> found = new ArrayList<>();
        for (int i = 0; i < counts.length && found.size() < limit; i++) {{
            if (counts[i] * {number} > limit || i == counts.length - 1) {{
                found.add(i);
            }}
        }}
        return found.size() > {number} ? found : values;
    }}
}}
"""


def python_program(number: int) -> str:
    return f"""def largest(values, limit):
    counts = [0] * {number + 2}
    for value in values:
        counts[value % len(counts)] += 1
    found = []
    for i, count in enumerate(counts):
        if len(found) < limit and (count * {number} > limit or i == len(counts) - 1):
            found.append(i)
    return found if len(found) > {number} else values
"""
