"""`python -m tests.sass`: counts what the kernels' machine code executes.

    python -m tests.sass --library build/sm90/libkvx.so --hostgrid build/hostgrid/libkvx.so \\
        --name now --out benchmarks/results/sass.json

Both libraries are built of the sources beside this file: the first by nvcc with
CMAKE_CUDA_ARCHITECTURES=90-real, the second with KVX_HOSTGRID=ON. The cases are those of
benchmarks.gpu. `--check` compares the bytes that the machine code copies with torch's instead.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sass", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.description = __doc__
    parser.add_argument("--library", type=Path, required=True, help="libkvx with code for sm_90")
    parser.add_argument("--hostgrid", type=Path, required=True, help="libkvx of tests/hostgrid")
    parser.add_argument("--check", action="store_true", help="compare bytes, count nothing")
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--name", default="now", help="of the figures in --out")
    parser.add_argument("--commit", default="", help="that both libraries were built of")
    parser.add_argument("--out", type=Path, help="JSON whose other figures stay as they are")
    options = parser.parse_args()
    os.environ["KVX_LIBRARY"] = str(options.hostgrid.resolve())  # before kvx_core is imported

    from tests.sass import budget, listing
    from tests.sass.machine import ARCHITECTURE, Machine

    machine = Machine(options.library.resolve(), options.hostgrid.resolve())
    if options.check:
        for name, launches in budget.check(machine, options.only).items():
            print(f"{launches:3} launches  {name}")
        return
    results = budget.read_results(options.out) if options.out and options.out.exists() else {}
    before = results.get("before", {}).get("cases", {})
    found = results.setdefault(options.name, {"cases": {}})
    found["commit"] = options.commit
    found["kernels"] = {
        listing.short(name): usage._asdict()
        for name, usage in listing.usages(options.library.resolve())[ARCHITECTURE].items()
    }
    for name, of_case in budget.measure(machine, options.only):
        found["cases"][name] = of_case
        (ratio,) = budget.ratios({name: of_case}, before).values() or (math.nan,)
        print(f"{of_case['instructions_per_512_bytes']:8.2f} {ratio:6.3f} {name}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    compared = budget.ratios(found["cases"], before)
    if compared:
        print(f"most {max(compared.values()):.3f}, geometric mean {budget.mean(compared):.3f}")


if __name__ == "__main__":
    main()
