import pytest
import torch

from tests.budget import assert_budget, assert_within, results


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3.1


def test_the_same_code_passes():
    assert_budget(_scaled, _scaled, {"x": torch.randn(63)}, torch.bfloat16)


def test_one_wrong_element_fails_on_max():
    truth = torch.ones(1000, dtype=torch.float64)
    actual = truth.float()
    actual[17] += 1e-6
    with pytest.raises(AssertionError, match="y: max error"):
        assert_within({"y": actual}, {"y": truth.float()}, {"y": truth}, torch.float32)


def test_many_small_errors_fail_on_rms():
    truth = torch.linspace(0.001, 1, 1000, dtype=torch.float64)
    eager = truth.float()
    eager[3] += 1e-6
    actual = truth.float() + 3e-7
    with pytest.raises(AssertionError, match="y: rms error"):
        assert_within({"y": actual}, {"y": eager}, {"y": truth}, torch.float32)


def test_a_wrong_gradient_fails():
    with pytest.raises(AssertionError, match="gradient of x: max error"):
        assert_budget(
            lambda x: _WrongGradient.apply(x), _scaled, {"x": torch.randn(63)}, torch.float32
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_fail(bad):
    truth = torch.ones(5, dtype=torch.float64)
    actual = truth.float()
    actual[2] = bad
    with pytest.raises(AssertionError, match="max error"):
        assert_within({"y": actual}, {"y": truth.float()}, {"y": truth}, torch.float32)


def test_nan_in_a_bf16_gradient_fails():
    with pytest.raises(AssertionError, match="gradient of x"):
        assert_budget(
            lambda x: (x * 0).sqrt() + 3 * x, _scaled, {"x": torch.randn(9)}, torch.bfloat16
        )


def test_another_shape_or_dtype_fails():
    truth = torch.ones(4, dtype=torch.float64)
    for actual in (torch.ones(1), truth.clone()):
        with pytest.raises(AssertionError, match="expected"):
            assert_within({"y": actual}, {"y": truth.float()}, {"y": truth}, torch.float32)


def test_a_missing_gradient_fails():
    with pytest.raises(AssertionError, match="y has no gradient"):
        results(lambda x, y: x * 2, {"x": torch.randn(3), "y": torch.randn(3)}, torch.float32)
