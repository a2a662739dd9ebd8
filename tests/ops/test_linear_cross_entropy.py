from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.errors import ShapeError
from slipstream.ops import dispatch, linear_cross_entropy, token_losses
from slipstream.ops.linear_cross_entropy import autograd
from tests.budget import assert_budget
from tests.ops.compiling import assert_compiles

V, D = 101, 32
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 2.0},
    "both": {"label_smoothing": 0.2, "softcap": 3.0},
}
DTYPES = [torch.float32, torch.bfloat16]


@contextmanager
def _forced(name: str) -> Iterator[None]:
    with dispatch.force(linear_cross_entropy=name):
        yield


@pytest.fixture
def small_chunks(monkeypatch) -> int:
    """Chunks of 7 tokens, so that 63 tokens are 9 chunks and 257 leave a ragged last one."""
    monkeypatch.setattr(autograd, "CHUNK_LOGITS", 7 * V + 5)
    return 7


def _targets(tokens: int, ignored: float = 0.3) -> torch.Tensor:
    targets_T = torch.randint(0, V, (tokens,))
    return targets_T.masked_fill(torch.rand(tokens) < ignored, -100)


def _inputs(tokens: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(tokens, D), "w": torch.randn(V, D) / D**0.5}


def _by_hand(x, w, targets_T, label_smoothing=0.0, softcap=None, ignore_index=-100):
    # One token at a time, from the definitions.
    losses, lses = [], []
    for row, target in zip(x, targets_T.tolist(), strict=True):
        logits = torch.stack([(row * weight).sum() for weight in w])
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        lse = logits.exp().sum().log()
        wanted = torch.full((len(w),), label_smoothing / len(w), dtype=x.dtype)
        if target != ignore_index:
            wanted[target] += 1 - label_smoothing
        kept = float(target != ignore_index)
        losses.append(kept * (wanted * (lse - logits)).sum())
        lses.append(lse)
    return torch.stack(losses), torch.stack(lses)


def _stock(x, w, targets_T, label_smoothing=0.0, softcap=None):
    """The usual code: logits in the dtype of the model, loss in fp32 (fp64 for the truth)."""
    logits = F.linear(x, w)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss_T = F.cross_entropy(logits, targets_T, reduction="none", label_smoothing=label_smoothing)
    return loss_T, logits.logsumexp(-1)


@pytest.mark.parametrize("name", OPTIONS)
def test_reference_matches_the_definition_in_fp64(name):
    x, w = torch.randn(9, 5).double(), torch.randn(7, 5).double()
    targets_T = torch.tensor([0, 6, -100, 3, 2, -100, 1, 1, 5])
    expected = _by_hand(x, w, targets_T, **OPTIONS[name])
    assert_close(token_losses(x, w, targets_T, **OPTIONS[name]), expected)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_reductions_match_torch_on_full_logits(reduction):
    x, w, targets_T = torch.randn(63, 5).double(), torch.randn(7, 5).double(), _targets(63) % 7
    targets_T[::5] = -100
    expected = F.cross_entropy(x @ w.T, targets_T, reduction=reduction)
    assert_close(linear_cross_entropy(x, w, targets_T, reduction=reduction), expected)


def test_z_loss_counts_the_tokens_kept():
    x, w, targets_T = torch.randn(9, D).double(), torch.randn(V, D).double(), _targets(9)
    targets_T[0], targets_T[1] = -100, 4
    kept = targets_T != -100
    z = (x @ w.T).logsumexp(-1).square()[kept].sum() / kept.sum()
    plain = linear_cross_entropy(x, w, targets_T)
    assert_close(linear_cross_entropy(x, w, targets_T, z_loss=0.01), plain + 0.01 * z)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_the_reference_in_fp64(name):
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    targets_T = torch.tensor([0, -100, 4, 2])
    assert torch.autograd.gradcheck(
        lambda x, w: token_losses(x, w, targets_T, **OPTIONS[name]), (x, w)
    )


