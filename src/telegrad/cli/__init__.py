"""The command `telegrad`: `run` a script on local workers, look at jobs that run, see what this machine is good for."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from telegrad import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    options = _parser().parse_args(arguments)
    return int(options.command(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telegrad", description="Distributed autograd over RPC for PyTorch.")
    parser.add_argument("--version", action="version", version=f"telegrad {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run a script on several local workers",
        description="Run a Python script on several local workers. Each finds RANK, WORLD_SIZE, LOCAL_RANK, "
        "MASTER_ADDR, MASTER_PORT, TELEGRAD_NAME and TELEGRAD_SECRET in its environment, so rpc.init_rpc(name) "
        "needs nothing more. Output is shown under each worker's name. A worker that fails is started again, if "
        "--max-restarts allows; then its failure ends all, and its status is the command's.",
    )
    run.add_argument("-n", "--workers", type=_positive, default=2, metavar="N", help="how many workers (default: 2)")
    run.add_argument(
        "--name-prefix", default="worker", metavar="NAME", help="workers are NAME0, NAME1, ... (default: worker)"
    )
    run.add_argument(
        "--seed", type=int, metavar="S", help="seed random numbers: torch's and Python's of worker N with S + N"
    )
    run.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start a worker that fails again, up to N times, while the others go on (default: 0)",
    )
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="go to the script")
    run.set_defaults(command=_run)

    _add_watching(commands)
    doctor = commands.add_parser(
        "doctor",
        help="check this machine and measure what its ways of talking cost",
        description="Check what Telegrad uses on this machine, measure what it costs, and say what to do.",
    )
    doctor.set_defaults(command=_doctor)
    return parser


def _add_watching(commands: Any) -> None:
    trace = commands.add_parser(
        "trace",
        help="run a script and record a timeline of all its workers",
        description="Run a script and record what all its workers do, into one file for https://ui.perfetto.dev.",
    )
    trace.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="default: trace.json")
    dashboard = commands.add_parser(
        "dashboard",
        help="show a live page of a script that it runs, or of a job that runs already",
        description="Run a script with a live page; without a script, serve a page of a job that runs already.",
    )
    dashboard.add_argument("--listen", metavar="HOST:PORT", help="default: a free port of the loopback address")
    _add_connect(dashboard)
    for parser, needed in ((trace, True), (dashboard, False)):
        parser.add_argument(
            "-n", "--workers", type=_positive, metavar="N", help="as with `run`; by default the script starts its own"
        )
        parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
        parser.add_argument("script", metavar="SCRIPT", nargs=None if needed else "?")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="go to the script")
        parser.set_defaults(command=_watch, watch=parser.prog.split()[-1])
    top = commands.add_parser("top", help="show a running job in the terminal", description="Show a running job.")
    top.add_argument("url", nargs="?", metavar="URL", help="of its dashboard, if it has one; else see --connect")
    _add_connect(top)
    top.add_argument("--once", action="store_true", help="print once and end")
    top.set_defaults(command=_watch, watch="top")
    status = commands.add_parser(
        "status",
        help="print the workers of a running job: state, address, uptime, calls, memory",
        description="Print the workers of a running job. The exit status is 0 if each of them answers and none is in a "
        "deadlock.",
    )
    _add_connect(status)
    status.add_argument("--json", action="store_true", help="for programs to read")
    status.set_defaults(command=_watch, watch="status")


def _add_connect(parser: argparse.ArgumentParser) -> None:
    """For commands that look at a job that runs: which one."""
    parser.add_argument(
        "--connect",
        metavar="WHERE",
        help="the id of one of the job's processes on this host, or tcp://HOST:PORT, where its workers meet, with its "
        "secret in TELEGRAD_SECRET; default: the job of yours that runs on this host",
    )


def _watch(options: argparse.Namespace) -> int:
    from telegrad.cli import watch
    from telegrad.errors import TelegradError

    try:
        return int(getattr(watch, options.watch)(options))
    except TelegradError as error:
        sys.stderr.write(f"telegrad {options.watch}: {error}\n")
        return 1


def _run(options: argparse.Namespace) -> int:
    from telegrad.launch.script import run_script

    script = ["-m", options.script] if options.module else [options.script]
    return run_script(
        options.workers,
        [*script, *options.arguments],
        name_prefix=options.name_prefix,
        max_restarts=options.max_restarts,
        seed=options.seed,
    )


def _doctor(_: argparse.Namespace) -> int:
    from telegrad.cli.doctor import examine, report

    findings = examine()
    sys.stdout.write(report(findings))
    return 1 if any(finding.fatal for finding in findings) else 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} workers: at least one is needed")
    return number
