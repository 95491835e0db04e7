"""The live page, in a real browser and by its plain answers: a run, a killed worker, a stuck pass, many workers."""

import json
import threading
import urllib.error
import urllib.request

import pytest
import torch

import telegrad
from telegrad import autograd, rpc
from telegrad.observe.live.page import serving
from telegrad.observe.live.top import fetch, render
from telegrad.rpc.current import require_agent
from tests.cluster import cluster
from tests.observe.browser import LAPTOP, PHONE, browser, check, picture, text
from tests.waiting import wait_until

gate = threading.Event()
model = torch.nn.Linear(256, 256)


def get(url: str, **headers: str) -> bytes:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:
        return bytes(answer.read())


def forward(x):
    return model(x)


def relay(x):
    return rpc.rpc_sync("worker2", forward, args=(x,)).relu()


def hook(gradient):
    gate.wait(30)
    return gradient


def stuck(x):
    y = rpc.rpc_sync("worker2", forward, args=(x,))
    y.register_hook(hook)
    return y


def open_gate():
    gate.set()


def keep(size):
    return torch.ones(size)


def train(stop: threading.Event) -> None:
    while not stop.is_set():
        with autograd.context() as context_id:
            futures = [rpc.rpc_async(f"worker{n}", relay, args=(torch.ones(8, 256),)) for n in (1, 3)]
            autograd.backward(context_id, [sum(future.wait() for future in futures).sum()])


@pytest.mark.slow
def test_the_server_answers_those_with_the_token_only():
    with cluster(2), serving(require_agent()) as page:
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
        base = f"http://127.0.0.1:{page.port}"
        for path in ("/", "/state", "/events", "/metrics", "/state?token=guess"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                get(base + path)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{base}/static/..%2Fpage.py?token={page.token}")
        assert b"uPlot" in get(f"{base}/static/uPlot.iife.min.js")
        wait_until(lambda: fetch(page.url)["links"])
        metrics = get(f"{base}/metrics", Authorization=f"Bearer {page.token}").decode()
        assert (
            'rpc_client_call_duration_seconds_count{client="worker0",rpc_system_name="telegrad",server="worker1"}'
            in (metrics)
        )
        assert 'telegrad_resident_memory_bytes{worker="worker1"}' in metrics
        assert json.loads(get(f"{base}/state?token={page.token}"))["totals"]["up"] == 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_and_a_killed_worker():
    stop = threading.Event()
    with cluster(4) as job, serving(require_agent()) as page:
        kept = [rpc.remote("worker3", keep, args=(250_000,)) for _ in range(3)]
        trainer = threading.Thread(target=train, args=(stop,))
        trainer.start()
        try:
            wait_until(lambda: len(fetch(page.url)["history"][0]) >= 6, 30)
            with browser() as view:
                view.get(page.url)
                wait_until(lambda: "4 of 4" in text(view, "summary"))
                assert page.token not in view.current_url
                wait_until(lambda: "worker1" in text(view, "links"))
                wait_until(lambda: any(w["name"] == "worker0" and w["calls"] > 0 for w in fetch(page.url)["workers"]))
                assert "worker3" in text(view, "references") and "3.0 MB" in text(view, "references")
                assert view.execute_script("return document.querySelectorAll('.uplot canvas').length") == 3
                number = view.execute_script("return document.body.dataset.number")
                wait_until(lambda: view.execute_script("return document.body.dataset.number") != number)
                check(view)
                picture(view, "run-light")
            with browser(dark=True) as view:
                view.get(page.url)
                wait_until(lambda: "4 of 4" in text(view, "summary"))
                assert (
                    view.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
                )
                check(view)
                picture(view, "run-dark")
            with browser(PHONE) as view:
                view.get(page.url)
                wait_until(lambda: "4 of 4" in text(view, "summary"))
                check(view)
                picture(view, "run-phone")
        finally:
            stop.set()
            trainer.join()
        state = fetch(page.url)
        assert len(render(state, 40).renderables) >= 2
        with browser() as view:
            view.get(page.url)
            wait_until(lambda: "4 of 4" in text(view, "summary"))
            job.kill("worker2")
            wait_until(lambda: "Dead: worker2" in text(view, "alarms"), 20)
            assert "worker2 is gone" in text(view, "recent")
            assert view.execute_script("return document.querySelectorAll('.worker.dead').length") == 1
            check(view)
            picture(view, "killed")
        del kept


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_stuck_pass():
    with cluster(3), serving(require_agent()) as page, autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", stuck, args=(torch.ones(1, 256),))
        passed = autograd.backward_async(context_id, [y.sum()])
        try:
            with browser(LAPTOP) as view:
                view.get(page.url)
                wait_until(lambda: "begun by worker0" in text(view, "passes"), 20)
                wait_until(lambda: "worker2 waits for worker1" in text(view, "passes"), 20)
                wait_until(lambda: "in hook" in text(view, "explanation"), 20)
                assert view.execute_script("return document.querySelectorAll('#wait-graph circle').length") >= 2
                check(view)
                picture(view, "stuck-pass")
            with browser(PHONE, dark=True) as view:
                view.get(page.url)
                wait_until(lambda: "in hook" in text(view, "explanation"), 20)
                check(view)
                picture(view, "stuck-pass-phone-dark")
        finally:
            rpc.rpc_sync("worker1", open_gate)
            passed.wait()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
def test_many_workers():
    size = 64
    with cluster(size, rendezvous_timeout=100) as job, serving(require_agent()) as page:
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
            with browser() as view:
                view.get(page.url)
                wait_until(lambda: f"{size} of {size}" in text(view, "summary"), 60)
                wait_until(
                    lambda: view.execute_script("return document.querySelectorAll('.worker').length") == size, 30
                )
                wait_until(lambda: len(fetch(page.url)["history"][0]) >= 8, 60)
                check(view)
                picture(view, "many-light")
            with browser(PHONE, dark=True) as view:
                view.get(page.url)
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