@pytest.mark.parametrize("tokens", [63, 257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_chunked_stays_in_budget(name, dtype, tokens, small_chunks):
    targets_T = _targets(tokens)
    with _forced("chunked"):
        assert_budget(
            lambda x, w: token_losses(x, w, targets_T, **OPTIONS[name]),
            lambda x, w: _stock(x, w, targets_T, **OPTIONS[name]),
            _inputs(tokens),
            dtype,
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_calls_with_one_token_stay_in_budget(dtype):
    # Many calls are pooled: the error of a single number is luck.
    targets_T = _targets(63)

    def one_by_one(x, w):
        calls = [token_losses(x[t : t + 1], w, targets_T[t : t + 1]) for t in range(63)]
        return tuple(torch.cat(parts) for parts in zip(*calls, strict=True))

    assert_budget(one_by_one, lambda x, w: _stock(x, w, targets_T), _inputs(63), dtype)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunked_reductions_with_z_loss_stay_in_budget(dtype, reduction, small_chunks):
    targets_T = _targets(63)
    kept_T = targets_T != -100

    def stock(x, w):
        loss_T, lse_T = _stock(x, w, targets_T)
        loss_T = loss_T + 0.01 * lse_T.square() * kept_T
        return {"none": loss_T, "sum": loss_T.sum(), "mean": loss_T.sum() / kept_T.sum()}[reduction]

    assert_budget(
        lambda x, w: linear_cross_entropy(x, w, targets_T, reduction=reduction, z_loss=0.01),
        stock,
        _inputs(63),
        dtype,
    )


def test_chunks_do_not_change_the_losses(monkeypatch):
    inputs, targets_T = _inputs(63), _targets(63)
    whole = token_losses(*inputs.values(), targets_T)
    monkeypatch.setattr(autograd, "CHUNK_LOGITS", 1)
    single = token_losses(*inputs.values(), targets_T)
    assert_close(single, whole)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("name", ["chunked", "reference"])
def test_whole_logits_exist_in_the_reference_only(name, small_chunks):
    tokens = 257
    x, w = (tensor.requires_grad_() for tensor in _inputs(tokens).values())
    with _forced(name), _Largest() as largest:
        linear_cross_entropy(x, w, _targets(tokens), z_loss=0.1, softcap=9.0).backward()
    inputs_numel = max(x.numel(), w.numel())
    limits = {"chunked": max(inputs_numel, small_chunks * V), "reference": tokens * V}
    assert largest.numel == limits[name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_tokens_ignored_gives_zero_loss_and_zero_gradients(dtype, small_chunks):
    x, w = (tensor.to(dtype).requires_grad_() for tensor in _inputs(63).values())
    loss = linear_cross_entropy(x, w, torch.full((63,), -100), z_loss=0.1, label_smoothing=0.1)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(w.grad, torch.zeros_like(w))


def test_ignored_tokens_get_exactly_zero_gradient(small_chunks):
    x, w = (tensor.requires_grad_() for tensor in _inputs(63).values())
    targets_T = _targets(63)
    linear_cross_entropy(x, w, targets_T, z_loss=0.1, label_smoothing=0.1, softcap=9.0).backward()
    ignored = targets_T == -100
    assert torch.equal(x.grad[ignored], torch.zeros(int(ignored.sum()), D))
    assert (x.grad[~ignored].abs().sum(1) > 0).all()


def test_an_ignore_index_inside_the_vocabulary():
    inputs, targets_T = _inputs(63), torch.randint(0, 4, (63,))
    loss = linear_cross_entropy(*inputs.values(), targets_T, ignore_index=3)
    expected = F.cross_entropy(inputs["x"] @ inputs["w"].T, targets_T, ignore_index=3)
    assert_close(loss, expected)


def test_zero_tokens():
    x, w = torch.randn(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    targets_T = torch.zeros(0, dtype=torch.int64)
    loss_T, lse_T = token_losses(x, w, targets_T)
    (loss_T.sum() + lse_T.sum()).backward()
    assert loss_T.shape == lse_T.shape == (0,)
    assert torch.equal(w.grad, torch.zeros(V, D))
    assert linear_cross_entropy(x, w, targets_T).item() == 0


def test_large_logits_stay_finite(small_chunks):
    x, w = torch.full((9, D), 100.0, requires_grad=True), torch.randn(V, D, requires_grad=True)
    linear_cross_entropy(x, w, torch.arange(9), z_loss=0.1).backward()
    assert x.grad.isfinite().all()
    assert w.grad.isfinite().all()


def test_strided_inputs_and_expanded_gradients(small_chunks):
    x = torch.randn(D, 63).T.requires_grad_()
    w = torch.randn(V, 2 * D)[:, ::2].requires_grad_()
    targets_T = torch.stack([_targets(63), _targets(63)], dim=1)[:, 0]
    token_losses(x, w, targets_T)[0].sum().backward()
    dense = [t.detach().clone(memory_format=torch.contiguous_format) for t in (x, w)]
    loss_T = _stock(*(t.requires_grad_() for t in dense), targets_T.contiguous())[0]
    (loss_T * torch.ones(63)).sum().backward()
    assert_close(x.grad, dense[0].grad)
    assert_close(w.grad, dense[1].grad)


def test_the_weight_may_be_fp32_under_bf16_activations():
    inputs, targets_T = _inputs(63), _targets(63)
    x, w = inputs["x"].bfloat16().requires_grad_(), inputs["w"].requires_grad_()
    linear_cross_entropy(x, w, targets_T).backward()
    assert (x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_runs_forward_and_backward_in_its_dtype(small_chunks):
    targets_T = _targets(63)

    def under_autocast(x, w):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return token_losses(x, w, targets_T)

    def in_bf16(x, w):
        return token_losses(x.bfloat16(), w, targets_T)

    leaves = [tensor.requires_grad_() for tensor in _inputs(63).values()]
    grads = [
        torch.autograd.grad(run(*leaves)[0].sum(), leaves) for run in (under_autocast, in_bf16)
    ]
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_two_runs_are_bitwise_equal(small_chunks):
    inputs, targets_T = _inputs(63), _targets(63)
    leaves = [t.bfloat16().requires_grad_() for t in inputs.values()]
    runs = [torch.autograd.grad(linear_cross_entropy(*leaves, targets_T), leaves) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_fp64_is_served_by_the_reference_and_the_rest_by_chunks():
    dispatch.reset_counts()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        token_losses(torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype), torch.arange(2))
    op = "linear_cross_entropy"
    assert dispatch.counts() == {(op, "reference"): 1, (op, "chunked"): 2}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles(backend, small_chunks):
    targets_T = _targets(16)
    options = {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 5.0}
    assert_compiles(
        lambda x, w: linear_cross_entropy(x, w, targets_T, **options), _inputs(16), backend
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x_TD": torch.randn(2, 3, 8)}, r"x has shape \(2, 3, 8\)"),
        ({"w_VD": torch.randn(5, 7)}, r"w has shape \(5, 7\), expected \(any, 8\)"),
        ({"targets_T": torch.arange(4)}, r"targets has shape \(4,\), expected \(3\)"),
        ({"targets_T": torch.arange(3).int()}, "targets are torch.int32, expected int64"),
        ({"softcap": 0.0}, "softcap = 0.0"),
        ({"label_smoothing": 1.0}, "label_smoothing = 1.0"),
        ({"reduction": "max"}, "reduction = 'max'"),
        ({"w_VD": torch.randn(5, 8, device="meta")}, "w on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    valid = {"x_TD": torch.randn(3, 8), "w_VD": torch.randn(5, 8), "targets_T": torch.arange(3)}
    with pytest.raises(ShapeError, match=message):
        linear_cross_entropy(**{**valid, **arguments})
