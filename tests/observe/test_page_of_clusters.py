"""The live page of clusters that are started for it: 64 workers, and a local cluster with a dashboard."""

import threading

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.observe.live.page import serving
from telegrad.observe.live.top import fetch
from telegrad.rpc.current import require_agent
from tests.cluster import cluster
from tests.observe.browser import PHONE, browser, check, count, look, picture, text
from tests.waiting import wait_until


def keep(size):
    return torch.ones(size)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
def test_many_workers():
    size = 64
    with cluster(size, rendezvous_timeout=100) as job, serving(require_agent()) as page, browser() as view:
        stop = threading.Event()

        def chatter() -> None:
            while not stop.is_set():
                futures = [rpc.rpc_async(name, keep, args=(10,)) for name in job.others]
                for future in futures:
                    future.wait()
                rpc.rpc_sync("worker7", chain, args=(8, size))

        caller = threading.Thread(target=chatter)
        caller.start()
        try:
            look(view, page.url)
            wait_until(lambda: f"{size} of {size}" in text(view, "summary"), 60)
            wait_until(lambda: count(view, ".worker") == size, 30)
            wait_until(lambda: len(fetch(page.url)["history"][0]) >= 8, 60)
            check(view)
            picture(view, "many-light")
            look(view, page.url, PHONE, dark=True)
            wait_until(lambda: f"{size} of {size}" in text(view, "summary"), 60)
            check(view)
            picture(view, "many-phone-dark")
        finally:
            stop.set()
            caller.join()


def chain(number, size):
    if number < size:
        rpc.rpc_sync(f"worker{number}", chain, args=(number + 8, size))


@pytest.mark.slow
def test_a_cluster_with_a_dashboard(capsys):
    with telegrad.local_cluster(workers=2, dashboard=True) as job:
        assert fetch(job.dashboard)["totals"]["workers"] == 2
    assert "the dashboard is at http://127.0.0.1:" in capsys.readouterr().out
