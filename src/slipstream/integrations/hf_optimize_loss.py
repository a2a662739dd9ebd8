"""The head and loss of a causal language model as one op: no logits while training with labels.

The model's own forward still does everything else. While it runs with labels, its head computes
the loss where it would have made logits, under the same autocast and with the weights gathered,
and returns logits of width 0; its loss function, asked with those, returns that loss.
"""

import inspect
import warnings
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from slipstream import ops
from slipstream.errors import ConfigError
from slipstream.integrations.hf_optimize_linear import is_plain_weight
from slipstream.integrations.hf_optimize_probe import Stub, attempt, numbers, same, stand_in
from slipstream.integrations.hf_optimize_state import (
    KEY,
    bind,
    own_forward,
    settings_if_plain,
    state_of,
    unbind,
)

TASK = "_slipstream_loss"
LOSS = "_loss_function"
KEPT = "_slipstream_kept_head"
"""The head that cannot make the loss, of which the user was told."""
SHARDED = "FSDPLinear"
"""What ``fully_shard`` makes of the class of a linear layer."""
CACHE_OPTIONS = ("use_cache", "cache", "past_key_values")
CAP = "final_logit_softcapping"


class LossSettings(NamedTuple):
    """What was read from a causal language model."""

    names: tuple[str, ...]
    """Parameters of its forward, in order."""


class LossTask:
    """What the head needs for one call, and the loss it found."""

    def __init__(self, labels: torch.Tensor, softcap: float | None, call: dict[str, Any]) -> None:
        self.labels, self.softcap = labels, softcap
        self.items = call.get("num_items_in_batch")
        self.ignore_index = call.get("ignore_index", -100)
        self.shifted = call.get("shift_labels")
        self.loss: torch.Tensor | None = None


def causal_lm_forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
    """The model's own forward; without logits while training with labels, or if ``skip_logits``."""
    state = self.__dict__.get(KEY)
    if state is None:  # a wrapper put around this forward outlived restore
        return type(self).forward(self, *args, **kwargs)
    kwargs.update(zip(state.settings.names, args, strict=False))
    if not _skips(self, skip_logits, kwargs):
        return state.stock(self, **kwargs)
    if torch.is_grad_enabled() and all(kwargs.get(name) is None for name in CACHE_OPTIONS):
        kwargs["use_cache"] = False  # else every layer would copy its keys and values into one
    head, softcap = self.lm_head, getattr(self.config, CAP, None)
    setattr(head, TASK, LossTask(kwargs["labels"], softcap, kwargs))
    try:
        outputs = state.stock(self, **kwargs)
    finally:
        delattr(head, TASK)
    return type(outputs)(**{name: v for name, v in outputs.items() if name != "logits"})


