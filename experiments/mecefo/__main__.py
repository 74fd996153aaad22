"""MeCeFO beside its alternatives: `python -m experiments.mecefo out=results/mecefo`, about half an hour.

    python -m experiments.mecefo out=/tmp/try quick=true      some minutes, to see that it works

Parts: `throughput.py`, how much slower plans get; `convergence.py`, what training loses. Every run is a file under
out/runs/, so the same command goes on where it was stopped. Written at the end: summary.json, table.md, CSV files and
pictures.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.mecefo import convergence, throughput
from haap_rl import configs
from haap_rl.problem.errors import yes_or_no
from haap_rl.tracking.record import check_writable, to_json_text, write_files

PARTS = {"throughput": throughput.run, "convergence": convergence.run}
OPTIONS = {"out": None, "quick": False}


def run(options: dict[str, Any]) -> int:
    """Run what is missing and write the files; the exit status."""
    quick = yes_or_no("mecefo", "quick", options["quick"])
    out = Path(str(options["out"]))
    check_writable(out)
    summary: dict[str, Any] = {"assumptions": {}}
    texts = []
    try:
        for name, part in PARTS.items():
            found, text = part(out, quick)
            summary["assumptions"][name] = found.pop("assumptions")
            summary |= found
            texts.append(text)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the runs that are missing", file=sys.stderr)
        return 130
    text = "\n".join(texts)
    write_files(out, {"summary.json": to_json_text(summary).encode(), "table.md": text.encode()})
    print(text)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    return configs.run_with_options(run, dict(OPTIONS), sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
