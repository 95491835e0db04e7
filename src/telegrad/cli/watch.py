"""`telegrad dashboard`, `top` and `trace`: programs that are watched, and those that are found running."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from telegrad.errors import TelegradError
from telegrad.launch.script import run_script
from telegrad.observe.live.jobs import running_pages


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
    """Run a script with a page, or tell of the pages that there are."""
    if options.script is not None:
        return run_watched(options, "TELEGRAD_DASHBOARD", options.listen or "1")
    pages = running_pages()
    for page in pages:
        sys.stdout.write(f"{page.name} (process {page.pid}): {page.url}\n")
    if not pages:
        sys.stdout.write(
            "No job with a dashboard runs here. Start one with `telegrad dashboard script.py`, with "
            "`local_cluster(dashboard=True)`, or any job with TELEGRAD_DASHBOARD=1 in the environment of worker 0.\n"
        )
    return 0 if pages else 1


def top(options: argparse.Namespace) -> int:
    """Show a job in the terminal."""
    from telegrad.observe.live.top import show

    url = options.url
    if url is None:
        pages = running_pages()
        if not pages:
            raise TelegradError(
                "no job with a dashboard runs here; give its address, or start one with `telegrad dashboard script.py`"
            )
        url = pages[-1].url
    return show(url, once=options.once)
