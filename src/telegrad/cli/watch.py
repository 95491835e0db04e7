"""`telegrad dashboard`, `top`, `status` and `trace`: programs that are watched, and those that are found running."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from telegrad.launch.script import run_script
from telegrad.observe.attach import attached, has_ended, only_errors_logged

_LOOK_SECONDS = 0.5
_ONCE_SECONDS = 3.0


def run_watched(options: argparse.Namespace, variable: str, value: str) -> int:
    """Run a script with what `variable` asks for: on N workers, or alone if it starts its workers itself."""
    command = (["-m"] if options.module else []) + [options.script, *options.arguments]
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        if options.workers:
            return run_script(options.workers, command)
        return subprocess.run([sys.executable, *command], check=False).returncode
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def trace(options: argparse.Namespace) -> int:
    """Record a script."""
    return run_watched(options, "TELEGRAD_TRACE", str(Path(options.output).absolute()))


def dashboard(options: argparse.Namespace) -> int:
    """Run a script with a page, or serve a page of a job that runs."""
    if options.script is not None:
        return run_watched(options, "TELEGRAD_DASHBOARD", options.listen or "1")
    from telegrad.observe.live.page import serving

    host, _, port = (options.listen or "").rpartition(":")
    with attached(options.connect) as agent, serving(agent, host or "127.0.0.1", int(port or 0)) as page:
        sys.stdout.write(f"the dashboard is at {page.url}\n")
        sys.stdout.flush()
        try:
            while not has_ended(agent):
                time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            return 0
    sys.stdout.write("the job has ended\n")
    return 0


def top(options: argparse.Namespace) -> int:
    """Show a job in the terminal."""
    from telegrad.observe.live.board import Board
    from telegrad.observe.live.top import fetch, show

    where = options.connect or options.url
    if where is not None and where.startswith("http"):
        return show(lambda: fetch(where), once=options.once)
    with only_errors_logged(), attached(where) as agent:
        board = Board(agent)
        board.start()
        try:
            if options.once:  # rates are those between two looks
                board.wait_for_news(1, _ONCE_SECONDS)
            return show(lambda: None if has_ended(agent) else board.state, once=options.once)
        finally:
            board.close()


def status(options: argparse.Namespace) -> int:
    """Print the workers of a job, once."""
    from telegrad.cli.status import show

    return show(options)
