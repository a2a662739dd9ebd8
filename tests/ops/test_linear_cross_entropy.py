from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from slipstream.errors import ShapeError
from slipstream.ops import dispatch, linear_cross_entropy, linear_cross_entropy_sums, token_losses
from slipstream.ops.linear_cross_entropy import chunked, chunks, launch, tuned
from slipstream.ops.triton_support import interpreting
from tests.budget import Draws, assert_budget, assert_within
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import ONE, cases, fast, forced, runnable

OP = "linear_cross_entropy"
# A prime number of tokens; the interpreter takes a second for a hundred of them.
T, V, D = 23 if interpreting() else 61, 101, 32
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 2.0},
    "both": {"label_smoothing": 0.2, "softcap": 3.0},
}


@pytest.fixture
def small_chunks(monkeypatch) -> int:
    """Chunks of 7 tokens (14 in 16 bits, with Triton), the last one ragged."""
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 7 * V + 5)
    monkeypatch.setattr(chunks, "SLAB_BYTES", 7 * chunks.row_stride(V) * 4 + 100)
    return 7


@pytest.fixture(params=["one-block", "blocks"])
def blocks(request, monkeypatch) -> None:
    """Rows in one block, or in blocks of 32 of which the last is ragged."""
    if request.param == "blocks":
        for table in (tuned.STATS, tuned.POINTWISE):
            for size, entry in table.items():
                monkeypatch.setitem(table, size, replace(entry, block=32))


def _targets(tokens: int, ignored: float = 0.3) -> torch.Tensor:
    targets_T = torch.randint(0, V, (tokens,))
    return targets_T.masked_fill(torch.rand(tokens) < ignored, -100)


def _inputs(tokens: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(tokens, D), "w": torch.randn(V, D) / D**0.5}


