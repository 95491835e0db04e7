"""The live page, in a real browser and by its plain answers: a run, a killed worker, a stuck pass, many workers."""

import json
import threading
import urllib.error
import urllib.request

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.observe.live.page import serving
from telegrad.observe.live.top import fetch, render
from telegrad.rpc.current import require_agent
from tests.cluster import cluster
from tests.observe.browser import LAPTOP, PHONE, browser, check, count, look, picture, text
from tests.observe.made_up import MadeUpJob
from tests.waiting import wait_until

gate = threading.Event()
model = torch.nn.Linear(256, 256)


def get(url: str, **headers: str) -> bytes:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def forward(x):
    return model(x)


def relay(x):
    return rpc.rpc_sync("worker2", forward, args=(x,)).relu()


def hook(gradient):
    gate.wait(230)
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


@pytest.fixture(scope="module")
def view():
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def job():
    with cluster(4) as made:
        yield made


@pytest.fixture(scope="module")
def page(job):
    with serving(require_agent()) as made:
        yield made


@pytest.mark.slow
def test_the_server_answers_those_with_the_token_only(page):
    rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1))
    base = f"http://127.0.0.1:{page.port}"
    for path in ("/", "/state", "/events", "/metrics", "/state?token=guess"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(base + path)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{base}/static/..%2Fpage.py?token={page.token}")
    assert b"uPlot" in get(f"{base}/static/uPlot.iife.min.js")
    wait_until(lambda: any(link["total"] for link in fetch(page.url)["links"] if link["to"] == "worker1"))
    metrics = get(f"{base}/metrics", Authorization=f"Bearer {page.token}").decode()
    assert (
        'rpc_client_call_duration_seconds_count{client="worker0",rpc_system_name="telegrad",server="worker1"}'
        in metrics
    )
    assert 'telegrad_resident_memory_bytes{worker="worker1"}' in metrics
    wait_until(lambda: json.loads(get(f"{base}/state?token={page.token}"))["totals"]["up"] == 4)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run(page, view):
    stop = threading.Event()
    kept = [rpc.remote("worker3", keep, args=(250_000,)) for _ in range(3)]
    trainer = threading.Thread(target=train, args=(stop,))
    trainer.start()
    try:
        look(view, page.url)
        wait_until(lambda: "4 of 4" in text(view, "summary"))
        assert page.token not in view.current_url
        wait_until(lambda: "worker1" in text(view, "links"))
        wait_until(lambda: any(w["name"] == "worker0" and w["calls"] > 0 for w in fetch(page.url)["workers"]))
        wait_until(lambda: "worker3" in text(view, "references") and "3.0 MB" in text(view, "references"))
        wait_until(lambda: count(view, ".uplot canvas") == 3)
        number = view.execute_script("return document.body.dataset.number")
        wait_until(lambda: view.execute_script("return document.body.dataset.number") != number)
        check(view)
        picture(view, "run-light")
        for name, size, dark in (("run-dark", LAPTOP, True), ("run-phone", PHONE, False)):
            look(view, page.url, size, dark)
            wait_until(lambda: "4 of 4" in text(view, "summary"))
            background = view.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(18, 22, 28)") == dark
            check(view)
            picture(view, name)
    finally:
        stop.set()
        trainer.join()
    assert len(render(fetch(page.url), 40).renderables) >= 2
    del kept


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_stuck_pass(page, view):
    with autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", stuck, args=(torch.ones(1, 256),))
        passed = autograd.backward_async(context_id, [y.sum()], timeout=230)
        try:
            look(view, page.url)
            wait_until(lambda: "begun by worker0" in text(view, "passes"), 60)
            wait_until(lambda: "worker2 waits for worker1" in text(view, "passes"), 60)
            wait_until(lambda: "in hook" in text(view, "explanation"), 60)
            wait_until(lambda: count(view, "#wait-graph circle") >= 2)
            check(view)
            picture(view, "stuck-pass")
            look(view, page.url, PHONE, dark=True)
            wait_until(lambda: "in hook" in text(view, "explanation"), 60)
            check(view)
            picture(view, "stuck-pass-phone-dark")
        finally:
            rpc.rpc_sync("worker1", open_gate)
            passed.wait()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_worker(job, page, view):
    """The last that uses these workers."""
    look(view, page.url)
    wait_until(lambda: "4 of 4" in text(view, "summary"))
    job.kill("worker2")
    wait_until(lambda: "Dead: worker2" in text(view, "alarms"), 60)
    wait_until(lambda: "worker2 is gone" in text(view, "recent"))
    wait_until(lambda: count(view, ".worker.dead") == 1)
    check(view)
    picture(view, "killed")


def _redraw(view) -> float:
    """Milliseconds that it takes to draw the page."""
    script = "const begun = performance.now(); redraw(); return performance.now() - begun"
    return float(view.execute_script(script))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_page_is_usable_with_128_workers(view, monkeypatch):
    """Workers that are made up; the board, the server and the browser are real."""
    made_up = MadeUpJob(128)
    monkeypatch.setattr("telegrad.observe.live.board.ask_all", made_up.ask_all)
    monkeypatch.setattr("telegrad.observe.explanation.ask_all", made_up.ask_all)
    with serving(made_up.agent) as page:
        look(view, page.url)
        wait_until(lambda: "125 of 128" in text(view, "summary"), 60)
        assert count(view, ".worker") == 128
        wait_until(lambda: "2 dead: worker40, worker41" in text(view, "alarms"))
        wait_until(lambda: "No answer: worker50" in text(view, "alarms"))
        wait_until(lambda: "begun by worker5" in text(view, "passes"))
        wait_until(lambda: "worker8 waits for worker11" in text(view, "passes"))
        wait_until(lambda: "model.py:12, in f" in text(view, "explanation"))
        wait_until(lambda: len(fetch(page.url)["history"][0]) >= 4, 60)
        # It fits a few screens, and what is sent each second is little.
        assert view.execute_script("return document.documentElement.scrollHeight") < 4000
        assert len(get(page.url.replace("/?", "/state?"))) < 200_000
        assert min(_redraw(view) for _ in range(5)) < 1000
        check(view)
        picture(view, "128-light")
        look(view, page.url, LAPTOP, dark=True)
        wait_until(lambda: count(view, ".worker") == 128)
        picture(view, "128-dark")
        for name, dark in (("128-phone", False), ("128-phone-dark", True)):
            look(view, page.url, PHONE, dark)
            wait_until(lambda: count(view, ".worker") == 128)
            check(view)
            picture(view, name)
