"""Reports from records: `python -m haap_rl.report DIR...`.

One directory: that run's report.html is made again. Several: a page that compares the runs, report.html in the present
folder. out=FILE puts either elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from haap_rl import configs
from haap_rl.problem.errors import InputError

USAGE = "python -m haap_rl.report DIR... [out=FILE]   (DIR: a run's record; out: default report.html)"


def report(directories: Sequence[Path], out: Path | None) -> Path:
    """Write the page of one run, or of several compared; its path. Raises InputError, and nothing is written then."""
    from haap_rl.report.comparison import comparison_page
    from haap_rl.report.page import read_run, run_page
    from haap_rl.tracking.record import REPORT, write_files

    if not directories:
        raise InputError(f"no record is named; {USAGE}")
    runs = [read_run(directory) for directory in directories]
    alone = len(runs) == 1
    page = run_page(runs[0]) if alone else comparison_page(runs)
    path = out or Path(directories[0] if alone else ".", REPORT)
    write_files(path.parent, {path.name: page.encode()})
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status (see `haap_rl.configs`)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    statuses = [0]
    with configs.reported(statuses):
        outs = [Path(a.removeprefix("out=")) for a in arguments if a.startswith("out=")]
        if outs and outs[-1].suffix not in (".html", ".htm"):
            raise InputError(f"out={str(outs[-1])!r} must end in .html; give out=FILE.html")
        directories = [Path(a) for a in arguments if not a.startswith("out=")]
        print(f"report: {report(directories, outs[-1] if outs else None)}")
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