def _leaves(tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [tensor.to(dtype).requires_grad_() for tensor in _inputs(tokens).values()]


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
    x, w, targets_T = torch.randn(T, 5).double(), torch.randn(7, 5).double(), _targets(T) % 7
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


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP))
@pytest.mark.parametrize("name", OPTIONS)
def test_token_losses_stay_in_budget(name, implementation, dtype, small_chunks, blocks, poisoned):
    targets_T = _targets(T)
    with forced(OP, implementation):
        assert_budget(
            lambda x, w: token_losses(x, w, targets_T, **OPTIONS[name]),
            lambda x, w: _stock(x, w, targets_T, **OPTIONS[name]),
            _inputs(T),
            dtype,
        )


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, (torch.float32, torch.bfloat16)))
def test_calls_with_one_token_stay_in_budget(implementation, dtype):
    # Many calls are pooled: the error of a single number is luck.
    targets_T = _targets(T)

    def one_by_one(loss):
        # Both: where gradients of w meet, each call's has been rounded, and every sum is.
        def run(x, w):
            calls = [loss(x[t : t + 1], w, targets_T[t : t + 1]) for t in range(T)]
            return tuple(torch.cat(parts) for parts in zip(*calls, strict=True))

        return run

    with forced(OP, implementation):
        assert_budget(one_by_one(token_losses), one_by_one(_stock), _inputs(T), dtype)


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
@pytest.mark.parametrize("name", ["plain", "both"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_reductions_with_z_loss_stay_in_budget(
    reduction, name, implementation, dtype, small_chunks, blocks, poisoned
):
    targets_T = _targets(T)
    kept_T = targets_T != -100

    def stock(x, w):
        loss_T, lse_T = _stock(x, w, targets_T, **OPTIONS[name])
        loss_T = loss_T + 0.01 * lse_T.square() * kept_T
        return {"none": loss_T, "sum": loss_T.sum(), "mean": loss_T.sum() / kept_T.sum()}[reduction]

    options = {**OPTIONS[name], "reduction": reduction, "z_loss": 0.01}
    with forced(OP, implementation):
        assert_budget(
            lambda x, w: linear_cross_entropy(x, w, targets_T, **options),
            stock,
            _inputs(T),
            dtype,
        )


@pytest.mark.parametrize("implementation", runnable(OP))
def test_sums_are_those_of_the_tokens(implementation, small_chunks):
    targets_T = _targets(T)
    options = {"label_smoothing": 0.1, "softcap": 9.0}
    x, w = _leaves(T)
    with forced(OP, implementation):
        objective, nll, z, tokens = linear_cross_entropy_sums(
            x, w, targets_T, z_loss=0.5, **options
        )
        loss_T, lse_T = token_losses(x, w, targets_T, **options)
    kept_T = targets_T != -100
    assert_close(nll, loss_T.sum().detach())
    assert_close(z, lse_T.square()[kept_T].sum().detach())
    assert_close(objective, (loss_T + 0.5 * lse_T.square() * kept_T).sum())
    assert (tokens.item(), tokens.dtype) == (kept_T.sum().item(), torch.int64)
    wanted = [tensor.requires_grad for tensor in (objective, nll, z, tokens)]
    assert wanted == [True, False, False, False]


@pytest.mark.parametrize("implementation", runnable(OP))
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.37, -2.0)], ids=str)
def test_every_backward_of_a_graph_is_right(implementation, factors, small_chunks):
    # The first may hand out what forward made; the second must not.
    targets_T, leaves = _targets(T), _leaves(T)
    with forced(OP, "reference"):
        truth = linear_cross_entropy_sums(*leaves, targets_T, z_loss=0.1)[0]
        expected = torch.autograd.grad(truth, leaves)
    with forced(OP, implementation):
        loss = linear_cross_entropy_sums(*leaves, targets_T, z_loss=0.1)[0]
    found = [torch.autograd.grad(f * loss, leaves, retain_graph=True) for f in factors]
    for factor, grads in zip(factors, found, strict=True):
        for grad, wanted in zip(grads, expected, strict=True):
            assert_close(grad, factor * wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
@pytest.mark.parametrize("call", ["sums", "tokens"])
def test_accumulate_adds_the_gradient_in_fp32(call, implementation, dtype, small_chunks):
    targets_T, (x, w) = _targets(T), _leaves(T, dtype)
    reduction = "sum" if call == "sums" else "none"

    def grads(**more):
        x.grad = w.grad = None
        loss = linear_cross_entropy(x, w, targets_T, reduction=reduction, **more)
        (0.5 * loss.sum()).backward()
        return x.grad, w.grad

    buffer = torch.full((V, D), 3.0)
    with forced(OP, implementation):
        dx, dw = grads()
        again_dx, no_dw = grads(accumulate=buffer)
        grads(accumulate=buffer)
    assert no_dw is None
    assert torch.equal(dx, again_dx)
    added = (buffer - 3.0) / 2
    # Twice the same, less than the rounding of the buffer apart; w.grad is it rounded once.
    assert_close(added.to(dtype), dw, atol=1e-6, rtol=torch.finfo(dtype).eps)
    if dtype != torch.float32:
        assert not torch.equal(added.to(dtype).float(), added)


@pytest.mark.parametrize("implementation", fast(OP))
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("wanted", ["x", "w"])
def test_only_one_input_wants_a_gradient(wanted, reduction, implementation, small_chunks):
    targets_T, (x, w) = _targets(T), _leaves(T)
    leaf, frozen = (x, w) if wanted == "x" else (w, x)
    with forced(OP, implementation):
        linear_cross_entropy(x, w, targets_T, reduction=reduction).sum().backward()
        both = leaf.grad.clone()
        leaf.grad, frozen.grad = None, None
        frozen.requires_grad_(False)
        linear_cross_entropy(x, w, targets_T, reduction=reduction).sum().backward()
    assert torch.equal(leaf.grad, both)
    assert frozen.grad is None


@pytest.mark.parametrize("implementation", runnable(OP))
def test_a_tied_embedding_gets_both_gradients(implementation, small_chunks):
    ids, targets_T = torch.randint(0, V, (T,)), _targets(T)
    w = (torch.randn(V, D) / D**0.5).requires_grad_()
    with forced(OP, implementation):
        linear_cross_entropy(w[ids], w, targets_T).backward()
    (expected,) = torch.autograd.grad(F.cross_entropy(w[ids] @ w.T, targets_T), w)
    assert_close(w.grad, expected, atol=1e-6, rtol=1e-5)


def _refuse(*_, **__):
    raise AssertionError("forward made gradients")


@pytest.mark.parametrize("where", ["no_grad", "frozen", "checkpoint"])
def test_forward_makes_no_gradients_where_none_or_another_forward_follows(where, monkeypatch):
    if "triton" not in runnable(OP):
        pytest.skip("Triton makes gradients in forward, and cannot run here")
    monkeypatch.setattr(launch, "gradients_launch", _refuse)
    targets_T, (x, w) = _targets(9), _leaves(9)
    with forced(OP, "triton"):
        with pytest.raises(AssertionError, match="forward made gradients"):
            linear_cross_entropy(x, w, targets_T)
        if where == "no_grad":
            with torch.no_grad():
                loss = linear_cross_entropy(x, w, targets_T)
        elif where == "frozen":
            loss = linear_cross_entropy(x.detach(), w.detach(), targets_T)
        else:
            loss = checkpoint(linear_cross_entropy, x, w, targets_T, use_reentrant=False)
            loss.backward()
    expected = F.cross_entropy(x @ w.T, targets_T)
    assert_close(loss, expected)
    if where == "checkpoint":
        assert_close((x.grad, w.grad), torch.autograd.grad(expected, (x, w)))


@pytest.mark.parametrize("implementation", fast(OP))
def test_chunks_do_not_change_the_losses(implementation, monkeypatch):
    inputs, targets_T = _inputs(T), _targets(T)
    with forced(OP, implementation):
        whole = token_losses(*inputs.values(), targets_T)
        monkeypatch.setattr(chunked, "CHUNK_LOGITS", 1)
        monkeypatch.setattr(chunks, "SLAB_BYTES", 1)
        single = token_losses(*inputs.values(), targets_T)
    assert_close(single, whole)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned; the interpreter copies bytes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        floating = [tensor.numel() for tensor in tensors if tensor.is_floating_point()]
        self.numel = max([self.numel, *floating])
        return out


@pytest.mark.parametrize("name", runnable(OP))
def test_whole_logits_exist_in_the_reference_only(name, small_chunks):
    tokens = 67
    x, w = _leaves(tokens)
    with forced(OP, name), _Largest() as largest:
        linear_cross_entropy(x, w, _targets(tokens), z_loss=0.1, softcap=9.0).backward()
    inputs_numel = max(x.numel(), w.numel())
    chunk = max(inputs_numel, small_chunks * chunks.row_stride(V))
    assert largest.numel == {"reference": tokens * V}.get(name, chunk)


@pytest.mark.parametrize("implementation", fast(OP))
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_all_tokens_ignored_gives_zero_loss_and_zero_gradients(
    reduction, implementation, small_chunks, poisoned
):
    (x, w), targets_T = _leaves(T), torch.full((T,), -100)
    options = {"z_loss": 0.1, "label_smoothing": 0.1, "reduction": reduction}
    with forced(OP, implementation):
        loss = linear_cross_entropy(x, w, targets_T, **options)
        loss.sum().backward()
    assert torch.equal(loss, torch.zeros_like(loss))
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize("implementation", fast(OP))
def test_ignored_tokens_get_exactly_zero_gradient(implementation, small_chunks, poisoned):
    (x, w), targets_T = _leaves(T), _targets(T)
    options = {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 9.0}
    with forced(OP, implementation):
        linear_cross_entropy(x, w, targets_T, **options).backward()
    ignored = targets_T == -100
    assert torch.equal(x.grad[ignored], torch.zeros(int(ignored.sum()), D))
    assert (x.grad[~ignored].abs().sum(1) > 0).all()


@pytest.mark.parametrize("implementation", fast(OP))
def test_an_ignore_index_inside_the_vocabulary(implementation):
    inputs, targets_T = _inputs(T), torch.randint(0, 4, (T,))
    with forced(OP, implementation):
        loss = linear_cross_entropy(*inputs.values(), targets_T, ignore_index=3)
    expected = F.cross_entropy(inputs["x"] @ inputs["w"].T, targets_T, ignore_index=3)
    assert_close(loss, expected)


@pytest.mark.parametrize("target", [V, -1, 1 << 40])
def test_a_target_that_does_not_exist_gives_nan(target):
    # PyTorch's own code stops the process on a GPU.
    if "triton" not in runnable(OP):
        pytest.skip("Triton cannot run here")
    (x, w), targets_T = _leaves(9), _targets(9, ignored=0.0)
    targets_T[4] = target
    with forced(OP, "triton"):
        loss_T = token_losses(x, w, targets_T)[0]
        loss_T.sum().backward()
        of_tokens = x.grad
        x.grad = None
        loss = linear_cross_entropy(x, w, targets_T)
        loss.backward()
    wrong = torch.arange(9) == 4
    assert torch.equal(loss_T.isnan(), wrong)
    assert loss.isnan()
    for grad in (of_tokens, x.grad):
        assert torch.equal(grad.isnan().any(1), wrong)


@pytest.mark.parametrize("implementation", fast(OP))
def test_zero_tokens(implementation):
    x, w = _leaves(0)
    targets_T = torch.zeros(0, dtype=torch.int64)
    buffer = torch.ones(V, D)
    with forced(OP, implementation):
        loss_T, lse_T = token_losses(x, w, targets_T)
        (loss_T.sum() + lse_T.sum()).backward()
        assert loss_T.shape == lse_T.shape == (0,)
        assert torch.equal(w.grad, torch.zeros(V, D))
        w.grad = None
        loss = linear_cross_entropy(x, w, targets_T)
        loss.backward()
        linear_cross_entropy(x, w, targets_T, accumulate=buffer).backward()
    assert loss.item() == 0
    assert torch.equal(w.grad, torch.zeros(V, D))
    assert torch.equal(buffer, torch.ones(V, D))


@pytest.mark.parametrize("implementation", fast(OP))
def test_large_logits_stay_finite(implementation, small_chunks):
    x, w = torch.full((9, D), 100.0, requires_grad=True), torch.randn(V, D, requires_grad=True)
    with forced(OP, implementation):
        linear_cross_entropy(x, w, torch.arange(9), z_loss=0.1).backward()
    assert x.grad.isfinite().all()
    assert w.grad.isfinite().all()


@pytest.mark.parametrize("implementation", fast(OP))
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_strided_inputs_and_expanded_gradients(reduction, implementation, small_chunks):
    x = torch.randn(D, T).T.requires_grad_()
    w = torch.randn(V, 2 * D)[:, ::2].requires_grad_()
    targets_T = torch.stack([_targets(T), _targets(T)], dim=1)[:, 0]
    with forced(OP, implementation):
        linear_cross_entropy(x, w, targets_T, reduction=reduction).sum().backward()
    dense = [t.detach().clone(memory_format=torch.contiguous_format) for t in (x, w)]
    loss_T = _stock(*(t.requires_grad_() for t in dense), targets_T.contiguous())[0]
    (loss_T * torch.ones(T)).sum().backward()
    assert_close(x.grad, dense[0].grad)
    assert_close(w.grad, dense[1].grad)


@pytest.mark.parametrize(
    ("implementation", "dtype"), cases(OP, (torch.bfloat16, torch.float16), ONE)
)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_weight_may_be_fp32_under_16_bit_activations(reduction, implementation, dtype):
    inputs, targets_T = _inputs(T), _targets(T)
    x, w = inputs["x"].to(dtype).requires_grad_(), inputs["w"].requires_grad_()
    rounded = w.detach().to(dtype).requires_grad_()
    with forced(OP, implementation):
        for weight in (w, rounded):
            linear_cross_entropy(x, weight, targets_T, reduction=reduction).sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (dtype, torch.float32)
    assert torch.equal(w.grad.to(dtype), rounded.grad)
    # Within a chunk, the other one's products round what they return.
    assert implementation != "triton" or not torch.equal(w.grad, rounded.grad.float())


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_autocast_runs_forward_and_backward_in_its_dtype(reduction, small_chunks):
    targets_T = _targets(T)

    def under_autocast(x, w):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return linear_cross_entropy(x, w, targets_T, reduction=reduction)

    def in_bf16(x, w):
        return linear_cross_entropy(x.bfloat16(), w, targets_T, reduction=reduction)

    leaves = _leaves(T)
    grads = [torch.autograd.grad(run(*leaves).sum(), leaves) for run in (under_autocast, in_bf16)]
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_two_runs_are_bitwise_equal(implementation, dtype, small_chunks):
    targets_T, leaves = _targets(T), _leaves(T, dtype)
    with forced(OP, implementation):
        runs = [
            torch.autograd.grad(linear_cross_entropy(*leaves, targets_T), leaves) for _ in range(2)
        ]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


def test_fp64_is_served_by_the_reference_and_the_rest_by_the_fastest_that_runs():
    dispatch.reset_counts()
    for dtype in (torch.float64, torch.float32):
        token_losses(torch.ones(2, 3, dtype=dtype), torch.ones(4, 3, dtype=dtype), torch.arange(2))
    assert dispatch.counts() == {(OP, "reference"): 1, (OP, runnable(OP)[0]): 1}


def _sure(offset: float = 0.0) -> dict[str, torch.Tensor]:
    """One logit far above the rest, of which few count: any order of their sum is as good.

    Products with 0 and a power of two are exact: what is wrong is wrong in the loss.
    """
    w_VD = torch.randn(33, 8)
    w_VD[7] = 17 + torch.rand(8)
    w_VD[9:] -= 60
    return {"x": torch.cat([torch.eye(8), torch.eye(8) / 2]), "w": w_VD + offset}


@pytest.mark.parametrize("implementation", fast(OP))
@pytest.mark.parametrize("call", ["sums", "none", "lse"])
@pytest.mark.parametrize("name", ["plain", "softcap"])
def test_a_token_the_model_is_sure_of_has_an_exact_gradient(name, call, implementation, blocks):
    """The logsumexp is nearly the largest logit, and its rounding would be that of a gradient."""
    targets_T, softcap = torch.full((16,), 3), 30.0 if name == "softcap" else None

    def ours(x, w):
        with forced(OP, implementation):
            if call == "sums":
                return linear_cross_entropy_sums(x, w, targets_T, softcap=softcap)[0]
            return token_losses(x, w, targets_T, softcap=softcap)[call == "lse"]

    def stock(x, w):
        loss_T, lse_T = _stock(x, w, targets_T, softcap=softcap)
        return {"sums": loss_T.sum(), "none": loss_T, "lse": lse_T}[call]

    assert_budget(ours, stock, Draws(_sure, 4), torch.float32)


@pytest.mark.parametrize("implementation", fast(OP))
@pytest.mark.parametrize("offset", [0.0, -100.0])
@pytest.mark.parametrize("name", ["plain", "smoothing", "softcap"])
def test_the_loss_of_a_right_and_sure_token_is_exact(name, offset, implementation, blocks):
    """It is far smaller than the rounding of the logsumexp, or of logits with an offset."""
    options = {"softcap": 30.0} if name == "softcap" else OPTIONS[name]
    draws = [_sure(offset).values() for _ in range(4)]

    def losses(call, dtype):
        runs = [call(x.to(dtype), w.to(dtype), torch.full((16,), 7), **options) for x, w in draws]
        return {"loss": torch.cat([loss_T for loss_T, _ in runs])}

    eager, truth = losses(_stock, torch.float32), losses(_stock, torch.float64)
    with forced(OP, implementation):
        assert_within(losses(token_losses, torch.float32), eager, truth, torch.float32)


@pytest.mark.parametrize("implementation", fast(OP))
@pytest.mark.parametrize("size", [0.01, 1.0, 10.0, 40.0])
def test_a_wide_softcap_keeps_the_digits_of_logits(size, implementation):
    targets_T = torch.randint(0, V, (16,))

    def inputs():
        return {"x": torch.randn(16, 1).sign(), "w": size * torch.randn(V, 1)}

    with forced(OP, implementation):
        assert_budget(
            lambda x, w: token_losses(x, w, targets_T, softcap=30.0),
            lambda x, w: _stock(x, w, targets_T, softcap=30.0),
            Draws(inputs, 16),
            torch.float32,
        )


@pytest.mark.parametrize("implementation", fast(OP))
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_compiles(reduction, backend, implementation, small_chunks):
    targets_T = _targets(16)
    options = {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 5.0, "reduction": reduction}

    def call(x, w):
        return linear_cross_entropy(x, w, targets_T, **options)

    def truth(x, w):
        with forced(OP, "reference"):
            return call(x, w)

    with forced(OP, implementation):
        assert_compiles(call, _inputs(16), backend, truth)


def _head(**values) -> chunks.Head:
    shape = {"tokens": 16384, "width": 4096, "vocab": 128256, "itemsize": 2}
    return chunks.Head(**{**shape, "x_grad": True, "w_grad": True, **values})


def test_the_model_counts_what_the_readme_says():
    # 4 chunks: 12 products, 16384 rows of logits written, read and written, dw passed 7 times.
    products = 6 * 16384 * 4096 * 128256 / chunks.FLOPS_PER_MS
    bytes_moved = 2 * 2 * 16384 * 128256 + 7 * 4 * 128256 * 4096
    expected = products + bytes_moved / chunks.BYTES_PER_MS + 16 * chunks.TAIL_MS
    assert chunks.cost_ms(_head(), 4096) == pytest.approx(expected, rel=1e-9)
    # A ragged last chunk is one more pass.
    ragged = chunks.cost_ms(_head(tokens=16385), 4096) - chunks.cost_ms(_head(), 4096)
    assert ragged > 8 * 128256 * 4096 / chunks.BYTES_PER_MS


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ({}, 4096),
        ({"tokens": 2048, "width": 2048, "vocab": 32000}, 2048),
        ({"tokens": 1, "vocab": 262144, "itemsize": 4}, 128),
        ({"tokens": 0}, 1),
    ],
)
def test_chunks_of_common_shapes(values, rows):
    assert chunks.chunk_rows(_head(**values), chunks.SLAB_BYTES) == rows


