"""The command `telegrad`: `run` a script on local workers, `doctor` to see what this machine is good for."""

import argparse
import sys
from collections.abc import Sequence

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

    doctor = commands.add_parser(
        "doctor",
        help="check this machine and measure what its ways of talking cost",
        description="Check what Telegrad uses on this machine, measure what it costs, and say what to do.",
    )
    doctor.set_defaults(command=_doctor)
    return parser


def _run(options: argparse.Namespace) -> int:
    from telegrad.launch.script import run_script

    script = ["-m", options.script] if options.module else [options.script]
    return run_script(
        options.workers,
        [*script, *options.arguments],
        name_prefix=options.name_prefix,
        max_restarts=options.max_restarts,
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
