"""torch's test classes, imported while Telegrad stands in for the modules they test.

A class in torch names no backend: it is completed here by a fixture that says how a worker is started, and by the base
that runs one test in several processes.
"""

import importlib
import sys
import tomllib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from telegrad import compat

_TORCH_TESTS = "torch.testing._internal.distributed."
_NOT_EXPECTED = Path(__file__).with_name("not_expected.toml")


class Suite(NamedTuple):
    """A test class of torch, and what it needs."""

    module: str
    name: str
    faulty: bool = False


SUITES = (
    Suite("rpc.rpc_test", "RpcTest"),
    Suite("rpc.rpc_test", "TensorPipeAgentRpcTest"),
    Suite("rpc.dist_autograd_test", "DistAutogradTest"),
    Suite("rpc.dist_autograd_test", "TensorPipeAgentDistAutogradTest"),
    Suite("rpc.dist_optimizer_test", "DistOptimizerTest"),
    Suite("nn.api.remote_module_test", "RemoteModuleTest"),
    Suite("nn.api.remote_module_test", "ThreeWorkersRemoteModuleTest"),
    Suite("ddp_under_dist_autograd_test", "DdpUnderDistAutogradTest"),
    Suite("ddp_under_dist_autograd_test", "DdpComparisonTest"),
    Suite("rpc.examples.parameter_server_test", "ParameterServerTest"),
    Suite("rpc.examples.reinforcement_learning_rpc_test", "ReinforcementLearningRpcTest"),
    Suite("rpc.faulty_agent_rpc_test", "FaultyAgentRpcTest", faulty=True),
    Suite("rpc.dist_autograd_test", "FaultyAgentDistAutogradTest", faulty=True),
)


def load() -> dict[str, Any]:
    """Test classes by name, ready to run."""
    compat.install()
    cases: dict[str, Any] = {}
    home = sys.modules.setdefault("tests.conformance.cases", types.ModuleType("tests.conformance.cases"))
    with _scripting_leniently():
        base = importlib.import_module("torch.testing._internal.common_distributed").MultiProcessTestCase
        for suite in SUITES:
            case = getattr(importlib.import_module(_TORCH_TESTS + suite.module), suite.name)
            fixture = compat.faulty_fixture() if suite.faulty else _fixture()
            # Bound methods of a test are sent over RPC, so the class must be found by its name.
            names = {"__module__": home.__name__, "__qualname__": suite.name}
            cases[suite.name] = type(suite.name, (case, fixture, base), names)
            setattr(home, suite.name, cases[suite.name])
    return cases


def tests_of(case: Any) -> list[str]:
    """The names of the tests of a class."""
    return sorted(name for name in dir(case) if name.startswith("test") and callable(getattr(case, name)))


def not_expected() -> dict[str, str]:
    """Tests that are not expected to pass, with the reason."""
    with _NOT_EXPECTED.open("rb") as file:
        groups = tomllib.load(file)["group"]
    return {test: group["reason"] for group in groups for test in group["tests"]}


def _fixture() -> Any:
    template = importlib.import_module(_TORCH_TESTS + "rpc.rpc_agent_test_fixture").RpcAgentTestFixture

    class TelegradFixture(template):
        """How torch's tests start a worker."""

        @property
        def rpc_backend(self) -> Any:
            return compat.rpc_backend()

        @property
        def rpc_backend_options(self) -> Any:
            return compat.make_backend_options(init_method=self.init_method)

        def get_shutdown_error_regex(self) -> str:
            return ".*"

        def get_timeout_error_regex(self) -> str:
            return "RPC ran for more than"

    return TelegradFixture


@contextmanager
def _scripting_leniently() -> Iterator[None]:
    """Test modules script functions over torch's own RRef type when they are imported; leave those as they are."""
    real_script = torch.jit.script

    def script(obj: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
        try:
            return real_script(obj, *args, **kwargs)
        except Exception:
            return obj

    torch.jit.script = script
    try:
        yield
    finally:
        torch.jit.script = real_script