@pytest.mark.parametrize("vocab", [1, 101, 50304, 262144])
@pytest.mark.parametrize("limit_mib", [0, 1, 64, 1008])
@pytest.mark.parametrize("grads", [True, False])
def test_the_slab_fits_and_nothing_that_fits_is_much_faster(grads, limit_mib, vocab):
    head, limit = _head(vocab=vocab, x_grad=grads, w_grad=grads), limit_mib << 20
    rows = chunks.chunk_rows(head, limit)
    assert rows == 1 or rows * head.row_bytes <= limit
    fitting = [r for r in (1, 7, 128, 640, 1024, 4096, 16384) if r * head.row_bytes <= limit]
    fastest = min([chunks.cost_ms(head, r) for r in fitting], default=float("inf"))
    # The candidates are splits into equal chunks; these are not all among them.
    assert chunks.cost_ms(head, rows) <= 1.03 * fastest


def test_without_gradients_less_memory_does():
    assert chunks.chunk_rows(_head(x_grad=False, w_grad=False), chunks.SLAB_BYTES) <= 1536


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x_TD": torch.randn(2, 3, 8)}, r"x has shape \(2, 3, 8\)"),
        ({"w_VD": torch.randn(5, 7)}, r"w has shape \(5, 7\), expected \(any, 8\)"),
        ({"targets_T": torch.arange(4)}, r"targets has shape \(4,\), expected \(3\)"),
        ({"targets_T": torch.arange(3).int()}, "targets are torch.int32, expected int64"),
        ({"softcap": 0.0}, "softcap = 0.0"),
        ({"softcap": float("nan")}, "softcap = nan, expected a positive number or None"),
        ({"softcap": float("inf")}, "softcap = inf"),
        ({"z_loss": -1.0}, "z_loss = -1.0, expected a number of at least 0"),
        ({"z_loss": float("nan")}, "z_loss = nan"),
        ({"x_TD": torch.ones(3, 8).long()}, "x has dtype torch.int64"),
        ({"w_VD": torch.randn(0, 8)}, r"w has shape \(0, 8\), expected one row or more"),
        ({"label_smoothing": 1.0}, "label_smoothing = 1.0"),
        ({"reduction": "max"}, "reduction = 'max'"),
        ({"w_VD": torch.randn(5, 8, device="meta")}, "w on meta"),
        ({"accumulate": torch.zeros(5, 7)}, r"accumulate has shape \(5, 7\), expected \(5, 8\)"),
        ({"accumulate": torch.zeros(5, 8).half()}, "accumulate is torch.float16"),
        ({"accumulate": torch.zeros(8, 5).T}, r"accumulate has strides \(1, 5\)"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    valid = {"x_TD": torch.randn(3, 8), "w_VD": torch.randn(5, 8), "targets_T": torch.arange(3)}
    # It was made before the test chose its device.
    arguments = {
        name: value.to(valid["x_TD"].device) if name == "accumulate" else value
        for name, value in arguments.items()
    }
    with pytest.raises(ShapeError, match=message):
        linear_cross_entropy(**{**valid, **arguments})


def test_accumulate_refuses_a_compiled_graph():
    (x, w), targets_T, buffer = _leaves(9), _targets(9), torch.zeros(V, D)

    def run(x):
        return linear_cross_entropy(x, w, targets_T, accumulate=buffer)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="accumulate works in eager code only"):
        compiled(x)


@pytest.mark.gpu
def test_a_cuda_graph_replays_forward_and_backward():
    with torch.device("cuda"):
        x, w = _leaves(T, torch.bfloat16)
        targets_T = _targets(T)
    run = torch.cuda.make_graphed_callables(
        lambda x, w: linear_cross_entropy(x, w, targets_T, z_loss=0.1), (x, w)
    )
    with torch.no_grad():
        x.mul_(0.5)
    found = torch.autograd.grad(run(x, w), (x, w))
    expected = torch.autograd.grad(linear_cross_entropy(x, w, targets_T, z_loss=0.1), (x, w))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
