"""The text of an owner's failure, and the norm of gradients that are not here."""

import pytest
import torch

from telegrad.errors import WorkerDied
from telegrad.optim.clip import shrink_factor, total_norm
from telegrad.optim.gradients import gradient_norms
from telegrad.optim.rounds import naming


class WantsTwo(Exception):
    """Cannot be made from a text."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


def test_a_failure_keeps_its_type_and_names_its_worker() -> None:
    named = naming("ps1", "the optimizer step", ValueError("no such thing"))
    assert type(named) is ValueError
    assert str(named) == "worker 'ps1' failed in the optimizer step: no such thing"


def test_a_failure_that_names_its_worker_is_left_as_it_is() -> None:
    error = WorkerDied("worker 'ps1' closed", worker="ps1")
    assert naming("ps1", "the optimizer step", error) is error


@pytest.mark.parametrize("error", [WantsTwo(1, 2), KeyError("lr")])
def test_a_failure_that_cannot_be_made_again_is_noted(error: Exception) -> None:
    named = naming("ps1", "the optimizer step", error)
    assert type(named) is type(error)
    assert "ps1" in str(named) or "ps1" in named.__notes__[0]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
def test_the_norm_is_that_of_one_process(norm_type: float) -> None:
    gradients = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in [(3, 4), (5,), (), (2, 2)]]
    parts = [
        ([3, 0], gradient_norms([gradients[3], gradients[0]], norm_type)),
        ([], gradient_norms([], norm_type)),
        ([1, 2], gradient_norms(gradients[1:3], norm_type)),
    ]
    total = total_norm(parts, norm_type, error_if_nonfinite=True)
    assert torch.equal(total, torch.nn.utils.get_total_norm(gradients, norm_type))

    for param in (params := [torch.zeros_like(gradient, requires_grad=True) for gradient in gradients]):
        param.grad = gradients[len([p for p in params if p.grad is not None])].clone()
    torch.nn.utils.clip_grads_with_norm_(params, 0.3, total)
    for param, gradient in zip(params, gradients, strict=True):
        assert torch.equal(gradient * shrink_factor(total, 0.3), param.grad)


def test_a_sparse_gradient_counts_by_its_rows() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), torch.tensor([[1.0], [2.0], [3.0]]), (4, 1))
    assert torch.equal(gradient_norms([sparse], 2.0), gradient_norms([sparse.to_dense()], 2.0))


def test_no_gradient_at_all_has_norm_zero() -> None:
    assert total_norm([], 2.0, error_if_nonfinite=True) == 0.0


def test_a_norm_that_is_not_finite_names_the_parameters() -> None:
    parts = [([4], torch.tensor([1.0])), ([2], torch.tensor([float("nan")]))]
    with pytest.raises(RuntimeError, match=r"non-finite.*\[2\]"):
        total_norm(parts, 2.0, error_if_nonfinite=True)
    assert total_norm(parts, 2.0, error_if_nonfinite=False).isnan()