def _skips(self: Any, skip_logits: bool | None, call: dict[str, Any]) -> bool:
    wanted = self.training if skip_logits is None else skip_logits
    keep = call.get("logits_to_keep", 0)
    if call.get("labels") is None or not wanted or not isinstance(keep, int) or keep:
        return False
    if call.get("return_dict", getattr(self.config, "return_dict", True)) is False:
        return False
    if getattr(self.__dict__.get(LOSS), "__func__", None) is not head_loss:
        return False
    if _is_ours(self.lm_head):
        return True
    if self.__dict__[KEPT] is self.lm_head:
        return False
    if torch.compiler.is_compiling():
        raise ConfigError(
            "optimize: lm_head was changed after slipstream.optimize; call slipstream.optimize "
            "once more before the model is compiled"
        )
    reason = follow_head(self)
    if reason is not None:
        warnings.warn(
            f"optimize: {type(self).__name__} makes logits while training: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason is None


def follow_head(model: Any) -> str | None:
    """Have the head make the loss, if another one is in its place too; the reason if it cannot."""
    head = model._modules.get("lm_head")
    if head is None:
        return "it has no lm_head any more"
    if state_of(head) is None and _is_plain(head):
        bind(head, "head", head_forward, ())
    if _is_ours(head):
        return None
    model.__dict__[KEPT] = head
    if state_of(head) is None:
        return f"its lm_head is now a {type(head).__name__}, expected a plain nn.Linear, no bias"
    return "hooks on its lm_head, a wrapper around it or the kind of its weight want them"


def _is_plain(head: nn.Module) -> bool:
    return type(head) is nn.Linear and head.bias is None and not own_forward(head)


def _is_ours(head: nn.Module) -> bool:
    # Sharded data parallelism gathers the weight in hooks; hooks of others may want the logits.
    if type(head).__name__ == SHARDED and KEY in head.__dict__:
        return True
    plain = settings_if_plain(head, "head") is not None
    return plain and is_plain_weight(head._parameters["weight"])


def head_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Logits; or, if a loss is asked for, the loss on the side and logits of width 0."""
    task: LossTask | None = getattr(self, TASK, None) if TASK in self.__dict__ else None
    if task is None:
        return self.__dict__[KEY].stock(self, hidden_states)
    targets = task.shifted
    if targets is None:
        targets = F.pad(task.labels, (0, 1), value=task.ignore_index)[..., 1:]
    loss = ops.linear_cross_entropy(
        hidden_states.flatten(0, -2),
        self.weight,
        targets.flatten().to(device=hidden_states.device, dtype=torch.int64),
        reduction="mean" if task.items is None else "sum",
        ignore_index=task.ignore_index,
        softcap=task.softcap,
    )
    if task.items is not None:
        items = task.items
        loss = loss / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)
    task.loss, logits = _Beside.apply(loss, hidden_states)
    return logits


class _Beside(torch.autograd.Function):
    """The loss, and logits of width 0 from the same node of the graph.

    Who shards the head gathers its weight for backward in a hook on what the head returns.
    """

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return loss.clone(), hidden.new_empty((*hidden.shape[:-1], 0))

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        return grads[0], None


def head_loss(model: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The model's loss function: what the head has found, or the usual one of the logits."""
    task: LossTask | None = model.lm_head.__dict__.get(TASK)
    if task is None or task.loss is None:
        return ForCausalLMLoss(logits, *args, **kwargs)
    return task.loss


def is_model(module: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Whether it is a model of transformers, whole or without its head."""
    return isinstance(module, PreTrainedModel)


def read_loss(model: Any) -> LossSettings | str:
    """How a causal language model makes its loss, or why it is not as ours does."""
    head = model._modules.get("lm_head")
    if type(head) is not nn.Linear:
        return "its lm_head is not a plain nn.Linear"
    if head.bias is not None:
        return "its lm_head has a bias, which ops.linear_cross_entropy does not take"
    if model.loss_function is not ForCausalLMLoss:
        return "its loss function is not that of causal language models"
    if own_forward(head) or not hasattr(model.forward, "__func__"):
        return "another library has bound a forward to it or to its lm_head"
    names = inspect.signature(type(model).forward).parameters
    if not attempt(lambda: _is_plain_head(model, names)):
        return "its forward does more than lm_head, a cap of the logits and the loss"
    return LossSettings(tuple(names)[1:])


def _is_plain_head(model: Any, names: Any) -> bool:
    hidden, weight = numbers(2, 3, 6), numbers(6, 10, seed=1)
    calls = []

    def loss(logits: torch.Tensor, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        calls.append((labels, vocab_size, kwargs.get("num_items_in_batch")))
        return logits.sin().sum()

    outputs = SimpleNamespace(
        last_hidden_state=hidden, hidden_states=None, attentions=None, router_logits=None,
        cache=None, past_key_values=None,
    )  # fmt: skip
    parts = {
        model.base_model_prefix: Stub(lambda **_: outputs),
        "lm_head": Stub(lambda states: states @ weight),
        LOSS: loss,
    }
    other = stand_in(model, **parts)
    off = {"output_router_logits": False} if "output_router_logits" in names else {}
    found = type(model).forward(
        other, input_ids=None, labels="labels", num_items_in_batch="items", **off
    )
    logits, cap = hidden @ weight, getattr(model.config, CAP, None)
    logits = logits if cap is None else cap * (logits / cap).tanh()
    return (
        same(found.logits, logits)
        and same(found.loss, logits.sin().sum())
        and [(labels, items) for labels, _, items in calls] == [("labels", "items")]
    )


def bind_loss(model: Any, settings: LossSettings) -> None:
    """Give this model its head and loss as one op."""
    head = model.lm_head
    bind(head, "head", head_forward, ())
    model.__dict__[KEPT] = None
    model.__dict__[LOSS] = MethodType(head_loss, model)
    bind(model, "loss", _with_signature_of(model.forward), settings)


def _with_signature_of(stock: Any) -> Any:
    """Trainers read from the signature of a model's forward which columns of a batch it takes."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return causal_lm_forward(self, *args, **kwargs)

    signature = inspect.signature(stock)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [first, *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    forward.__wrapped__ = stock.__func__  # type: ignore[attr-defined]  # launchers unwrap forwards
    return forward


def unbind_loss(model: Any) -> None:
    """Undo ``bind_loss`` but for the head."""
    unbind(model)
    model.__dict__.pop(KEPT, None)
    if getattr(model.__dict__.get(LOSS), "__func__", None) is head_loss:
        del model.__dict__[LOSS]
